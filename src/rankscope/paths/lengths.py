"""All paths by their length, exactly: a dynamic programme over the layers.

A state is a polynomial in z whose coefficient k, Y_l[k], is the sum of the terms of all paths of length k
through the first l layers: attention multiplies by z, everything else acts on coefficients. Of attention and
skips alone

    Y_l[k] = skip Y_{l-1}[k] + sum_h P_h Y_{l-1}[k-1] W_h,

so that L(L+1)/2 layer applications sum over (1 + H)^L paths. What starts at a bias is a second polynomial
beside what starts at the embedding: a value bias, or the bias of a norm before the heads, passes through
heads of its own layer; an output bias does not.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rankscope.errors import ClosureError, FileError
from rankscope.files import atomic
from rankscope.metrics.catalogue import metric
from rankscope.metrics.residuals import frobenius_norm
from rankscope.metrics.tokens import tokens, unit_of
from rankscope.nets.order import Half
from rankscope.nets.parts import Part
from rankscope.nets.traversal import Arithmetic, Block, traverse
from rankscope.paths.frozen import Frozen, with_bias
from rankscope.paths.shares import cosine, share
from rankscope.paths.terms import Linear, Terms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.paths.views import LengthView

Coefficients = Float[Tensor, "length batch token width"]
PIECE = 2**20
"""Numbers that go through a layer together on a CPU."""
DIGITS = math.log(1e-9) / math.log(unit_of(torch.float64))
"""The share of an arithmetic's digits to which parts must add up: 1e-9 in float64, 1e-4 in float32, 6e-2 in
bfloat16."""

TENSORS = ("embedding", "bias", "output", "padding")
ABOUT = ("counts", "bias_counts", "closure", "variant")
"""The fields of `ByLength`, as a file has them."""


@dataclass(frozen=True, eq=False, repr=False)
class ByLength:
    """The sum of the terms of all paths of every length."""

    embedding: Coefficients
    """Of paths that start at the embedding."""
    bias: Coefficients
    """Of paths that start at a bias."""
    counts: list[int]
    """Paths of each length that start at the embedding."""
    bias_counts: list[int]
    output: Float[Tensor, "batch token width"]
    padding: Tensor
    closure: float
    """How far the terms are from adding up to the output, relative to it."""
    variant: str = "as given"

    def __repr__(self) -> str:
        from rankscope.paths.card import lengths_repr

        return lengths_repr(self.views(), len(self.output), self.closure)

    def _repr_html_(self) -> str:
        """For notebooks: shares and residuals by length."""
        from rankscope.paths.card import lengths_card

        return lengths_card(self.table, self.closure)

    @property
    def table(self) -> pl.DataFrame:
        """One row per sample, length and start (embedding, bias, all):

        sample · length · start · paths · norm · residual · relative_residual · below_floor · share · cosine

        `paths` is exact and so a string; `share` is `<term, output> / <output, output>`: over lengths it adds
        up to one. A term whose residual lies `below_floor` is uniform as far as the arithmetic can see.
        """
        frames = []
        for start, terms, counts in (
            ("embedding", self.embedding, self.counts),
            ("bias", self.bias, self.bias_counts),
            (
                "all",
                self.embedding + self.bias,
                [a + b for a, b in zip(self.counts, self.bias_counts, strict=True)],
            ),
        ):
            for length, (term, count) in enumerate(zip(terms, counts, strict=True)):
                frames.append(_rows(term, self.output, self.padding, length, start, count))
        return pl.concat(frames)

    def plot(self) -> "Figure":
        """Shares and residuals by length, with the number of paths."""
        from rankscope.paths.plot import plot_lengths

        return plot_lengths(self.table)

    def views(self) -> "list[LengthView]":
        """What each length says: all that is drawn, printed and told of it."""
        from rankscope.paths.views import length_views

        return length_views(self.table)

    def save(self, path: str | Path) -> Path:
        """Write all of it, terms too, as one safetensors file, atomically."""
        about = {name: getattr(self, name) for name in ABOUT}
        tensors = {name: getattr(self, name).contiguous() for name in TENSORS}
        with atomic(path) as temporary:
            save_file(tensors, temporary, {"ByLength": json.dumps(about)})
        return Path(path)

    @classmethod
    def read(cls, path: str | Path) -> "ByLength":
        """What `save` wrote, on the CPU."""
        try:
            with safe_open(path, "pt") as file:
                about = json.loads(file.metadata()["ByLength"])
                return cls(**{name: file.get_tensor(name) for name in TENSORS}, **about)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise FileError(
                f"{path} must be a file written by ByLength.save; it cannot be read ({error})"
            ) from error


def by_length(frozen: Frozen) -> ByLength:
    """Sum the terms of all paths of every length, and check that they add up to the output."""
    embedding, bias = length_terms(frozen)
    closure = closure_of((embedding + bias).sum(0), frozen)
    counts, bias_counts = length_counts(frozen)
    output, padding, order = frozen.output, ~frozen.real, frozen.order
    if order is not None:  # tokens where the user had them
        embedding, bias = (torch.stack([order.restored(t) for t in terms]) for terms in (embedding, bias))
        output, padding = order.restored(output), padding.gather(1, order.back)
    return ByLength(embedding, bias, counts, bias_counts, output, padding, closure)


class ByLengthRules(Linear):
    """Rules on polynomials: the coefficients from the embedding, then those from biases, which begin at
    `start`. On a CPU a few coefficients at a time go through a part, to stay in the processor's cache."""

    def norm(self, block: Block, name: str, terms: Terms) -> Terms:
        """Acts on coefficients."""
        return self._piecewise(terms, lambda piece: super(ByLengthRules, self).norm(block, name, piece))

    def mlp(self, block: Block, terms: Terms) -> Terms:
        """Acts on coefficients."""
        return self._piecewise(terms, lambda piece: super(ByLengthRules, self).mlp(block, piece))

    def values(self, block: Block, terms: Terms) -> Any:
        """Left to `output`, where a piece goes through all of attention at once."""
        return terms

    def mix(self, block: Block, P: Any, values: Any) -> Any:
        """Left to `output`."""
        return values

    def output(self, block: Block, terms: Any) -> Terms:
        """Multiplies by z; the output bias is one more constant."""
        Y, start = terms
        longer = Y.new_zeros(len(Y) + (1 if start is None else 2), *Y.shape[1:])
        for piece, here in _pieces(Y, start):
            after = piece.start + 1 + (start is not None and piece.start >= start)
            V = super().values(block, Terms(Y[piece], here))
            heads = self.added(block, super().mix(block, self.weights(block, terms), V))
            longer[after : after + len(heads)] = heads
        start = None if start is None else start + 1
        return Terms(with_bias(longer, start, block.weights.attention.output.bias), start)

    def add(self, block: Block, half: Half, terms: Terms, branches: dict[str, Terms]) -> Terms:
        """Coefficient by coefficient; attention's polynomial is one longer."""
        if not half.attends:
            return super().add(block, half, terms, branches)
        longer, beside = branches["attention"], branches.get("mlp")
        for part, after in _halves(terms, longer):
            past = torch.zeros_like(terms.parts[part]) if half.skip == 0.0 else half.skip * terms.parts[part]
            longer.parts[after] += past if beside is None else past + beside.parts[part]
        return longer

    def _piecewise(self, terms: Terms, rule: Callable[[Terms], Terms]) -> Terms:
        found = torch.empty_like(terms.parts)
        for piece, here in _pieces(*terms):
            found[piece] = rule(Terms(terms.parts[piece], here)).parts
        return terms._replace(parts=found)


