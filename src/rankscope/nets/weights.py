"""The tensors of a network, in the structure that the forward pass reads.

Row vectors, as in the papers: a linear map is `x W + b`, W of shape `[in, out]`. Query, key, value and
output keep the head as an axis of its own, so `W_h = value.weight[:, h] @ output.weight[h]`.

Layers may also be read from files one at a time (`StreamedLayers`). A pass reads each layer once, and whoever
asks for the same layer again gets the last one, still in memory. Variants of a network share its source, so
that variants that run side by side read each layer once for all.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rankscope.nets.norms import UNWEIGHTED, NormWeights
from rankscope.nets.structures import converted, named
from rankscope.shapes import Float

LATENT_EPS = 1e-6  # Of the norms of latents, whatever that of tokens is
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Linear:
    """The weights of a linear map, `x W + b`."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Latent:
    """`x A + b`, the first entries, as many as the norm has, through it."""

    weight: Tensor  # [width, latent]
    norm: NormWeights
    bias: Tensor | None = None


@dataclass(frozen=True)
class AttentionWeights:
    """The tensors of one attention branch."""

    query: Linear  # [width, head, head_width], or of its latent's width, and so are key and value
    key: Linear  # [width, key_head, head_width]
    value: Linear  # [width, key_head, value_width]
    output: Linear  # [head, value_width, width]
    query_latent: Latent | None = None
    key_latent: Latent | None = None
    gate: Linear | None = None  # [width, head, value_width], on the outputs of heads (architecture's `head_gate`)
    query_norm: NormWeights = UNWEIGHTED  # Of each query, before positions (architecture's `query_norm`)
    key_norm: NormWeights = UNWEIGHTED
    position: Float[Tensor, "width head head_width"] | None = None
    """Projects the sinusoid of `i - j` to a relative key (positions 'relative')."""
    content_bias: Float[Tensor, "head head_width"] | None = None  # u of Transformer-XL: added to queries that meet keys
    position_bias: Float[Tensor, "head head_width"] | None = None
    """v of Transformer-XL: added to the query that meets relative positions."""
    sink: Float[Tensor, " head"] | None = None  # The score for seeing nothing (kernel 'sink')
    relative_key: Linear | None = None  # [width, head, head_width], of rows of the table of positions 'disentangled'
    relative_query: Linear | None = None
    mix_keys: Float[Tensor, "rank length"] | None = None  # E of Linformer: mixes tokens into k keys
    mix_values: Float[Tensor, "rank length"] | None = None  # F of Linformer: mixes tokens into k values


@dataclass(frozen=True)
class MLPWeights:
    """`act(x up) down`, or gated `(act(x gate) * (x up)) down`."""

    up: Linear
    down: Linear
    gate: Linear | None = None


@dataclass(frozen=True)
class ExpertWeights:
    """A mixture of experts (`mlp.py`)."""

    router: Linear  # [width, expert]
    gate: Linear  # [width, expert, expert_width]; a bias [expert, expert_width]
    up: Linear  # [width, expert, expert_width]
    down: Linear  # [expert, expert_width, width]; a bias [expert, width]
    shared: MLPWeights | None = None
    shared_gate: Linear | None = None  # [width, 1]
    correction: Float[Tensor, " expert"] | None = None  # Added to scores where experts are chosen by them

    def expert(self, index: int) -> MLPWeights:
        """Return the MLP of one expert."""
        biases = [None if part.bias is None else part.bias[index] for part in (self.up, self.down, self.gate)]
        up, gate = (part.weight[:, index] for part in (self.up, self.gate))
        weights = (up, self.down.weight[index], gate)
        return MLPWeights(*(Linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)))

    def side_by_side(self) -> MLPWeights:
        """All of them as one gated MLP, the shared one last: a mixture at its `gates`."""
        up, gate = (Linear(linear.weight.flatten(1)) for linear in (self.up, self.gate))
        down = Linear(self.down.weight.flatten(0, 1))
        if self.shared is None or self.shared.gate is None:
            return MLPWeights(up, down, gate)
        return MLPWeights(
            Linear(torch.cat([up.weight, self.shared.up.weight], 1)),
            Linear(torch.cat([down.weight, self.shared.down.weight])),
            Linear(torch.cat([gate.weight, self.shared.gate.weight], 1)),
        )


