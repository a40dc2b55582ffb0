"""Networks and tokens that meet a theorem's hypotheses or nearly so, drawn to have rounding decide.

What is drawn depends on the seed and the number of the draw alone.
"""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, Experts, Mask, Transformer
from rankscope.remedies import REMEDIES
from tests.builders import normal

Case = tuple[Transformer, Tensor]
Tensors = dict[str, Tensor]
Fields = dict[str, Any]
MASKS = ("complete", "complete", "causal", "window:1", "unidirectional", "prefix:2", "strided:2",
         "longformer:1:1", "causal&window:2")  # fmt: skip
NO_SKIP = (0.0, 0.0, 0.0, 0.0, 1e-9, -1e-12, 1e-16, 1e-80, 1e-300)
SKIPS = (1.0, 1.0, -1.0, 0.5, 2.0, 1e-9, 1e-16, 1e3, 1e-80)
KERNELS = ("sinkhorn:1", "sinkhorn:3", "linear", "sigmoid", "sink", "linformer:2")
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "identity")


def drawn(seed: int, number: int) -> tuple[str, Case]:
    """(the family, a network and the tokens of one sample `[token, width]`)."""
    draw = Random(f"{seed} {number}")
    name = draw.choice(list(FAMILIES))
    return name, FAMILIES[name](draw, {})


class Featured(NamedTuple):
    """A network with features beyond its family's, and one sample with its padding."""

    family: str
    features: tuple[str, ...]
    net: Transformer
    X: Tensor  # [token, width]
    padding: Tensor | None  # [token], True at padding


def featured(seed: int, number: int) -> Featured:
    """The same families with up to three of all the features that a network can have, and padding."""
    draw, choose = Random(f"{seed} {number}"), Random(f"{seed} {number} features")
    family = draw.choice(list(FAMILIES))
    names = tuple(sorted(choose.sample(list(FEATURES), choose.choice((0, 1, 1, 1, 2, 2, 3)))))
    extra: Fields = {}
    for name in names:
        extra |= FEATURES[name](choose)
    padded = choose.choice((0, 0, 1, 2, 3)) if "mask" in names else choose.choice((0, 0, 0, 0, 1))
    while True:
        try:
            net, X = FAMILIES[family](draw, extra)
            break
        except ArchitectureError:  # features that do not go together
            extra.pop(choose.choice(list(extra)))
    if choose.random() < 0.04:
        remedy = choose.choice(list(REMEDIES))
        try:
            net, names = net.with_remedy(remedy), (*names, remedy)
        except ArchitectureError:  # one that is not for such a block
            names = names
    padding = torch.zeros(len(X) + padded, dtype=torch.bool)
    padding[choose.sample(range(len(padding)), padded)] = True
    whole = normal(len(padding), X.shape[1], seed=choose.getrandbits(30)) * 10.0 ** choose.choice((0, 3, -3))
    whole[~padding] = X
    return Featured(family, names, net, whole, padding if padded else None)


def _masked(choose: Random) -> Fields:
    """Masks that depend on the number of tokens, or differ from layer to layer."""
    window, few, seed = choose.choice((0, 0, 1)), choose.choice((0, 1)), choose.randrange(1000)
    bigbird = f"bigbird:{window}:{few}:{choose.choice((1, 1, 2))}:{seed}"
    every = 2 + seed % 2
    own = Mask(
        "own", lambda n: torch.eye(n, dtype=torch.bool) | (torch.arange(n)[:, None] * every % n == torch.arange(n))
    )
    return {"mask": choose.choice((bigbird, bigbird, bigbird, "strided", "dilated:1:2", f"{bigbird};causal", own))}


def _rotated(choose: Random) -> Fields:
    pairs, base = choose.choice(("half", "adjacent")), choose.choice((10.0, 10000.0))
    scales: tuple[float, ...] = choose.choice(((), (1.5, 0.7)))
    turned = {"rotary_pairs": pairs, "rotary_base": base, "rotary_scales": scales}
    return {"positions": "rotary", "head_width": 2, **turned}


def _few_heads(choose: Random) -> Fields:
    kept = choose.choice((((0,),), ((1,),), ((0, 1),), ((),)))
    return {"heads": 2, "layers": 1, "kept_heads": kept, "key_heads": choose.choice((1, 2))}


