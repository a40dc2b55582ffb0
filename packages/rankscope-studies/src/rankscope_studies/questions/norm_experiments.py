"""Networks and trainings of the question `layernorm`, and what is measured of them: rows of its tables.

`near_rows`, `far_rows`, `stable_rows` and `trained_rows` are the four experiments; `layernorm.py`, which calls them,
says what they are for.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import polars as pl
import torch
from torch import Tensor

from rankscope.forecasts import mean_field
from rankscope.lab import Initialisation, NextCharacter, Recipe, Task, Training, release_memory, with_gains
from rankscope.metrics import relative_mu
from rankscope.nets import Architecture, Dropout, Transformer, training_states
from rankscope.profiles import measure
from rankscope.shapes import Float
from rankscope.theory import slope, transverse_exponent, transverse_modes
from rankscope_studies.dong2021.tasks import Sort
from rankscope_studies.trial import train_until
from rankscope_studies.wu2024.networks import DROPOUT, MASKS, in_training

NORMS: dict[str, dict[str, str]] = {
    "none": {"norm": "none"}, "post": {"norm_place": "post"}, "pre": {"norm_place": "pre"}
}  # fmt: skip
HELD = -2.0  # log10 of relative mu above which tokens are apart, and below which they have collapsed
NOISE = 0.5  # Of values that are a multiple of the identity otherwise: standard deviation times sqrt(width)
NOISE_SEED = 20_000  # Added to a network's seed: its own weights and tokens are drawn from others
DROPOUT_SEEDS = (0, 1)  # Of two passes with masks of their own
NEAR_START = 1e-12  # 1 - cosine of tokens that begin near the collapsed state
NO_SKIP, CHAOTIC = "values, no skip", "MLP, no skips"
FAMILIES: dict[str, dict[str, Any]] = {
    NO_SKIP: {},
    "values, skip, post-norm": {"attention_skip": 1.0},
    "values, skip, pre-norm": {"attention_skip": 1.0, "norm_place": "pre"},
    "values, skip, no norm": {"attention_skip": 1.0, "norm": "none"},
    CHAOTIC: {"mlp": "plain", "activation": "tanh", "mlp_skip": 0.0},
}
"""Networks whose collapsed state is tried: values are `a 1 + noise`, or the MLP's first matrix is multiplied by a."""
LAYERS_KEPT = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
CASE = ("tokens", "width", "heads", "start", "mask", "init")
Case = tuple[int, int, int, float, str, str]  # Of these; start is 1 - cosine of the tokens at layer 0


@dataclass(frozen=True)
class NormSizes:
    """How large the experiment is."""

    depth: int  # Of networks near the collapsed state
    width: int
    tokens: int
    heads: int
    seeds: int
    gains: tuple[float, ...]  # Of queries: the standard deviation of scores
    cases: tuple[Case, ...]  # Networks whose gain is varied
    far_depth: int
    draws: int  # Networks of each case and gain
    stable_depth: int
    stable_seeds: int
    stable_width: int
    stable_tokens: int
    values: tuple[float, ...]  # a of the families of values
    mlps: tuple[float, ...]  # a of the family of MLPs
    constructed: tuple[int, ...]  # Tokens of theorem 3's construction
    constructed_starts: int
    trainings: tuple[tuple[str, int], ...]  # Task and layers
    train_width: int
    context: int
    batch: int
    steps: int
    lr: float
    train_seeds: int


def bare(layers: int, width: int, heads: int, **fields: Any) -> Architecture:
    """Attention and a LayerNorm after it, no skip, no MLP, no biases; `fields` are in place of these."""
    usual = {"mlp": "none", "norm": "layer", "norm_place": "post", "attention_skip": 0.0, "biases": False}
    return Architecture(layers=layers, width=width, heads=heads, **usual | fields)  # type: ignore[arg-type]


