"""Token ids and their padding on the way into a network that knows where it came from."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import TokensError
from rankscope.nets import Architecture, Encoded, Inputs, Transformer
from tests.builders import normal
from tests.raising import raises

TABLE = normal(10, 8)
IDS = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


class TableOfTokens:
    """An origin that embeds token ids."""

    def encode(self, inputs: Inputs, tokens: int, padding: Tensor | None) -> Encoded:
        assert isinstance(inputs, Tensor)
        X = TABLE[inputs[:, :tokens]]
        return Encoded(X, torch.zeros(X.shape[:2], dtype=torch.bool) if padding is None else padding[:, :tokens])

    def words(self, texts: Sequence[str], tokens: int) -> list[list[str]]:
        return [text.split()[:tokens] for text in texts]

    def described(self) -> dict[str, Any]:
        return {"name": "table"}

    def fingerprint(self) -> str:
        return "table"


def test_token_ids_take_padding_in_either_convention() -> None:
    net = replace(Transformer.random(Architecture(layers=1, width=8, heads=2)), origin=TableOfTokens())
    for most in (None, 3):
        padded, masked = net.encode(IDS, most, MASK == 0), net.encode(IDS, most, attention_mask=MASK)
        assert torch.equal(masked.padding, (MASK == 0)[:, :most]) and torch.equal(masked.padding, padded.padding)
        assert torch.equal(masked.X, TABLE[IDS[:, :most]])
    with raises(TokensError, "attention_mask"):
        net.encode(IDS, padding=MASK == 0, attention_mask=MASK)
    with raises(TokensError, "padding"):
        net.encode("Call me Ishmael.", attention_mask=MASK)
    with raises(TokensError, "max_length"):
        net.encode(IDS, 0)


def test_a_network_that_was_not_loaded_has_no_words() -> None:
    net = Transformer.random(Architecture(layers=1, width=8, heads=2))
    for encode in (net.encode, net.words):
        with raises(TokensError, "texts"):
            encode("Call me Ishmael.")
