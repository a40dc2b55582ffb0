"""The networks of figure 3: two tokens in the plane that should go round a circle, one step at a time.

`Linear(2 -> d)`, one canonical layer of two heads, `Linear(d -> 2)`, no positions. Without a norm all of it
but softmax and the MLP's activation is linear in `x~ = (x, 1)`, and folds into small matrices:

    next x = sum_h softmax(x~ A_h x~^T) x~ M_h + b      A_h: 3 x 3, M_h: 3 x 2

Hence what pure attention can compute here does not depend on d; how it trains does. Folded networks cost next
to nothing, so all seeds train side by side. The published code's network has norms, which do not fold.

On a pair (u, -u) at radius r with A_h = a I and M the same for all heads, attention is
`p = sigmoid(2 a r^2)` on itself, so a step multiplies the radius by a constant times `2p - 1 = tanh(a r^2)`:
it grows with r, and the circle is unstable. A small relative change of r becomes

    d log r' / d log r = 1 + 4z / sinh 2z,    z = a r^2

times as large in one step: 3 where attention is nearly uniform (the cube of Dong et al. 2021, Thm 2.2), and
nearly 1 where it is sharp.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.nets import Architecture, Transformer
from rankscope.shapes import Float

RADIUS, ANGLES, HEADS = 0.3, 1000, 2
OWN = ("into.weight", "into.bias", "out.weight", "out.bias")  # The tensors around the layer
Tensors = dict[str, Tensor]  # By name, the seed as first axis
Pairs = Float[Tensor, "seed pair 2 2"]
BySeed = Float[Tensor, " seed"]
TOGETHER = 0.05  # The share of the diameter below which tokens have fallen together
ENDS = ("fell together", "ran away", "drifted off", "apart", "on the circle")
PairPath = Float[Tensor, "step 2 2"]  # Of both tokens, up to where one has run away


@dataclass(frozen=True)
class CircleNetwork:
    """A row of the figure: what the layer is and how it is trained."""

    parts: dict[str, Any] = field(default_factory=dict)  # Of the architecture
    decay: float = 0.0  # Decoupled weight decay
    as_published: bool = False  # Data, start and training of the published code

    def architecture(self, width: int) -> Architecture:
        """The architecture of the layer; the MLP is as wide as the tokens, as published."""
        return Architecture(
            layers=1, width=width, heads=HEADS, mlp_width=width, activation="gelu",
            **{"norm": "none", "mlp": "none", "attention_skip": 0.0, "mlp_skip": 0.0, **self.parts},
        )  # fmt: skip


NETWORKS = {
    "pure attention": CircleNetwork(),
    "with skip": CircleNetwork({"attention_skip": 1.0}),
    "with MLP": CircleNetwork({"mlp": "plain"}),
    "pure attention, weight decay": CircleNetwork(decay=0.3),
    "the published code": CircleNetwork({"norm": "layer", "attention_skip": 1.0}, as_published=True),
}
"""The published 'no skip' adds the layer's input before a norm, and another norm follows `Linear(2 -> d)`."""


def circle(angles: int = ANGLES, apart: float = 0.5) -> Float[Tensor, "pair 2 2"]:
    """The pairs of one turn and the first again; a token is `apart` turns ahead of the other."""
    turn = 2 * math.pi * torch.arange(angles + 1, dtype=torch.float64) / angles
    first, second = (
        RADIUS * torch.stack([angle.cos(), angle.sin()], -1) for angle in (turn, turn + 2 * math.pi * apart)
    )
    return torch.stack([first, second], 1)


def initial(network: CircleNetwork, width: int, seeds: int) -> Tensors:
    """Random tensors of every seed: Xavier's and, around the layer, torch's; or N(0, 0.02), as published."""
    arch = network.architecture(width)
    by_seed = []
    for seed in range(seeds):
        draw = torch.Generator().manual_seed(seed)
        tensors = Transformer.random(arch, seed, "kaiming" if network.as_published else "xavier").state_dict()
        for name, shape in (("into", (2, width)), ("out", (width, 2))):
            if network.as_published:
                weight = 0.02 * torch.randn(shape, generator=draw, dtype=torch.float64)
                bias = torch.zeros(shape[1], dtype=torch.float64)
            else:
                both = 2 * torch.rand(shape[0] + 1, shape[1], generator=draw, dtype=torch.float64) - 1
                weight, bias = both[:-1] / math.sqrt(shape[0]), both[-1] / math.sqrt(shape[0])
            tensors |= {f"{name}.weight": weight, f"{name}.bias": bias}
        by_seed.append(tensors)
    return {name: torch.stack([tensors[name] for tensors in by_seed]) for name in by_seed[0]}


