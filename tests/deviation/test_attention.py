"""Gates on heads in deviation arithmetic, against hundreds of digits."""

import math
from typing import Any

import mpmath as mp
import pytest
import torch

from rankscope.deviation import Scaled
from rankscope.deviation.attention import HeadOutputs, gated, sigmoid
from rankscope.deviation.state import ValidTokens
from rankscope.nets import Architecture
from rankscope.profiles import measure
from tests.builders import awake, normal
from tests.deviation.reference import SMALL, compare


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("norm", "place"), [("none", "post"), ("rms", "pre"), ("layer", "post")])
@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_gated_heads_are_exact(norm: Any, place: Any, skip: float) -> None:
    for seed, mask in enumerate(("complete", "causal")):
        arch = Architecture(**SMALL, norm=norm, norm_place=place, mask=mask, head_gate=True, key_heads=1,
                            attention_skip=skip, mlp_skip=skip)  # fmt: skip
        compare(arch, seed)


def test_a_sigmoids_change_at_every_size() -> None:
    """Of steps from 1e-3000 to 50, where the sigmoid is open, shut, gone on either side and in between."""
    for z in (-5000.0, -300.0, -30.0, 0.0, 2.0, 40.0, 5000.0):
        for log10 in (-3000.0, -200.0, -12.0, -1.0, 0.5, 1.7):
            for sign in (1.0, -1.0):
                d = Scaled(
                    torch.full((1, 1, 1, 1), sign, dtype=torch.float64),
                    torch.tensor([log10 * math.log(10)], dtype=torch.float64),
                )
                _, found = sigmoid(Scaled.plain(torch.tensor([[[z]]], dtype=torch.float64)), d)
                with mp.workdps(6000 if log10 < -1000 else 2600):
                    step = sign * mp.exp(mp.mpf(float(d.log[0])))
                    true = 1 / (1 + mp.exp(-(z + step))) - 1 / (1 + mp.exp(-mp.mpf(z)))
                    log = float(mp.log(abs(true)))
                assert float(found.value.sign()) == sign
                assert float(found.value.abs().log() + found.log[0]) == pytest.approx(log, rel=1e-12, abs=1e-12)


def test_gates_that_are_open_to_zeros_alone() -> None:
    """Entries that are not zero meet gates at e^-9000 or below: (1, 0) and (0, 2) become e^-9000 (1, 0), (0, 2/e)."""
    tokens = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)[None, None]
    logits = torch.tensor([[-9000.0, 50.0], [60.0, -9001.0], [70.0, 0.0]], dtype=torch.float64)[None, None]
    zero = Scaled.plain(torch.zeros(1, 1, 2, dtype=torch.float64)).by_head()
    valid = ValidTokens(torch.tensor([[True, True, False]]))
    heads = HeadOutputs(zero, Scaled.plain(tokens).by_head(), valid, torch.eye(2, dtype=torch.float64)[None])
    found = gated(heads, zero, Scaled.plain(logits).by_head())
    result = (found.x.mapped(lambda t: t[:, :, None]) + found.R).at(torch.full((1, 1), -9000.0, dtype=torch.float64))
    expected = torch.tensor([[1.0, 0.0], [0.0, 2 / math.e]], dtype=torch.float64)
    assert (result[0, 0, :2] - expected).abs().max() < 1e-12 and not found.R.value[0, 0, 2].any()


@pytest.mark.slow
def test_doubled_precision_confirms_gated_heads() -> None:
    arch = Architecture(**SMALL, norm="rms", norm_place="pre", head_gate=True, attention_skip=0.0)
    once, twice = (
        measure(awake(arch), normal(1, 4, 4), metrics=["mu", "head_mu"], confirm=sure).table for sure in (False, True)
    )
    assert twice["log10"].to_list() == pytest.approx(once["log10"].to_list(), abs=1e-12)
    assert not twice["below_floor"].any()
