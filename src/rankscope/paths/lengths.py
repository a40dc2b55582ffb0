"""`ByLength`: the sum of the terms of all paths of every length, and what of the output each length is."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rankscope.errors import ClosureError, FileError
from rankscope.files import atomic
from rankscope.metrics.catalogue import metric
from rankscope.metrics.token_norms import frobenius_norm
from rankscope.metrics.tokens import Values, tokens, unit_of
from rankscope.nets.plain import Tokens
from rankscope.paths.frozen import Frozen
from rankscope.paths.polynomials import Coefficients, length_counts, length_terms
from rankscope.shapes import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.paths.views import LengthView


DIGITS = math.log(1e-9) / math.log(unit_of(torch.float64))
"""The share of an arithmetic's digits to which parts must add up: 1e-9 in float64, 1e-4 in float32, 6e-2 in
bfloat16."""

TENSORS = ("embedding", "bias", "output", "padding")
ABOUT = ("counts", "bias_counts", "closure", "variant")  # the fields of `ByLength`, as a file has them


@dataclass(frozen=True, eq=False, repr=False)
class ByLength:
    """The sum of the terms of all paths of every length."""

    embedding: Coefficients  # of paths that start at the embedding
    bias: Coefficients  # of paths that start at a bias
    counts: list[int]  # paths of each length that start at the embedding
    bias_counts: list[int]
    output: Float[Tensor, "batch token width"]
    padding: Tensor
    closure: float  # how far the terms are from adding up to the output, relative to it
    variant: str = "as given"

    def __repr__(self) -> str:
        from rankscope.paths.figures import lengths_repr

        return lengths_repr(self.views(), len(self.output), self.closure)

    def _repr_html_(self) -> str:
        """For notebooks: shares and residuals by length."""
        from rankscope.paths.figures import lengths_card

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
            ("all", self.embedding + self.bias, [a + b for a, b in zip(self.counts, self.bias_counts, strict=True)]),
        ):
            for length, (term, count) in enumerate(zip(terms, counts, strict=True)):
                frames.append(_rows(term, self.output, self.padding, length, start, count))
        return pl.concat(frames)

    def plot(self, *, ax: "Iterable[Axes] | None" = None, figsize: tuple[float, float] | None = None) -> "Figure":
        """Shares and residuals by length, with the number of paths: in two panels, the two axes of `ax` if
        given, or of a new figure of `figsize` inches."""
        from rankscope.figures.drawing import plot
        from rankscope.paths.figures import lengths_chart

        return plot(lengths_chart(self.table), ax=ax, figsize=figsize)

    def views(self) -> "list[LengthView]":
        """What each length says: all that is drawn, printed and told of it."""
        from rankscope.paths.views import length_views

        return length_views(self.table)

    def save(self, path: str | Path) -> Path:
        """Write all of it, terms too, as one safetensors file, atomically."""
        description = {name: getattr(self, name) for name in ABOUT}
        tensors = {name: getattr(self, name).contiguous() for name in TENSORS}
        with atomic(path) as temporary:
            save_file(tensors, temporary, {"ByLength": json.dumps(description)})
        return Path(path)

    @classmethod
    def read(cls, path: str | Path) -> "ByLength":
        """What `save` wrote, on the CPU."""
        try:
            with safe_open(path, "pt") as file:
                description = json.loads(file.metadata()["ByLength"])
                return cls(**{name: file.get_tensor(name) for name in TENSORS}, **description)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            sentence = f"{path} must be a file of ByLength.save; it cannot be read ({error})"
            raise FileError(sentence, subject="path") from error


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


def closure_of(total: Tensor, frozen: Frozen) -> float:
    """How far the parts are from the output, relative to it; an error where that is more than rounding."""
    output_size = float(torch.linalg.vector_norm(frozen.output))
    gap = float(torch.linalg.vector_norm(total - frozen.output))
    return require_closure(gap / output_size if output_size else gap, total.dtype)


def require_closure(closure: float, dtype: torch.dtype) -> float:
    """Return how far parts are from the output, relative to it; an error where that is more than rounding."""
    allowed = unit_of(dtype) ** DIGITS
    if not closure <= allowed:
        sentence = f"the parts must add up to the output within {allowed:.0e} of it; they miss it by {closure:.1e}"
        why = "the frozen network overflows, or its terms cancel to nothing; use float64"
        raise ClosureError(f"{sentence}: {why}", subject="closure")
    return closure


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


def share(term: Tokens, total: Tokens) -> Values:
    """`<term, total> / <total, total>`: shares of terms that add up to the total add up to one."""
    size = frobenius_norm(total.double())
    return (_divided(term, size) * _divided(total, size)).sum((1, 2))


def cosine(term: Tokens, total: Tokens) -> Values:
    """`<term, total> / (||term|| ||total||)`; 0 where either is zero."""
    term, total = (_divided(tensor, frobenius_norm(tensor.double())) for tensor in (term, total))
    return (term * total).sum((1, 2))


def _divided(X: Tokens, size: Values) -> Tokens:
    """X / size before anything is multiplied: products of small numbers would leave the range."""
    safe = size.masked_fill(size == 0, torch.inf)
    return X.double() / safe[:, None, None]
