"""What a GPU is asked for in a step: kernels, and nothing that it would have to be waited for."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rankscope.errors import ArchitectureError
from rankscope.lab import Training
from rankscope_studies.remedies.trainings import EVERY
from rankscope_studies.trial import Trial, TrialSizes

SIZES = TrialSizes(width=8, heads=2, context=6, batch=2, steps=9)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="steps are recorded on a GPU")


class CpuUse(TorchDispatchMode):
    """Notes what touches the CPU, or asks for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[str] = []
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls += 1
        touched = [each for each in tree_leaves((args, kwargs, found)) if isinstance(each, Tensor)]
        near = [each for each in touched if each.device.type == "cpu"]
        copied = "copy" in str(func) and 0 < len(near) < len(touched)
        if "local_scalar" in str(func) or copied or any(each.ndim for each in near):  # numbers go along
            self.waited.append(str(func))
        return found


def on(device: str, remedy: str, seeds: tuple[int, ...]) -> Training:
    for setting in ("pre", "post", "images"):
        try:
            return Trial(remedy, setting, 2, seeds, SIZES).training(device)
        except ArchitectureError:
            continue
    raise AssertionError(remedy)


@pytest.mark.slow
@pytest.mark.parametrize(("remedy", "seeds"), [("none", (0,)), *((each, (0, 3)) for each in EVERY)])
def test_a_step_waits_for_nothing(remedy: str, seeds: tuple[int, ...]) -> None:
    """On torch's device without numbers, where a question has no answer, as in a recording."""
    training = on("meta", remedy, seeds)
    batches = training._batches(0)
    training._batch_losses(batches)  # masks are made in the first
    with CpuUse() as use:
        losses = training._batch_losses(batches)
        losses.sum().backward()
        training._clip()
    assert use.calls > 100 and use.waited == []
    assert getattr(training.learner, "refusal", None) is None


@GPU
@pytest.mark.parametrize("seeds", [(0,), (0, 3)])
def test_recorded_steps_are_those_that_are_made_one_by_one(seeds: tuple[int, ...]) -> None:
    several = Trial("contranorm", "pre", 2, seeds, SIZES)
    fast, slow = (several.training("cuda", capture).finish() for capture in (True, False))
    assert fast.captured is not None and fast.captured.refusal is None
    torch.testing.assert_close(torch.stack(fast.losses), torch.stack(slow.losses), rtol=1e-5, atol=1e-5)