def random_tokens(tokens: int, width: int, seed: int, start: float = 1.0) -> Float[Tensor, "1 token width"]:
    """Tokens of entries of size one whose directions have the cosine `1 - start` with one another, on average."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    apart = torch.randn(1, tokens, width, generator=generator, dtype=torch.float64)
    common = torch.randn(1, 1, width, generator=generator, dtype=torch.float64)
    return math.sqrt(start) * apart + math.sqrt(1 - start) * common


def near_rows(mask: str, norm: str, sizes: NormSizes) -> pl.DataFrame:
    """log10 of relative mu by layer from random tokens, with dropout off (deviation arithmetic) and on, and which share
    of differences is common to two passes (1 with dropout off: they are the same). From tokens that are all but equal:
    the rate of the second half of the layers (natural log a layer), and by which factor the log grows in the last
    layer; beside them ln|nu|."""
    arch = bare(sizes.depth, sizes.width, sizes.heads, mask=MASKS[mask], **NORMS[norm])
    nu = float(transverse_modes(arch, sizes.tokens).abs()[0])
    rows = []
    for seed, dropout in product(range(sizes.seeds), (False, True)):
        net = Transformer.random(arch, seed, "xavier")
        X, close = (random_tokens(sizes.tokens, sizes.width, seed, start) for start in (1.0, NEAR_START))
        rate = order = math.nan
        if dropout:
            passes = [[*training_states(net, X, Dropout.seeded(DROPOUT, k, net.device))] for k in DROPOUT_SEEDS]
            logs = [math.log10(float(relative_mu(state))) for state in passes[0]]
            shares = [*map(common_share, *passes)]
        else:
            logs = measure(net, X, metrics="relative_mu").curve("relative_mu", "log10")[0].tolist()
            shares = [1.0] * len(logs)
            close_logs = measure(net, close, metrics="relative_mu").curve("relative_mu", "log10")[0]
            rate, order = float(slope(close_logs)) * math.log(10), float(close_logs[-1] / close_logs[-2])
        rows += [
            {"mask": mask, "norm": norm, "dropout": dropout, "seed": seed, "layer": layer, "log10": logs[layer],
             "common": shares[layer], "rate": rate, "order": order, "predicted": math.log(nu) if nu else -math.inf}
            for layer in (*(k for k in LAYERS_KEPT if k < sizes.depth), sizes.depth)
        ]  # fmt: skip
    return pl.DataFrame(rows)


def common_share(X: Float[Tensor, "1 token width"], Y: Float[Tensor, "1 token width"]) -> float:
    """The cosine of the differences between tokens in two passes: 1 if they are the same, about 0 if each pass has
    drawn its own.

    >>> X, Y = torch.tensor([[[1.0, 1.0], [3.0, 3.0]]]), torch.tensor([[[1.0, 3.0], [3.0, 1.0]]])
    >>> common_share(X, X + 5), common_share(X, Y)
    (1.0, 0.0)
    """
    R, S = (states - states.mean(1, keepdim=True) for states in (X, Y))
    return float((R * S).sum() / (R.norm() * S.norm()))


@torch.no_grad()
def far_rows(case: Case, sizes: NormSizes, device: str = "cpu") -> pl.DataFrame:
    """The layer at which tokens have collapsed (relative mu below 0.01, float64), one more than there are where they
    have not, of every draw and gain; and what mean-field theory says of it."""
    n, d, heads, start, mask, init = case
    rows = []
    for seed in range(sizes.draws):
        net = Transformer.random(bare(sizes.far_depth, d, heads, mask=MASKS[mask]), seed, init, device=device)
        X = random_tokens(n, d, seed, start).to(device)
        for gain in sizes.gains:
            sharp = with_gains(net, [("attention.query.weight", gain)])
            layers = {"life": lifetime(float(relative_mu(step.state)) for step in sharp.steps(X))}
            if seed == 0:
                theory = mean_field(sharp, X, draws=max(2, 512 // n))  # fewer where many tokens average already
                layers["predicted"] = lifetime(moments.relative_residual for moments in theory)
            labels = dict(zip(CASE, case, strict=True)) | {"gain": gain, "seed": seed}
            rows += [labels | {"what": what, "layer": layer} for what, layer in layers.items()]
    return pl.DataFrame(rows)


def lifetime(residuals: Iterable[float]) -> int:
    """The layer of the first residual that is below `10^HELD`; one more than the last layer if none is.

    >>> lifetime([1.0, 0.5, 0.001]), lifetime([1.0, 0.5, 0.4])
    (2, 3)
    """
    layer = -1
    for layer, residual in enumerate(residuals):
        if residual < 10**HELD:
            return layer
    return layer + 1


def family_network(family: str, mask: str, a: float, seed: int, sizes: NormSizes) -> Transformer:
    """A network of a family of `FAMILIES`, with weights of its own in each layer."""
    d = sizes.stable_width
    net = Transformer.random(bare(sizes.stable_depth, d, 2, mask=MASKS[mask], **FAMILIES[family]), seed, "xavier")
    if family == CHAOTIC:
        return with_gains(net, [("mlp.up.weight", a)])
    generator = torch.Generator().manual_seed(NOISE_SEED + seed)
    tensors, eye = net.state_dict(), torch.eye(d, dtype=torch.float64)
    for name, tensor in tensors.items():
        if name.endswith("attention.value.weight"):
            tensors[name] = eye.reshape(tensor.shape)
        elif name.endswith("attention.output.weight"):
            noise = NOISE / math.sqrt(d) * torch.randn(d, d, generator=generator, dtype=torch.float64)
            tensors[name] = (a * eye + noise).reshape(tensor.shape)
    return Transformer.from_weights(net.arch, tensors)


@torch.no_grad()
def stable_rows(family: str, mask: str, a: float, sizes: NormSizes) -> pl.DataFrame:
    """Lambda about the mean of random tokens, and log10 of relative mu that these tokens end with, of every seed."""
    rows = []
    for seed in range(sizes.stable_seeds):
        net = family_network(family, mask, a, seed, sizes)
        X = random_tokens(sizes.stable_tokens, sizes.stable_width, seed)
        exponent = transverse_exponent(net, X[0].mean(0), sizes.stable_tokens, relative=True)
        value = max(float(relative_mu(net.run(X).output)), 1e-17)  # the floor of float64
        rows.append({"family": family, "mask": mask, "a": a, "seed": seed, "predicted": exponent.rate,
                     "log10": math.log10(value)})  # fmt: skip
    return pl.DataFrame(rows)


TASKS: dict[str, Callable[[NormSizes], Task]] = {
    "sort": lambda sizes: Sort(), "next character": lambda sizes: NextCharacter(sizes.context)
}  # fmt: skip


def equal_tokens_loss(task: Task) -> float:
    """The least held-out loss of a network whose tokens are all equal after the last layer.

    Tokens that see the whole sample can know which labels there are, not where: the entropy of a sample's labels. Under
    a causal mask equal tokens can carry only what token 1 sees; we count that as no information.
    """
    if not isinstance(task, Sort):
        return task.blind
    labels = task.held_out(256).labels
    counts = torch.stack([torch.bincount(row, minlength=task.interface.classes) for row in labels]).double()
    parts = counts / counts.sum(1, keepdim=True)
    return float(-torch.special.xlogy(parts, parts).sum(1).mean())


def trained_rows(
    task: str, layers: int, dropout: float, skip: float, sizes: NormSizes, device: str = "cpu"
) -> pl.DataFrame:
    """Train networks with norms: loss, and before and after training log10 of relative mu after the last layer (dropout
    off and on) and the spread of scores in units of sqrt(2 ln n), in the layer where it is largest.

    Args:
        task: A name in `TASKS`.
        layers: The depth of the networks.
        dropout: The rate of dropout in training.
        skip: The weight of both skips; 0: there are none.
        sizes: The sizes of the experiment.
        device: Where networks are trained.
    """
    problem = TASKS[task](sizes)
    arch = problem.architecture(layers, sizes.train_width, sizes.heads, attention_skip=skip, mlp_skip=skip)
    recipe = Recipe(steps=sizes.steps, batch_size=sizes.batch, lr=sizes.lr, warmup=0.1)
    training = Training(
        problem, arch, recipe, seeds=range(sizes.train_seeds), device=device, capture=True,
        initialisation=Initialisation("xavier", embedding_std=1.0, dropout=dropout),
    )  # fmt: skip
    before = [*map(fate, training.networks(), training.tokens(1)[0])]
    alive = train_until(training)
    losses = [evaluation.loss for evaluation in training.evaluate()]
    after = [*map(fate, training.networks(), training.tokens(1)[0])]
    rows = []
    for seed in training.seeds:
        row = {"task": task, "layers": layers, "dropout": dropout, "skip": skip, "seed": seed,
               "loss": losses[seed] if alive[seed] else math.nan, "equal": equal_tokens_loss(problem)}  # fmt: skip
        row |= {f"{name}_start": value for name, value in before[seed].items()}
        rows.append(row | {f"{name}_end": value for name, value in after[seed].items()})
    del training
    release_memory(device)
    return pl.DataFrame(rows)


def fate(net: Transformer, X: Float[Tensor, "1 token width"]) -> dict[str, float]:
    """log10 of relative mu after the last layer with dropout off and on (`noisy`), and the largest spread of scores."""
    wide, X = net.to(torch.float64), X.double()
    noisy = in_training(wide, X).filter(metric="relative_mu").sort("layer")["log10"]
    logs = measure(wide.to(device="cpu"), X.cpu(), metrics="relative_mu", check=False).curve("relative_mu", "log10")[0]
    return {"log10": float(logs[-1]), "noisy": float(noisy[-1]), "scores": max(score_spread(wide, X))}


@torch.no_grad()
def score_spread(net: Transformer, X: Float[Tensor, "sample token width"]) -> list[float]:
    """By layer the standard deviation of scores over the n keys that a query sees, divided by sqrt(2 ln n): the mean
    over samples, heads and queries with n > 1. The log of a row of the pattern is its scores but for a shift."""
    spreads = []
    for step in net.steps(X):
        if step.attention is not None:
            seen = step.attention > 0
            n = seen.sum(-1)
            logs = step.attention.clamp(min=1e-300).log()
            mean = (logs * seen).sum(-1, keepdim=True) / n[..., None]
            deviation = (((logs - mean).square() * seen).sum(-1) / n).sqrt()
            spreads.append(float((deviation / (2 * n.double().log()).sqrt())[n > 1].mean()))
    return spreads
