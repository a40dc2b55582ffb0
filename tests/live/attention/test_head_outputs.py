"""Shapes of heads, checks that parts add up, and the output projection, found or noticed to be missing."""

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rankscope.errors import WatchError
from rankscope.live.attention.head_outputs import (
    by_head,
    check_contributions,
    check_pattern,
    contributions_of,
    weight_of,
)
from tests.live.families import FAMILIES, made, seen
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


class _Sharp(nn.Linear):
    """Not a linear map, whatever its class says."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


@pytest.mark.parametrize("projection", [_Sharp(16, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16))])
def test_an_output_projection_that_is_not_linear_is_noticed(projection: nn.Module) -> None:
    model, batch = made("distilbert")
    block = FAMILIES["distilbert"].stack(model)[0]
    block.get_submodule("attention").out_lin = projection.double()
    with raises(WatchError, subject="heads"):
        seen(model, "head_mu", **batch)


class Adapted(nn.Module):
    """A linear map with a low-rank addition, as LoRA wraps it."""

    def __init__(self, base: nn.Module, width: int, in_place: bool) -> None:
        super().__init__()
        self.base, self.in_place = base, in_place
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            y = self.base(x)
            return y.add_(self.up(self.down(x)))
        return self.up(self.down(x)) + self.base(x)


@pytest.mark.parametrize("in_place", [False, True])
def test_heads_are_refused_where_an_adapter_adds_to_their_projection(in_place: bool) -> None:
    """The linear map inside would be found, and what the adapter adds be left out without a word; one that
    adds nothing is no obstacle."""
    model, batch = made("bert")
    expected = seen(model, "head_mu", **batch).profile().curve("head_mu")[:, 1:]
    for block in model.encoder.layer:
        output = block.attention.output
        output.dense = Adapted(output.dense, output.dense.out_features, in_place).to(output.dense.weight)
    with raises(WatchError, subject="heads"):
        seen(model, "head_mu", **batch)
    assert len(seen(model, ["mu", "entropy"], **batch).profile().table)
    if in_place:  # else the adapter's own map is the first to be called
        for block in model.encoder.layer:
            nn.init.zeros_(block.attention.output.dense.up.weight)
        assert torch.equal(seen(model, "head_mu", **batch).profile().curve("head_mu")[:, 1:], expected)
