"""One layer of a pass as readers see it, and readers: what is taken from each layer while a network is run once.

`measuring.py` makes a `LayerStep` of each layer, in floating point or in deviation arithmetic, and shows it to every
reader; the caller asks each for its result. A reader says what it needs and what that costs, takes it from one layer at
a time, and has a result at the end. `measure` runs the reader of metrics and the reader of checks, and takes others
along; one of your own is any object with the four names of `Reader`. One that needs attention and can do with numbers
of its rows says of which metrics in `by_row`; else P is held whole.

Readings come from `read_tensor` where the network ran on ordinary tensors, as those of `watch` do
(`live/state_readings.py`; a sample that holds NaN or infinity at a token is **broken**: its values are NaN, the other
samples of the batch are read as usual), and from `deviation/readings.py` where it ran in deviation arithmetic; then
`agreement.py` compares them with the second pass. What several readers need is computed once; what no reader asks for
is not computed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple, Protocol, runtime_checkable

import polars as pl
import torch
from torch import Tensor

from rankscope.deviation import (
    LOWEST,
    Confirmation,
    DeviationPattern,
    DeviationSecondPass,
    DeviationStep,
    FloatSecondPass,
    PatternByRows,
    SecondPassLayer,
    read,
)
from rankscope.metrics import ROUNDING, Metric, Of, PatternRows, Reading, Readings, Tokens, tokens_of, unit_of
from rankscope.nets import PatternNumbers, Step, Transformer, contributions
from rankscope.profiles.agreement import checked, checked_floats, confirmed
from rankscope.profiles.profile import NUMBERS, SCHEMA
from rankscope.shapes import Bool, Float

WHOLE = 2**27  # bytes in float64 up to which P of a layer is taken whole
BLOCK = 2**25  # bytes of a block of rows of all heads, beyond


def read_tensor(
    of: Of,
    x: Tensor,
    valid: Tensor,
    metrics: Sequence[Metric],
    unit: float,
    unpadded: bool = False,
    *,
    whole: int = WHOLE,
    block: int = BLOCK,
) -> tuple[Readings, Tensor]:
    """The readings of those metrics that are of x, and which samples of x are broken.

    Args:
        of: What x is.
        x: Tokens `[batch, token, width]`, attention `[batch, head, token, token]`, what each head adds
            `[batch, head, token, width]`, or routing `[batch, token, expert]`.
        valid: `[batch, token]`, True at tokens and False at padding.
        metrics: Metrics of anything; those of x are read.
        unit: The eps of the arithmetic that made x.
        unpadded: True where every token is known to be valid.
        whole: Bytes in float64 up to which P is taken whole.
        block: Bytes of a block of rows, beyond.
    """
    chosen = [metric for metric in metrics if metric.of == of]
    if of == "tokens" and chosen:
        ready, broken = tokens_of(x, valid, unpadded)
        return read_tokens(ready, broken, metrics, unit), broken
    broken = broken_samples(x, valid if of in ("tokens", "routing") else valid[:, None])
    if not chosen:
        return [], broken
    readings: Readings = []
    if of == "attention" and 8 * x.numel() > whole:
        streamed = [metric for metric in chosen if metric.streams]
        readings = _read_blocks(x, valid & ~broken[:, None], streamed, unit, block)
        chosen = [metric for metric in chosen if not metric.streams]
    if chosen:
        x = x.masked_fill(broken.reshape(-1, *[1] * (x.ndim - 1)), 0.0)
        readings += [(metric, metric.read(x, ~valid, unit=unit)) for metric in chosen]
    return nan_where_broken(in_order(readings, metrics), broken), broken


def in_order(readings: Readings, metrics: Sequence[Metric]) -> Readings:
    """The readings in the order in which their metrics were asked for."""
    order = [metric.name for metric in metrics]
    return sorted(readings, key=lambda pair: order.index(pair[0].name))


def _read_blocks(P: Tensor, valid: Tensor, metrics: Sequence[Metric], unit: float, size: int) -> Readings:
    """Metrics of a large P a block of its rows at a time: no copy of it is made in float64."""
    of_rows = [(metric, metric.by_row) for metric in metrics if metric.by_row is not None]
    numbers = [P.new_empty(P.shape[:-1], dtype=torch.float64) for _ in of_rows]
    step = max(1, size // (8 * P.shape[-1] * len(P) * P.shape[1]))
    for start in range(0, P.shape[-2], step):
        block = slice(start, start + step)
        counts = valid[:, None, block, None] & valid[:, None, None]
        rows = P[..., block, :].to(torch.float64).masked_fill(~counts, 0.0)
        for (_, by_row), values in zip(of_rows, numbers, strict=True):
            values[..., block] = by_row(rows, valid[:, None])
    pairs = zip(of_rows, numbers, strict=True)
    readings = [(metric, metric.from_rows(values, valid, unit)) for (metric, _), values in pairs]
    pattern = PatternRows.of(P, valid[:, None])
    of_heads = [(metric, metric.by_head) for metric in metrics if metric.by_row is None and metric.by_head is not None]
    return readings + [(metric, metric.from_heads(by_head(pattern), unit)) for metric, by_head in of_heads]


def read_tokens(ready: Tokens, broken: Tensor, metrics: Sequence[Metric], unit: float) -> Readings:
    """The readings of those metrics that are of tokens, from tokens that are ready to be measured."""
    chosen = [metric for metric in metrics if metric.of == "tokens"]
    return nan_where_broken([(metric, metric.read(ready, unit=unit)) for metric in chosen], broken)


def broken_samples(x: Tensor, valid: Tensor) -> Tensor:
    """The samples that hold NaN or infinity at a token: the least or the largest entry is one."""
    if not x.shape[-1]:
        return torch.zeros(len(x), dtype=torch.bool, device=x.device)
    least, largest = x.aminmax(dim=-1)
    fine = (least.isfinite() & largest.isfinite()) | ~valid
    return ~fine.flatten(1).all(1)


def row_sum_defect(P: Tensor, valid: Tensor) -> Tensor:
    """The largest |row sum - 1| of the rows of tokens, of what is finite."""
    if not P.numel():
        return torch.zeros((), dtype=torch.float64, device=P.device)
    defect = (P.sum(-1, dtype=torch.float64) - 1).abs() * valid[:, None]
    return defect.nan_to_num(0.0).max()


def nan_where_broken(readings: Readings, broken: Tensor) -> Readings:
    """NaN where samples are broken; all readings at once, which is one call of an accelerator."""
    if not readings:
        return readings
    parts = [part for _, reading in readings for part in (reading.value, reading.log10, reading.floor)]
    hole = broken.reshape(-1, *[1] * (parts[0].ndim - 1))
    rows = iter(torch.stack(parts).masked_fill(hole, torch.nan).unbind())
    return [(metric, Reading(next(rows), next(rows), next(rows))) for metric, _ in readings]


class ReadingRow(NamedTuple):
    """One metric of one layer, for a batch of samples."""

    layer: int
    start: int  # the index of the batch's first sample
    metric: Metric
    reading: Reading


def readings_table(rows: Sequence[ReadingRow], variant: str, arithmetic: str) -> pl.DataFrame:
    """The table of one network in one arithmetic, as a profile holds it."""
    columns: dict[str, list[Any]] = {name: [] for name in ("sample", "layer", "head", "metric")}
    for layer, start, metric, reading in rows:
        batch, *heads = reading.value.shape
        count = heads[0] if heads else 1
        columns["sample"] += [start + k for k in range(batch) for _ in range(count)]
        columns["head"] += [head if heads else None for _ in range(batch) for head in range(count)]
        columns["layer"] += [layer] * (batch * count)
        columns["metric"] += [metric.name] * (batch * count)
    parts = ([getattr(row.reading, name) for row in rows] for name in ("value", "log10", "floor"))
    joined = Reading(*map(_on_cpu, parts))
    digits = [
        torch.full_like(reading.value, torch.nan) if reading.digits is None else reading.digits
        for reading in (row.reading for row in rows)
    ]
    numbers = {name: getattr(joined, name).numpy() for name in NUMBERS} | {"digits": _on_cpu(digits).numpy()}
    count = len(columns["sample"])
    known: dict[str, Any] = {"variant": [variant] * count, "arithmetic": [arithmetic] * count, **columns, **numbers}
    return pl.DataFrame(
        [pl.Series(name, known[name], kind, nan_to_null=name == "digits") for name, kind in SCHEMA.items()]
    )


def _on_cpu(parts: Sequence[Tensor]) -> Tensor:
    """All numbers in one row on the CPU, brought over at once from each device."""
    runs = groupby((part.flatten() for part in parts), key=lambda part: part.device)
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(torch.cat(list(run)).cpu() for _, run in runs)])


DEFECT = "row_sum_defect"


class ResidualShape(NamedTuple):
    """The residual of one layer, `res X = 10^log10 |X|_F R`."""

    layer: int
    R: Float[Tensor, "batch token width"]  # of Frobenius norm one, zero at padded tokens; zero where tokens are equal
    log10: Float[Tensor, " batch"]  # its share of the tokens' norm; -inf of equal tokens, NaN where numbers overflow


LAYERS = 33  # the most layers that are kept: of a deeper network so many evenly, its ends among them


@cache
def sampled_layers(depth: int, most: int = LAYERS) -> frozenset[int]:
    """The layers of a network of this depth that are kept.

    >>> sorted(sampled_layers(1000, 3))
    [0, 500, 1000]
    """
    return frozenset(range(depth + 1) if depth < most else (round(k * depth / (most - 1)) for k in range(most)))


@dataclass(frozen=True, eq=False)
class CapturedNumbers:
    """Readings of a layer that a captured graph computed together with the layer (`captured.py`)."""

    metrics: Sequence[Metric]  # the metrics that were asked for
    readings: Readings
    finite: Bool[Tensor, ""]
    row_sum_defect: Float[Tensor, ""] | None


@dataclass(frozen=True, eq=False)
class LayerStep:
    """What a batch of samples gives at one layer; layer 0 is the input, without attention and heads."""

    net: Transformer  # as it runs: in its arithmetic, on its device
    start: int  # the index of the batch's first sample
    valid: Bool[Tensor, "batch token"]  # True at tokens, False at padding
    step: Step | DeviationStep
    second: SecondPassLayer | None = None  # the same layer of a second pass with different rounding
    confirmation: Confirmation | None = None  # the same layer in float64 beside doubled precision, if asked for
    known: "CapturedNumbers | None" = None  # readings that a captured graph computed together with the layer

    @property
    def layer(self) -> int:
        """The layer's index, 0 for the input."""
        return self.step.layer

    @property
    def unit(self) -> float:
        """The eps of the arithmetic that the network runs in."""
        return unit_of(self.net.dtype)

    @property
    def tokens(self) -> Float[Tensor, "batch token width"]:
        """X as an ordinary tensor."""
        state = self.step.state
        return state if isinstance(state, Tensor) else state.tokens()

    @cached_property
    def attention(self) -> Float[Tensor, "batch head token token"] | None:
        """P as an ordinary tensor; None at layer 0, and where no reader needs it."""
        P = self.step.attention
        P = P.matrix() if isinstance(P, DeviationPattern) else P
        return P if isinstance(P, Tensor) else None

    @property
    def rows(self) -> PatternNumbers | None:
        """Numbers of attention, where P itself is too large to be held."""
        P: Any = self.step.attention
        return P if isinstance(P, PatternNumbers) else None

    def readings(self, metrics: Sequence[Metric]) -> Readings:
        """Readings of those metrics that this layer has, in the order asked. In deviation arithmetic they are compared
        with doubled precision (`confirmation`) or with a second pass (`second`), where the step has one."""
        if self.known is not None and self.known.metrics is metrics:
            return self.known.readings
        if isinstance(self.step, DeviationStep):
            found = [(metric, read(metric, self.step)) for metric in metrics]
            readings = [(metric, reading) for metric, reading in found if reading is not None]
            if self.confirmation is not None:
                single, second = self.confirmation.single, self.confirmation.second
                of_single = replace(self, step=single, second=second, confirmation=None)
                marked = of_single.readings([metric for metric, _ in readings])
                return confirmed(readings, marked, self.confirmation)
            if self.second is None:
                return readings
            assert isinstance(self.second, DeviationSecondPass)
            return checked(readings, self.step, self.second)
        readings = self._plain_readings(metrics)
        if not isinstance(self.second, FloatSecondPass):
            return readings
        layer, by_floats = self.second.layer, self.second
        dropped = [name for name in ("attention", "heads", "routing") if getattr(self.step, name) is None]
        nothing: dict[str, Any] = dict.fromkeys(dropped)  # of what was dropped here the narrow step has none either
        narrow = replace(self, step=layer.narrow._replace(**nothing), second=None)

        def by_deviation(metric: Metric) -> tuple[DeviationStep, DeviationSecondPass]:
            return by_floats.tokens_by_deviation if metric.of == "tokens" else by_floats.block_by_deviation

        of_narrow = narrow._plain_readings([metric for metric, _ in readings])
        return checked_floats(readings, of_narrow, layer, self.net, by_deviation)

    def _plain_readings(self, metrics: Sequence[Metric]) -> Readings:
        """Readings of a pass on ordinary tensors."""
        readings = read_tokens(*self._ready, metrics, self.unit)
        if self.rows is not None:
            readings += self._read_rows(metrics, self.rows)
        parts: dict[Of, Tensor | None] = {"attention": self.attention, "routing": self.step.routing}
        if not isinstance(self.step, DeviationStep) and self.step.heads is not None:
            layer = self.net.weights.layers[self.layer - 1]
            parts["heads"] = contributions(layer, self.step.heads.to(self.net.dtype))
        for of, x in parts.items():
            readings += [] if x is None else read_tensor(of, x, self.valid, metrics, self.unit)[0]
        return in_order(readings, metrics)

    def _read_rows(self, metrics: Sequence[Metric], rows: PatternNumbers) -> Readings:
        """Metrics of attention from the numbers of its rows."""
        of_rows, of_heads = rows.of_rows, rows.of_heads
        readings = [(m, m.from_rows(of_rows[m.name], self.valid, self.unit)) for m in metrics if m.name in of_rows]
        readings += [(m, m.from_heads(of_heads[m.name], self.unit)) for m in metrics if m.name in of_heads]
        sums = of_rows.get(DEFECT)
        if not readings or sums is None:
            return readings
        return nan_where_broken(readings, (sums.isnan() & self.valid[:, None]).any(-1).any(-1))

    @property
    def finite(self) -> Bool[Tensor, ""]:
        """Whether no number of any token overflows."""
        if self.known is not None:
            return self.known.finite
        if isinstance(self.step, DeviationStep):
            return ~self.step.state.log.isnan().any()  # of a state made tidy, NaN and infinity are NaN in its log
        if isinstance(self.second, FloatSecondPass):
            return self.second.layer.sees.all()  # which is finite
        return ~self._ready[1].any()

    @property
    def row_sum_defect(self) -> Float[Tensor, ""] | None:
        """The largest |row sum of P - 1| of tokens, NaN counting as 0; None where nobody saw the rows. In deviation
        arithmetic rows sum to what the row sums to that all share, and to their `row_excess` where a part changed P."""
        if self.known is not None:
            return self.known.row_sum_defect
        P: Any = self.step.attention
        if self.rows is not None:
            defect = self.rows.of_rows.get(DEFECT)
            return None if defect is None else (defect * self.valid[:, None]).nan_to_num(0.0).max()
        if isinstance(P, DeviationPattern | PatternByRows):
            sums = P.p.sum(-1, keepdim=True)  # [batch, head, 1]
            excess = P.row_excess
            sums = sums if excess is None else sums + excess.explicit()
            tokens = self.valid[:, None] if excess is not None else self.valid.any(-1)[:, None, None]
            return ((sums - 1).abs() * tokens).nan_to_num(0.0).max() if P.p.numel() else P.p.sum()
        return None if self.attention is None else row_sum_defect(self.attention, self.valid)

    @cached_property
    def residual(self) -> ResidualShape:
        """The residual as a shape and a scale."""
        if isinstance(self.step, DeviationStep):
            state = self.step.state
            _, R = state.centred()
            norm = torch.linalg.vector_norm(state.scaled_tokens, dim=(1, 2)).log()
            return residual_shape(self.layer, R.value, R.log, norm + state.log)
        kept = self.valid[..., None]
        X = self.step.state.double() * kept
        mean = X.sum(1, keepdim=True) / self.valid.sum(-1).clamp(min=1)[:, None, None]
        norm = torch.linalg.vector_norm(X, dim=(1, 2)).log()
        return residual_shape(self.layer, (X - mean) * kept, torch.zeros_like(norm), norm)

    @cached_property
    def _ready(self) -> tuple[Tokens, Tensor]:
        """Ordinary tokens ready to be measured, and which samples are broken."""
        return tokens_of(self.tokens, self.valid)


