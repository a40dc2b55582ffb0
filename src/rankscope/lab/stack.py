"""How networks learn at one step: one alone, or several of one architecture at once.

Several lie behind one another along a first axis of every tensor, and one call of `vmap` runs all: a small
network alone leaves most of a GPU idle. Each has its own samples, gradients and clipping, and gives what it
gives alone, but for rounding. Where samples have padding or networks dropout, or a part of a network asks
what its numbers are (a mixture of experts), they run one after the other.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from rankscope.lab.tasks import Batch
from rankscope.nets.dropout import Dropout


class Learner(Protocol):
    """What the loop needs of networks."""

    def parameters(self) -> dict[str, Tensor]:
        """What an optimiser moves, by name."""

    def said(self, batches: Sequence[Batch], drops: Sequence[Dropout | None]) -> list[Tensor]:
        """What each network says of its samples."""

    def clip(self, longest: float) -> None:
        """Gradients of each network, cut to a length."""


class Alone:
    """One network."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def parameters(self) -> dict[str, Tensor]:
        """Its own."""
        return dict(self.model.named_parameters())

    def said(self, batches: Sequence[Batch], drops: Sequence[Dropout | None]) -> list[Tensor]:
        """Of the only batch."""
        (batch,), (drop,) = batches, drops
        return [self.model(batch.inputs, batch.padding, drop)]

    def clip(self, longest: float) -> None:
        """By torch."""
        nn.utils.clip_grad_norm_(self.model.parameters(), longest)


class Stacked:
    """Several networks; the tensors of each are views of those of all, and so are its gradients."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = list(models)
        self.stacked, self.buffers = stack_module_state(self.models)
        self.in_turn: str | None = None
        """Why they cannot learn at once, and run one after the other."""
        for place, model in enumerate(self.models):
            for name, one in model.named_parameters():
                one.data = self.stacked[name].data[place]
            for name, buffer in model.named_buffers():
                buffer.data = self.buffers[name].data[place]

    def parameters(self) -> dict[str, Tensor]:
        """Of all, `[network, ...]`."""
        return self.stacked

    def said(self, batches: Sequence[Batch], drops: Sequence[Dropout | None]) -> list[Tensor]:
        """All at once, where that can be done."""
        plain = all(each.padding is None for each in batches) and all(each is None for each in drops)
        if self.in_turn is None and plain:
            try:
                return self._at_once(torch.stack([each.inputs for each in batches]))
            except RuntimeError as error:
                if "vmap" not in str(error):
                    raise
                self.in_turn = str(error).splitlines()[0]
        return self._one_by_one(batches, drops)

    def _at_once(self, inputs: Tensor) -> list[Tensor]:
        def call(tensors: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
            found: Tensor = functional_call(self.models[0], (tensors, buffers), (inputs,))
            return found

        return list(vmap(call)(self.stacked, self.buffers, inputs).unbind())

    def _one_by_one(self, batches: Sequence[Batch], drops: Sequence[Dropout | None]) -> list[Tensor]:
        apart = {name: each.unbind() for name, each in (self.stacked | self.buffers).items()}
        return [
            functional_call(
                self.models[0],
                {name: each[place] for name, each in apart.items()},
                (batch.inputs, batch.padding, drop),
            )
            for place, (batch, drop) in enumerate(zip(batches, drops, strict=True))
        ]

    def clip(self, longest: float) -> None:
        """Each by its own length, as torch does it for one: many tensors in one launch."""
        gradients = [each.grad.unbind() for each in self.stacked.values() if each.grad is not None]
        for mine in zip(*gradients, strict=True):
            whole = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(mine)))
            torch._foreach_mul_(mine, (longest / (whole + 1e-6)).clamp(max=1.0))

    def show_gradients(self) -> None:
        """To each network its own, for who looks at them."""
        for place, model in enumerate(self.models):
            for name, one in model.named_parameters():
                whole = self.stacked[name].grad
                one.grad = None if whole is None else whole[place]