def _mixed(choose: Random) -> Fields:
    experts = Experts(number=3, chosen=choose.choice((1, 2)), width=2, shared_width=choose.choice((0, 2)))
    return {"mlp": "experts", "experts": experts}


FEATURES: dict[str, Callable[[Random], Fields]] = {
    "mask": _masked,
    "cap": lambda choose: {"score_cap": choose.choice((1e-3, 0.3, 5.0))},
    "query norm": lambda choose: {"query_norm": True, "query_norm_across": choose.random() < 0.3},
    "output norm": lambda choose: {"norm_place": "output", "norm": choose.choice(("layer", "rms", "scale"))},
    "rotary": _rotated,
    "positions": lambda choose: {"positions": choose.choice(("alibi", "bias", "relative", "absolute")),
                                 "width": choose.choice((2, 4, 6)), "bias_buckets": 8, "bias_reach": 6,
                                 "bias_ahead": choose.random() < 0.5},
    "kernel": lambda choose: {"kernel": choose.choice(KERNELS),
                              "length": 16},
    "heads": _few_heads,
    "values": lambda choose: {"value_width": choose.choice((1, 3))},
    "shared": lambda choose: {"shared": True},
    "final norm": lambda choose: {"final_norm": True},
    "bare layer": lambda choose: {"bare_layers": (0,), "norm_place": choose.choice(("pre", "sandwich")),
                                  "norm": choose.choice(("layer", "rms", "scale"))},
    "parallel": lambda choose: {"parallel": True, "mlp_skip": 1.0},
    "divisor": lambda choose: {"divisor": 10.0 ** choose.uniform(-6, 6)},
    "biases": lambda choose: {"biases": tuple(choose.sample(("query", "key", "value", "output", "mlp", "norm"), 2))},
    "gate": lambda choose: {"head_gate": True},
    "experts": _mixed,
    "log gain": lambda choose: {"log_gain": 1.0},
}  # fmt: skip
"""By name, the fields of each."""


def tokens(draw: Random, width: int) -> Tensor:
    """`[token, width]`: generic, clustered, close, equal in direction, of few directions, of mixed sizes."""
    n = draw.choice((1, 2, 2, 3, 4, 5, 6))
    X = normal(n, width, seed=draw.getrandbits(31))
    first, kind = X[:1].clone(), draw.randrange(16)
    small = 10.0 ** -draw.uniform(1, 17)
    if kind == 0:
        X = first + small * X
    elif kind == 1:
        X = first.expand_as(X).clone()
    elif kind == 2:
        X[1:] = first + 1e-9 * X[1:]
        X[-1] *= -3.0
    elif kind == 3:
        X[draw.randrange(n)] = 0.0
    elif kind == 4:
        X = X.mul(2).round()
    elif kind == 5:  # one direction, several lengths, to rounding
        X = first * (1 + small * X[:, :1])
    elif kind == 6:  # two clusters
        X = torch.where(torch.arange(n)[:, None] % 2 == 0, first, -first) + small * X
    elif kind == 7:
        X[0] *= 10.0 ** draw.uniform(3, 14)
    elif kind == 8:
        X = X * 10.0 ** torch.linspace(0, draw.uniform(-20, 20), width, dtype=torch.float64)
    elif kind == 9:  # of rank one or two
        k = draw.choice((1, 2))
        X = normal(n, k, seed=draw.getrandbits(31)) @ normal(k, width, seed=draw.getrandbits(31))
    elif kind == 10:  # a common token far larger than what differs
        X = X + 10.0 ** draw.uniform(2, 13)
    elif kind == 11:
        X = X.abs()
    elif kind == 12:  # neighbours in the last digit
        X = first * (1 + 2.0**-52 * torch.randint(-2, 3, X.shape, generator=torch.Generator().manual_seed(n)))
    return X * 10.0 ** draw.choice((0, 0, 0, 0, -3, 3, draw.uniform(-12, 12), draw.uniform(-120, 120)))


