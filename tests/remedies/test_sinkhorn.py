"""Sinkhorn attention, written out again."""

import pytest
import torch

from tests.remedies.score_networks import MASKS, PADDING, first, network, scores, softmax


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
