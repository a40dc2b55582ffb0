"""How factors become a network."""

import pytest
import torch

from rankscope import fresh
from rankscope.engine.spec import Cell, base_network, cell_network, described
from rankscope.errors import SweepError
from tests.raising import raises


def test_a_cell_is_the_variant_that_its_factors_say() -> None:
    net = fresh("bert-tiny")
    cell: Cell = {"variant": "transformer-mlp", "depth": 3, "skip": 0.5, "mask": "causal", "temperature": 2.0}
    by_hand = net.variant("transformer-mlp").variant(layers=3, skip=0.5, mask="causal", divisor=2 * net.arch.divisor)
    X, _ = net.encode(["Call me Ishmael"], 4)
    made = cell_network(net, cell)
    assert made.arch == by_hand.arch and torch.equal(made.run(X).output, by_hand.run(X).output)
    assert cell_network(net, {"model": "bert-tiny", "remedy": "none"}) is net
    with_remedy = cell_network(net, {"remedy": "attnscale:w=0.5"})
    assert torch.equal(with_remedy.run(X).output, net.with_remedy("attnscale", w=0.5).run(X).output)


@pytest.mark.parametrize("factor", ["seed", "init", "width"])
def test_trained_weights_are_not_drawn(factor: str) -> None:
    with raises(SweepError, subject=factor):
        base_network({"model": "minilm", factor: 1}, None)


@pytest.mark.parametrize(
    ("factor", "value"), [("seed", -1), ("seed", 0.5), ("temperature", 0.0), ("temperature", "hot")]
)
def test_a_value_out_of_range_is_refused(factor: str, value: float) -> None:
    net = fresh("bert-tiny")
    with raises(SweepError, subject=factor):
        cell_network(base_network({"model": "bert-tiny", factor: value}, net.arch), {factor: value})


def test_a_cell_is_described_by_what_is_unusual() -> None:
    assert described({"model": "bert-base", "samples": 4, "tokens": 32}) == "the usual"
    assert described({"depth": 6, "skip": 1.0, "mask": None}) == "depth 6, skip 1"
