"""All paths by their length, exactly: their sums, by a dynamic programme over the layers, and their number.

A state is a polynomial in z whose coefficient k, Y_l[k], is the sum of the terms of all paths of length k through the
first l layers: attention multiplies by z, everything else acts on coefficients. Of attention and skips alone

    Y_l[k] = skip Y_{l-1}[k] + sum_h P_h Y_{l-1}[k-1] W_h,

so that L(L+1)/2 layer applications sum over (1 + H)^L paths. What starts at a bias is a second polynomial beside what
starts at the embedding: a value bias, or the bias of a norm before the heads, passes through heads of its own layer; an
output bias does not.

`by_length` calls `length_terms` and `length_counts`; `ByLength` says what of the output each length is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import polars as pl
import torch
from torch import Tensor

from rankscope.extras import counted
from rankscope.metrics import frobenius_norm, metric, tokens
from rankscope.nets import Arithmetic, Block, Half, Part, traverse
from rankscope.paths.figures import LengthView, counted_paths, length_views, lengths_overview, lengths_section
from rankscope.paths.frozen import Frozen, FrozenRules, Terms, closure_of, cosine, share, with_bias
from rankscope.results import Result, Section
from rankscope.runs import Manifest
from rankscope.shapes import Float

Coefficients = Float[Tensor, "length batch token width"]
PIECE = 2**20  # numbers that go through a layer together on a CPU
LENGTHS: dict[str, Any] = {
    "sample": pl.Int64, "length": pl.Int64, "start": pl.String, "paths": pl.String, "norm": pl.Float64,
    "residual": pl.Float64, "relative_residual": pl.Float64, "below_floor": pl.Boolean, "share": pl.Float64,
    "cosine": pl.Float64,
}  # fmt: skip
"""The columns of `ByLength.table`."""
TERMS: dict[str, Any] = {"start": pl.String, "length": pl.Int64, "sample": pl.Int64, "token": pl.Int64,
                         "padding": pl.Boolean, "values": pl.List(pl.Float64)}  # fmt: skip
"""The columns of the table of terms; `start` is embedding, bias, or output (of all paths: it has no length)."""
COUNTS = ("counts", "bias_counts")  # the fields of `ByLength` that are whole numbers of any size


class PolynomialRules(FrozenRules):
    """Rules on polynomials, with gradients: the coefficients from the embedding, then those from biases, which begin
    at `start`."""

    def output(self, block: Block, head_terms: Any) -> Terms:
        """What the heads add: their terms times z, so every path is one longer; the output bias has length 0."""
        added, start = self.added(block, head_terms), self.start
        zero = torch.zeros_like(added[:1])
        if start is None:
            return Terms(torch.cat([zero, added]))
        longer = torch.cat([zero, added[:start], zero, added[start:]])
        return Terms(with_bias(longer, start + 1, block.weights.attention.output.bias), start + 1)

    def values(self, block: Block, terms: Terms) -> Any:
        """The values of every coefficient; where biases begin is remembered for `output`, which is given none."""
        self.start = terms.start
        return super().values(block, terms)

    def add(self, block: Block, half: Half, terms: Terms, branches: dict[str, Terms]) -> Terms:
        """Coefficient by coefficient; attention's polynomial is one longer."""
        if not half.attends:
            return super().add(block, half, terms, branches)
        longer, beside = branches["attention"], branches.get("mlp")
        for part, after in _halves(terms, longer):
            if half.skip != 0.0:
                longer.parts[after].add_(terms.parts[part], alpha=half.skip)
            if beside is not None:
                longer.parts[after] += beside.parts[part]
        return longer


