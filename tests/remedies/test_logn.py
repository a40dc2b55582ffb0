"""Scores times gamma ln n, written out again."""

import math
from typing import Any

import pytest
import torch

from tests.remedies.score_networks import MASKS, first, network, scores, softmax


@pytest.mark.parametrize("mask", MASKS)
def test_scores_grow_with_the_log_of_the_number_of_valid_tokens(mask: str) -> None:
    net = network(mask)
    gain = torch.tensor([math.log(6), math.log(4)])[:, None, None, None] * 0.8
    assert torch.allclose(first(net.with_remedy("logn", gamma=0.8)), softmax(scores(net) * gain, mask), atol=1e-14)


@pytest.mark.parametrize("fields", [{"kernel": "gaussian"}, {"positions": "alibi", "score_cap": 2.0}])
def test_the_gain_multiplies_positions_and_caps_as_well(fields: dict[str, Any]) -> None:
    """log P, but for a constant of each row, is so many times what it was."""
    net = network(**fields)
    logs = [first(each)[0].log() for each in (net, net.with_remedy("logn", gamma=0.8))]
    before, after = (each - each.mean(-1, keepdim=True) for each in logs)
    assert torch.allclose(after, 0.8 * math.log(6) * before, atol=1e-12)
