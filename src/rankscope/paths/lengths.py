"""All paths by their length, exactly: a dynamic programme over the layers.

With Y_l[k] the sum of the terms of all paths of length k through the first l layers,

    Y_l[k] = close_l( past_l(Y_{l-1}[k]) + sum_h P_h Y_{l-1}[k-1] W_h ),

so that L(L+1)/2 layer applications sum over (1 + H)^L paths. What starts at a bias is carried beside what
starts at the embedding: a value bias, or the bias of a norm before the heads, passes through heads of its own
layer; an output bias does not.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl
import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.errors import ClosureError
from rankscope.metrics.catalogue import metric
from rankscope.metrics.residual import frobenius_norm
from rankscope.metrics.tokens import tokens, unit_of
from rankscope.paths.frozen import Frozen, FrozenLayer
from rankscope.paths.shares import cosine, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.paths.views import LengthView

Terms = Float[Tensor, "length batch token width"]
PIECE = 2**20
"""Numbers that go through a layer together on a CPU."""
DIGITS = math.log(1e-9) / math.log(unit_of(torch.float64))
"""The share of an arithmetic's digits to which parts must add up: 1e-9 in float64, 1e-4 in float32, 6e-2 in
bfloat16."""


@dataclass(frozen=True, eq=False, repr=False)
class ByLength:
    """The sum of the terms of all paths of every length."""

    embedding: Terms
    """Of paths that start at the embedding."""
    bias: Terms
    """Of paths that start at a bias."""
    counts: list[int]
    """Paths of each length that start at the embedding."""
    bias_counts: list[int]
    output: Float[Tensor, "batch token width"]
    padding: Tensor
    closure: float
    """How far the terms are from adding up to the output, relative to it."""

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


@torch.no_grad()
def length_terms(frozen: Frozen) -> tuple[Terms, Terms]:
    """(from the embedding, from biases), by length."""
    biased = frozen.has_constants
    Y = frozen.X[None]
    if biased:
        Y = torch.cat([Y, torch.zeros_like(Y)])
    for number, layer in enumerate(frozen.layers, 1):  # Y holds lengths 0..number-1, once or twice
        start = number if biased else None
        longer = Y.new_zeros(len(Y) + (2 if biased else 1), *Y.shape[1:])
        for piece, here in _pieces(Y, start):
            after = piece.start + (1 if biased and piece.start >= number else 0)
            stop = after + piece.stop - piece.start
            longer[after:stop] += layer.past(Y[piece], start=here)
            longer[after + 1 : stop + 1] += layer.through(Y[piece], start=here)
        for piece, here in _pieces(longer, number + 1 if biased else None):
            longer[piece] = layer.close(longer[piece], start=here)
        Y = longer
    lengths = len(frozen.layers) + 1
    Y = frozen.end(Y, lengths if biased else None)
    return Y[:lengths], Y[lengths:] if biased else torch.zeros_like(Y)


def _pieces(Y: Terms, start: int | None) -> Iterator[tuple[slice, int | None]]:
    """(parts, where `start` is among them): few enough at a time to stay in the processor's cache; a piece
    lies on one side of `start`, the first part that begins at a bias."""
    most = max(1, PIECE // max(Y[0].numel(), 1)) if Y.device.type == "cpu" else len(Y)
    halves = [(0, len(Y))] if start is None else [(0, start), (start, len(Y))]
    for low, high in halves:
        for first in range(low, high, most):
            yield slice(first, min(first + most, high)), 0 if first == start else None


def length_counts(frozen: Frozen) -> tuple[list[int], list[int]]:
    """(from the embedding, from biases): how many paths there are of each length, exactly.

    Where there is no skip past the heads, no path goes past them."""
    lengths = len(frozen.layers) + 1
    counts, biases = [1] + [0] * (lengths - 1), [0] * lengths
    for layer in frozen.layers:
        open_past = int(None in layer.ways)
        heads = len(layer.ways) - open_past
        inside, values, after = _constants(layer)
        counts, biases = (
            [open_past * number + heads * (known[k - 1] if k else 0) for k, number in enumerate(known)]
            for known in (counts, biases)
        )
        biases[1] += heads * (inside + values)
        biases[0] += after
    final = frozen.net.weights.final_norm.bias if frozen.net.arch.final_norm else None
    biases[0] += final is not None
    return counts, biases


def _constants(layer: FrozenLayer) -> tuple[int, int, int]:
    """Biases of a layer: (of the norm before its heads, of their values, and those that pass through
    none)."""
    arch, w = layer.arch, layer.weights
    post, sandwich, serial = arch.norm_place == "post", arch.norm_place == "sandwich", not arch.parallel
    has_mlp = arch.mlp != "none"

    def number(*biases: Tensor | None) -> int:
        return sum(bias is not None for bias in biases)

    norms = arch.norm == "layer"
    inside = 0 if post or layer.index in arch.bare_layers or not norms else number(w.attention_norm.bias)
    rest = number(w.attention.output.bias)
    if has_mlp and w.mlp is not None:
        rest += number(w.mlp.up.bias, w.mlp.down.bias)
    if norms and sandwich:
        rest += number(w.attention_after.bias) + (number(w.mlp_after.bias) if has_mlp else 0)
    if norms and post:
        rest += number(w.attention_norm.bias)
    if norms and has_mlp and (serial or not post):
        rest += number(w.mlp_norm.bias)
    return inside, number(w.attention.value.bias), rest


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