def step(arch: Architecture, tensors: Tensors, pairs: Pairs) -> tuple[Pairs, Float[Tensor, "seed pair head 2 2"]]:
    """The next pair of each pair, and the attention of each."""
    if arch.norm == "none":
        return _folded(arch, tensors, pairs)
    steps = [
        canonical(arch, {name: tensor[seed] for name, tensor in tensors.items()}, part)
        for seed, part in enumerate(pairs)
    ]
    return torch.stack([after for after, _ in steps]), torch.stack([pattern for _, pattern in steps])


def canonical(
    arch: Architecture, tensors: Tensors, pairs: Float[Tensor, "pair 2 2"]
) -> tuple[Float[Tensor, "pair 2 2"], Float[Tensor, "pair head 2 2"]]:
    """One network on its own tensors (no axis of seeds), layer and all, as it is defined."""
    net = Transformer.from_weights(arch, {name: tensor for name, tensor in tensors.items() if name not in OWN})
    X = pairs @ tensors["into.weight"] + tensors["into.bias"]
    if arch.norm == "layer":
        X = F.layer_norm(X, (arch.width,), eps=arch.norm_eps)
    *_, last = net.steps(X)
    assert last.attention is not None
    return last.state @ tensors["out.weight"] + tensors["out.bias"], last.attention


def _folded(arch: Architecture, tensors: Tensors, pairs: Pairs) -> tuple[Pairs, Tensor]:
    """The same of every seed at once, with the linear maps multiplied out first."""
    part = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
    into = torch.cat([part["into.weight"], part["into.bias"][:, None]], 1)  # [seed, 3, width]
    constant = into.new_tensor([0.0, 0.0, 1.0])[:, None]
    seeds, pair_count = pairs.shape[:2]

    def projected(name: str) -> Tensor:  # [seed, head, 3, head_width]
        flat = into @ part[f"attention.{name}.weight"].flatten(2)
        flat = flat + constant * part[f"attention.{name}.bias"].flatten(1)[:, None]
        return flat.view(seeds, 3, arch.heads, arch.head_width).transpose(1, 2)

    A = projected("query") @ projected("key").transpose(-1, -2) / arch.divisor  # [seed, head, 3, 3]
    W = projected("value") @ part["attention.output.weight"]  # [seed, head, 3, width]
    bias = part["attention.output.bias"][:, None]  # [seed, 1, width]
    x = F.pad(pairs, (0, 1), value=1.0)  # [seed, pair, 2, 3]
    rows = (x.flatten(1, 2)[:, None] @ A).view(seeds, arch.heads, pair_count, 2, 3)
    P = (rows @ x[:, None].transpose(-1, -2)).softmax(-1)  # [seed, head, pair, 2, 2]
    mixed = (P @ x[:, None]).flatten(2, 3)  # [seed, head, pair * 2, 3]
    out, out_bias = part["out.weight"], part["out.bias"][:, None]
    if arch.mlp == "none":
        Y = (mixed @ (W @ out[:, None])).sum(1) + bias @ out + out_bias
        if arch.attention_skip:
            Y = Y + arch.attention_skip * (x.flatten(1, 2) @ (into @ out))
    else:
        up, down = part["mlp.up.weight"], part["mlp.down.weight"]
        hidden = (mixed @ (W @ up[:, None])).sum(1) + bias @ up + part["mlp.up.bias"][:, None]
        Y = F.gelu(hidden) @ (down @ out) + part["mlp.down.bias"][:, None] @ out + out_bias
    return Y.view(seeds, pair_count, 2, 2), P.transpose(1, 2)


def trained(network: CircleNetwork, width: int, seeds: int, rounds: int, device: str = "cpu") -> Tensors:
    """Tensors after so many steps of Adam on the squared distance to the next pair, seeds side by side.

    Usually: batches of 50 pairs evenly round the circle, a rate that falls from 3e-3 in half a cosine. As
    published: float32, rate 1e-5, batches of 30 in order, no shuffling; 70 epochs are 1190 steps.
    """
    arch = network.architecture(width)
    dtype = torch.float32 if network.as_published else torch.float64
    start = initial(network, width, seeds)
    tensors = {name: tensor.to(device, dtype).requires_grad_() for name, tensor in start.items()}
    if network.as_published:
        pairs, spacing, rate = circle(apart=0.499)[:500], 1, 1e-5
        starts = [slice(first, first + 30) for first in range(0, 499, 30)]
    else:
        pairs, spacing, rate = circle(), 20, 3e-3
        starts = [slice(7 * first % spacing, None, spacing) for first in range(spacing)]
    pairs = pairs.to(device, dtype)
    before, after = pairs[:-1], pairs[1:]
    optimiser = torch.optim.AdamW(list(tensors.values()), lr=rate, weight_decay=network.decay)
    for done in range(rounds):
        if not network.as_published:
            optimiser.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * done / rounds))
        chosen = starts[done % len(starts)]
        predicted, _ = step(arch, tensors, before[chosen].expand(seeds, -1, 2, 2))
        gaps = (predicted - after[chosen]).square().flatten(1)
        loss = (gaps.sum(1) if network.as_published else gaps.mean(1)).sum()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return {name: tensor.detach().double() for name, tensor in tensors.items()}


