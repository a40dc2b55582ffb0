"""Cross-attention in deviation arithmetic, against hundreds of digits and against float64."""

from typing import Any

import mpmath as mp
import pytest
import torch

from rankscope.nets import Architecture
from rankscope.profiles import measure
from tests.builders import awake, normal
from tests.deviation.reference import Network, log10_residual

SMALL: dict[str, Any] = {"layers": 3, "width": 8, "heads": 2, "cross_attention": True}
BARE: dict[str, Any] = {"norm": "none", "mlp": "none", "attention_skip": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "post": {},
    "pre, grouped": {"norm_place": "pre", "norm": "rms", "key_heads": 1},
    "sandwich": {"norm_place": "sandwich"},
    "causal with positions": {"norm_place": "pre", "positions": "rotary", "mask": "causal"},
    "capped": {"score_cap": 0.5},
    "gaussian": {"kernel": "gaussian", "norm_place": "pre"},
    "uniform": {"kernel": "uniform", "norm_place": "pre"},
    "attention alone": BARE,
    "attention alone, gaussian": {**BARE, "kernel": "gaussian"},
    "no skip": {"attention_skip": 0.0, "norm": "none"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_residuals_are_those_of_hundreds_of_digits(case: str) -> None:
    net = awake(Architecture(**SMALL, **CASES[case]), 3).with_memory(normal(1, 5, 8, seed=9))
    X = normal(1, 4, 8, seed=4)
    with mp.workdps(300):  # without skips the log triples from layer to layer
        exact = [log10_residual(state) for state in Network(net).states(X[0])]
    profile = measure(net, X, metrics="residual")
    found = profile.curve("residual", "log10")[0].tolist()
    assert max(abs(a - float(b)) / max(1.0, abs(a) / 100) for a, b in zip(found, exact, strict=True)) < 1e-10
    assert not bool(profile.curve("residual", "below_floor").any())


def test_tokens_meet_far_below_float64() -> None:
    """What tokens differ by goes through a causal attention and the queries of a cross-attention to first
    order: below float64 it falls at one rate, however small it is."""
    arch = Architecture(**SMALL, **BARE, mask="causal").replace(layers=60)
    net = awake(arch, 3).variant(layers=[1] * 60).with_memory(normal(1, 5, 8, seed=9))
    found = measure(net, normal(1, 4, 8, seed=4), metrics="residual", check=False).curve("residual", "log10")[0]
    rates = found[41:] - found[40:-1]
    assert float(found[-1]) < -30 and float(rates.max() - rates.min()) < 1e-6


def test_equal_tokens_stay_equal() -> None:
    net = awake(Architecture(**SMALL), 3).with_memory(normal(2, 5, 8, seed=9))
    found = measure(net, normal(2, 1, 8, seed=4).expand(-1, 4, -1), metrics="mu")
    assert float(found.curve("mu").max()) == 0.0


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("confirm", "batch"), [(False, 2), (True, 5)])
def test_padding_of_tokens_and_memory(confirm: bool, batch: int) -> None:
    """Both padded on either side, many samples in one batch or several, against float64 on each by itself."""
    hidden = torch.zeros(5, 6, dtype=torch.bool)
    hidden[1, :2] = hidden[2, 4:] = hidden[3, ::2] = True
    aside = torch.zeros(5, 7, dtype=torch.bool)
    aside[0, 3:] = aside[2, :4] = aside[4, 1::2] = True
    X, M = normal(5, 6, 8, seed=4), normal(5, 7, 8, seed=9)
    net = awake(Architecture(**SMALL, norm_place="pre", mask="causal"), 3).variant(layers=2)
    together = measure(net.with_memory(M, aside), X, hidden, "mu", batch_size=batch, confirm=confirm).curve("mu")
    for sample in range(5):
        alone = net.with_memory(M[sample : sample + 1, ~aside[sample]])
        mine = measure(alone, X[sample : sample + 1, ~hidden[sample]], None, "mu", "float64").curve("mu")
        torch.testing.assert_close(together[sample], mine[0], rtol=1e-11, atol=0)
