"""One traversal of a block, for every arithmetic.

An arithmetic is a set of **rules**: what a norm, attention, an MLP and a sum do to its kind of state (a
tensor, a deviation with its scale, terms of paths, a count, a bound). `traverse` takes a state through a
block and asks the rules at every part; it knows none of them, and they do not know the order. Attention has
five rules: `values`, `pattern` (the matrix P), `mix` (P V of every head), `gate` (where heads have gates)
and `output` (what heads add). Cross-attention has one, `cross`, made of the same.

A part of one's own (`parts.py`) stands at a named place of the traversal and brings a rule per arithmetic.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from rankscope.errors import ArchitectureError
from rankscope.nets.architecture import Architecture
from rankscope.nets.order import Branch, Branching, Half, active_heads, order
from rankscope.nets.parts import Part, Place, pieces
from rankscope.nets.streamed_layers import StreamedLayers
from rankscope.nets.weights import Layer, MLPWeights, Weights

State = TypeVar("State")
ENTRANCES: dict[Branching, Place] = {"attention": "attention_in", "cross": "cross_in", "mlp": "mlp_in"}


@dataclass(frozen=True)
class Block:
    """One layer of a network: its number (0-based), its tensors and the order of its parts. It does not hold
    tensors that the network does not hold: those of layers that are not in memory are read when asked for."""

    arch: Architecture
    index: int
    layers: tuple[Layer, ...] | StreamedLayers[Layer]
    """Of the network; this block's is the one of its `place`."""
    place: int
    halves: tuple[Half, ...]

    @classmethod
    def of(
        cls,
        arch: Architecture,
        index: int,
        layers: tuple[Layer, ...] | StreamedLayers[Layer],
        place: int | None = None,
    ) -> "Block":
        """Layer `index` of a network of this architecture, its tensors at that place among `layers`."""
        return cls(arch, index, layers, index if place is None else place, order(arch, index))

    @property
    def weights(self) -> Layer:
        """The tensors of this layer."""
        return self.layers[self.place]

    def with_weights(self, weights: Layer) -> "Block":
        """Return the layer with other tensors."""
        return replace(self, layers=(weights,), place=0)

    @property
    def mlp(self) -> MLPWeights:
        """The weights of the MLP; of a mixture, all experts side by side, which at the gates that it has on
        some tokens is the mixture."""
        if self.weights.experts is not None:
            return self.weights.experts.side_by_side()
        assert self.weights.mlp is not None
        return self.weights.mlp

    @property
    def crossing(self) -> "Block":
        """The layer with its cross-attention, all heads of it, in the place of its attention."""
        assert self.weights.cross is not None
        there = self.with_weights(replace(self.weights, attention=self.weights.cross))
        return replace(there, arch=self.arch.replace(kept_heads=None))

    @property
    def active_heads(self) -> tuple[int, ...]:
        """The heads that speak here."""
        return active_heads(self.arch, self.index)


def blocks(arch: Architecture, weights: Weights) -> tuple[Block, ...]:
    """Every layer of a network."""
    return tuple(Block.of(arch, index, weights.layers) for index in range(len(weights.layers)))


@runtime_checkable
class Rules(Protocol[State]):
    """What each part of a block does to a state. `Any` is what an arithmetic has for attention inside."""

    def takes(self, block: Block, half: Half, branch: Branch) -> bool:
        """Whether a branch is gone through at all."""

    def norm(self, block: Block, name: str, state: State) -> State:
        """The norm of that name, as the block's weights have it."""

    def values(self, block: Block, state: State) -> Any:
        """Return the values that heads mix."""

    def pattern(self, block: Block, state: State) -> Any:
        """Return P, the attention pattern."""

    def mix(self, block: Block, pattern: Any, values: Any) -> Any:
        """Return the output of each head, P V."""

    def gate(self, block: Block, heads: Any, state: State) -> Any:
        """Return the output of each head times its gate; asked where an architecture has a `head_gate`."""

    def output(self, block: Block, heads: Any) -> State:
        """Return what heads add to the hidden states."""

    def cross(self, block: Block, state: State) -> State:
        """Return what cross-attention adds to the hidden states; asked where an architecture has one."""

    def mlp(self, block: Block, state: State) -> State:
        """Return what the MLP adds to the hidden states."""

    def add(self, block: Block, half: Half, state: State, branches: dict[str, State]) -> State:
        """`skip * state` and the branches that were taken, by the name of their part."""

    def part(self, block: Block, part: Part, x: Any, inside: Any) -> Any:
        """A part of the user's own: x is what it changes, `inside` what its branch reads."""


