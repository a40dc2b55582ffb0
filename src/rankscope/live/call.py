"""What to look for in a model, and what is known of one call of it while it runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.live.chain import Chain
from rankscope.live.sizes import Sizes, suffices
from rankscope.live.states import Layout
from rankscope.metrics import Metric
from rankscope.profiles.rows import Found


@dataclass
class Plan:
    """What to look for."""

    metrics: Sequence[Metric]
    layers: frozenset[int] | None
    """None for all."""
    keep: frozenset[str]
    layout: Layout
    grid: bool
    """Whether states of four dims are tokens in rows and columns."""
    padding: Tensor | None
    """Given by the user; else the model's own."""
    own_padding: bool
    """Whether to take the padding from the model's call."""
    found: bool
    """Whether the blocks were found, not named."""
    finer: Callable[[], str]
    """Stacks inside the blocks, in words."""
    decoder: bool
    """Whether the blocks are the decoder's of a model that has an encoder as well."""
    trained: bool = False
    """Whether calls in train mode alone count: an evaluation between two steps is no training batch."""

    @cached_property
    def by_sizes(self) -> bool:
        """Whether the sizes of tokens are all that is asked of them."""
        return suffices(self.metrics)

    def measures(self, layer: int) -> bool:
        """Whether a layer is asked for."""
        return self.layers is None or layer in self.layers

    def wants(self, of: str) -> bool:
        """Whether anything of this kind is asked for."""
        return of in self.keep or any(each.of == of for each in self.metrics)


@dataclass
class Call:
    """One call of the model, while it runs."""

    arguments: dict[str, Any]
    alone: bool = False
    """Whether it is a call of a part of the model, from outside the model."""
    layer: int = 0
    """The layer entered last."""
    around: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of the model's parts around the blocks, from the outside in."""
    chain: Chain = field(default_factory=Chain)
    mask: str | None = None
    """The argument that says which tokens are padding."""
    inside: list[int] = field(default_factory=list)
    """Layers entered and not yet left."""
    took: list[torch.Size | None] = field(default_factory=list)
    """The shape of the state that each of these took."""
    shape: torch.Size | None = None
    """[batch, token], once a block was entered."""
    real: dict[torch.device, Tensor] = field(default_factory=dict)
    """Which tokens count `[batch, token]`."""
    whole: bool = False
    """Whether all do, for want of padding."""
    unit: float = 0.0
    attention_unit: float = 0.0
    """The eps of the softmax, where it is coarser."""
    sizes: Sizes | None = None
    """Of states that are read by their sizes."""
    waiting: list[tuple[int, Tensor]] = field(default_factory=list)
    """States that will be read together, by layer."""
    found: list[tuple[int, Found]] = field(default_factory=list)
    broken: list[tuple[int, Tensor]] = field(default_factory=list)
    defects: list[Tensor] = field(default_factory=list)
    fired: list[int] = field(default_factory=list)
    attended: set[int] = field(default_factory=set)
    others: int = 0
    """Attention after the first of a block: cross-attention, as a rule."""
    unfit: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of attention that is not of the block's tokens to themselves."""
    elsewhere: list[str] = field(default_factory=list)
    """The same of attention seen through torch's functions, in words."""
    routed: set[int] = field(default_factory=set)
    """Layers whose routing was seen."""
    strays: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of routing that is not of the block's tokens."""
    longer: bool = False
    """Whether its tokens looked at more than themselves, as those of a chunk that goes on from a cache."""
    spoken: Tensor | None = None
    """The heads' outputs, until the output projection is called."""
    projection: tuple[nn.Module, Tensor, Tensor] | None = None
    """The output projection that was found in this layer, its input and its output."""
    kept: list[tuple[str, int, Tensor]] = field(default_factory=list)

    def read(self, metrics: Sequence[Metric]) -> list[tuple[int, Found]]:
        """All that was read of it, by layer."""
        return self.found + ([] if self.sizes is None else self.sizes.read(metrics))