def residual_shape(layer: int, R: Tensor, log: Tensor, log_norm: Tensor) -> ResidualShape:
    """The shape and scale of the residual `e^log R` of tokens whose norm is `e^log_norm`."""
    largest = R.abs().amax((1, 2))
    unit = R / largest.masked_fill(largest == 0, 1.0)[:, None, None]  # so that squares stay in range
    size = torch.linalg.vector_norm(unit, dim=(1, 2))
    zero = (size == 0) | (log <= LOWEST)
    size = size.masked_fill(size == 0, 1.0)
    log10 = (log + largest.masked_fill(largest == 0, 1.0).log() + size.log() - log_norm) / math.log(10)
    return ResidualShape(layer, unit / size[:, None, None], log10.masked_fill(zero, -torch.inf).cpu())


@runtime_checkable
class Reader(Protocol):
    """Takes what it needs from each layer of a pass."""

    @property
    def needs(self) -> frozenset[Of]:
        """tokens, attention, heads, routing: what no reader of a pass needs is not there for any."""

    @property
    def cost(self) -> str:
        """The cost of this reader in words: time at each layer, and what it keeps."""

    def read(self, step: LayerStep) -> None:
        """Look at one layer of one batch: layers in order, batch after batch; of a network whose layers are
        read from files, several batches at a layer before any at the next."""

    def result(self) -> Any:
        """The result, when the pass has ended."""


