"""`Trainable`: the canonical network as a torch module.

Its parameters are the tensors of `net.state()`, by the same names, and its forward pass is the plain rules
with autograd: its numbers are those of `net.run`. What is learnt is a `Transformer` again, `network()`.

`reparametrise`: sigmaReparam (Zhai et al. 2023): every matrix W is trained as `g W / sigma`, sigma its largest singular
value and g a number of its own that is trained too.

sigma is followed by one step of the power method in each forward pass of a training, from the vector that the
last one left (the singular vector, at first):

    v <- W^T u / |W^T u|,   u <- W v / |W v|   (without gradient),   sigma = u^T W v   (with gradient to W)

for `x W` with W of shape `[in, out]`. In evaluation the step is made and forgotten. While W moves, sigma is
below its norm, as it is in the published code.

As published, matrices of the blocks, of patches and points and of the head have it, tables of symbols and
positions, norms and biases do not. Queries, keys and values have a g each, and all heads of a layer share it;
the published vision models have one for the three, which are one matrix there. g starts at sigma, where the
network starts as it was drawn (published for images), or at one (published for speech, and the paper's).
Experts of a mixture are left as they are. `Trainable.network()` gives the product, as plain weights.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rankscope.errors import LabError, require_one_of
from rankscope.live import AttentionCall, OnAttention, WrittenScores
from rankscope.nets import (
    Block,
    Dropout,
    DropoutRules,
    Memory,
    PassSettings,
    Plain,
    Seen,
    Transformer,
    built,
    contributions,
    scores,
    traverse,
    unpadded,
)
from rankscope.shapes import Bool, Float

Tokens = Float[Tensor, "batch token width"]
STARTS = ("sigma", "one")  # What g starts from
MATRICES = ("query", "key", "value", "gate", "output", "up", "down", "query_latent", "key_latent")
"""Of a block, by the last part of their names."""


class TrainedLayer(nn.Module):
    """The tensors of one layer, and its call: the traversal of its block. A watch is told of its attention
    (`live/attention/observer.py`), whatever parts change it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_listeners: list[OnAttention] = []

    def forward(self, X: Tokens, block: Block, rules: Plain, padding: Tensor | None) -> Tokens:
        """Tokens after the layer; padded ones `[batch, token, 1]` stay zero."""
        output = traverse(block, rules, X)
        for listener in self.attention_listeners:
            outputs = partial(contributions, block.weights, output.heads)
            parts: Any = {"pattern": lambda: output.pattern, "contributions": outputs}
            if block.arch.kernel == "softmax" and rules.attended is not None:
                parts["scores"] = partial(_scores, block, rules, rules.attended)
                parts["products"] = partial(_rows, output.pattern)
            listener(AttentionCall(**parts))
        state: Tokens = output.state
        return state if padding is None else state.masked_fill(padding, 0.0)


def _scores(block: Block, rules: Plain, X: Tokens) -> WrittenScores:
    """The scores whose softmax the block's attention to these tokens is."""
    with torch.no_grad():
        q, k, context = rules.kernel_inputs(block, X.detach())
        return WrittenScores(scores(q, k, context).masked_fill(~context.visible, -torch.inf))


