"""How `Training` runs its networks at a step: one alone, or several of one architecture at once.

Tensors of several networks are stacked along a first axis, and one call of `vmap` runs all: a small network
alone leaves most of a GPU idle. Each has its own samples, gradients and clipping, and gives what it gives
alone, but for rounding. Where samples have padding or networks dropout, or a part of a network branches on
its numbers (a mixture of experts), networks run one after the other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from rankscope.lab.tasks import Batch
from rankscope.nets import Dropout


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
                return self._at_once(torch.stack([batch.inputs for batch in batches]))
            except RuntimeError as error:
                if "vmap" not in str(error):
                    raise
                self.refusal = str(error).splitlines()[0]
        return self._one_by_one(batches, drops)

    def _at_once(self, inputs: Tensor) -> list[Tensor]:
        def call(tensors: dict[str, Tensor], inputs: Tensor) -> Tensor:
            logits: Tensor = functional_call(self.models[0], tensors, (inputs,))
            return logits

        return list(vmap(call)(self.stacked | self.buffers, inputs).unbind())

    def _one_by_one(self, batches: Sequence[Batch], drops: Sequence[Dropout | None]) -> list[Tensor]:
        apart = {name: stack.unbind() for name, stack in (self.stacked | self.buffers).items()}
        logits = []
        for k, (batch, drop) in enumerate(zip(batches, drops, strict=True)):
            tensors = {name: rows[k] for name, rows in apart.items()}
            logits.append(functional_call(self.models[0], tensors, (batch.inputs, batch.padding, drop)))
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
