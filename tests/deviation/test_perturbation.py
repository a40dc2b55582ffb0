"""A token that is zero but for rounding, through a norm of two entries: its sign is not read."""

import pytest
import torch

from rankscope import Architecture, Transformer, measure


def _cancelling(share: float, eps: float) -> Transformer:
    """Causal attention whose values are minus `share` of the tokens, split over two heads, and a skip: at
    one the first token is cancelled, whatever it is."""
    net = Transformer.random(
        Architecture(layers=1, width=2, heads=2, head_width=2, mask="causal", mlp="none", norm_eps=eps,
                     biases=())
    ).to(torch.float64)  # fmt: skip
    w = net.weights.layers[0].attention
    turn = torch.linalg.qr(torch.randn(2, 2, 2, dtype=torch.float64))[0]
    w.value.weight.copy_(turn.transpose(0, 1))
    parts = torch.tensor([0.3, 0.7], dtype=torch.float64)[:, None, None]
    w.output.weight.copy_(-share * parts * turn.mT)
    return net


def _layer_one(net: Transformer, scale: float) -> list[dict[str, float]]:
    X = torch.randn(1, 1, 2).double() + scale * torch.randn(20, 3, 2).double()
    rows = measure(net, X, metrics=["mu"]).table.iter_rows(named=True)
    return [row for row in rows if row["layer"] == 1]


@pytest.mark.parametrize("scale", [1.0, 1e-14])
def test_a_sign_that_is_roundings_is_marked_every_time(scale: float) -> None:
    torch.manual_seed(0)
    assert all(row["below_floor"] for row in _layer_one(_cancelling(1.0, eps=0.0), scale))


def test_a_sign_that_is_plain_is_read() -> None:
    torch.manual_seed(0)
    apart = [row for row in _layer_one(_cancelling(0.9, eps=0.0), 1.0) if row["log10"] > -10]
    assert len(apart) > 10 and not any(row["below_floor"] for row in apart)
