"""Passes of a person's own module: called with a batch, its loss taken, its logits found; and left as it was.

`live_module.py` takes readings of them. A loss hides what it is made of, so the logits are found by what they are: the
tensor z in the output at which the gradient of the loss is that of a mean cross-entropy,

    N dloss/dz_t = softmax(z_t) - onehot(y_t)     at N tokens t, and zero at the others.

That also tells the labels y. Where no tensor of the output is that, logits are not known.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.errors import LabError, RankscopeError, require
from rankscope.live import Blocks, arguments_of, floating_tensors, hooked, submodules
from rankscope.monitor import loss_in
from rankscope.sources import first_line

LossOfBatch = Callable[[Any, Any], Tensor]  # Takes what the model returns and the batch, and gives one number
ALIKE = 1e-3  # By how much `N dloss/dz` may differ from that of a cross-entropy
NO_SYMBOLS = ("label", "target", "mask", "type", "pos")  # In names of integers that are no symbols of tokens


@dataclass(frozen=True)
class ModuleInputs:
    """What a module of a person's own is forecast from: two batches of its training, and its loss."""

    inputs: Sequence[Any]
    """A list of two batches: each a tensor, a tuple of positional arguments, or a dictionary of arguments by name, of
    which entries that the module's forward does not name are for the loss alone."""
    loss: LossOfBatch | None = None
    """Takes what the module returns and the batch, and gives a tensor of one number; left out, the module must return
    an object with `.loss`, as those of Hugging Face do when they are given labels."""
    blocks: Blocks | None = None  # The stack of blocks where it is not found by itself, as in `watch`

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, list) or len(self.inputs) != 2:
            got = f"a {type(self.inputs).__name__}, which is one batch"
            got = f"a list of {len(self.inputs)}" if isinstance(self.inputs, list) else got
            raise LabError(f"inputs must be a list of two batches; got {got}", subject="inputs")
        sentence = f"loss must be a function of output and batch; got a {type(self.loss).__name__}"
        require(self.loss is None or callable(self.loss), sentence, LabError, "loss")

    def batches(self, model: nn.Module) -> "list[LiveBatch]":
        """The two batches, checked, as this module is called with them."""
        batches = [LiveBatch.of(batch, model) for batch in self.inputs]
        first, second = (batch.tensors for batch in batches)
        same = len(first) == len(second) and all(map(torch.equal, first, second))
        sentence = "inputs must be two different batches, whose gradients are compared; got the same one twice"
        require(not same, sentence, LabError, "inputs")
        return batches


