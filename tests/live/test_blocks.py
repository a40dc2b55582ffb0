"""The stack of blocks is found where there is one to be found."""

import pytest
import torch
from torch import Tensor, nn

import rankscope
from rankscope.live.blocks import find_blocks, stacks


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


def blocks(*inside: nn.Module, **others: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({**others, "blocks": nn.ModuleList(inside)})


STEM = nn.Sequential(nn.Sequential(nn.Conv1d(1, 1, 1)), nn.Sequential(nn.Conv1d(1, 1, 1)))


@pytest.mark.parametrize(
    ("model", "name", "number"),
    [
        (nn.Sequential(nn.Embedding(5, 4), nn.Sequential(Block(3), Block(3))), "1", 2),
        (blocks(Block(3)), "blocks", 1),
        (nn.Sequential(blocks(Block(), Block())), "0.blocks", 2),
        (blocks(Block(), Block(), stem=STEM), "blocks", 2),
        (blocks(Block(), Other(), Block()), "blocks", 3),
        (blocks(*[Block()] * 5), "blocks", 5),
    ],
    ids=["no experts inside blocks", "a stack of one with experts", "inside a wrapper", "no convolutions",
         "nearly of one class", "one block many times"],
)  # fmt: skip
def test_the_stack_is_found(model: nn.Module, name: str, number: int) -> None:
    ((found, inside),) = stacks(model).items()
    assert (found, inside) == find_blocks(model) and found == name and len(inside) == number
    assert all(isinstance(block, Block) for block in inside)


def test_the_model_may_itself_be_the_stack() -> None:
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


def test_modules_are_composite_if_they_hold_a_module_even_an_empty_one() -> None:
    class Holder(nn.Module):
        def __init__(self, part: nn.Module | None) -> None:
            super().__init__()
            self.part = part

    assert stacks(nn.Sequential(Holder(nn.ModuleList()), Holder(nn.ModuleList()))).keys() == {""}
    assert not stacks(nn.Sequential(Holder(None), Holder(None)))
