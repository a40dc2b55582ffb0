"""What `measure`, `certify` and `decompose` take: tokens, what `encode` gave, or texts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rankscope import certify, decompose, fresh, measure
from rankscope.nets import Architecture

TEXTS = ["Call me Ishmael.", "Some years ago, never mind how long precisely"]
NET = fresh(Architecture(layers=2, width=8, heads=2))


def outcome(found: Any) -> Any:
    """Numbers that tell one answer from another."""
    return found.output if hasattr(found, "output") else found.table.drop("hypotheses", strict=False).rows()


@pytest.mark.parametrize("ask", [measure, certify, decompose])
def test_texts_and_what_encode_gave_are_as_good_as_tokens(ask: Callable[..., Any]) -> None:
    tokens = outcome(ask(NET, *NET.encode(TEXTS)))
    same = torch.equal if isinstance(tokens, torch.Tensor) else lambda a, b: str(a) == str(b)
    assert same(outcome(ask(NET, NET.encode(TEXTS))), tokens)
    assert same(outcome(ask(NET, TEXTS)), tokens)
    assert same(outcome(ask(NET, tuple(TEXTS))), tokens)
    assert same(outcome(ask(NET, TEXTS[0])), outcome(ask(NET, *NET.encode(TEXTS[:1]))))


def test_a_variant_by_its_name_is_the_one_by_its_parts() -> None:
    assert NET.variant("san").arch == NET.variant(skip=False, mlp=False, norm=False).arch
    assert NET.variant("transformer").arch == NET.arch
    assert NET.variant("transformer-norm").arch == NET.variant(norm=False).arch
    deep = NET.variant("san+norm", layers=5, mask="causal").arch
    assert deep == NET.variant(skip=False, mlp=False, layers=5, mask="causal").arch
    assert NET.variant("san", skip=0.5).arch.attention_skip == 0.5
    assert NET.variant("san").weights.layers[0] is NET.weights.layers[0]