class MetricReader:
    """Reads metrics at every layer, for the rows of a table."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = metrics
        self.needs: frozenset[Of] = frozenset(metric.of for metric in metrics)
        of_attention = [metric for metric in metrics if metric.of == "attention"]
        self.by_row = of_attention if all(metric.streams for metric in of_attention) else None
        """Metrics that can be read off rows of attention; None where one cannot."""
        self.cost = f"{len(metrics)} metrics at each layer; keeps three numbers a sample of each"
        self._rows: list[ReadingRow] = []

    def read(self, step: LayerStep) -> None:
        """Read each metric that the layer has."""
        self._rows += [ReadingRow(step.layer, step.start, *pair) for pair in step.readings(self.metrics)]

    def result(self) -> list[ReadingRow]:
        """Rows in the order of batches, layers, and metrics as asked."""
        return sorted(self._rows, key=lambda row: (row.start, row.layer))


class CheckReader:
    """What a pass finds about itself: padding, rows of attention, and where numbers overflow."""

    needs: frozenset[Of] = frozenset(("tokens", "attention"))
    by_row: Sequence[Metric] = ()
    cost = "a sum over attention at each layer; keeps two numbers of each"

    def __init__(self) -> None:
        self._padded = 0
        self._rounding = 0.0
        self._defects: list[Tensor] = []
        self._finite: list[tuple[int, Tensor]] = []

    def read(self, step: LayerStep) -> None:
        """Look at one layer; numbers stay on its device until the end."""
        if step.layer == 0:
            self._padded += int((~step.valid).sum())
            rounding = ROUNDING * step.unit
            self._rounding = max(rounding, min(1e-9, rounding * step.valid.shape[1]))  # a row is a sum of so many
        defect = step.row_sum_defect
        if defect is not None:
            self._defects.append(defect)
        self._finite.append((step.layer, step.finite))

    def result(self) -> dict[str, Any]:
        """The checks, as the manifest has them."""
        # Where attention is fused nobody sees its rows, which a softmax makes to sum to one.
        defect = max((float(defect) for defect in self._defects), default=0.0)
        return {
            "padded_tokens": self._padded,
            "largest_row_sum_defect": defect,
            "first_layer_not_finite": min((layer for layer, finite in self._finite if not bool(finite)), default=None),
            "rows_sum_to_one": defect <= self._rounding,
        }
