"""Shapes of heads, and the checks that parts add up."""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rankscope.errors import WatchError
from rankscope.live.attention.head_outputs import (
    by_head,
    check_contributions,
    check_pattern,
    contributions_of,
    weight_of,
)
from tests.raising import raises


def test_axes_of_heads() -> None:
    assert by_head(torch.zeros(5, 6)).shape == (1, 1, 5, 6)
    assert by_head(torch.zeros(2, 5, 6)).shape == (2, 1, 5, 6)
    assert by_head(torch.zeros(2, 3, 4, 5, 6)).shape == (2, 12, 5, 6)


def test_contributions_sum_to_what_the_projection_gives() -> None:
    heads = torch.randn(2, 5, 3, 4)
    for projection in (nn.Linear(12, 7), Conv1D(7, 12)):
        output = projection(heads.flatten(-2))
        parts = contributions_of(heads, weight_of(projection))
        assert parts.shape == (2, 3, 5, 7)
        check_contributions(parts, projection.bias, output, "it")
        with raises(WatchError, subject="heads"):
            check_contributions(parts, projection.bias, output.tanh(), "it")


def test_a_pattern_gives_its_output() -> None:
    pattern, values = torch.rand(2, 3, 5, 5), torch.randn(2, 3, 5, 4)
    check_pattern(pattern, values, pattern @ values, "it")
    with raises(WatchError, subject="pattern"):
        check_pattern(pattern.tril(), values, pattern @ values, "it")
