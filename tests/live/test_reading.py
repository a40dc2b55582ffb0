"""States that are read together, as off the CPU, give what each gives alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.live.call import Call, Plan
from rankscope.live.reading import read_state, read_waiting
from rankscope.metrics import metric
from rankscope.metrics.tokens import real_tokens

METRICS = [metric(name) for name in ("relative_residual", "residual", "mu", "mean_cosine", "stable_rank")]
PLAN = Plan(METRICS, None, frozenset(), "batch first", False, None, True, True, "", False)


def _call(batch: int, tokens: int, padded: bool) -> Call:
    call = Call({})
    call.shape = torch.Size([batch, tokens])
    padding = torch.arange(tokens).expand(batch, -1) >= tokens - 1 if padded else None
    call.real[torch.device("cpu")] = real_tokens(call.shape, padding, torch.device("cpu"))
    call.whole, call.unit = padding is None, 1e-7
    return call


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(2, 5), st.integers(1, 4), st.booleans(), st.integers(0, 2**16))
def test_together_as_each_alone(batch: int, tokens: int, layers: int, padded: bool, seed: int) -> None:
    torch.manual_seed(seed)
    states = [torch.randn(batch, tokens, 4 if k < 2 else 6) for k in range(layers)]
    states[-1][0, 0, 0] = torch.nan
    together, alone = _call(batch, tokens, padded), _call(batch, tokens, padded)
    together.waiting = list(enumerate(states))
    read_waiting(PLAN, together)
    for layer, state in enumerate(states):
        read_state(PLAN, alone, layer, state)
    assert not together.waiting
    for (layer, found), (same, expected) in zip(together.found, alone.found, strict=True):
        assert layer == same and len(found) == len(METRICS)
        for (_, one), (_, other) in zip(found, expected, strict=True):
            for part in ("value", "log10", "floor"):
                assert getattr(one, part).numpy() == pytest.approx(
                    getattr(other, part).numpy(), rel=1e-12, abs=1e-12, nan_ok=True
                )
    assert [(layer, bool(hole)) for layer, hole in together.broken] == [
        (layer, bool(hole)) for layer, hole in alone.broken
    ]
