"""`CapturedStep`: a training step recorded once on a GPU and then replayed (a CUDA graph).

A step of a small network is some thousands of short kernels, and Python takes longer to launch them than the
GPU to run them; replayed they are launched at once. The first steps are made as usual, and then one is
recorded: samples are copied to where it reads them, and the learning rate is a tensor. Where a step cannot be
recorded, or its samples have another shape, it is made as usual.
"""

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rankscope.lab.tasks import Batch

WARM_STEPS = 3  # Steps before one is recorded: libraries set themselves up in the first


class CapturedStep:
    """A training step that is replayed where it can be.

    Args:
        losses: Gives the loss of every network on its samples.
        optimizer: Moves the parameters.
        clip: Clips gradients.
    """

    def __init__(
        self, losses: Callable[[Sequence[Batch]], Tensor], optimizer: torch.optim.Optimizer, clip: Callable[[], None]
    ) -> None:
        self.losses, self.optimizer, self.clip = losses, optimizer, clip
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
