"""Norms of states say what the metrics say of the states themselves."""

import pytest
import torch

from rankscope.live.plan import WatchPlan
from rankscope.live.state_norms import PIECE
from rankscope.metrics import metric
from rankscope.profiles import DEFAULT_METRICS
from rankscope.profiles.readings import read_tensor
from tests.live.test_state_readings import states_of

DEFAULT = WatchPlan([metric(name) for name in DEFAULT_METRICS], [])
SHAPES = [(1, 3, 1), (3, 5, 4), (2, 128, 600), (40, 60, 64)]
"""The last two are more than is taken together: of a sample, and of many."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padded", [False, True])
def test_norms_say_what_the_metrics_say(
    shape: tuple[int, int, int], dtype: torch.dtype, padded: bool
) -> None:
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
    return sum(len(norms.layers) for norms in call.norms.taken) if call.norms is not None else 0
