"""The stack of blocks is found where there is one to be found."""

import torch
from torch import Tensor, nn

from rankscope.live.blocks import blocks_of, stacks


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)


class Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.attention = Attention()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(experts))


class Other(Block):
    pass


def test_experts_inside_blocks_are_no_stack() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Sequential(Block(3), Block(3)))
    assert {name: len(inside) for name, inside in stacks(model).items()} == {"1": 2}


def test_a_stack_of_one_with_experts_is_itself() -> None:
    (inside,) = stacks(nn.ModuleDict({"blocks": nn.ModuleList([Block(3)])})).values()
    assert len(inside) == 1 and isinstance(inside[0], Block)


def test_a_wrapper_is_looked_into() -> None:
    model = nn.Sequential(nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()])}))
    assert list(stacks(model)) == ["0.blocks"]


def test_convolutions_before_a_transformer_are_no_candidates() -> None:
    stem = nn.Sequential(nn.Sequential(nn.Conv1d(1, 1, 1)), nn.Sequential(nn.Conv1d(1, 1, 1)))
    model = nn.ModuleDict({"stem": stem, "blocks": nn.ModuleList([Block(), Block()])})
    assert list(stacks(model)) == ["blocks"]


def test_blocks_may_be_nearly_of_one_class() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block(), Other(), Block()])})
    assert len(blocks_of(model)[1]) == 3


def test_one_block_many_times_in_a_list() -> None:
    block = Block()
    _, found = blocks_of(nn.ModuleDict({"blocks": nn.ModuleList([block] * 5)}))
    assert found == [block] * 5


def test_the_model_may_itself_be_the_stack() -> None:
    import rankscope

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inside(x)

    model = nn.Sequential(Step(), Step())
    with rankscope.watch(model, "mu") as w:
        model(torch.randn(2, 3, 4))
    assert w.profile().curve("mu").shape == (2, 3)
