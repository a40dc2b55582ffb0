"""What wraps a model is taken off, and nothing else."""

import pytest
import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live import watch
from rankscope.live.modules import is_compiled, refuse_scripted, submodules, unwrapped
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