def shape(draw: Random, extra: Fields, **fixed: Any) -> Architecture:
    """What the family fixes, the rest by chance; but for the fields of features."""
    heads, fields = draw.choice((1, 1, 2)), dict(fixed)
    fields.setdefault("layers", draw.choice((1, 1, 2, 2, 3, 4)))
    fields.setdefault("width", draw.choice((2, 3, 4, 6)))
    fields.setdefault("heads", heads)
    fields.setdefault("head_width", draw.choice((1, 2, 3)))
    fields.setdefault("kernel", draw.choice(("softmax", "softmax", "softmax", "gaussian", "uniform")))
    fields.setdefault("divisor", draw.choice((0.0, 0.25, 8.0)))
    fields.setdefault("positions", draw.choice(("none", "none", "none", "absolute")))
    fields.setdefault("biases", draw.choice((True, False)))
    fields.setdefault("mask", "complete")
    fields.setdefault("mlp", "none")
    fields.setdefault("norm", "none")
    fields.setdefault("attention_skip", draw.choice(NO_SKIP))
    return Architecture(**{**fields, **extra})


def weighted(draw: Random, arch: Architecture) -> Tensors:
    """Every tensor at a size of its own, biases and gains not at their usual 0 and 1."""
    seed = draw.getrandbits(30)
    tensors = Transformer.random(arch, seed, draw.choice(("bert", "xavier", "orthogonal"))).state_dict()
    wide = draw.choice((0.0, 1.0, 1.0, 3.0, 3.0, 60.0))
    sizes = {part: 10.0 ** draw.uniform(-wide, wide) for part in ("query", "key", "value", "output", "mlp")}
    for place, (name, tensor) in enumerate(tensors.items()):
        size = next((sizes[part] for part in sizes if f".{part}." in name), 1.0)
        if name.endswith("bias"):
            tensor = normal(*tensor.shape, seed=seed + place)
        elif name.endswith("gain"):
            tensor = tensor + draw.choice((0.0, 0.5)) * normal(*tensor.shape, seed=seed + place)
        tensors[name] = tensor * size
    return tensors


def twisted(draw: Random, arch: Architecture, tensors: Tensors, X: Tensor) -> Tensors:
    """One thing that makes rounding decide: a cancelling projection, a closed gate, sharp or equal scores."""
    kind, tensors = draw.randrange(12), dict(tensors)
    names = [name for name in tensors if name.endswith("weight")]

    def change(end: str, by: Callable[[Tensor], Tensor]) -> None:
        for name in names:
            if name.endswith(end):
                tensors[name] = by(tensors[name])

    R = X - X.mean(0)
    scale = R.abs().max() if len(R) else torch.ones(())
    if kind == 0 and len(R) > 1 and bool(torch.isfinite(R).all()) and float(scale) > 0:
        away = torch.linalg.svd(R / scale, full_matrices=False).Vh[:1]  # the main direction, taken out
        change("value.weight", lambda W: W - torch.einsum("ij,jhk->ihk", away.mT @ away, W))
    elif kind == 1:
        turn = torch.linalg.qr(normal(arch.width, arch.width, seed=draw.getrandbits(30))).Q[:1]
        change("output.weight", lambda W: W - W @ turn.mT @ turn)
        change("mlp.down.weight", lambda W: W - W @ turn.mT @ turn)
    elif kind == 2:  # gates that are all but closed
        closed = -(10.0 ** draw.uniform(0.5, 3))
        for name in tensors:
            if name.endswith(("gate.bias", "up.bias")):
                tensors[name] = torch.full_like(tensors[name], closed)
    elif kind == 3:
        change("query.weight", lambda W: W * 10.0 ** draw.uniform(1, 8))
    elif kind == 4:
        change("query.weight", torch.zeros_like)
    elif kind == 5:
        change("value.weight", lambda W: W * 1e13)
        change("output.weight", lambda W: W * 1e-13)
    elif kind == 6:  # values whose product vanishes
        step = torch.zeros(arch.width, arch.width, dtype=torch.float64)
        step[0, -1] = 1.0
        turn = torch.linalg.qr(normal(arch.width, arch.width, seed=draw.getrandbits(30))).Q
        nil = turn.mT @ step @ turn
        change("value.weight", lambda W: torch.einsum("ij,jhk->ihk", nil, W))
    elif kind == 7:
        for name in tensors:
            if name.endswith("gain"):
                tensors[name] = tensors[name].clone()
                tensors[name][0] *= 10.0 ** -draw.uniform(3, 12)
    elif kind == 8:  # a branch that takes the skip away
        eye = torch.eye(arch.width, dtype=torch.float64)
        if arch.value_width == arch.width:
            change("value.weight", lambda W: eye[:, None].expand_as(W).clone())
            change("output.weight", lambda W: -arch.attention_skip / arch.heads * eye.expand_as(W))
            change("query.weight", lambda W: W * 1e6)
    return tensors


