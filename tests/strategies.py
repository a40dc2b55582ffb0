"""What hypothesis draws: token matrices, stochastic matrices, architectures."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from rankscope.nets import Architecture


@st.composite
def matrices(draw: st.DrawFn, rows: tuple[int, int] = (1, 7), columns: tuple[int, int] = (1, 6)) -> Tensor:
    """Token matrices, from generic to degenerate: equal rows, zeros, tiny and huge scales."""
    n, d = draw(st.integers(*rows)), draw(st.integers(*columns))
    kind = draw(st.sampled_from(["generic", "integers", "equal rows", "one outlier", "zero"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    X = torch.randn(n, d, generator=generator, dtype=torch.float64)
    if kind == "integers":
        X = X.mul(2).round()
    elif kind == "equal rows":
        X = X[:1].expand(n, d).clone()
    elif kind == "one outlier":
        X[1:] = X[0]
        X[-1] = X[-1] + torch.randn(d, generator=generator, dtype=torch.float64)
    elif kind == "zero":
        X = torch.zeros_like(X)
    return X * 10.0 ** draw(st.integers(-3, 3))


@st.composite
def stochastic(draw: st.DrawFn, most: int = 7) -> Tensor:
    """Row-stochastic matrices `[token, token]`, some with exact zeros."""
    n = draw(st.integers(1, most))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sharpness = draw(st.sampled_from([0.1, 1.0, 30.0]))
    P = (sharpness * torch.randn(n, n, generator=generator, dtype=torch.float64)).softmax(-1)
    if draw(st.booleans()):
        P = P.tril() / P.tril().sum(-1, keepdim=True)
    return P


@st.composite
def architectures(draw: st.DrawFn, /, **fixed: Any) -> Architecture:
    """Small architectures over everything a block can be."""
    heads = draw(st.sampled_from([1, 2, 4]))
    fields: dict[str, Any] = {
        "layers": draw(st.integers(1, 3)),
        "width": 8,
        "heads": heads,
        "head_width": 4,
        "key_heads": draw(st.sampled_from([k for k in (1, 2, 4) if heads % k == 0])),
        "mask": draw(st.sampled_from(["complete", "causal", "window:1", "prefix:2", "causal;complete"])),
        "kernel": draw(st.sampled_from(["softmax", "gaussian", "uniform", "sigmoid"])),
        "positions": draw(st.sampled_from(["none", "absolute", "relative", "rotary", "bias", "alibi"])),
        "length": 16,
        "rotary_pairs": draw(st.sampled_from(["half", "adjacent"])),
        "mlp": draw(st.sampled_from(["plain", "gated", "none"])),
        "mlp_width": 12,
        "activation": draw(st.sampled_from(["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh"])),
        "norm": draw(st.sampled_from(["layer", "rms", "scale", "none"])),
        "norm_place": draw(st.sampled_from(["pre", "post", "sandwich"])),
        "final_norm": draw(st.booleans()),
        "attention_skip": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "parallel": draw(st.booleans()),
        "shared": draw(st.booleans()),
        "biases": draw(st.sampled_from([True, False, ("query", "value", "norm")])),
    }
    if not fields["parallel"]:
        fields["mlp_skip"] = draw(st.sampled_from([0.0, 0.7, 1.0]))
    return Architecture(**{**fields, **fixed})