class PolynomialRulesInPieces(PolynomialRules):
    """The rules of `PolynomialRules` without gradients, in pieces that fit into the processor's cache.

    On a CPU a few coefficients at a time go through a part, and what comes out is written where it belongs: products of
    matrices are nine tenths of the time.
    """

    inner: Tensor | None = None  # room for what MLPs hold inside, the same for all of them

    def norm(self, block: Block, name: str, terms: Terms) -> Terms:
        """The polynomial whose coefficients are those of `terms`, each through the norm; the bias joins at `start`."""
        norm, (Y, start) = self.layer(block).norms[name], terms
        result, factor = torch.empty_like(Y), norm.factor
        for piece, _ in _pieces(Y, None):
            X, out = Y[piece], result[piece]
            X = torch.sub(X, X.mean(-1, keepdim=True), out=out) if norm.centred else X
            torch.mul(X, factor, out=out)
        return Terms(with_bias(result, start, norm.weights.bias), start)

    def mlp(self, block: Block, terms: Terms) -> Terms:
        """The polynomial whose coefficients are those of `terms`, each through the MLP; biases join at `start`."""
        w, gate, (Y, start) = block.mlp, self.layer(block).gate, terms
        assert gate is not None
        result, rows, mlp_width = torch.empty_like(Y), Y[0, ..., 0].numel(), w.up.weight.shape[1]
        shape = (min(_most(Y), len(Y)) * rows, mlp_width)
        if self.inner is None or self.inner.shape != shape:
            self.inner = Y.new_empty(shape)
        for piece, local_start in _pieces(Y, start):
            X, out = Y[piece].flatten(0, 2), result[piece].flatten(0, 2)
            inner = torch.mm(X, w.up.weight, out=self.inner[: len(X)]).view(-1, *gate.shape)
            inner = with_bias(inner, local_start, w.up.bias).mul_(gate)
            torch.mm(inner.flatten(0, 2), w.down.weight, out=out)
        return Terms(with_bias(result, start, w.down.bias), start)

    def values(self, block: Block, terms: Terms) -> Any:
        """Left to `output`, where a piece goes through all of attention at once."""
        return terms

    def mix(self, block: Block, P: Any, values: Any) -> Any:
        """Returns its input: `output` does this work piece by piece."""
        return values

    def gate(self, block: Block, heads: Any, terms: Terms) -> Any:
        """Returns its input: `output` does this work piece by piece."""
        return heads

    def output(self, block: Block, terms: Any) -> Terms:
        """What the heads add: their terms times z, so every path is one longer; the output bias has length 0."""
        Y, start = terms
        longer = Y.new_empty(len(Y) + (1 if start is None else 2), *Y.shape[1:])
        longer[0] = 0.0
        if start is not None:
            longer[start + 1] = 0.0
        for piece, local_start in _pieces(Y, start):
            after = piece.start + 1 + (start is not None and piece.start >= start)
            V = super().values(block, Terms(Y[piece], local_start))
            head_terms = super().mix(block, self.pattern(block, terms), V)
            head_terms = super().gate(block, head_terms, terms) if self.arch.head_gate else head_terms
            self.added(block, head_terms, longer[after : after + len(head_terms)])
        start = None if start is None else start + 1
        return Terms(with_bias(longer, start, block.weights.attention.output.bias), start)


def length_terms(frozen: Frozen, biases: bool = True) -> tuple[Coefficients, Coefficients]:
    """The sums of terms by length: of paths from the embedding, and of paths from biases unless they are left out.

    Gradients go through every term of a network that was frozen with them (`frozen_pass`), and through what was
    measured on the way: attention, scales of norms, gates."""
    with torch.set_grad_enabled(frozen.gradients):
        rules = (PolynomialRules if frozen.gradients else PolynomialRulesInPieces)(frozen)
        Y, biased = frozen.X[None], biases and frozen.has_constants
        terms = Terms(torch.cat([Y, torch.zeros_like(Y)]), 1) if biased else Terms(Y)
        for layer in frozen.layers:
            terms = rules.through(layer.block, terms)
        lengths, Y = len(frozen.layers) + 1, rules.end(terms)
        return Y[:lengths], Y[lengths:] if biased else torch.zeros_like(Y)


