"""Scores times gamma ln n, and Sinkhorn attention, written out again."""

import math
from typing import Any

import pytest
import torch

from rankscope.deviation import Scaled
from rankscope.deviation.scores import Scores
from rankscope.deviation.softmax import balanced, split
from rankscope.deviation.state import ValidTokens
from tests.remedies.score_networks import MASKS, PADDING, first, network, scores, softmax


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


@pytest.mark.parametrize("mask", MASKS)
def test_sinkhorn_divides_columns_and_rows_in_turn(mask: str) -> None:
    """Loops over tokens; only valid ones have sums."""
    net = network(mask)
    actual = first(net.with_remedy("sinkhorn", rounds=3))
    expected = softmax(scores(net), mask)
    for sample in range(2):
        valid = [i for i in range(6) if not PADDING[sample, i]]
        for P in expected[sample]:
            for _ in range(3):
                for j in valid:
                    P[:, j] = P[:, j] / sum(float(P[i, j]) for i in valid)
                for i in valid:
                    P[i] = P[i] / sum(float(P[i, j]) for j in valid)
    assert torch.allclose(actual, expected, atol=1e-14)
    if mask == "complete":
        many = first(net.with_remedy("sinkhorn", rounds=200))
        assert torch.allclose(many.sum(-2), (~PADDING).double()[:, None], atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
def test_sinkhorn_of_no_round_is_softmax(mask: str) -> None:
    net = network(mask, positions="alibi")
    assert torch.equal(first(net.variant(kernel="sinkhorn:0")), first(net))


def test_columns_of_weights_below_all_range_are_divided_by_their_sums() -> None:
    """All look at the first token, by scores of 1e20: its column becomes 1/3. The largest weight of each other
    column, e^-1e20, becomes one. Rows then divide 1/3 and 1 by 4/3."""
    D = torch.tensor([[-3e20, 0.0, 0.0], [0.0, -1e20, 0.0], [0.0, -2e20, -1e20]], dtype=torch.float64)
    visible, valid = torch.ones(1, 1, 3, 3).tril().bool(), ValidTokens(torch.ones(1, 3, dtype=torch.bool))
    scores = Scores(Scaled.plain(torch.zeros(1, 1, 3).double()).by_head(), Scaled.plain(D[None, None]).by_head())
    P = split(balanced(scores, visible, valid, 1), visible, valid).matrix()[0, 0]
    expected = [[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.25, 0.0, 0.75]]
    torch.testing.assert_close(P, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)
