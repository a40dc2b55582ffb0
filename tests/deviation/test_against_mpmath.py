"""Deviation arithmetic against hundreds of digits, part by part and in every combination."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.nets import Architecture
from tests.deviation.reference import SMALL, compare

NORMS = [("none", "post"), *itertools.product(("layer", "rms", "scale"), ("pre", "post", "sandwich"))]
MLPS: tuple[Any, ...] = ("plain", "gated", "none")
SKIPS = (0.0, 0.5, 1.0)
MASKS = ("complete", "causal", "window:1")
POSITIONS = ("none", "absolute", "relative", "rotary", "bias", "alibi")


@pytest.mark.slow
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("norm", "place"), NORMS)
def test_every_combination(norm: Any, place: Any, mask: str, positions: Any) -> None:
    """Norm kind and place, MLP kind, skip weight, mask and position scheme: all 1620."""
    activations = itertools.cycle(("gelu", "silu", "gelu_tanh", "quick_gelu", "tanh", "relu"))
    for seed, (mlp, skip) in enumerate(itertools.product(MLPS, SKIPS)):
        compare(
            Architecture(**SMALL, norm=norm, norm_place=place, mask=mask, positions=positions, mlp=mlp,
                         attention_skip=skip, mlp_skip=skip, activation=next(activations)),
            seed,
        )  # fmt: skip


@given(
    st.fixed_dictionaries({
        "norm": st.sampled_from(["layer", "rms", "scale", "none"]),
        "norm_place": st.sampled_from(["pre", "post", "sandwich"]),
        "mask": st.sampled_from(["complete", "causal", "window:1", "edges:0>1,0>2,0>3"]),
        "positions": st.sampled_from(POSITIONS),
        "kernel": st.sampled_from(["softmax", "gaussian", "uniform"]),
        "mlp": st.sampled_from(MLPS),
        "activation": st.sampled_from(["gelu", "gelu_tanh", "quick_gelu", "silu", "tanh", "identity"]),
        "attention_skip": st.sampled_from([0.0, 0.5, 1.0, -0.3]),
        "parallel": st.booleans(),
        "key_heads": st.sampled_from([1, 2]),
        "biases": st.sampled_from([True, False]),
        "shared": st.booleans(),
        "rotary_pairs": st.sampled_from(["half", "adjacent"]),
        "rotary_frequencies": st.sampled_from([(), ((0.7,),), ((1.0,), (0.01,))]),
        "rotary_scales": st.sampled_from([(), (1.2,), (1.3, 0.7)]),
        "score_cap": st.sampled_from([0.0, 0.3, 2.0, 50.0]),
        "query_norm": st.booleans(),
    }),
    st.integers(0, 10**6),
)  # fmt: skip
def test_random_networks(fields: dict[str, Any], seed: int) -> None:
    if fields["kernel"] == "gaussian":
        fields["score_cap"] = 0.0
    compare(Architecture(**SMALL, **fields), seed, sure=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("norm", ["none", "layer", "rms", "scale"])
def test_pure_attention_far_below_floating_point(norm: Any) -> None:
    """Six layers without skips: the residual passes 1e-150 and still agrees."""
    arch = Architecture(**{**SMALL, "layers": 6}, norm=norm, mlp="none", attention_skip=0.0, biases=False)
    assert min(compare(arch, seed) for seed in range(3)) < -150
