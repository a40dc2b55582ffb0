"""`Captured`: a training step recorded once on a GPU and then played again (a CUDA graph).

A step of a small network is some thousands of short kernels, and Python takes longer to ask for them than the
GPU to run them; played again they are asked for at once. The first steps are made as usual, and then one is
recorded: samples are copied to where it reads them, and the rate is a tensor. Where a step cannot be
recorded, or its samples have another shape, it is made as usual.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rankscope.lab.tasks import Batch

WARM = 3
"""Steps before one is recorded: libraries set themselves up in the first."""


class Captured:
    """`losses` gives those of every network on its samples, `prepare` clips gradients."""

    def __init__(
        self,
        losses: Callable[[Sequence[Batch]], Tensor],
        optimizer: torch.optim.Optimizer,
        prepare: Callable[[], None],
    ) -> None:
        self.losses, self.optimizer, self.prepare = losses, optimizer, prepare
        self.made, self._stream = 0, torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.why: str | None = None
        """Why a step could not be recorded."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: list[Batch] = []
        """Where the recorded step reads its samples."""
        self._found = torch.empty(0)
        """Where it leaves its losses."""

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """Make a step; the losses before it."""
        self.made += 1
        if self._graph is None and self.why is None and self.made > WARM:
            self._record(batches)
        if self._graph is None or not self._fit(batches):
            return self._beside(batches)
        for place, batch in zip(self._given, batches, strict=True):
            place.inputs.copy_(batch.inputs)
            place.labels.copy_(batch.labels)
        self._graph.replay()
        return self._found.clone()

    def _record(self, batches: Sequence[Batch]) -> None:
        if any(each.padding is not None for each in batches):
            self.why = "samples have padding"
            return
        self._given = [Batch(each.inputs.clone(), each.labels.clone()) for each in batches]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._found = stepped(self.losses(self._given), self.optimizer, self.prepare)
        except Exception as error:  # nothing was run: the step is made as usual
            self.why = (str(error).splitlines() or [type(error).__name__])[0]
            torch.cuda.synchronize()
        else:
            self._graph = graph

    def _fit(self, batches: Sequence[Batch]) -> bool:
        return all(
            batch.padding is None
            and batch.inputs.shape == place.inputs.shape
            and batch.labels.shape == place.labels.shape
            for place, batch in zip(self._given, batches, strict=True)
        )

    def _beside(self, batches: Sequence[Batch]) -> Tensor:
        """On a stream of its own, as what comes before a recording must be."""
        here, stream = torch.cuda.current_stream(), self._stream
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            found = stepped(self.losses(batches), self.optimizer, self.prepare)
        here.wait_stream(stream)
        return found


def stepped(losses: Tensor, optimizer: torch.optim.Optimizer, prepare: Callable[[], None]) -> Tensor:
    """Gradients, what `prepare` does to them, and the optimiser's step; the losses, without their graph."""
    optimizer.zero_grad()
    losses.sum().backward()  # type: ignore[no-untyped-call]
    prepare()
    optimizer.step()
    return losses.detach()
