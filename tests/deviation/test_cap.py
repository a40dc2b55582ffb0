"""Capped scores in deviation arithmetic, against hundreds of digits."""

from typing import Any

import pytest

from rankscope.nets import Architecture
from tests.deviation.reference import SMALL, compare

MASKS = ("complete", "causal", "window:1")
POSITIONS = ("none", "absolute", "relative", "rotary", "bias", "alibi")


@pytest.mark.parametrize("positions", POSITIONS)
def test_capped_scores(positions: Any) -> None:
    """Below the scores' size and above it, with biases in queries and keys, skips and none."""
    for seed, (mask, cap) in enumerate(zip(MASKS, (0.1, 5.0, 0.1), strict=True)):
        skip = float((seed + POSITIONS.index(positions)) % 2)
        arch = Architecture(**SMALL, norm="rms", norm_place="pre", mask=mask, positions=positions,
                            attention_skip=skip, score_cap=cap, norm_eps=1e-6)  # fmt: skip
        compare(arch, seed)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_capped_pure_attention_far_below_floating_point(scale: float) -> None:
    """Six layers without skips, scores within the cap and far beyond it, where all of them are the cap's."""
    arch = Architecture(**{**SMALL, "layers": 6}, norm="none", mlp="none", attention_skip=0.0, score_cap=0.5)
    assert min(compare(arch, seed, scale, sure=False) for seed in range(4)) < -100
