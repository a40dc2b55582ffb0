"""Padding is read off whatever the model is called with."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope.live.mask import arguments_of, continues_from_cache, find_padding, is_decoder

REAL = torch.tensor([[1, 1, 1], [1, 0, 0]])


def padding_in(arguments: dict[str, Any], decoder: bool = False) -> Tensor | None:
    """What a call with these says of 2 x 3 tokens."""
    found = find_padding([arguments], {}, (2, 3), decoder)
    return None if found is None else found.at


class Named(nn.Module):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **rest: Any) -> Tensor:
        return x


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


@pytest.mark.parametrize("model", [Named(), Wrapper(Named()), Wrapper(Wrapper(Named()))])
@pytest.mark.parametrize("by_name", [True, False])
def test_positional_and_named_masks_are_found_also_behind_wrappers(model: nn.Module, by_name: bool) -> None:
    x = torch.zeros(2, 3, 4)
    found = (
        arguments_of(model, (x,), {"attention_mask": REAL}) if by_name else arguments_of(model, (x, REAL), {})
    )
    padding = padding_in(found)
    assert padding is not None and torch.equal(padding, REAL == 0)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("attention_mask", REAL),
        ("attention_mask", REAL.bool()),
        ("attention_mask", REAL.float()),
        ("src_key_padding_mask", REAL == 0),
        ("key_padding_mask", torch.zeros(2, 3).masked_fill(REAL == 0, -torch.inf)),
        ("padding_mask", REAL == 0),
    ],
)
def test_every_way_of_saying_padding(name: str, mask: Tensor) -> None:
    padding = padding_in({name: mask})
    assert padding is not None and torch.equal(padding, REAL == 0)


def test_masks_that_say_who_sees_whom_are_no_padding() -> None:
    assert padding_in({"attention_mask": torch.ones(2, 1, 3, 3)}) is None
    assert padding_in({"attention_mask": None}) is None
    assert padding_in({"attention_mask": {"full_attention": REAL}}) is None
    assert padding_in({}) is None


def test_a_decoder_beside_an_encoder_has_its_own() -> None:
    both = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
    assert is_decoder(both, "decoder.layers") and not is_decoder(both, "encoder.layers")
    assert not is_decoder(Named(), "decoder.layers")
    assert padding_in({"src_key_padding_mask": REAL == 0}, decoder=True) is None
    padding = padding_in({"tgt_key_padding_mask": REAL == 0}, decoder=True)
    assert padding is not None and torch.equal(padding, REAL == 0)


def test_a_cache_with_something_in_it_is_gone_on_from() -> None:
    from transformers import DynamicCache

    cache = DynamicCache()
    assert not continues_from_cache({"past_key_values": cache}) and not continues_from_cache(
        {"past_key_values": None}
    )
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert continues_from_cache({"past_key_values": cache})
