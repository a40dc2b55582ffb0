"""`Model`: a canonical network for a task, between an embedding and a head; `Initialisation` draws one.

| a token is           | embedding               |
|----------------------|-------------------------|
| a symbol             | a row of a table        |
| a point of the plane | `relu(x A + a) B + b`   |
| a patch of an image  | `x A + a`               |

Where its blocks have a norm after them, the embedding goes through one too, without gain and bias. Positions
are the architecture's, added after that norm, unless the task asks for a table of its own before it
(`Interface.positions`). The head is linear, of each token, or of their average where samples have the labels.

The network between them is a `Trainable`: a canonical network as a torch module. Its parameters are the tensors of
`net.state_dict()`, by the same names, and its forward pass is the plain rules with autograd: its numbers are those of
`net.run`. What is learnt is a `Transformer` again, `network()`.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankscope.errors import ArchitectureError, LabError, require
from rankscope.lab.sigma_reparam import reparametrise
from rankscope.live import AttentionCall, OnAttention, WrittenScores
from rankscope.nets import (
    Architecture,
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
from rankscope.remedies import Remedy
from rankscope.shapes import Bool, Float

Tokens = Float[Tensor, "batch token width"]
TOKENS, PERTURBATION, TOLERANCE = 6, 0.1, 1e-9
"""Of `reads_ahead`: tokens; times a normal number, what is added to every parameter, as a remedy at its zero
would hide what it does later; and of a change of size one, more than rounding brings to earlier tokens."""


@dataclass(frozen=True)
class Interface:
    """What a task asks of a network: what a token is, and how many classes its labels have."""

    classes: int
    symbols: int = 0  # How many symbols there are, where a token is one
    coordinates: int = 0  # Coordinates of a point, where a token is one
    patch: int = 0  # Numbers of a patch, where a token is one
    per: str = "token"  # What has a label: each "token", or the "sample"
    positions: int = 0  # Rows of a table of positions that is part of the embedding, as BERT's is; 0: it has none


@dataclass(frozen=True)
class Initialisation:
    """What networks are before they learn."""

    scheme: str = "xavier/sqrt(L)"  # A scheme of `nets/tensors.py`
    embedding_std: float | None = None
    """Standard deviation of the entries of embedding and positions; `1 / sqrt(width)` if left out."""
    dropout: float = 0.0  # The chance that an entry is zero in training (`nets/dropout.py`)
    sigma_reparam: str | None = None
    """What the g of sigmaReparam starts from, "sigma" or "one" (`sigma_reparam.py`); None: without it."""
    gains: tuple[tuple[str, float], ...] = ()
    """Factors of weights as drawn, by the end of their names: `(("attention.query.weight", 2.0),)`."""

    def model(
        self,
        arch: Architecture,
        task: Interface,
        seed: int,
        remedies: Sequence[str | Remedy] = (),
        frozen: Sequence[str] = (),
        dtype: torch.dtype = torch.float32,
        make: "Callable[..., Model] | None" = None,
    ) -> "Model":
        """An embedding, a network and a head before the first step.

        Args:
            arch: The network.
            task: What it is asked for.
            seed: What weights are drawn from.
            remedies: Put onto the network.
            frozen: Parameters that are not trained, by the last part of their names.
            dtype: The precision of parameters.
            make: Makes the model of its network, called as `Model` is, which it is if left out.

        Raises:
            ArchitectureError: A remedy does not go onto the architecture, or has tokens read later ones.
        """
        net = with_gains(Transformer.random(arch, seed, self.scheme), self.gains)
        for remedy in remedies:
            net = net.with_remedy(remedy)
        if remedies and net.arch.mask == "causal":
            what = f"with {' and '.join(map(str, remedies))} this network does, and would look up what it is asked for"
            sentence = f"under a causal mask no token may read later ones; {what}"
            advice = "take a task for encoders (sort, digits)"
            require(not reads_ahead(net), f"{sentence}: {advice}", ArchitectureError, "mask")
        model = (make or Model)(net.to(dtype), task, self.embedding_std, seed=seed + 1)
        if self.sigma_reparam is not None:
            reparametrise(model, self.sigma_reparam)
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] in frozen:
                parameter.requires_grad_(False)
        return model


def normal(*shape: int, std: float, draw: torch.Generator) -> nn.Parameter:
    """A parameter of normal entries, drawn in float64."""
    return nn.Parameter(std * torch.randn(shape, generator=draw, dtype=torch.float64))


class Affine(nn.Module):
    """The map `x W + b`; entries of W start with deviation `std / sqrt(inputs)`, of b with `bias_std`."""

    def __init__(
        self, inputs: int, outputs: int, draw: torch.Generator, std: float = 1.0, bias_std: float = 0.0
    ) -> None:
        super().__init__()
        self.weight = normal(inputs, outputs, std=std / math.sqrt(inputs), draw=draw)
        self.bias = normal(outputs, std=bias_std, draw=draw)

    def forward(self, x: Float[Tensor, "*rest inputs"]) -> Float[Tensor, "*rest outputs"]:
        """Map every row of x."""
        return x @ self.weight + self.bias


class TaskEmbedding(nn.Module):
    """Tokens of layer 0 from what a task gives."""

    def __init__(self, task: Interface, width: int, std: float, draw: torch.Generator) -> None:
        super().__init__()
        if task.symbols:
            self.table = normal(task.symbols, width, std=std, draw=draw)
        elif task.patch:
            self.first = Affine(task.patch, width, draw, std)
        else:
            self.first = Affine(task.coordinates, width, draw, bias_std=1.0)
            self.second = Affine(width, width, draw, std * math.sqrt(2))
        if task.positions:
            self.positions = normal(task.positions, width, std=std, draw=draw)
        self.task = task

    def forward(self, inputs: Tensor) -> Float[Tensor, "batch token width"]:
        """Tokens of symbols `[batch, token]` or of numbers `[batch, token, number]`."""
        if self.task.symbols:
            X: Tensor = F.embedding(inputs, self.table)
        else:
            X = self.first(inputs.to(self.first.weight.dtype))
            X = X if self.task.patch else self.second(F.relu(X))
        return X + self.positions[: X.shape[1]] if self.task.positions else X


class Model(nn.Module):
    """An embedding, a network and a head, to be trained on a task.

    Args:
        net: The network between embedding and head; the module has a copy of its weights.
        task: What a token is, and how many classes there are.
        std: Standard deviation of the entries of embedding and positions; `1 / sqrt(width)` if left out.
        seed: Decides embedding, positions and head, which are drawn in float64.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> Model(net, Interface(classes=5, symbols=5))(torch.tensor([[0, 3, 1]])).shape
    torch.Size([1, 3, 5])
    """

    def __init__(self, net: Transformer, task: Interface, std: float | None = None, seed: int = 0) -> None:
        super().__init__()
        draw, arch = torch.Generator().manual_seed(seed), net.arch
        std = 1 / math.sqrt(arch.width) if std is None else std
        self.per = task.per
        self.embed = TaskEmbedding(task, arch.width, std, draw).to(net.dtype)
        self.net = Trainable(net)
        self.head = Affine(arch.width, task.classes, draw).to(net.dtype)
        self.normed = arch.norm_place == "post" and arch.norm != "none"
        if arch.positions == "absolute":
            table: Any = self.net.positions
            table.data = normal(*table.shape, std=std, draw=draw).data.to(table)
        self.to(net.device)

    def tokens(self, inputs: Tensor) -> Float[Tensor, "batch token width"]:
        """Tokens of layer 0, as the network is given them."""
        X: Tensor = self.embed(inputs)
        return F.layer_norm(X, X.shape[-1:], eps=self.net.arch.norm_eps) if self.normed else X

    def forward(
        self, inputs: Tensor, padding: Bool[Tensor, "batch token"] | None = None, drop: Dropout | None = None
    ) -> Tensor:
        """Logits `[batch, token, class]`, or `[batch, class]` where samples have the labels."""
        Y: Tensor = self.net(self.tokens(inputs), padding, drop)
        return self.logits(Y if drop is None else drop(Y), padding)

    def logits(self, Y: Float[Tensor, "batch token width"], padding: Bool[Tensor, "batch token"] | None) -> Tensor:
        """What the head says of the output of the network: of each token, or of the mean of those that are valid."""
        if self.per == "token":
            return self.head(Y)
        if padding is None:
            return self.head(Y.mean(1))
        valid = (~padding).to(Y.dtype)[..., None]
        return self.head((Y * valid).sum(1) / valid.sum(1))

    def network(self, dtype: torch.dtype | None = None) -> Transformer:
        """The network as it is now, without embedding and head, in its own dtype or another."""
        return self.net.network(dtype)


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
        self._places = {name: self._register(name, tensor) for name, tensor in net.held().state_dict().items()}
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
        """By the names of `net.state_dict()`, as they are in a forward pass: with what parametrises them."""
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
        return Transformer(self.arch, built(self.arch, learnt), self.origin, memory)


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


def with_gains(net: Transformer, gains: Sequence[tuple[str, float]]) -> Transformer:
    """A network whose weights are multiplied by factors, given by the end of the weights' names.

    Raises:
        LabError: No weight of the network has such a name.

    >>> net = Transformer.random(Architecture(layers=1, width=4, heads=2))
    >>> before, after = net.state_dict(), with_gains(net, [("attention.value.weight", 2.0)]).state_dict()
    >>> float((after["layers.0.attention.value.weight"] / before["layers.0.attention.value.weight"]).mean())
    2.0
    """
    if not gains:
        return net
    state = net.state_dict()
    for end, factor in gains:
        names = [name for name in state if name.endswith(end)]
        sentence = "a gain must name the end of a weight's name, such as attention.query.weight"
        require(names, f"{sentence}; got {end}", LabError, "gains")
        state |= {name: state[name] * factor for name in names}
    return Transformer.from_weights(net.arch, state)


def reads_ahead(net: Transformer) -> bool:
    """True if a token depends on later ones in some layer, found by changing these. The mask forbids it, and a
    remedy may do it all the same: Sinkhorn attention divides columns, which hold the attention of later tokens.
    All layers are compared, not the last alone: where tokens become the same, what was read is below rounding.

    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2, mask="causal"))
    >>> reads_ahead(net), reads_ahead(net.with_remedy("shaped")), reads_ahead(net.with_remedy("sinkhorn"))
    (False, False, True)
    """
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    state = {name: tensor.double().cpu() for name, tensor in net.state_dict().items()}
    perturbed = {name: tensor + PERTURBATION * normal(*tensor.shape) for name, tensor in state.items()}
    copy = Transformer.from_weights(net.arch, perturbed)
    X = normal(1, TOKENS, net.arch.width)
    changed = X.clone()
    changed[:, TOKENS // 2 :] += normal(1, TOKENS - TOKENS // 2, net.arch.width)
    return any(
        bool((before.state - after.state)[:, : TOKENS // 2].abs().max() > TOLERANCE)
        for before, after in zip(copy.steps(X), copy.steps(changed), strict=True)
    )
