"""The order of a block, written once (`order`), and one traversal of it, for every arithmetic (`traverse`).

    half:    X <- norm(skip * X + branch(X) + ...)
    branch:  X -> norm -> attention or MLP -> norm

Every norm may be missing. A block has one half for attention and one for the MLP, and where it attends to a
memory one between them; in a parallel block both are branches of one half.

| norm_place | a branch reads through | what it adds goes through | the sum goes through |
|------------|------------------------|---------------------------|----------------------|
| post       |                        |                           | its norm             |
| pre        | its norm               |                           |                      |
| sandwich   | its norm               | a second norm             |                      |
| output     |                        | its norm                  |                      |

An arithmetic is a set of **rules**: what a norm, attention, an MLP and a sum do to its kind of state (a
tensor, a deviation with its scale, terms of paths, a count, a bound). `traverse` takes a state through a
block and calls a rule at every part; it knows no arithmetic, and rules do not know the order. Attention has
five rules: `values`, `pattern` (the matrix P), `mix` (P V of every head), `gate` (where heads have gates)
and `output` (the output projection). Cross-attention has one, `cross`, made of the same. A user's own part
(`parts.py`) stands at a named place of the traversal and brings a rule per arithmetic.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from rankscope.errors import ArchitectureError
from rankscope.nets.architecture import Architecture
from rankscope.nets.parts import Part, Place
from rankscope.nets.weights import HeldLayers, Layer, Layers, MLPWeights

Branching = Literal["attention", "cross", "mlp"]
ENTRANCES: dict[Branching, Place] = {"attention": "attention_in", "cross": "cross_in", "mlp": "mlp_in"}


@dataclass(frozen=True)
class Branch:
    """Attention, cross-attention or the MLP, with the names of the norm on its input and on its output."""

    part: Branching
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Half:
    """A skip, the branches that are added to it, and the name of the norm on the sum."""

    skip: float
    branches: tuple[Branch, ...]
    after: str | None

    @property
    def attends(self) -> bool:
        """Whether attention is one of its branches."""
        return any(branch.part == "attention" for branch in self.branches)


def order(arch: Architecture, index: int = 0) -> tuple[Half, ...]:
    """The halves of layer `index` (0-based).

    >>> order(Architecture(layers=1, width=8, heads=2, norm_place="post"))[0].after
    'attention_norm'
    """
    norm_place = "none" if arch.norm == "none" else arch.norm_place
    bare = index in arch.bare_layers

    def branch(part: Branching) -> Branch:
        reads = norm_place in ("pre", "sandwich") and not (bare and part == "attention")
        after = f"{part}_after" if norm_place in ("sandwich", "output") else None
        return Branch(part, f"{part}_norm" if reads else None, after)

    def half(skip: float, *parts: Branching) -> Half:
        norm = f"{parts[0]}_norm" if norm_place == "post" else None
        return Half(skip, tuple(branch(part) for part in parts), norm)

    if arch.parallel and arch.mlp != "none":
        return (half(arch.attention_skip, "attention", "mlp"),)
    cross = (half(arch.attention_skip, "cross"),) if arch.cross_attention else ()
    mlp = (half(arch.mlp_skip, "mlp"),) if arch.mlp != "none" else ()
    return half(arch.attention_skip, "attention"), *cross, *mlp


def active_heads(arch: Architecture, index: int) -> tuple[int, ...]:
    """Return the active heads of layer `index` (0-based)."""
    return tuple(range(arch.heads)) if arch.kept_heads is None else tuple(sorted(set(arch.kept_heads[index])))


def norms(arch: Architecture, index: int = 0) -> list[str]:
    """Return the names of the norms of layer `index`."""
    halves = order(arch, index)
    names = [name for half in halves for branch in half.branches for name in (branch.before, branch.after)]
    return [name for name in [*names, *(half.after for half in halves)] if name is not None]


@dataclass(frozen=True)
class Block:
    """One layer of a network: its number (0-based) and the order of its parts. Its tensors are those of
    `layers[position]`, so that streamed layers are read when they are needed and not held here."""

    arch: Architecture
    index: int
    layers: Layers
    position: int
    halves: tuple[Half, ...]

    @classmethod
    def of(cls, arch: Architecture, index: int, layers: Layers, position: int) -> "Block":
        """Layer `index` of a network of this architecture, its tensors at that position among `layers`."""
        return cls(arch, index, layers, position, order(arch, index))

    @property
    def weights(self) -> Layer:
        """The tensors of this layer."""
        return self.layers[self.position]

    def with_weights(self, weights: Layer) -> "Block":
        """Return the layer with other tensors."""
        return replace(self, layers=HeldLayers([weights]), position=0)

    @property
    def mlp(self) -> MLPWeights:
        """The weights of the MLP; of a mixture, all experts side by side."""
        if self.weights.experts is not None:
            return self.weights.experts.side_by_side()
        assert self.weights.mlp is not None
        return self.weights.mlp

    @property
    def cross_block(self) -> "Block":
        """The layer with its cross-attention, all heads of it, instead of its attention."""
        assert self.weights.cross is not None
        block = self.with_weights(replace(self.weights, attention=self.weights.cross))
        return replace(block, arch=self.arch.replace(kept_heads=None))

    @property
    def active_heads(self) -> tuple[int, ...]:
        """The heads that are active in this layer."""
        return active_heads(self.arch, self.index)


class Arithmetic:
    """A set of rules: what each part of a block does to a state. States, values, patterns and head outputs are of any
    type that the rules of one arithmetic agree on. A subclass has these rules, beside the methods below:

        norm(block, name, state)                 the norm of that name, as the block's weights have it
        values(block, state)                     the values V that heads mix
        pattern(block, state)                    the attention pattern P of every head
        mix(block, pattern, values)              P V, the output of each head
        gate(block, heads, state)                the output of each head times its gate, where there is a `head_gate`
        output(block, heads)                     the output projection of the heads, which is added to the hidden states
        mlp(block, state)                        the output of the MLP
        add(block, half, state, branches)        `skip * state` and the branches that were taken, by their part's name
    """

    name = ""  # The name of this arithmetic's method on a part

    def takes(self, block: Block, half: Half, branch: Branch) -> bool:
        """Whether a branch is computed at all: every one, unless a subclass leaves some out."""
        return True

    def active_heads(self, block: Block) -> tuple[int, ...]:
        """The active heads of a layer; a subclass may leave some out."""
        return block.active_heads

    def cross(self, block: Block, state: Any) -> Any:
        """The output of cross-attention, where the architecture has it; refused, unless a subclass has a rule."""
        sentence = f"the arithmetic {self.name!r} has no rule for cross-attention: use another"
        raise ArchitectureError(sentence, subject="cross_attention")

    def keep(self, block: Block, name: str, x: Any) -> None:
        """Keep x for the frozen rule of a part; only a subclass that freezes the network does."""

    def part(self, block: Block, part: Part, x: Any, inside: Any) -> Any:
        """A part of the user's own, by its rule of this arithmetic's name: x is what it changes, `inside` what its
        branch reads."""
        rule = getattr(part, self.name, None)
        if rule is None:
            sentence = f"{part.name} has no rule named {self.name!r}: write one, or use another arithmetic"
            raise ArchitectureError(sentence, subject=part.name)
        return rule(x, block, self, inside)


class BlockOutput(NamedTuple):
    """The state after a block, and from inside it the attention pattern P, the outputs of the heads, the
    weights of experts for each token, and P of cross-attention; None where the block has none."""

    state: Any
    pattern: Any
    heads: Any
    routing: Any = None
    cross: Any = None


def traverse(block: Block, rules: Any, state: Any) -> BlockOutput:
    """The state after a block, by the rules of an `Arithmetic`."""
    pattern = heads = None
    for half in block.halves:
        branches: dict[str, Any] = {}
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
    by_layer: list[dict[int, Any]] = [getattr(rules, name, {}) for name in ("routed", "cross_patterns")]
    state = changed("stream", block, rules, state, state)
    return BlockOutput(state, pattern, heads, *(kept.pop(block.index, None) for kept in by_layer))


def changed(place: Place, block: Block, rules: Any, x: Any, inside: Any) -> Any:
    """Return x as the parts at this place change it."""
    for part in block.arch.pieces:
        if part.place == place:
            x = rules.part(block, part, x, inside)
    return x