def _most(Y: Coefficients) -> int:
    """Coefficients that go through a layer together."""
    return max(1, PIECE // max(Y[0].numel(), 1)) if Y.device.type == "cpu" else len(Y)


def _pieces(Y: Coefficients, start: int | None) -> Iterator[tuple[slice, int | None]]:
    """(coefficients, where `start` is among them), few enough at a time; a piece lies on one side of `start`."""
    per_piece = _most(Y)
    halves = [(0, len(Y))] if start is None else [(0, start), (start, len(Y))]
    for low, high in halves:
        for first in range(low, high, per_piece):
            yield slice(first, min(first + per_piece, high)), 0 if first == start else None


def _halves(terms: Terms, longer: Terms) -> list[tuple[slice, slice]]:
    """Where the coefficients of both polynomials are in a state, and in one whose polynomials are longer."""
    count, start = len(terms.parts), terms.start
    if start is None or longer.start is None:
        return [(slice(0, count), slice(0, count))]
    bias_slice = slice(longer.start, longer.start + count - start)
    return [(slice(0, start), slice(0, start)), (slice(start, count), bias_slice)]


class _Counts(NamedTuple):
    """Polynomials whose coefficient k is the number of paths of length k."""

    embedding: list[int]
    biases: list[int]


class _CountingRules(Arithmetic):
    """Rules on counts. The half with the MLP is passed as a whole, branch and skip, so that a path's choices are heads
    or none; every bias on the way is one more path."""

    name = "counting"

    def norm(self, block: Block, name: str, counts: _Counts) -> _Counts:
        return _started(counts, getattr(block.weights, name).bias)

    def values(self, block: Block, counts: _Counts) -> _Counts:
        return _started(counts, block.weights.attention.value.bias)

    def pattern(self, block: Block, counts: _Counts) -> None:
        """Attention patterns have nothing to count."""

    def mix(self, block: Block, weights: None, counts: _Counts) -> _Counts:
        """Times z and the number of heads."""
        heads = len(block.active_heads)
        return _Counts(*([0, *(heads * count for count in polynomial)] for polynomial in counts))

    def gate(self, block: Block, counts: _Counts, inside: _Counts) -> _Counts:
        return counts

    def output(self, block: Block, counts: _Counts) -> _Counts:
        return _started(counts, block.weights.attention.output.bias)

    def mlp(self, block: Block, counts: _Counts) -> _Counts:
        return _started(_started(counts, block.mlp.up.bias), block.mlp.down.bias)

    def add(self, block: Block, half: Half, counts: _Counts, branches: dict[str, _Counts]) -> _Counts:
        """Past the heads where that is a way, and through them."""
        past = branches.get("mlp", counts)
        if not half.attends:
            return past
        heads = branches["attention"]
        if half.skip == 0.0 and "mlp" not in branches:
            return heads
        pairs = zip(past, heads, strict=True)
        return _Counts(*([a + b for a, b in zip([*short, 0], longer, strict=True)] for short, longer in pairs))

    def part(self, block: Block, part: Part, x: Any, inside: Any) -> Any:
        """A part of one's own is passed as a whole."""
        return x


def length_counts(frozen: Frozen) -> tuple[list[int], list[int]]:
    """(from the embedding, from biases): how many paths there are of each length, exactly.

    Where there is no skip past the heads, no path goes past them."""
    rules, counts = _CountingRules(), _Counts([1], [0])
    for layer in frozen.layers:
        counts = traverse(layer.block, rules, counts).state
    final = frozen.net.weights.final_norm.bias if frozen.net.arch.final_norm else None
    return tuple(_started(counts, final))  # type: ignore[return-value]


def _started(counts: _Counts, bias: Tensor | None) -> _Counts:
    return counts if bias is None else _Counts(counts.embedding, [counts.biases[0] + 1, *counts.biases[1:]])


@dataclass(frozen=True, eq=False, repr=False)
class ByLength(Result):
    """The sum of the terms of all paths of every length."""

    kind = "by_length"
    schemas: ClassVar = {"lengths": LENGTHS, "terms": TERMS}
    embedding: Coefficients  # of paths that start at the embedding
    bias: Coefficients  # of paths that start at a bias
    counts: list[int]  # paths of each length that start at the embedding
    bias_counts: list[int]
    output: Float[Tensor, "batch token width"]
    padding: Tensor
    closure: float  # how far the terms are from adding up to the output, relative to it
    variant: str = "as given"
    manifest: Manifest = field(default_factory=Manifest)
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """How many paths there are, and that they add up."""
        paths, count = counted_paths(sum(self.counts)), counted(len(self.counts), "length")
        return f"ByLength: {paths} paths of {count}, {counted(len(self.output), 'sample')}, closure {self.closure:.0e}"

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """The sums by length as numbers, and the terms themselves, of every token."""
        parts = [("embedding", self.embedding), ("bias", self.bias), ("output", self.output[None])]
        samples, tokens = self.padding.shape
        places = [(k, token) for k in range(samples) for token in range(tokens)]
        frames = [
            pl.DataFrame({
                "start": start, "length": None if start == "output" else length, "sample": [k for k, _ in places],
                "token": [token for _, token in places], "padding": self.padding.flatten().tolist(),
                "values": term.double().flatten(0, 1).tolist(),
            }, schema_overrides=TERMS)
            for start, terms in parts for length, term in enumerate(terms)
        ]  # fmt: skip
        return {"lengths": self.table, "terms": pl.concat(frames)}

    def details(self) -> dict[str, Any]:
        """How many paths there are of each length, exactly, and the dtype of the terms."""
        counts = {name: list(map(str, getattr(self, name))) for name in COUNTS}
        return {**counts, "closure": self.closure, "variant": self.variant, "dtype": str(self.output.dtype)}

    @classmethod
    def made_of(cls, tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]) -> "ByLength":
        """The sums of these tables, on the CPU."""
        terms, dtype = tables["terms"], getattr(torch, details["dtype"].removeprefix("torch."))
        output = terms.filter(start="output")
        shape, width = (output["sample"].n_unique(), output["token"].n_unique()), len(output["values"][0])
        tensors = {
            name: torch.tensor(terms.filter(start=name)["values"].to_list(), dtype=dtype).view(-1, *shape, width)
            for name in ("embedding", "bias", "output")
        }
        padding = torch.tensor(output["padding"].to_list()).view(shape)
        counts, bias_counts = (list(map(int, details[name])) for name in COUNTS)
        return cls(
            tensors["embedding"], tensors["bias"], counts, bias_counts, tensors["output"][0], padding,
            float(details["closure"]), details["variant"], manifest,
        )  # fmt: skip

    def sections(self) -> list[Section]:
        """Shares and residuals by length."""
        return [lengths_section(self.table, self.closure)]

    def overview(self) -> Section:
        """Shares and residuals by length as a figure and a table."""
        return lengths_overview(self.title, self.table, self.closure)

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
            ("all", self.embedding + self.bias, [a + b for a, b in zip(self.counts, self.bias_counts, strict=True)]),
        ):
            for length, (term, count) in enumerate(zip(terms, counts, strict=True)):
                frames.append(_rows(term, self.output, self.padding, length, start, count))
        return pl.concat(frames)

    def views(self) -> list[LengthView]:
        """What each length says: all that is drawn, printed and told of it."""
        return length_views(self.table)