@dataclass(frozen=True)
class Layer:
    """The tensors of one block."""

    attention: AttentionWeights
    cross: AttentionWeights | None = None  # Of cross-attention: keys and values of the memory, as wide as the tokens
    mlp: MLPWeights | None = None
    experts: ExpertWeights | None = None  # In the place of `mlp`
    attention_norm: NormWeights = UNWEIGHTED
    cross_norm: NormWeights = UNWEIGHTED
    mlp_norm: NormWeights = UNWEIGHTED
    attention_after: NormWeights = UNWEIGHTED  # Second norm of a sandwich, on the branch before it is added
    cross_after: NormWeights = UNWEIGHTED  # The same after cross-attention
    mlp_after: NormWeights = UNWEIGHTED  # And after the MLP
    parts: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Of parts that have tensors (`parts.py`), by the name of the part."""


class LayerSource(Generic[Item]):
    """Reads layers by number; one that somebody still holds is not read again. `like` is a tensor without
    entries, of the dtype and device of all; `note` is called with each layer once, its result `noted`."""

    def __init__(self, read: Callable[[int], Item], like: Tensor) -> None:
        self._read, self.like = read, like
        self.note: Callable[[Item], Any] | None = None
        self.noted: dict[int, Any] = {}
        self._held: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._moved: WeakValueDictionary[Hashable, LayerSource[Item]] = WeakValueDictionary()

    def __call__(self, index: int) -> Item:
        """Return a layer, read anew where nobody holds it."""
        held: Item | None = self._held.get(index)
        if held is not None:
            return held
        layer = self._held[index] = self._read(index)
        if self.note is not None and index not in self.noted:
            self.noted[index] = self.note(layer)
        return layer

    def moved(self, move: Callable[[Item], Item], like: Tensor, how: Hashable) -> "LayerSource[Item]":
        """Return a source of these layers, each changed after it is read; the same `how` gives the same source."""
        source = self._moved.get(how)
        if source is None:
            source = self._moved[how] = LayerSource(lambda index: move(self(index)), like)
        return source


class HeldLayers(tuple[Layer, ...]):
    """The layers of a network, all in memory."""

    __slots__ = ()
    streamed = False

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype of all, where they are."""
        return self[0].attention.query.weight

    def places(self) -> list[tuple[Any, int]]:
        """(what holds it, its number there) of each layer: the same for layers that are one and the same."""
        return [(layer, 0) for layer in self]

    def picked(self, indices: Sequence[int]) -> "HeldLayers":
        """Return some of the layers, in that order."""
        return HeldLayers([self[index] for index in indices])

    def noted(self, index: int, note: Callable[[Layer], Result]) -> Result:
        """Return `note(layer)` of a layer."""
        return note(self[index])

    def in_memory(self) -> "HeldLayers":
        """Return these layers: all are in memory."""
        return self

    def release(self) -> None:
        """Let go of nothing: the layers stay in memory."""


class StreamedLayers(Generic[Item]):
    """The layers of a network, in any order, one of them in memory; `numbers` are those in the source. Not a
    `Sequence` by name: type checks at run time would read some."""

    streamed = True

    def __init__(self, source: LayerSource[Item], numbers: Sequence[int]) -> None:
        self.source, self.numbers = source, tuple(numbers)
        self._last: tuple[int, Item] | None = None

    @property
    def like(self) -> Tensor:
        """A tensor without entries, of the dtype of all, where they are."""
        return self.source.like

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Item:
        index_in_source = self.numbers[index]
        if self._last is None or self._last[0] != index_in_source:
            self._last = None  # before the next is read
            self._last = index_in_source, self.source(index_in_source)
        return self._last[1]

    def converted(self, move: Callable[[Tensor], Tensor]) -> "StreamedLayers[Item]":
        """Return these layers with `move(tensor)` in the place of every tensor, each moved after it is read."""
        source = self.source.moved(lambda layer: converted(layer, move), move(self.source.like), move)
        return StreamedLayers(source, self.numbers)

    def places(self) -> list[tuple[Any, int]]:
        """(what holds it, its number there) of each layer: the same for layers that are one and the same."""
        return [(self.source, index_in_source) for index_in_source in self.numbers]

    def picked(self, indices: Sequence[int]) -> "StreamedLayers[Item]":
        """Return some of the layers, in that order; none is read for it."""
        return StreamedLayers(self.source, [self.numbers[index] for index in indices])

    def noted(self, index: int, note: Callable[[Item], Result]) -> Result:
        """Return `note(layer)` of a layer, made once for all networks that share the source."""
        noted, index_in_source = self.source.noted, self.numbers[index]
        if index_in_source not in noted:
            noted[index_in_source] = note(self[index])
        return cast(Result, noted[index_in_source])

    def in_memory(self) -> HeldLayers:
        """Return all layers, read; one that comes several times, once."""
        layers: dict[int, Any] = {index: self.source(index) for index in dict.fromkeys(self.numbers)}
        return HeldLayers([layers[index] for index in self.numbers])

    def release(self) -> None:
        """Let go of the last layer that was read, at the end of a pass."""
        self._last = None


Layers = HeldLayers | StreamedLayers[Layer]  # The layers of a network: in memory, or read one at a time


@dataclass(frozen=True, repr=False)
class Weights:
    """All tensors of a network."""

    layers: Layers
    positions: Float[Tensor, "length width"] | None = None  # The table of positions 'absolute', added to the tokens
    bias_table: Float[Tensor, "bucket head"] | None = None
    """The table of positions 'bias', added to the scores of every layer."""
    relative_table: Float[Tensor, "row width"] | None = None  # Of positions 'disentangled'
    final_norm: NormWeights = UNWEIGHTED

    @property
    def like(self) -> Tensor:
        """A tensor of their dtype, where they are."""
        return self.layers.like

    def __repr__(self) -> str:
        if self.layers.streamed:
            return f"Weights({len(self.layers)} layers, read one at a time)"
        distinct = {id(tensor): tensor.numel() for tensor in named(self).values()}
        return f"Weights({len(self.layers)} layers, {sum(distinct.values()):,} numbers)"