class BlockOutput(NamedTuple):
    """What a block gives: its state, and of its attention the pattern P and the outputs of the heads (None
    where no rule went through attention), how a mixture of experts routed its tokens, and P of its
    cross-attention (None where there is none)."""

    state: Any
    pattern: Any
    heads: Any
    routing: Any = None
    cross: Any = None


def traverse(block: Block, rules: Rules[State], state: State) -> BlockOutput:
    """The state after a block."""
    pattern = heads = None
    for half in block.halves:
        branches: dict[str, State] = {}
        for branch in half.branches:
            if not rules.takes(block, half, branch):
                continue
            inside = changed(ENTRANCES[branch.part], block, rules, state, state)
            inside = inside if branch.before is None else rules.norm(block, branch.before, inside)
            inside = changed("read", block, rules, inside, inside)
            if branch.part == "attention":
                values = changed("values", block, rules, rules.values(block, inside), inside)
                pattern = changed("pattern", block, rules, rules.pattern(block, inside), inside)
                heads = rules.mix(block, pattern, values)
                heads = rules.gate(block, heads, inside) if block.arch.head_gate else heads
                heads = changed("heads", block, rules, heads, inside)
                out = rules.output(block, heads)
            else:
                out = rules.cross(block, inside) if branch.part == "cross" else rules.mlp(block, inside)
            out = changed(branch.part, block, rules, out, inside)
            branches[branch.part] = out if branch.after is None else rules.norm(block, branch.after, out)
        state = rules.add(block, half, state, branches)
        state = changed("attention_sum", block, rules, state, state) if half.attends else state
        state = state if half.after is None else rules.norm(block, half.after, state)
    seen: list[dict[int, Any]] = [getattr(rules, name, {}) for name in ("routed", "crossed")]
    state = changed("stream", block, rules, state, state)
    return BlockOutput(state, pattern, heads, *(each.pop(block.index, None) for each in seen))


def changed(place: Place, block: Block, rules: Rules[Any], x: Any, inside: Any) -> Any:
    """x through the parts of the user's own that stand at a place."""
    for part in pieces(block.arch.parts):
        if part.place == place:
            x = rules.part(block, part, x, inside)
    return x


class Arithmetic:
    """What rules of all arithmetics have in common."""

    name = ""
    """As a part of one's own calls its rule."""

    def takes(self, block: Block, half: Half, branch: Branch) -> bool:
        """Every branch, unless a subclass leaves some out."""
        return True

    def active_heads(self, block: Block) -> tuple[int, ...]:
        """The heads that speak, unless a subclass silences some."""
        return block.active_heads

    def cross(self, block: Block, state: Any) -> Any:
        """Refused, unless a subclass has a rule."""
        raise ArchitectureError(
            f"cross-attention must have a rule in the arithmetic {self.name!r}; it has none: use another",
            subject="cross_attention",
        )

    def keep(self, block: Block, name: str, x: Any) -> None:
        """For nobody, unless a subclass freezes the network."""

    def part(self, block: Block, part: Part, x: Any, inside: Any) -> Any:
        """By the part's own rule of this arithmetic's name."""
        rule = getattr(part, self.name, None)
        if rule is None:
            raise ArchitectureError(
                f"{part.name} must have a rule named {self.name!r} to be used in that arithmetic; it has "
                "none: write one, or use another arithmetic",
                subject=part.name,
            )
        return rule(x, block, self, inside)
