"""`ByLength`: the sum of the terms of all paths of every length, and what of the output each length is.

Beside it how fast single paths collapse, the residual of a path's term against its length (`path_residuals`, `rate`). A
product of attention matrices makes rows alike, and soon to more digits than floating point has: by length 12 the
residual of a path through pure attention may be 1e-300 of its size. Where the network has no norms and no MLPs, terms
are carried in deviation arithmetic, `Y = 1 y^T + e^s R`, with the attention matrices that it splits into `1 p^T +
Delta`; elsewhere in float64, and what lies below its floor is marked.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import polars as pl
import torch
from torch import Tensor

from rankscope.deviation import DeviationPattern, DeviationStep, Scaled, State, applies, propagate, read
from rankscope.errors import ClosureError, require
from rankscope.extras import counted
from rankscope.metrics import Reading, Values, frobenius_norm, metric, tokens, unit_of
from rankscope.nets import Architecture, Layer, Tokens
from rankscope.paths.counts import Path, length_of
from rankscope.paths.figures import LengthView, counted_paths, length_views, lengths_overview, lengths_section
from rankscope.paths.frozen import Frozen
from rankscope.paths.polynomials import Coefficients, length_counts, length_terms
from rankscope.paths.terms import PathRules
from rankscope.results import Result, Section
from rankscope.runs import Manifest
from rankscope.shapes import Float

DIGITS = math.log(1e-9) / math.log(unit_of(torch.float64))
"""The share of an arithmetic's digits to which parts must add up: 1e-9 in float64, 1e-4 in float32, 6e-2 in
bfloat16."""

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
    def made_of(cls, tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]) -> Self:
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


def closure_of(total: Tensor, frozen: Frozen) -> float:
    """How far the parts are from the output, relative to it; an error where that is more than rounding."""
    output_size = float(torch.linalg.vector_norm(frozen.output))
    gap = float(torch.linalg.vector_norm(total - frozen.output))
    return require_closure(gap / output_size if output_size else gap, total.dtype)


def require_closure(closure: float, dtype: torch.dtype) -> float:
    """Return how far parts are from the output, relative to it; an error where that is more than rounding."""
    allowed = unit_of(dtype) ** DIGITS
    sentence = f"the parts must add up to the output within {allowed:.0e} of it; they miss it by {closure:.1e}"
    why = "the frozen network overflows, or its terms cancel to nothing; use float64"
    require(closure <= allowed, f"{sentence}: {why}", ClosureError, "closure")
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
    size = size_of(total.double())
    return (_divided(term, size) * _divided(total, size)).sum((1, 2))


def cosine(term: Tokens, total: Tokens) -> Values:
    """`<term, total> / (||term|| ||total||)`; 0 where either is zero."""
    term, total = (_divided(tensor, size_of(tensor.double())) for tensor in (term, total))
    return (term * total).sum((1, 2))


def _divided(X: Tokens, size: Values) -> Tokens:
    """X / size before anything is multiplied: products of small numbers would leave the range."""
    return X.double() / size[:, None, None]


def size_of(X: Tokens) -> Values:
    """The Frobenius norm of each sample, computed in float64; infinite where it is zero, to divide by."""
    size = frobenius_norm(X.double()).to(X)
    return size.masked_fill(size == 0, torch.inf)


RELATIVE = metric("relative_residual")


@torch.no_grad()
def path_residuals(frozen: Frozen, paths: list[Path]) -> pl.DataFrame:
    """One row per path and sample:

    path · length · sample · relative_residual · log10 · below_floor · arithmetic
    """
    arch = frozen.net.arch
    linear = arch.norm == "none" and arch.mlp == "none" and not arch.parts and not arch.head_gate
    deviation = linear and applies(frozen.net)
    attention = _attention(frozen) if deviation else []
    frames, samples = [], len(frozen.X)
    for path in paths:
        if deviation:
            reading = _carried(frozen, attention, path)
        else:
            reading = RELATIVE.read(tokens(PathRules(frozen).term(path, frozen.X), ~frozen.valid))
        columns = {
            "path": [" ".join("·" if head is None else str(head) for head in path)] * samples,
            "length": [length_of(path)] * samples,
            "sample": list(range(samples)),
            "relative_residual": reading.value.tolist(),
            "log10": reading.log10.tolist(),
            "below_floor": reading.below_floor.tolist(),
            "arithmetic": ["deviation" if deviation else "float64"] * samples,
        }
        frames.append(pl.DataFrame(columns))
    return pl.concat(frames)


def _attention(frozen: Frozen) -> list[DeviationPattern]:
    """Attention of every layer of the full network, split into what all rows share and what they do not."""
    X, table = frozen.X, frozen.net.weights.positions
    if table is not None:  # layer 0 before its positions were added: `propagate` adds them again
        X = (X - table[: X.shape[1]]) * frozen.valid[..., None]
    patterns = (step.attention for step in propagate(frozen.net, X, ~frozen.valid))
    return [P for P in patterns if isinstance(P, DeviationPattern)]


def _carried(frozen: Frozen, attention: list[DeviationPattern], path: Path) -> Reading:
    state = State.of(frozen.X.double(), frozen.valid)
    for layer, P, head in zip(frozen.net.weights.layers, attention, path, strict=True):
        if head is None:
            weight = frozen.net.arch.attention_skip
            state = State(state.x * weight, state.R * weight, state.valid).tidy()
        else:
            state = _through(frozen.net.arch, layer, P, head, state)
    reading = read(RELATIVE, DeviationStep(len(path), state, None))
    assert reading is not None
    return reading


def _through(arch: Architecture, layer: Layer, P: DeviationPattern, head: int, state: State) -> State:
    """`P_h Y W_h` of a state: P_h = 1 p^T + Delta, about the token that most attend to."""
    w = layer.attention
    key = head // (arch.heads // arch.key_heads)
    W = (w.value.weight[:, key] @ w.output.weight[head]).double()
    top = P.top[:, head, 0]
    top_token = state.R.value[torch.arange(len(top), device=top.device), top][:, None]  # [batch, 1, width]
    relative_to_top = state.R.value - top_token
    mean = Scaled((top_token + P.p[:, head, None] @ relative_to_top)[:, 0], state.R.log)
    mixed = Scaled(P.off_top.value[:, head] @ relative_to_top, P.off_top.log[:, head] + state.R.log)
    x = (state.x + mean).mapped(lambda t: t @ W)
    return State(x, mixed.mapped(lambda t: t @ W), state.valid).tidy()


def rate(table: pl.DataFrame) -> float:
    """Digits lost per head: the slope of log10 of the relative residual against length, by least squares."""
    seen = table.filter(~pl.col("below_floor") & pl.col("log10").is_finite())
    length, digits = seen["length"].to_numpy(), seen["log10"].to_numpy()
    spread = float(((length - length.mean()) ** 2).sum()) if len(length) else 0.0
    return float(((length - length.mean()) * digits).sum()) / spread if spread else math.nan
