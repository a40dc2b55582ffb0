"""What the calls of a watch add up to."""

import torch

import rankscope
from rankscope.live import Watch
from tests.live.encoders import encoder, padded


def curves(w: Watch) -> torch.Tensor:
    return w.profile().curve("mu")


def test_reading_between_calls_changes_nothing() -> None:
    """States that wait are read when they are asked for, or all at the end."""
    model, (X, padding) = encoder(), padded()
    with torch.no_grad(), rankscope.watch(model, "mu") as often, rankscope.watch(model, "mu") as once:
        for k in range(3):
            model(X + k, src_key_padding_mask=padding)
            assert curves(often).shape == (2 * (k + 1), 4)
            assert often.notes
    assert torch.equal(curves(often), curves(once))