@torch.no_grad()
def error(arch: Architecture, tensors: Tensors) -> BySeed:
    """Root mean square distance from the next pair, in steps along the circle: to stay in place has 1."""
    pairs = circle().to(tensors["out.bias"].device)
    predicted, _ = step(arch, tensors, pairs[:-1].expand(len(tensors["out.bias"]), -1, 2, 2))
    step_length = float((pairs[1, 0] - pairs[0, 0]).norm())
    return (predicted - pairs[1:]).square().sum(-1).mean((1, 2)).sqrt() / step_length


@torch.no_grad()
def followed(arch: Architecture, tensors: Tensors, steps: int) -> Float[Tensor, "step seed 2 2"]:
    """Where networks go that are fed their own predictions, from (r, 0) and (-r, 0) on. From where a token
    is ten times as far out as the circle is, nothing (nan)."""
    position = circle().to(tensors["out.bias"].device)[:1].expand(len(tensors["out.bias"]), 1, 2, 2)
    path, inside = [position[:, 0]], torch.ones_like(position[:, 0, :1, :1], dtype=torch.bool)
    for _ in range(steps):
        position, _ = step(arch, tensors, position)
        far = position[:, 0].norm(dim=-1).amax(-1)[:, None, None]
        inside = inside & (far <= 10 * RADIUS)
        path.append(position[:, 0].masked_fill(~inside, math.nan))
        position = position.masked_fill(~inside[:, None], 0.0)  # what has left is computed no further
    return torch.stack(path)


def multipliers(arch: Architecture, tensors: Tensors, angles: int = 20) -> tuple[BySeed, BySeed]:
    """(radial, shift): how many times as large a small error is after one step, on average round the circle.

    radial: of the tokens' distance, relative. shift: of a shift common to both, in its worst direction.
    """
    pairs = circle(angles).to(tensors["out.bias"].device)[:-1]
    seeds = len(tensors["out.bias"])
    nudge = torch.zeros(seeds, angles, 3, dtype=pairs.dtype, device=pairs.device, requires_grad=True)
    after, _ = step(arch, tensors, pairs * (1 + nudge[..., :1, None]) + nudge[..., None, 1:])
    apart = (after[:, :, 0] - after[:, :, 1]).norm(dim=-1).log()
    (radial,) = torch.autograd.grad(apart.sum(), nudge, retain_graph=True)
    shifts = [torch.autograd.grad(after.mean(2)[..., axis].sum(), nudge, retain_graph=True)[0] for axis in (0, 1)]
    worst = torch.linalg.matrix_norm(torch.stack([shift[..., 1:] for shift in shifts], -2), 2)
    return radial[..., 0].mean(1), worst.mean(1)


@torch.no_grad()
def sharpness(arch: Architecture, tensors: Tensors) -> BySeed:
    """The larger of a token's two attention weights, on average over the circle: from 1/2 to 1."""
    pairs = circle(100).to(tensors["out.bias"].device)
    _, P = step(arch, tensors, pairs.expand(len(tensors["out.bias"]), -1, 2, 2))
    return P.amax(-1).flatten(1).mean(1)


def path_of(rows: pl.DataFrame) -> PairPath:
    """The path of one seed, from its rows of the table of trajectories."""
    return torch.tensor(rows.sort("step", "token").select("x", "y").to_numpy()).view(-1, 2, 2)


def distance(path: PairPath) -> Float[Tensor, " step"]:
    """Between the tokens, as a share of the diameter."""
    return (path[:, 0] - path[:, 1]).norm(dim=-1) / (2 * RADIUS)


def ending(path: PairPath, steps: int) -> str:
    """Where a pair goes that was followed for so many steps, or until it ran away (ten times as far out as the circle
    is; it drifted off if both went together). On the circle: all along within half a radius of where it should be."""
    apart = distance(path)
    if bool((apart < TOGETHER).any()):
        return "fell together"
    if len(path) <= steps:
        return "drifted off" if 0.5 <= float(apart[-1]) <= 2 else "ran away"
    gap = (path - circle()[: len(path)]).norm(dim=-1)
    return "on the circle" if float(gap.max()) < RADIUS / 2 else "apart"


def left(path: PairPath, steps: int) -> int | None:
    """The first step at which the distance is below half or above twice the diameter, or a token has run
    away; None if that never comes."""
    apart = distance(path)
    out = ((apart < 0.5) | (apart > 2)).nonzero()
    if len(out):
        return int(out[0])
    return len(path) if len(path) <= steps else None
