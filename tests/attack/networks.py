"""Networks drawn to break the arithmetic: each kind is one way of losing digits."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.nets import Architecture, Experts, Transformer
from rankscope.remedies import REMEDY_FILES
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

    @property
    def broken(self) -> bool:
        """True if a NaN or infinity is among the weights or tokens."""
        return not all(bool(tensor.isfinite().all()) for tensor in (self.X, *self.net.state_dict().values()))


Tensors = dict[str, Tensor]
Harm = Callable[[random.Random, dict[str, Any], Tensors, Tensor], Tensor]
"""Changes a network's tensors in place, and gives the tokens."""


def drawn(seed: int, kind: str | None = None, feature: str = "none") -> Case:
    """Case number `seed`, of a kind by turns, with a feature of `FEATURES`."""
    draw = random.Random(seed)
    kind = list(KINDS)[seed % len(KINDS)] if kind is None else kind
    fields, harm = KINDS[kind]
    chosen = {**_any(draw), **fields(draw)}
    if seed >= CAPPED and chosen["kernel"] == "softmax":
        chosen["score_cap"] = random.Random(f"cap {seed}").choice((0.3, 5.0))
    beside = random.Random(f"{feature} {seed}")  # so that the rest is drawn as without the feature
    more, onto = FEATURES[feature](beside, chosen, kind != "ordinary")
    chosen |= more
    if chosen.get("parallel"):
        chosen["mlp_skip"] = 1.0
    if chosen["norm"] == "none" or chosen["norm_place"] == "post":
        chosen["bare_layers"] = ()
    arch = Architecture(**{**SMALL, **chosen})
    tensors = awake(arch, seed, size=draw.choice((0.0, 0.3))).state_dict()
    tokens = draw.choice((2, 3, 4, 5))
    X = torch.randn(tokens, arch.width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    X = harm(draw, chosen, tensors, X)
    padding = torch.zeros(1, len(X), dtype=torch.bool)
    if kind == "bigbird, padded":
        padding[0, draw.sample(range(len(X)), draw.randrange(1, len(X) - 1))] = True
    elif chosen["mask"] != "edges:0>1" and draw.random() < 0.2 and len(X) > 2:
        padding[0, draw.randrange(len(X))] = True
    return Case(kind, seed, onto(Transformer.from_weights(arch, tensors)), X[None], padding)


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
        if name.endswith(part) and len(tensors[name]) == len(main):  # what a latent is read off is not of tokens
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


def _zeros(draw: random.Random) -> dict[str, Any]:
    """Mostly norms without eps and no biases: what is zero stays so until something that is not comes in."""
    return {
        "norm_eps": draw.choice((0.0, 0.0, 1e-12)), "norm": draw.choice(("layer", "rms", "scale", "none")),
        "biases": draw.random() < 0.2, "attention_skip": draw.choice((0.0, 0.0, 1.0)),
        "positions": draw.choice(("none", "none", "rotary", "alibi", "absolute")),
    }  # fmt: skip


def _sharp_zeros(draw: random.Random) -> dict[str, Any]:
    return {**_zeros(draw), "divisor": 10 ** draw.uniform(-9, -1), "kernel": draw.choice(("softmax", "gaussian"))}


def _no_eps(draw: random.Random) -> dict[str, Any]:
    return {"norm_eps": 0.0, "norm": draw.choice(("layer", "rms", "scale")), "layers": draw.choice((2, 3, 4))}


def _gated(draw: random.Random) -> dict[str, Any]:
    return {
        "mlp": "gated", "activation": draw.choice(("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "tanh")),
        "mlp_skip": draw.choice((0.0, 0.0, 1.0)), "norm_eps": draw.choice((0.0, 1e-12, 1e-5)),
    }  # fmt: skip


def _narrow(draw: random.Random) -> dict[str, Any]:
    """Heads of one entry, whose queries and keys a norm makes signs."""
    return {
        "head_width": 1, "heads": draw.choice((1, 2, 4)), "key_heads": 1, "query_norm": True,
        "norm_eps": draw.choice((0.0, 0.0, 1e-12, 1e-6)), "positions": draw.choice(("none", "absolute", "bias")),
        "divisor": draw.choice((1.0, 0.1, 1e-3)),
    }  # fmt: skip


def _signs(draw: random.Random) -> dict[str, Any]:
    return {**_narrow(draw), "norm": draw.choice(("none", "rms", "scale")), "biases": False, "positions": "none"}


def _olmo(draw: random.Random) -> dict[str, Any]:
    """Norms on what branches add alone, and one on all queries of a token together."""
    return {"norm_place": "output", "norm": draw.choice(("layer", "rms")), "query_norm": True, "bare_layers": (),
            "query_norm_across": True, "norm_eps": draw.choice((0.0, 1e-12, 1e-5))}  # fmt: skip


def _bigbird(draw: random.Random) -> dict[str, Any]:
    window, everywhere, random_ones = draw.choice(((0, 0, 1), (0, 0, 2), (1, 0, 1), (0, 1, 1), (1, 1, 2)))
    mask = f"bigbird:{window}:{everywhere}:{random_ones}:{draw.randrange(100)}"
    return {"mask": mask, "attention_skip": draw.choice((0.0, 0.0, 1.0))}


def _some_zero(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    """One token zero or several, the others at a size of their own."""
    X = X * 10 ** draw.uniform(-2, 3)
    X[draw.sample(range(len(X)), draw.randrange(1, len(X)))] = 0.0
    return X


def _huge_gains(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    """Matrices of the MLP, or of all, a thousand to 1e8 times their usual size."""
    part = draw.choice((".mlp.", ".mlp.gate", ".mlp.up", "."))
    for name in tensors:
        if part in name and name.endswith("weight"):
            tensors[name] = tensors[name] * 10 ** draw.uniform(3, 8)
    return X


def _underflow(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    """Gates so far out in a tail that float64 has nothing left of them."""
    shift = -(10 ** draw.uniform(1.3, 5))
    for name in tensors:
        if name.endswith("gate.bias"):
            tensors[name] = tensors[name] * draw.choice((1.0, 1e2)) + shift
        elif name.endswith(("gate.weight", "up.weight")):
            tensors[name] = tensors[name] * 10 ** draw.uniform(0, 8)
    return X


def _broken_weight(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    name = draw.choice(sorted(tensors))
    flat = tensors[name].clone().flatten()
    flat[draw.randrange(len(flat))] = draw.choice((torch.nan, torch.nan, torch.inf, -torch.inf))
    tensors[name] = flat.view(tensors[name].shape)
    return X


def _broken_token(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    X[draw.randrange(len(X)), draw.randrange(X.shape[1])] = draw.choice((torch.nan, torch.inf, -torch.inf))
    return X


def _orthogonal(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    """Queries or keys of one token that are zero but for rounding: without eps a norm makes a sign of that."""
    token, part = X[draw.randrange(len(X))], draw.choice(("query", "key"))
    for name in tensors:
        if name.endswith(f"attention.{part}.weight") and len(tensors[name]) == len(token):
            W = tensors[name].flatten(1)
            tensors[name] = (W - torch.outer(token, token @ W) / (token @ token)).view(tensors[name].shape)
    return X


def _more_tokens(draw: random.Random, fields: dict[str, Any], tensors: Tensors, X: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    return torch.randn(draw.choice((4, 5, 6, 7, 8)), X.shape[1], generator=generator, dtype=X.dtype)


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
    "zero tokens": (_zeros, _some_zero),
    "zero tokens, sharp": (_sharp_zeros, _some_zero),
    "no eps": (_no_eps, _as_drawn),
    "no eps, equal": (_no_eps, _equal),
    "huge gains": (_gated, _huge_gains),
    "gates underflow": (lambda draw: {**_gated(draw), "biases": True}, _underflow),
    "broken weight": (_nothing, _broken_weight),
    "broken token": (_nothing, _broken_token),
    "width one": (_narrow, _as_drawn),
    "bigbird, padded": (_bigbird, _more_tokens),
    "width one, signs": (_signs, _orthogonal),
    "olmo": (_olmo, _large),
}
"""By name: which fields an architecture of the kind has, and what is done to its tensors and tokens."""


Onto = Callable[[Transformer], Transformer]
"""What is put onto a finished network."""
Feature = Callable[[random.Random, dict[str, Any], bool], tuple[dict[str, Any], Onto]]
"""(draw, the fields of the kind, whether to be harsh) to the fields that are otherwise, and what is put onto the
network. An ordinary network has the feature as it is used."""


def _without(draw: random.Random, fields: dict[str, Any], harsh: bool) -> tuple[dict[str, Any], Onto]:
    return {}, lambda net: net


def _experts(draw: random.Random, fields: dict[str, Any], harsh: bool) -> tuple[dict[str, Any], Onto]:
    """Routers from those that hardly choose to those whose other experts underflow."""
    number, shared = draw.choice((2, 3, 4)), draw.choice((0, 0, 3))
    experts = Experts(
        number=number, chosen=draw.randrange(1, number + 1), width=draw.choice((2, 3)),
        renormalised=draw.random() < 0.7, shared_width=shared, shared_gate=bool(shared) and draw.random() < 0.5,
    )  # fmt: skip
    factor, family = 10 ** draw.uniform(-3, 4) if harsh else 1.0, draw.randrange(8)
    if family == 0:  # DeepSeek-V3
        groups: dict[str, Any] = {"groups": 2, "groups_chosen": draw.choice((1, 2)), "group_best": draw.choice((1, 2))}
        experts = replace(experts, number=4, chosen=draw.choice((1, 2)), sigmoid=True, correction=True, **groups)
    elif family == 1:  # gpt-oss
        limit = draw.choice((0.0, 0.5, 7.0))
        experts = replace(experts, biases=True, limit=limit, shared_width=0, shared_gate=False)
    return {"mlp": "experts", "experts": experts}, lambda net: _multiplied(net, "router.weight", factor)


def _latents(draw: random.Random, fields: dict[str, Any], harsh: bool) -> tuple[dict[str, Any], Onto]:
    """As DeepSeek-V2 has them; a head of one entry has nothing to rotate."""
    narrow = fields.get("head_width") == 1
    positions = draw.choice(("none", "rotary", "rotary", "alibi", "absolute"))
    wide = {"head_width": 4, "rotary_share": 0.5} if draw.random() < 0.5 and not narrow else {}
    latents = {
        "query_latent": draw.choice((0, 2, 3)), "key_latent": draw.choice((2, 3)), "value_width": draw.choice((0, 3)),
        "positions": "none" if narrow else positions, "rotary_pairs": draw.choice(("half", "adjacent")),
    }  # fmt: skip
    return latents | wide, lambda net: net


def _cross(draw: random.Random, fields: dict[str, Any], harsh: bool) -> tuple[dict[str, Any], Onto]:
    """A memory of a few tokens, some of them zero, long, nearly equal or padding."""
    M = torch.randn(1, draw.choice((1, 2, 3, 5)), SMALL["width"], dtype=torch.float64,
                    generator=torch.Generator().manual_seed(draw.randrange(10**6)))  # fmt: skip
    kind, tokens = draw.randrange(6) if harsh else 5, M.shape[1]
    if kind == 0:
        M = M * 10 ** draw.uniform(-9, 4)
    elif kind == 1:
        M[0, draw.randrange(tokens)] = 0.0
    elif kind == 2:
        M = M[:, :1] + 10 ** draw.uniform(-17, -1) * (M - M[:, :1])
    elif kind == 3:
        M[0, draw.randrange(tokens)] *= 10 ** draw.uniform(2, 9)
    padding = torch.zeros(1, tokens, dtype=torch.bool)
    if tokens > 1 and draw.random() < 0.3:
        padding[0, draw.randrange(tokens)] = True
    positions = "none" if fields["positions"] == "relative" else fields["positions"]
    changed = {"cross_attention": True, "parallel": False, "query_norm": False, "query_norm_across": False,
               "positions": positions}  # fmt: skip
    return changed, lambda net: net.with_memory(M, padding)


def _caps(draw: random.Random, fields: dict[str, Any], harsh: bool) -> tuple[dict[str, Any], Onto]:
    """Caps under which scores are as they were, and caps that all scores reach."""
    divisor = {"divisor": 10 ** draw.uniform(-6, 0)} if draw.random() < 0.5 and harsh else {}
    cap = draw.choice((0.01, 0.3, 5.0, 30.0, 50.0) if harsh else (5.0, 30.0, 50.0))
    return {"kernel": "softmax", "score_cap": cap, **divisor}, lambda net: net


def _head_gates(draw: random.Random, fields: dict[str, Any], harsh: bool) -> tuple[dict[str, Any], Onto]:
    """Gates from half open to shut beyond what float64 holds."""
    factor = 10 ** draw.uniform(-2, 4) if harsh else 1.0
    return {"head_gate": True}, lambda net: _multiplied(net, "attention.gate.weight", factor)


def _multiplied(net: Transformer, end: str, factor: float) -> Transformer:
    state = {name: tensor * factor if name.endswith(end) else tensor for name, tensor in net.state_dict().items()}
    return Transformer.from_weights(net.arch, state)


NUMBERS: dict[str, Callable[[random.Random], dict[str, int | float]]] = {
    "shaped": lambda draw: {name: draw.choice((0.0, 0.3, 1.0, 1.0)) for name in ("alpha", "beta", "gamma")},
    "attnscale": lambda draw: {"w": draw.choice((0.0, 0.5, 5.0, -0.9))},
    "sinkhorn": lambda draw: {"rounds": draw.choice((1, 2, 5))},
    "logn": lambda draw: {"gamma": draw.choice((0.3, 1.0, 7.0))},
    "differential": lambda draw: {"norm": draw.choice((0, 1)), "spread": draw.choice((0.1, 1.0))},
    "rezero": lambda draw: {"weight": draw.choice((0.0, 0.1, 1.0)), "norms": draw.choice((0, 1))},
    "skipinit": lambda draw: {"weight": draw.choice((0.0, 0.1, 1.0)), "norms": draw.choice((0, 1))},
    "lambda": lambda draw: {"weight": draw.choice((2.0, 0.5, -1.0, 1e6))},
    "neutreno": lambda draw: {"weight": draw.choice((0.4, 0.6, 1.0))},
    "featscale": lambda draw: {"s": draw.choice((0.0, 0.5, -1.0)), "t": draw.choice((0.0, 0.5, -1.0))},
    "contranorm": lambda draw: {"s": draw.choice((1e-4, 0.1, 0.2, 2.0))},
}
"""The numbers that are drawn of remedies; those of others are as published."""


def _remedies(draw: random.Random, fields: dict[str, Any], harsh: bool) -> tuple[dict[str, Any], Onto]:
    """Any remedy, the numbers that it trains moved off their start, on a network that can have it."""
    name = draw.choice(sorted(REMEDY_FILES))
    numbers = NUMBERS.get(name, lambda draw: {})(draw) if harsh else {}
    seed, size = draw.randrange(10**6), draw.choice((0.0, 0.3, 0.3, 2.0)) if harsh else 0.1
    changed: dict[str, Any] = {}
    if name == "deepnorm":
        changed = {"norm_place": "post", "norm": "layer" if fields["norm"] == "none" else fields["norm"]}
    elif name == "lnscale":
        changed = {"norm_place": draw.choice(("pre", "sandwich"))}
    elif name in ("rezero", "skipinit", "sqrtl"):
        changed = {"norm_place": draw.choice(("pre", "post"))}
    elif name == "sinkhorn":
        changed = {"kernel": "softmax"}

    def onto(net: Transformer) -> Transformer:
        net = net.with_remedy(name, **numbers)
        state, generator = net.state_dict(), torch.Generator().manual_seed(seed)
        for each, tensor in state.items():
            if ".parts." in each or (name == "gate" and "attention.gate" in each):
                state[each] = tensor + size * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return Transformer.from_weights(net.arch, state)

    return changed, onto


FEATURES: dict[str, Feature] = {
    "none": _without,
    "remedies": _remedies,
    "experts": _experts,
    "latents": _latents,
    "cross": _cross,
    "caps": _caps,
    "gates": _head_gates,
}
"""By name: what else a network has, whatever its kind."""
