"""How `Training` makes a step: of one network alone or of several of one architecture at once, replayed on a GPU.

**Several at once.** Tensors of several networks are stacked along a first axis, and one call of `vmap` runs all: a
small network alone leaves most of a GPU idle. Each has its own samples, gradients and clipping, and gives what it gives
alone, but for rounding. Where samples have padding or networks dropout, or a part of a network branches on
its numbers (a mixture of experts), networks run one after the other.

**Replayed.** A step of a small network is some thousands of short kernels, and Python takes longer to launch them than
the GPU to run them; recorded once (a CUDA graph) and replayed they are launched at once. The first steps are made as
usual, and then one is recorded: samples are copied to where it reads them, and the learning rate is a tensor. Where a
step cannot be recorded, or its samples have another shape, it is made as usual.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from rankscope.lab.tasks import Batch
from rankscope.nets import Dropout

WARM_STEPS = 3  # Steps before one is recorded: libraries set themselves up in the first


@dataclass(eq=False)
class CapturedStep:
    """A training step that is replayed where it can be."""

    losses: Callable[[Sequence[Batch]], Tensor]  # Gives the loss of every network on its samples
    optimizer: torch.optim.Optimizer  # Moves the parameters
    clip: Callable[[], None]  # Clips gradients

    def __post_init__(self) -> None:
        self.steps, self._stream = 0, torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.refusal: str | None = None
        """Why a step could not be recorded."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Batch] = []
        """Where the recorded step reads its samples."""
        self._output = torch.empty(0)
        """Where it leaves its losses."""

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """Make a step; the losses before it."""
        self.steps += 1
        if self._graph is None and self.refusal is None and self.steps > WARM_STEPS:
            self._record(batches)
        if self._graph is None or not self._fit(batches):
            return self._on_own_stream(batches)
        for buffer, batch in zip(self._inputs, batches, strict=True):
            buffer.inputs.copy_(batch.inputs)
            buffer.labels.copy_(batch.labels)
        self._graph.replay()
        return self._output.clone()

    def _record(self, batches: Sequence[Batch]) -> None:
        if any(batch.padding is not None for batch in batches):
            self.refusal = "samples have padding"
            return
        self._inputs = [Batch(batch.inputs.clone(), batch.labels.clone()) for batch in batches]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._output = optimizer_step(self.losses(self._inputs), self.optimizer, self.clip)
        except Exception as error:  # nothing was run: the step is made as usual
            self.refusal = (str(error).splitlines() or [type(error).__name__])[0]
            torch.cuda.synchronize()
        else:
            self._graph = graph

    def _fit(self, batches: Sequence[Batch]) -> bool:
        return all(
            batch.padding is None
            and batch.inputs.shape == buffer.inputs.shape
            and batch.labels.shape == buffer.labels.shape
            for buffer, batch in zip(self._inputs, batches, strict=True)
        )

    def _on_own_stream(self, batches: Sequence[Batch]) -> Tensor:
        """A usual step, on a stream of its own as CUDA wants it before a recording."""
        current, stream = torch.cuda.current_stream(), self._stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            losses = optimizer_step(self.losses(batches), self.optimizer, self.clip)
        current.wait_stream(stream)
        return losses


def optimizer_step(losses: Tensor, optimizer: torch.optim.Optimizer, clip: Callable[[], None]) -> Tensor:
    """Compute gradients, clip them, and make the optimiser's step; the losses, without their graph."""
    optimizer.zero_grad()
    losses.sum().backward()  # type: ignore[no-untyped-call]
    clip()
    optimizer.step()
    return losses.detach()


def release_memory(device: str) -> None:
    """Give back the memory of a GPU that nobody holds any more: other processes run beside."""
    if torch.device(device).type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


class SingleLearner:
    """A learner that has one network."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def parameters(self) -> dict[str, Tensor]:
        """Parameters of the network itself."""
        return dict(self.model.named_parameters())

    def logits(self, batches: Sequence[Batch], drops: Sequence[Dropout | None]) -> list[Tensor]:
        """The logits of the only network on the only batch."""
        (batch,), (drop,) = batches, drops
        return [self.model(batch.inputs, batch.padding, drop)]

    def clip(self, max_norm: float) -> None:
        """Clip the gradient as torch does."""
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)


class StackedLearner:
    """A learner of several networks; the tensors of each are views of the stack, and so are its gradients."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = list(models)
        self.stacked, self.buffers = stack_module_state(self.models)
        self.refusal: str | None = None
        """Why networks cannot run at once, and run one after the other."""
        for k, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                parameter.data = self.stacked[name].data[k]
            for name, buffer in model.named_buffers():
                buffer.data = self.buffers[name].data[k]

    def parameters(self) -> dict[str, Tensor]:
        """Stacked parameters of all networks, `[network, ...]`."""
        return self.stacked

    def logits(self, batches: Sequence[Batch], drops: Sequence[Dropout | None]) -> list[Tensor]:
        """The logits of all networks, computed at once where that can be done."""
        plain = all(batch.padding is None for batch in batches) and all(drop is None for drop in drops)
        if self.refusal is None and plain:
            try:
                inputs = torch.stack([batch.inputs for batch in batches])
                return list(vmap(self._call)(self.stacked | self.buffers, inputs).unbind())
            except RuntimeError as error:
                if "vmap" not in str(error):
                    raise
                self.refusal = str(error).splitlines()[0]
        apart = {name: stack.unbind() for name, stack in (self.stacked | self.buffers).items()}
        return [
            self._call({name: rows[k] for name, rows in apart.items()}, batch.inputs, batch.padding, drop)
            for k, (batch, drop) in enumerate(zip(batches, drops, strict=True))
        ]

    def _call(self, tensors: dict[str, Tensor], *inputs: Any) -> Tensor:
        logits: Tensor = functional_call(self.models[0], tensors, inputs)
        return logits

    def clip(self, max_norm: float) -> None:
        """Clip each network by its own norm, as torch does for one: many tensors in one launch."""
        gradients = [stack.grad.unbind() for stack in self.stacked.values() if stack.grad is not None]
        for gradient in zip(*gradients, strict=True):
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradient)))
            torch._foreach_mul_(gradient, (max_norm / (norm + 1e-6)).clamp(max=1.0))

    def show_gradients(self) -> None:
        """Give each network its own gradients, for a monitor to read."""
        for k, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                gradient = self.stacked[name].grad
                parameter.grad = None if gradient is None else gradient[k]
