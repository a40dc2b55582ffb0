"""Networks drawn to break the arithmetic: each kind is one way of losing digits."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.nets import Architecture, Transformer
from tests.builders import awake

SMALL: dict[str, Any] = {"width": 4, "heads": 2, "head_width": 2, "mlp_width": 8, "length": 8,
                         "bias_buckets": 8, "bias_reach": 6}  # fmt: skip
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "silu", "tanh", "relu", "identity")
MASKS = ("complete", "complete", "causal", "causal", "window:1", "edges:0>1")


CAPPED = 2 * 10**6
"""From this seed on scores are capped."""


class Case(NamedTuple):
    """A network and one sample, with its padding."""

    kind: str
    seed: int
    net: Transformer
    X: Tensor  # [1, token, width]
    padding: Tensor  # [1, token]


Tensors = dict[str, Tensor]
Harm = Callable[[random.Random, dict[str, Any], Tensors, Tensor], Tensor]
"""Changes a network's tensors in place, and gives the tokens."""


def drawn(seed: int, kind: str | None = None) -> Case:
    """Case number `seed`, of a kind by turns."""
    draw = random.Random(seed)
    kind = list(KINDS)[seed % len(KINDS)] if kind is None else kind
    fields, harm = KINDS[kind]
    chosen = {**_any(draw), **fields(draw)}
    if seed >= CAPPED and chosen["kernel"] == "softmax":
        chosen["score_cap"] = random.Random(f"cap {seed}").choice((0.3, 5.0))
    if chosen.get("parallel"):
        chosen["mlp_skip"] = 1.0
    if chosen["norm"] == "none" or chosen["norm_place"] == "post":
        chosen["bare_layers"] = ()
    arch = Architecture(**{**SMALL, **chosen})
    tensors = awake(arch, seed, size=draw.choice((0.0, 0.3))).state()
    tokens = draw.choice((2, 3, 4, 5))
    X = torch.randn(tokens, arch.width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    X = harm(draw, chosen, tensors, X)
    padding = torch.zeros(1, len(X), dtype=torch.bool)
    if chosen["mask"] != "edges:0>1" and draw.random() < 0.2 and len(X) > 2:
        padding[0, draw.randrange(len(X))] = True
    return Case(kind, seed, Transformer.from_weights(arch, tensors), X[None], padding)


def _any(draw: random.Random) -> dict[str, Any]:
    """Every part of a block by chance."""
    return {
        "layers": draw.choice((1, 2, 3, 4)),
        "norm": draw.choice(("layer", "rms", "scale", "none")),
        "norm_place": draw.choice(("pre", "post", "sandwich")),
        "norm_eps": draw.choice((1e-12, 1e-5, 1e-6)),
        "mask": draw.choice(MASKS),
        "positions": draw.choice(("none", "none", "absolute", "relative", "rotary", "bias", "alibi")),
        "kernel": draw.choice(("softmax", "softmax", "softmax", "gaussian", "uniform")),
        "mlp": draw.choice(("plain", "gated", "none")),
        "activation": draw.choice(ACTIVATIONS),
        "attention_skip": draw.choice((0.0, 1.0, 1.0, 0.5, -0.3)),
        "mlp_skip": draw.choice((0.0, 1.0, 1.0)),
        "parallel": draw.random() < 0.15,
        "key_heads": draw.choice((1, 2)),
        "biases": draw.random() < 0.5,
        "query_norm": draw.random() < 0.15,
        "bare_layers": draw.choice(((), (), (0,))),
    }


def _ordinary(draw: random.Random) -> dict[str, Any]:
    return {"attention_skip": 1.0, "mlp_skip": 1.0, "norm": draw.choice(("layer", "rms")), "layers": 4}


def _nothing(draw: random.Random) -> dict[str, Any]:
    return {}


def _sharp(draw: random.Random) -> dict[str, Any]:
    return {"divisor": 10 ** draw.uniform(-3, 0), "attention_skip": draw.choice((0.0, 1.0))}


def _llama(draw: random.Random) -> dict[str, Any]:
    return {
        "layers": draw.choice((6, 12)), "norm": "none", "mlp": "gated", "activation": "silu",
        "mask": "causal", "positions": "rotary", "key_heads": 1, "attention_skip": 1.0, "mlp_skip": 1.0,
        "biases": False, "parallel": False, "kernel": "softmax", "query_norm": False,
    }  # fmt: skip


def _bare(draw: random.Random) -> dict[str, Any]:
    """Attention without a skip."""
    return {"attention_skip": 0.0, "mlp": draw.choice(("none", "plain")), "layers": draw.choice((2, 4, 6))}


def _saturated(draw: random.Random) -> dict[str, Any]:
    return {"mlp": draw.choice(("plain", "gated")), "mlp_skip": 0.0, "biases": True, "parallel": False,
            "activation": draw.choice(("tanh", "gelu", "silu", "gelu_tanh", "quick_gelu"))}  # fmt: skip


def _absolute(draw: random.Random) -> dict[str, Any]:
    return {"positions": "absolute"}


def _as_drawn(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    return X


def _large(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    """Gains of weights and tokens off their usual size."""
    for name in tensors:
        if name.endswith("weight"):
            tensors[name] = tensors[name] * 10 ** draw.uniform(-0.5, 0.7)
    return X * 10 ** draw.uniform(-2, 2)


def _long_token(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    X[draw.randrange(len(X))] *= 10 ** draw.uniform(3, 9)
    return X


def _mixed_tokens(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    reach = draw.choice((6, 20, 80))
    return X * torch.tensor([[10 ** draw.uniform(-reach, reach)] for _ in X], dtype=X.dtype)


def _mixed_columns(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    reach = draw.choice((6, 20, 80))
    return X * torch.tensor([10 ** draw.uniform(-reach, reach) for _ in X[0]], dtype=X.dtype)


def _clustered(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    """Two groups of tokens far apart, and hardly anything, or nothing, within each."""
    near = draw.choice((0.0, 1e-16, 1e-12, 1e-8, 1e-4))
    centres = torch.stack([X[0], X[-1]])
    return centres[torch.arange(len(X)) % 2] + near * X


def _close(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    """Tokens that differ by little."""
    return X[:1] + 10 ** draw.uniform(-15, -1) * (X - X[:1])


def _equal(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    """Some tokens, or all, exactly equal or zero."""
    X[draw.randrange(len(X)) :] = draw.choice((X[0].clone(), torch.zeros_like(X[0])))
    return X


def _biased(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    """Activations far out in a tail."""
    shift = draw.choice((-1, 1)) * 10 ** draw.uniform(0.5, 3.2)
    for name in tensors:
        if name.endswith(("up.bias", "gate.bias")):
            tensors[name] = tensors[name] + shift
    return X


def _cancelling(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    """A matrix that takes out the direction in which tokens differ most."""
    part = draw.choice(("value.weight", "up.weight", "gate.weight", "query.weight"))
    main = torch.linalg.svd(X - X.mean(0))[2][0]
    for name in tensors:
        if name.endswith(part):
            W = tensors[name].flatten(1)
            tensors[name] = (W - torch.outer(main, main @ W)).view(tensors[name].shape)
    return draw.choice((X, X + 10 ** draw.uniform(2, 8) * torch.outer(X[:, 0], main)))


def _projected(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    """What heads or hidden units say lies along one direction, which the next matrix takes out."""
    into, out = draw.choice((("value", "output"), ("up", "down")))
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    for name in [each for each in tensors if each.endswith(f"{into}.weight")]:
        W, after = tensors[name], name.replace(into, out)
        u = torch.randn(W.flatten(1).shape[1], generator=generator, dtype=W.dtype)
        tensors[name] = torch.outer(torch.randn(len(W), generator=generator, dtype=W.dtype), u).view(W.shape) + 1e-9 * W
        V = tensors[after].reshape(len(u), -1) if tensors[after].numel() % len(u) == 0 else None
        if V is not None:
            tensors[after] = (V - torch.outer(u, u @ V) / (u @ u)).view(tensors[after].shape)
    return X


def _far_positions(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    """Positions beside tokens that are large, and nearly equal."""
    return (X[:1] + 10 ** draw.uniform(-12, 0) * (X - X[:1])) * 10 ** draw.uniform(0, 14)


KINDS: dict[str, tuple[Callable[[random.Random], dict[str, Any]], Harm]] = {
    "ordinary": (_ordinary, _as_drawn),
    "any": (_nothing, _as_drawn),
    "large": (_nothing, _large),
    "sharp": (_sharp, _as_drawn),
    "bare": (_bare, _as_drawn),
    "llama": (_llama, _as_drawn),
    "long token": (_bare, _long_token),
    "long token, any": (_nothing, _long_token),
    "mixed tokens": (_nothing, _mixed_tokens),
    "mixed columns": (_nothing, _mixed_columns),
    "clustered": (_nothing, _clustered),
    "clustered, sharp": (_sharp, _clustered),
    "close": (_nothing, _close),
    "equal": (_nothing, _equal),
    "saturated": (_saturated, _biased),
    "cancelling": (_nothing, _cancelling),
    "projected": (_nothing, _projected),
    "positions": (_absolute, _far_positions),
}
"""By name: which fields an architecture of the kind has, and what is done to its tensors and tokens."""