@torch.no_grad()
def length_terms(frozen: Frozen) -> tuple[Coefficients, Coefficients]:
    """(from the embedding, from biases), by length."""
    rules, Y = ByLengthRules(frozen), frozen.X[None]
    biased = frozen.has_constants
    terms = Terms(torch.cat([Y, torch.zeros_like(Y)]), 1) if biased else Terms(Y)
    for layer in frozen.layers:
        terms = rules.through(layer.block, terms)
    lengths, Y = len(frozen.layers) + 1, rules.end(terms)
    return Y[:lengths], Y[lengths:] if biased else torch.zeros_like(Y)


def _pieces(Y: Coefficients, start: int | None) -> Iterator[tuple[slice, int | None]]:
    """(coefficients, where `start` is among them): few enough at a time; a piece lies on one side of
    `start`, the first that begins at a bias."""
    most = max(1, PIECE // max(Y[0].numel(), 1)) if Y.device.type == "cpu" else len(Y)
    halves = [(0, len(Y))] if start is None else [(0, start), (start, len(Y))]
    for low, high in halves:
        for first in range(low, high, most):
            yield slice(first, min(first + most, high)), 0 if first == start else None


def _halves(terms: Terms, longer: Terms) -> list[tuple[slice, slice]]:
    """Where the coefficients of both polynomials are in a state, and in one whose polynomials are longer."""
    number, start = len(terms.parts), terms.start
    if start is None or longer.start is None:
        return [(slice(0, number), slice(0, number))]
    others = slice(longer.start, longer.start + number - start)
    return [(slice(0, start), slice(0, start)), (slice(start, number), others)]


class Counts(NamedTuple):
    """Polynomials whose coefficient k is the number of paths of length k."""

    embedding: list[int]
    biases: list[int]


class Counting(Arithmetic):
    """Rules on counts. The MLP step is passed as a whole, branch and skip, so that a path's choices are heads
    or none; every bias on the way is one more path."""

    name = "counting"

    def norm(self, block: Block, name: str, counts: Counts) -> Counts:
        """Its bias starts here."""
        return _started(counts, getattr(block.weights, name).bias)

    def values(self, block: Block, counts: Counts) -> Counts:
        """A value bias starts here."""
        return _started(counts, block.weights.attention.value.bias)

    def weights(self, block: Block, counts: Counts) -> None:
        """Nothing to count."""

    def mix(self, block: Block, weights: None, counts: Counts) -> Counts:
        """Times z and the number of heads."""
        heads = len(block.speaking)
        return Counts(*([0, *(heads * number for number in known)] for known in counts))

    def output(self, block: Block, counts: Counts) -> Counts:
        """The output bias starts here, past the heads."""
        return _started(counts, block.weights.attention.output.bias)

    def mlp(self, block: Block, counts: Counts) -> Counts:
        """Its two biases start here."""
        w = block.weights.mlp
        assert w is not None
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
                [a + b for a, b in zip([*one, 0], other, strict=True)]
                for one, other in zip(past, heads, strict=True)
            )
        )

    def part(self, block: Block, part: Part, x: Any, inside: Any) -> Any:
        """A part of one's own is passed as a whole."""
        return x