def by_length(frozen: Frozen) -> ByLength:
    """Sum the terms of all paths of every length, and check that they add up to the output."""
    embedding, bias = length_terms(frozen)
    closure = closure_of((embedding + bias).sum(0), frozen)
    counts, bias_counts = length_counts(frozen)
    output, padding, order = frozen.output, ~frozen.valid, frozen.order
    if order is not None:  # tokens where the user had them
        embedding, bias = (torch.stack([order.restored(t) for t in terms]) for terms in (embedding, bias))
        output, padding = order.restored(output), padding.gather(1, order.back)
    return ByLength(embedding, bias, counts, bias_counts, output, padding, closure)


def _rows(term: Tensor, output: Tensor, padding: Tensor, length: int, start: str, count: int) -> pl.DataFrame:
    ready = tokens(term, padding)
    residual = metric("residual").read(ready)
    relative = metric("relative_residual").read(ready)
    return pl.DataFrame({
        "sample": list(range(len(term))), "length": [length] * len(term), "start": [start] * len(term),
        "paths": [str(count)] * len(term), "norm": frobenius_norm(ready.X).tolist(),
        "residual": residual.value.tolist(), "relative_residual": relative.value.tolist(),
        "below_floor": relative.below_floor.tolist(), "share": share(term, output).tolist(),
        "cosine": cosine(term, output).tolist(),
    })  # fmt: skip