def of(arch: Architecture, tensors: Tensors) -> Transformer:
    return Transformer.from_weights(arch, tensors)


def pure(draw: Random, extra: Fields) -> Case:
    arch = shape(draw, extra, mask=draw.choice(("complete", "complete", "prefix:8", draw.choice(MASKS))))
    X = tokens(draw, arch.width)
    return of(arch, twisted(draw, arch, weighted(draw, arch), X)), X


def with_mlp(draw: Random, extra: Fields) -> Case:
    arch = shape(
        draw, extra, mlp=draw.choice(("plain", "plain", "gated")), mlp_width=3,
        activation=draw.choice(ACTIVATIONS), mlp_skip=draw.choice((0.0, 1.0, -0.5, 1e-9)),
    )  # fmt: skip
    X = tokens(draw, arch.width)
    return of(arch, twisted(draw, arch, weighted(draw, arch), X)), X


def skipped(draw: Random, extra: Fields) -> Case:
    width = draw.choice((2, 3, 4))
    arch = shape(
        draw, extra, width=width, head_width=draw.choice((1, 2, width)), mask=draw.choice(MASKS),
        attention_skip=draw.choice(SKIPS),
        mlp=draw.choice(("none", "none", "plain", "gated")), mlp_width=3, activation=draw.choice(ACTIVATIONS),
        norm=draw.choice(("none", "none", "layer", "rms", "scale")),
        norm_place=draw.choice(("pre", "post", "sandwich")), norm_eps=draw.choice((0.0, 1e-12, 1e-5, 1e-300)),
        parallel=draw.random() < 0.2,
    )  # fmt: skip
    X = tokens(draw, arch.width)
    return of(arch, twisted(draw, arch, weighted(draw, arch), X)), X


def sphere(draw: Random, extra: Fields) -> Case:
    width = draw.choice((2, 3, 4, 6))
    extra = {
        name: value for name, value in extra.items() if name not in ("width", "heads", "head_width", "value_width")
    }
    arch = shape(
        draw, extra, width=width, heads=1, head_width=width, mask=draw.choice(MASKS),
        kernel=draw.choice(("softmax", "uniform")),
        norm=draw.choice(("scale", "rms")), norm_eps=draw.choice((0.0, 0.0, 0.0, 1e-30)), positions="none",
        biases=draw.choice(((), ("query",))),
    )  # fmt: skip
    tensors, bend = weighted(draw, arch), draw.choice((0.0, 0.0, 1e-13, 1e-10, 1e-8))
    for name in tensors:
        if name.endswith((".value.weight", ".output.weight")):
            turn = torch.linalg.qr(normal(width, width, seed=draw.getrandbits(30))).Q * 10.0 ** draw.uniform(-3, 3)
            turn = turn * (1 + bend * normal(width, width, seed=draw.getrandbits(30)))
            tensors[name] = turn[:, None] if ".value." in name else turn[None]
        elif name.endswith("gain"):
            tensors[name] = torch.full_like(tensors[name], draw.choice((1.0, -2.0, 0.1)))
    X = tokens(draw, width)
    return of(arch, tensors), X.abs() if draw.random() < 0.6 else X


def under_a_norm(draw: Random, extra: Fields) -> Case:
    arch = shape(
        draw, extra, attention_skip=draw.choice((1.0, -1.0, 4.0, 100.0)), mask=draw.choice(MASKS), positions="none",
        norm=draw.choice(("scale", "rms", "layer")), norm_eps=draw.choice((0.0, 0.0, 0.0, 1e-40)),
        biases=draw.choice(((), ("query",))),
    )  # fmt: skip
    tensors = weighted(draw, arch)
    for name in tensors:
        if name.endswith("gain"):
            tensors[name] = torch.full_like(tensors[name], draw.choice((1.0, -2.0, 0.1)))
        elif name.endswith("output.weight"):
            tensors[name] = tensors[name] * 10.0 ** -draw.uniform(0, 4)
    X = tokens(draw, arch.width)
    return of(arch, twisted(draw, arch, tensors, X)), X


