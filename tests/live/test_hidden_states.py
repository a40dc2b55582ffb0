"""Where the hidden states are in what blocks take and return."""

import torch
from torch import nn

import rankscope
from rankscope.errors import WatchError
from tests.live import reference
from tests.live.encoders import Loop
from tests.live.families import WIDTH, seen
from tests.raising import raises


def test_layout_can_be_forced() -> None:
    model = Loop()
    X = torch.randn(2, 6, WIDTH)
    with rankscope.watch(model, "mu", blocks=["first", "second"], layout="token first") as w:
        model(X.transpose(0, 1))
    expected = reference.mu(X, torch.ones(2, 6, dtype=torch.bool))
    torch.testing.assert_close(w.profile().curve("mu")[:, 0], expected, rtol=1e-6, atol=0)


def test_states_that_are_no_tokens() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1)), nn.Sequential(nn.Conv2d(3, 3, 1)))
    with raises(WatchError, subject="blocks"):
        seen(model, "mu", torch.randn(1, 3, 4, 4))