@dataclass(frozen=True)
class LiveBatch:
    """A batch as it was given, and the arguments that the module is called with."""

    given: Any  # What the loss gets
    args: tuple[Any, ...]  # Positional arguments
    kwargs: Mapping[str, Any]  # Arguments by name
    for_loss: tuple[str, ...] = ()
    """Names of entries that the module's forward does not take: they are for the loss alone."""

    @classmethod
    def of(cls, batch: Any, model: nn.Module) -> "LiveBatch":
        """The batch of a tensor, of a tuple or list of positional arguments, or of a dictionary of arguments by name.

        Raises:
            LabError: It is none of these, or holds no tensor.
        """
        if not isinstance(batch, Tensor | Mapping | tuple | list):
            sentence = "a batch of inputs must be a tensor, a tuple or a dictionary"
            raise LabError(f"{sentence}; received a {type(batch).__name__}", subject="inputs")
        args = (batch,) if isinstance(batch, Tensor) else () if isinstance(batch, Mapping) else tuple(batch)
        kwargs = {str(name): value for name, value in batch.items()} if isinstance(batch, Mapping) else {}
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        require(tensors, "a batch of inputs must hold a tensor for the model; received none", LabError, "inputs")
        sentence = "inputs must be in memory, and not made in inference_mode, which no gradient goes through"
        in_memory = not any(x.is_meta or x.is_inference() for x in tensors)
        require(in_memory, f"{sentence}: make them outside of it, or clone them there", LabError, "inputs")
        taken = inspect.signature(model.forward).parameters
        for_loss: tuple[str, ...] = ()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            for_loss = tuple(name for name in kwargs if name not in taken)
        return cls(batch, args, {name: kwargs[name] for name in kwargs if name not in for_loss}, for_loss)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors for the module, in their order."""
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]

    def called(self, model: nn.Module, dtype: torch.dtype | None = None) -> Any:
        """What the model returns of it, floating tensors in another dtype if one is named.

        Raises:
            LabError: The model raised an error.
        """

        def cast(value: Any) -> Any:
            floating = dtype is not None and isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if floating else value

        try:
            return model(*map(cast, self.args), **{name: cast(value) for name, value in self.kwargs.items()})
        except (RankscopeError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raised = f"{type(model).__name__} raised {type(error).__name__}: {first_line(error)}"
            sentence = f"inputs must be batches that the model can be called with; called with one, {raised}"
            raise LabError(sentence, subject="inputs") from error

    def symbols(self, model: nn.Module, shape: torch.Size) -> Tensor | None:
        """The symbol of each token: the one argument of integers of this shape `[sample, token]`; None if there is
        none, or more than one."""
        named = arguments_of(model, self.args, dict(self.kwargs)).items()
        candidates = [
            value
            for name, value in named
            if isinstance(value, Tensor) and value.shape == shape and value.dtype in (torch.int64, torch.int32)
            if not any(mark in name.lower() for mark in NO_SYMBOLS)
        ]
        return candidates[0] if len(candidates) == 1 else None


@dataclass
class LivePass:
    """One call of the module with a batch, with its graph."""

    loss: Tensor  # What the loss gave
    logits: Tensor | None = None  # `[sample, token, class]` or `[sample, class]`; None where they are not known
    labelled: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """Which rows of the logits, flat, have a label."""
    labels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))  # Those labels
    head: nn.Module | None = None  # The module that gave the logits; None if none gave them as they are
    head_input: Tensor | None = None  # What the head took, `[sample, token, width]`; None if it is not that

    @property
    def rows(self) -> Tensor:
        """Logits of what has a label, `[token, class]`."""
        assert self.logits is not None
        return self.logits.flatten(0, -2)[self.labelled]

    @property
    def trained_loss(self) -> Tensor:
        """The cross-entropy of the labels, where logits are known; else the loss as it was given."""
        return self.loss if self.logits is None else F.cross_entropy(self.rows, self.labels)


def passed(model: nn.Module, batch: LiveBatch, loss: LossOfBatch | None, dtype: torch.dtype | None = None) -> LivePass:
    """Call the module, in a context that leaves it as it was, with a batch, and find its logits. `loss` gives the loss,
    None to take that of the output, `.loss`; `dtype` is that of floating inputs, None for their own.

    Raises:
        LabError: The module cannot be called so, or has no loss.
        MonitorError: The loss is not one number with a gradient.
    """
    calls: list[tuple[nn.Module, Any, Any]] = []
    matrices = [
        part for part in submodules(model) if any(w is not None and w.ndim > 1 for w in part._parameters.values())
    ]
    with hooked(matrices, lambda part, args, output: calls.append((part, args, output))):
        output = batch.called(model, dtype)
    value = loss_in(output, None if loss is None else lambda output: loss(output, batch.given))
    if value is None:
        returned = f"{type(model).__name__} returned a {type(output).__name__} without a .loss that has a gradient"
        raise LabError(f"loss must be given, or be part of what the model returns; {returned}", subject="loss")
    live_pass = LivePass(value.reshape(()))
    for z in dict.fromkeys((*floating_tensors(output), *floating_tensors(getattr(output, "logits", None)))):
        if (labels := _labels(live_pass.loss, z)) is not None:
            live_pass.logits, (live_pass.labelled, live_pass.labels) = z, labels
            break
    for part, args, returned in calls:
        if returned is live_pass.logits and returned is not None:
            live_pass.head = part
            taken = args[0] if args and isinstance(args[0], Tensor) else None
            per_token = taken is not None and taken.ndim == 3 and taken.shape[:2] == returned.shape[:2]
            live_pass.head_input = taken if per_token else None
    return live_pass


def _labels(loss: Tensor, z: Tensor) -> tuple[Tensor, Tensor] | None:
    """(which rows of z have a label, these labels) if the loss is the mean cross-entropy of z, else None."""
    if z.ndim < 2 or z.shape[-1] < 2 or not z.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(loss, z, retain_graph=True, allow_unused=True)
    if gradient is None:
        return None
    r, rows = gradient.detach().flatten(0, -2).float(), z.detach().flatten(0, -2).float()
    labelled = r.abs().amax(-1) > 0
    if not bool(labelled.any()):
        return None
    r, p = r[labelled] * int(labelled.sum()), rows[labelled].softmax(-1)
    labels = r.argmin(-1)
    expected = p - F.one_hot(labels, p.shape[-1])
    return (labelled, labels) if bool(torch.allclose(r, expected, rtol=0.0, atol=ALIKE)) else None


@contextmanager
def in_dtype(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """A context in which copies of this dtype (None: of their own) replace the floating weights and buffers of a
    module; it holds its own again afterwards.

    The tensors themselves do not change: setting the `.data` of a weight to another dtype, even for a while, breaks
    the hooks of DDP on it and the graphs that it is in.
    """
    copies: dict[int, Tensor] = {}
    with ExitStack() as undo:
        modules = submodules(model)
        holders: list[Any] = [held for part in modules for held in (part._parameters, part._buffers)]
        for held in holders:
            undo.callback(held.update, dict(held))
            for name, tensor in held.items():
                if tensor is not None and tensor.is_floating_point():
                    if id(tensor) not in copies:
                        copy = tensor.detach().to(dtype or tensor.dtype, copy=True)
                        is_weight = isinstance(tensor, nn.Parameter)
                        copies[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if is_weight else copy
                    held[name] = copies[id(tensor)]
        for values in [values for part in modules for values in vars(part).values() if isinstance(values, list)]:
            if any(id(value) in copies for value in values):  # torch's recurrent layers keep a list of their weights
                undo.callback(values.__setitem__, slice(None), list(values))
                values[:] = [copies.get(id(value), value) for value in values]
        yield


class NarrowingNoticed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices operations that take float64 and give less: what they compute has not float64's digits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrowed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if any(x.dtype == torch.float64 for x in floating_tensors(args)):
            self.narrowed |= any(x.dtype != torch.float64 for x in floating_tensors(output))
        return output
