"""States read together give what each gives alone, and norms say what the metrics say of the states."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.live.plan import WatchPlan
from rankscope.live.state_readings import PIECE, StateReadings, TokenBatch
from rankscope.metrics import ROUNDING, Tokens, metric
from rankscope.profiles import DEFAULT_METRICS, read_tensor

METRICS = [metric(name) for name in ("relative_residual", "residual", "mu", "mean_cosine", "stable_rank")]
PLAN = WatchPlan(METRICS, [])


def states_of(plan: WatchPlan, hidden: torch.Tensor, padded: bool) -> StateReadings:
    """The readings of a call whose hidden states have this shape, the last token being padding or not."""
    batch, tokens, _ = hidden.shape
    padding = torch.arange(tokens).expand(batch, -1) >= tokens - 1 if padded else None
    return StateReadings(plan, TokenBatch.of(hidden, padding, torch.float32))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(2, 5), st.integers(1, 4), st.booleans(), st.integers(0, 2**16))
def test_together_as_each_alone(batch: int, tokens: int, layers: int, padded: bool, seed: int) -> None:
    torch.manual_seed(seed)
    states = [torch.randn(batch, tokens, 4 if k < 2 else 6) for k in range(layers)]
    states[-1][0, 0, 0] = torch.nan
    together, alone = states_of(PLAN, states[0], padded), states_of(PLAN, states[0], padded)
    together.waiting = list(enumerate(states))
    together.flush()
    for layer, state in enumerate(states):
        alone.read(layer, state)
    assert not together.waiting
    for (layer, found), (same, expected) in zip(together.readings, alone.readings, strict=True):
        assert layer == same and len(found) == len(METRICS)
        for (_, one), (_, other) in zip(found, expected, strict=True):
            for part in ("value", "log10", "floor"):
                assert getattr(one, part).numpy() == pytest.approx(
                    getattr(other, part).numpy(), rel=1e-12, abs=1e-12, nan_ok=True
                )
    assert [(layer, bool(hole)) for layer, hole in together.broken] == [
        (layer, bool(hole)) for layer, hole in alone.broken
    ]


DEFAULT = WatchPlan([metric(name) for name in DEFAULT_METRICS], [])
SHAPES = [(1, 3, 1), (3, 5, 4), (2, 128, 600), (40, 60, 64)]
"""The last two are more than is taken together: of a sample, and of many."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padded", [False, True])
def test_norms_say_what_the_metrics_say(shape: tuple[int, int, int], dtype: torch.dtype, padded: bool) -> None:
    """Of states of any size; of zeros, of NaN and infinity, and of what leaves the range of float64."""
    torch.manual_seed(0)
    X = torch.randn(shape, dtype=torch.float64)
    assert not 100 < X.numel() < PIECE
    huge = 1e200 if dtype == torch.float64 else 1e30
    strange = [X.index_fill(0, torch.tensor(0), value) for value in (torch.nan, torch.inf, 0.0, 3.0)]
    usual = [X, X + 100, X.mT.contiguous().mT]
    assert _as_the_metrics_say([each.to(dtype) for each in usual], padded) == len(usual)
    _as_the_metrics_say([each.to(dtype) for each in (X, *strange, huge * X, X / huge, X)], padded)


def _as_the_metrics_say(states: list[torch.Tensor], padded: bool) -> int:
    """How many were read by their norms."""
    call = states_of(DEFAULT, states[0], padded)
    for layer, state in enumerate(states):
        kept = state.clone()
        call.read(layer, kept)
        kept.zero_()  # as a model may do with it later
    found = dict(call.all_readings())
    broken = {layer for layer, hole in call.broken if bool(hole)}
    for layer, state in enumerate(states):
        batch = call.batch
        expected, holes = read_tensor("tokens", state, batch.valid_for(state), DEFAULT.metrics, batch.unit)
        assert bool(holes.any()) == (layer in broken)
        for (one, mine), (other, theirs) in zip(found[layer], expected, strict=True):
            assert one is other
            for part, least in (("value", 0.0), ("floor", 0.0), ("log10", 1e-12)):
                close = pytest.approx(getattr(theirs, part).tolist(), rel=1e-12, abs=least, nan_ok=True)
                assert getattr(mine, part).tolist() == close
    return sum(len(layers) for layers, *_ in call.norms.taken) if call.norms is not None else 0


def _halved(x: Tokens, padding: torch.Tensor | None = None) -> torch.Tensor:
    """Half the Frobenius norm of the entries themselves, which norms of states taken together do not have."""
    return x.X.square().sum((-2, -1)).sqrt() / 2


@pytest.mark.parametrize("change", [{"compute": _halved}, {"scale": _halved}, {"compute": _halved, "scale": _halved}])
def test_changed_copy_of_a_metric_is_computed_by_its_own_functions(change: dict[str, Any]) -> None:
    """A copy with another value or floor is not read from the norms that suffice for the original."""
    mine, hidden = replace(metric("mu"), name="mine", **change), torch.tensor([[[3.0, 0.0], [0.0, 4.0]]])
    call = states_of(WatchPlan([mine, metric("relative_mu")], []), hidden, padded=False)
    call.read(0, hidden)
    reading = dict(call.all_readings()[0][1])[mine]
    residual = (2 * (1.5**2 + 2.0**2)) ** 0.5  # both tokens are (1.5, 2) away from their mean
    assert reading.value.tolist() == pytest.approx([2.5 if "compute" in change else residual])
    size = 2.5 if "scale" in change else 5.0
    assert reading.floor.tolist() == pytest.approx([ROUNDING * torch.finfo(torch.float32).eps * size])
