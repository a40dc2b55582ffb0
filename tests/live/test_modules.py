"""What wraps a model is taken off, and nothing else; the stack of blocks is found where there is one to be found."""

import pytest
import torch
from torch import Tensor, nn

import rankscope
from rankscope.errors import WatchError
from rankscope.live import watch
from rankscope.live.modules import find_blocks, is_compiled, refuse_scripted, stacks, submodules, unwrapped
from tests.live.encoders import encoder, padded
from tests.raising import raises


class Scaled(nn.Module):
    """A model of one's own whose only child is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.module(10 * x)


def test_a_model_whose_only_child_is_called_module_keeps_its_forward() -> None:
    model, (X, _) = Scaled(), padded()
    assert unwrapped(model) is model
    with torch.no_grad(), watch(model, "mu") as w:
        model(X)
    with torch.no_grad(), watch(model.module, "mu") as inner:
        model.module(10 * X)
    assert torch.equal(w.profile().curve("mu"), inner.profile().curve("mu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        lambda model: torch.compile(nn.DataParallel(model)),
        type("FullyShardedDataParallel", (nn.DataParallel,), {"__module__": "torch.distributed.fsdp"}),
        type("DeepSpeedEngine", (nn.DataParallel,), {"__module__": "deepspeed.runtime.engine"}),
    ],
)
def test_what_spreads_or_compiles_a_model_is_taken_off(wrap: type[nn.Module]) -> None:
    model = encoder()
    assert unwrapped(wrap(model)) is model


def test_compiled_modules_are_known() -> None:
    assert not is_compiled(submodules(encoder()))
    assert is_compiled(submodules(torch.compile(encoder())))  # type: ignore[arg-type]
    model = encoder()
    model.layers[1].compile()
    assert is_compiled(submodules(model))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_scripted_modules_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    refuse_scripted(submodules(nn.Linear(2, 2)))
    with raises(WatchError, subject="1"):
        refuse_scripted(submodules(model))


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