def low_rank(draw: Random, extra: Fields) -> Case:
    net, X = skipped(draw, extra)
    arch, width = net.arch, net.arch.width
    rank, turn = draw.randrange(width), torch.linalg.qr(normal(width, width, seed=draw.getrandbits(30))).Q
    if draw.random() < 0.3:
        turn = torch.eye(width, dtype=torch.float64)
    frame = turn[:rank].mT @ turn[:rank] + draw.choice((0.0, 0.0, 1e-15, 1e-13)) * turn
    tensors = {
        name: W @ frame if name.endswith((".output.weight", "mlp.down.weight")) else W
        for name, W in net.state_dict().items()
    }
    if draw.random() < 0.3:  # tokens within what is written, but for rounding
        X = X @ turn[:rank].mT @ turn[:rank]
    return of(arch, tensors), X


def gated(draw: Random, extra: Fields) -> Case:
    """Gated MLPs whose gates, or values, are rounding on these tokens."""
    arch = shape(
        draw, extra, mlp="gated", mlp_width=2, activation=draw.choice(ACTIVATIONS), biases=True,
        mlp_skip=draw.choice((0.0, 0.0, 1e-9)), attention_skip=draw.choice((1.0, 1.0, 0.0)),
    )  # fmt: skip
    X, tensors = tokens(draw, arch.width), weighted(draw, arch)
    part = draw.choice(("gate", "up"))
    shift = draw.choice((0.0, -30.0, -9.0, -40.0, -300.0))
    for name in tensors:
        if name.endswith(f"mlp.{part}.weight") and draw.random() < 0.7:
            mean = X.mean(0)
            there, bias = mean @ tensors[name], name.replace("weight", "bias")
            if bias in tensors:
                tensors[bias] = shift - there if bool(there.isfinite().all()) else there * 0
    return of(arch, twisted(draw, arch, tensors, X)), X


def anything(draw: Random, extra: Fields) -> Case:
    arch = shape(
        draw, extra, norm=draw.choice(("layer", "rms", "scale")),
        norm_place=draw.choice(("pre", "post", "sandwich")), norm_eps=draw.choice((0.0, 1e-12, 1e-5)),
        mlp=draw.choice(("none", "plain", "gated")), mlp_width=3, attention_skip=draw.choice((0.0, 1.0)),
        mask=draw.choice(MASKS),
        positions=draw.choice(("none", "absolute", "alibi", "rotary")), head_width=2,
        parallel=draw.random() < 0.2,
    )  # fmt: skip
    X = tokens(draw, arch.width)
    return of(arch, twisted(draw, arch, weighted(draw, arch), X)), X


FAMILIES: dict[str, Callable[[Random, Fields], Case]] = {
    "pure": pure, "with MLP": with_mlp, "skips": skipped, "sphere": sphere, "under a norm": under_a_norm,
    "low rank": low_rank, "gated": gated, "anything": anything,
}  # fmt: skip
AIMED: dict[str, tuple[str, ...]] = {
    "pure": ("dong2021-2.2", "dong2021-2.3", "dong2021-2.3-gamma1", "oscillation", "attention-factors",
             "exact-factors", "dobrushin", "wu2024-1"),
    "with MLP": ("dong2021-3.2", "dobrushin"),
    "skips": ("dong2021-skip", "elementary-skip", "aligned-skip", "norm-rank"),
    "sphere": ("wu2024-2", "wu2024-cor1", "hemisphere", "norm-rank"),
    "under a norm": ("lambda-skip", "elementary-skip", "aligned-skip", "norm-rank"),
    "low rank": ("untouched", "norm-rank"),
    "gated": ("dobrushin",),
    "anything": ("dobrushin", "norm-rank"),
}  # fmt: skip
"""Whom each family is drawn against; every theorem is asked of every network all the same."""
