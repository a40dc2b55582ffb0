"""Latent queries, keys and values in deviation arithmetic, against hundreds of digits."""

from typing import Any

import mpmath as mp
import pytest

from rankscope.nets import Architecture
from rankscope.profiles import measure
from tests.builders import awake, normal
from tests.deviation.reference import Network, log10_residual

SMALL: dict[str, Any] = {"layers": 3, "width": 8, "heads": 2, "head_width": 6, "value_width": 3}
BARE: dict[str, Any] = {"norm": "none", "mlp": "none", "attention_skip": 0.0}
ROTARY: dict[str, Any] = {"positions": "rotary", "rotary_share": 2 / 6, "rotary_pairs": "adjacent"}
CASES: dict[str, dict[str, Any]] = {
    "as DeepSeek": {**ROTARY, "query_latent": 4, "key_latent": 5, "norm_place": "pre", "mask": "causal"},
    "plain queries": {**ROTARY, "key_latent": 3, "norm": "rms", "norm_place": "pre"},
    "queries alone": {"query_latent": 3},
    "grouped, capped": {"query_latent": 4, "key_latent": 5, "key_heads": 1, "score_cap": 0.7},
    "gaussian": {"query_latent": 4, "key_latent": 5, "kernel": "gaussian"},
    "attention alone": {"query_latent": 4, "key_latent": 5, **BARE},
    "attention alone, rotated": {"query_latent": 4, "key_latent": 5, **BARE, **ROTARY},
}


OTHER_SIZES = [(case, size) for case in ("as DeepSeek", "attention alone, rotated") for size in (1e-3, 1e4)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "size"), [*((case, 1.0) for case in CASES), *OTHER_SIZES])
def test_residuals_are_those_of_hundreds_of_digits(case: str, size: float) -> None:
    """Of tokens of ordinary size, and of small and large ones, beside which the norm of a latent is of
    another scale than what it leaves out."""
    net = awake(Architecture(**SMALL, **CASES[case]), 3)
    X = size * normal(1, 4, 8, seed=4)
    with mp.workdps(300):
        exact = [log10_residual(state) for state in Network(net).states(X[0])]
    profile = measure(net, X, metrics="residual")
    found, marks = (profile.curve("residual", each)[0].tolist() for each in ("log10", "below_floor"))
    for mine, true, marked in zip(found, exact, marks, strict=True):
        assert marked or abs(mine - float(true)) < 1e-10 * max(1.0, abs(mine) / 100)
    assert size != 1.0 or not any(marks)