def length_counts(frozen: Frozen) -> tuple[list[int], list[int]]:
    """(from the embedding, from biases): how many paths there are of each length, exactly.

    Where there is no skip past the heads, no path goes past them."""
    rules, counts = Counting(), Counts([1], [0])
    for layer in frozen.layers:
        counts = traverse(layer.block, rules, counts).state
    final = frozen.net.weights.final_norm.bias if frozen.net.arch.final_norm else None
    return tuple(_started(counts, final))  # type: ignore[return-value]


def _started(counts: Counts, bias: Tensor | None) -> Counts:
    return counts if bias is None else Counts(counts.embedding, [counts.biases[0] + 1, *counts.biases[1:]])


def closure_of(total: Tensor, frozen: Frozen) -> float:
    """How far the parts are from the output, relative to it; an error where that is more than rounding."""
    whole = float(torch.linalg.vector_norm(frozen.output))
    gap = float(torch.linalg.vector_norm(total - frozen.output))
    closure = gap / whole if whole else gap
    allowed = unit_of(total.dtype) ** DIGITS
    if not closure <= allowed:
        raise ClosureError(
            f"the parts must add up to the output within {allowed:.0e} of it; they miss it by "
            f"{closure:.1e}: the frozen network overflows, or its terms cancel to nothing; use float64"
        )
    return closure


def _rows(term: Tensor, output: Tensor, padding: Tensor, length: int, start: str, count: int) -> pl.DataFrame:
    ready = tokens(term, padding)
    residual = metric("residual").read(ready)
    relative = metric("relative_residual").read(ready)
    return pl.DataFrame(
        {
            "sample": list(range(len(term))),
            "length": [length] * len(term),
            "start": [start] * len(term),
            "paths": [str(count)] * len(term),
            "norm": frobenius_norm(ready.X).tolist(),
            "residual": residual.value.tolist(),
            "relative_residual": relative.value.tolist(),
            "below_floor": relative.below_floor.tolist(),
            "share": share(term, output).tolist(),
            "cosine": cosine(term, output).tolist(),
        }
    )
