"""How many paths of each length a network has, those that start at biases included: exact whole numbers."""

from typing import Any, NamedTuple

from torch import Tensor

from rankscope.nets.order import Half
from rankscope.nets.parts import Part
from rankscope.nets.traversal import Arithmetic, Block, traverse
from rankscope.paths.frozen import Frozen


class Counts(NamedTuple):
    """Polynomials whose coefficient k is the number of paths of length k."""

    embedding: list[int]
    biases: list[int]


class CountingRules(Arithmetic):
    """Rules on counts. The MLP step is passed as a whole, branch and skip, so that a path's choices are heads
    or none; every bias on the way is one more path."""

    name = "counting"

    def norm(self, block: Block, name: str, counts: Counts) -> Counts:
        """The bias of the norm starts a path here."""
        return _started(counts, getattr(block.weights, name).bias)

    def values(self, block: Block, counts: Counts) -> Counts:
        """A value bias starts here."""
        return _started(counts, block.weights.attention.value.bias)

    def pattern(self, block: Block, counts: Counts) -> None:
        """Attention patterns have nothing to count."""

    def mix(self, block: Block, weights: None, counts: Counts) -> Counts:
        """Times z and the number of heads."""
        heads = len(block.active_heads)
        return Counts(*([0, *(heads * count for count in polynomial)] for polynomial in counts))

    def gate(self, block: Block, counts: Counts, inside: Counts) -> Counts:
        """A gate on what heads say is passed with them."""
        return counts

    def output(self, block: Block, counts: Counts) -> Counts:
        """The output bias starts here, past the heads."""
        return _started(counts, block.weights.attention.output.bias)

    def mlp(self, block: Block, counts: Counts) -> Counts:
        """The two biases of the MLP start paths here."""
        w = block.mlp
        return _started(_started(counts, w.up.bias), w.down.bias)

    def add(self, block: Block, half: Half, counts: Counts, branches: dict[str, Counts]) -> Counts:
        """Past the heads where that is a way, and through them."""
        past = branches.get("mlp", counts)
        if not half.attends:
            return past
        heads = branches["attention"]
        if half.skip == 0.0 and "mlp" not in branches:
            return heads
        return Counts(
            *(
                [a + b for a, b in zip([*past_counts, 0], head_counts, strict=True)]
                for past_counts, head_counts in zip(past, heads, strict=True)
            )
        )

    def part(self, block: Block, part: Part, x: Any, inside: Any) -> Any:
        """A part of one's own is passed as a whole."""
        return x


def length_counts(frozen: Frozen) -> tuple[list[int], list[int]]:
    """(from the embedding, from biases): how many paths there are of each length, exactly.

    Where there is no skip past the heads, no path goes past them."""
    rules, counts = CountingRules(), Counts([1], [0])
    for layer in frozen.layers:
        counts = traverse(layer.block, rules, counts).state
    final = frozen.net.weights.final_norm.bias if frozen.net.arch.final_norm else None
    return tuple(_started(counts, final))  # type: ignore[return-value]


def _started(counts: Counts, bias: Tensor | None) -> Counts:
    return counts if bias is None else Counts(counts.embedding, [counts.biases[0] + 1, *counts.biases[1:]])
