"""Padding in both conventions, and tokens put back where they stood."""

import pytest
import torch

from rankscope.errors import TokensError
from rankscope.nets import Architecture, Transformer
from rankscope.nets.padding import TokenOrder, padding_from
from tests.builders import normal
from tests.raising import raises

MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_an_attention_mask_is_the_complement_of_padding(dtype: torch.dtype) -> None:
    assert torch.equal(padding_from(None, MASK.to(dtype), (2, 4)), MASK == 0)  # type: ignore[arg-type]
    assert padding_from(None, None) is None
    assert padding_from(MASK == 0, None) is not None


def test_attention_masks_that_do_not_fit_are_refused() -> None:
    for padding, mask, shape in (
        (MASK == 0, MASK, (2, 4)),
        (None, MASK, (2, 5)),
        (None, MASK - 1, None),
        (None, MASK.tolist(), None),
    ):
        with raises(TokensError, subject="attention_mask"):
            padding_from(padding, mask, shape)


def test_networks_take_either() -> None:
    net, X = Transformer.random(Architecture(layers=2, width=8, heads=2)), normal(2, 4, 8)
    one, other = net.run(X, MASK == 0), net.run(X, attention_mask=MASK)
    assert torch.equal(one.output, other.output)
    with raises(TokensError, subject="attention_mask"):
        net.run(X, MASK == 0, MASK)


def test_tokens_come_back_where_they_stood() -> None:
    order, X = TokenOrder.of(MASK == 1), normal(2, 4, 8)
    assert order is not None and TokenOrder.of(MASK[:1] == 1) is None
    assert torch.equal(order.restored(order.sorted(X)), X)
    assert torch.equal(order.sorted(X)[1, :3], X[1, 1:])