def _rows(pattern: Tensor, rows: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a pattern, beside those of the block's own, which parts and dropout may have changed."""
    return P.transpose(1, 2), pattern.detach()[:, :, rows].transpose(1, 2)


class Trainable(nn.Module):
    """A network to train.

    >>> import torch
    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2)).with_remedy("attnscale")
    >>> module, X = Trainable(net), torch.randn(1, 5, 8, dtype=torch.float64)
    >>> bool((module(X) == net.run(X).output).all())
    True
    >>> module.layers[1].parts.attnscale.w.requires_grad
    True
    """

    layers: nn.ModuleList

    def __init__(self, net: Transformer) -> None:
        super().__init__()
        self.arch, self.origin, self.memory = net.arch, net.origin, net.memory
        self.layers = nn.ModuleList(TrainedLayer() for _ in range(1 if net.arch.shared else net.arch.layers))
        self._places = {name: self._register(name, tensor) for name, tensor in net.held().state().items()}
        """The module and attribute of each tensor: looking it up by its name would take as long as a layer."""
        self._masks: dict[tuple[int, torch.device], Seen] = {}

    def _register(self, name: str, tensor: Tensor) -> tuple[nn.Module, str]:
        """Make a copy of the tensor a parameter: each part of its dotted name but the last is a module."""
        module: nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(tensor.detach().clone()))
        return module, leaf

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Trainable":
        """What `to`, `double` and `cuda` do: the memory that a decoder reads goes along."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.memory is not None:
            self.memory = Memory(fn(self.memory.tokens), fn(self.memory.valid))
        return self

    def tensors(self) -> dict[str, Tensor]:
        """By the names of `net.state()`, as they are in a forward pass: with what parametrises them."""
        return {name: getattr(part, leaf) for name, (part, leaf) in self._places.items()}

    def current(self) -> Transformer:
        """The network on the parameters themselves."""
        return Transformer(self.arch, built(self.arch, self.tensors()), self.origin, self.memory)

    def masks_for(self, X: Tokens) -> Seen:
        """Masks are made once for a length and a device: on a GPU each would be waited for at every step."""
        where = X.shape[-2], X.device
        if where not in self._masks:
            with torch.inference_mode(False):  # also where the first pass is no training
                self._masks[where] = unpadded(self.arch, *where)
        return self._masks[where]

    def states(
        self,
        X: Tokens,
        padding: Bool[Tensor, "batch token"] | None = None,
        drop: Dropout | None = None,
        net: Transformer | None = None,
    ) -> Iterator[Tokens]:
        """Tokens at layer 0, 1, ..., valid ones where they stood, as `net.steps` has them; `drop` is dropout
        in training, and `net` what `current` gives, where it is at hand."""
        net = self.current() if net is None else net
        X, valid, order = net.prepared(X, padding)
        seen = self.masks_for(X) if padding is None else None
        settings = PassSettings.of(self.arch, net.weights, X, valid, self.memory, seen=seen)
        rules = Plain(self.arch, settings) if drop is None else DropoutRules(self.arch, settings, drop)
        X = X if drop is None else drop(X)
        padded = None if padding is None or bool(valid.all()) else ~valid[..., None]
        yield X if order is None else order.restored(X)
        for block in net.blocks:
            X = self.layers[0 if self.arch.shared else block.index](X, block, rules, padded)
            yield X if order is None else order.restored(X)

    def forward(
        self, X: Tokens, padding: Bool[Tensor, "batch token"] | None = None, drop: Dropout | None = None
    ) -> Tokens:
        """The last state, through the final norm where there is one."""
        net = self.current()
        (last,) = deque(self.states(X, padding, drop, net), maxlen=1)
        return net.finish(last)

    def network(self, dtype: torch.dtype | None = None) -> Transformer:
        """The trained network, which `save` writes and `load` reads, in its own dtype or another; what parametrises
        tensors is multiplied into them, as it is in evaluation."""
        with torch.no_grad(), eval_mode(self):
            learnt = {name: t.detach().to(dtype or t.dtype, copy=True) for name, t in self.tensors().items()}
        memory = self.memory
        if memory is not None and dtype is not None:
            memory = Memory(memory.tokens.to(dtype), memory.valid)
        return replace(Transformer.from_weights(self.arch, learnt), origin=self.origin, memory=memory)


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode inside the block; afterwards every part is in the mode that it was in."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


class SigmaReparam(nn.Module):
    """The parametrisation `g W / sigma(W)` of one weight; a weight with three axes is the matrix of its first
    `rows` axes by the others."""

    u: Tensor

    def __init__(self, weight: Tensor, rows: int, start: str) -> None:
        super().__init__()
        self.rows = rows
        left, size, _ = torch.linalg.svd(self.matrix(weight.detach()), full_matrices=False)
        self.register_buffer("u", left[:, 0].clone())
        self.g = nn.Parameter(size[0].clone() if start == "sigma" else torch.ones_like(size[0]))

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as a matrix `[in, out]`."""
        return weight.flatten(0, self.rows - 1).flatten(1)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that the network uses."""
        W = self.matrix(weight)
        with torch.no_grad():
            v = nn.functional.normalize(self.u @ W, dim=0)
            u = nn.functional.normalize(W @ v, dim=0)
            if self.training:
                self.u.copy_(u)
        return weight * (self.g / (u @ W @ v))


def reparametrise(module: nn.Module, start: str = "sigma") -> None:
    """Put it on every matrix of a `Trainable` or a `Model`, in place.

    >>> from rankscope.nets import Architecture, Transformer
    >>> module = Trainable(Transformer.random(Architecture(layers=1, width=8, heads=2)))
    >>> reparametrise(module, start="one")
    >>> W = module.network().state()["layers.0.mlp.up.weight"]
    >>> round(float(torch.linalg.matrix_norm(W, 2)), 12)
    1.0
    """
    require_one_of("start of g", start, STARTS, LabError, "sigma_reparam")
    for name, part in list(module.named_modules()):
        weight, last = getattr(part, "weight", None), name.rpartition(".")[2]
        if not isinstance(weight, Tensor) or weight.ndim < 2:
            continue
        if ".layers." in f".{name}" and (last not in MATRICES or ".experts." in name):
            continue
        rows = 2 if last == "output" else 1
        parametrize.register_parametrization(part, "weight", SigmaReparam(weight, rows, start))
