"""States that are read together give what each gives alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.live.plan import WatchPlan
from rankscope.live.state_readings import StateReadings, TokenBatch
from rankscope.metrics import metric

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
