"""Attention of one call of the model, reduced to numbers: its pattern, and what each head adds.

`call_follower.py` makes an `AttentionReadings` for each call and hands it what the observers of `attention/`
report, with the layer that runs. `read` decides whether that is the attention of the block's tokens to
themselves and reads its metrics; `read_heads` those of what each head adds, which the observer knows, or
which `attention/head_outputs.py` finds. When the call ends, the follower calls `finish` and `check`.

What scores give is checked at a few rows. A GPU would wait for the answer. So of kernels of torch, in layers where
scores were right in an earlier call and are still made in the same way, it is asked for one layer in `IN_TURN` at each
call, all of these together in `finish`, which also computes the metrics of all layers from their rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError, require
from rankscope.live.attention import AttentionCall
from rankscope.live.attention.head_outputs import (
    Miss,
    OutputProjectionFinder,
    PartOfSum,
    check_sum,
    scores_miss,
    without_heads,
)  # fmt: skip
from rankscope.live.attention.row_statistics import row_statistics, sink_weights
from rankscope.live.attention.scores import AnyScores
from rankscope.live.hooks import isolated, to_float64_device
from rankscope.live.plan import WatchPlan
from rankscope.live.state_readings import TOGETHER, TokenBatch
from rankscope.metrics import Metric, Reading, RowStatistics, from_statistics, unit_of
from rankscope.profiles import Readings, nan_where_broken, read_tensor, row_sum_defect
from rankscope.shapes import Float

FLOAT64_MISS = 1e-11  # products of a model in float64 miss by less, unless it computes attention in float32
COARSEST = 1e-3  # the most that rounding of scores may be off: beyond, differences of them have few digits left
PADDED = 1e-5  # the largest share of a row that may go to padding
IN_TURN = 4  # after so many calls all layers were checked again
WAITING_ROWS = 1 << 22  # rows of attention whose numbers wait to be read together
UNSEEN = "for a kernel of your own give an observer, attention=[Mine(), *OBSERVERS], or watch metrics of tokens"
OF_HEADS = ("attention", "scores", "heads")  # metrics that have a value for each head


@dataclass
class OwnHeads:
    """What one of the processes that share a model has read of its heads in one call."""

    readings: dict[tuple[int, str], tuple[Tensor, ...]] = field(default_factory=dict)  # by layer and metric
    widths: dict[int, int] = field(default_factory=dict)  # of all its heads side by side, by layer
    parts: dict[int, PartOfSum] = field(default_factory=dict)  # of the output projection's sum, by layer
    defect: Tensor | None = None  # the largest |row sum - 1|
    float32_inside: bool = False


class WaitingRows(NamedTuple):
    """The numbers of a layer's rows of attention, from which metrics are not computed yet."""

    layer: int
    metrics: list[Metric]
    statistics: RowStatistics
    sinks: Tensor  # the weight that a sink takes in each row
    miss: Float[Tensor, "2"] | None  # what `scores_miss` gives, where it was not looked at yet
    dtype: torch.dtype  # that attention gave its output in


class AttentionReadings:
    """Reads the metrics of attention and of heads in one call into `readings`. `projections` finds what takes the
    heads' outputs, where the observer does not know it; `mask` is the argument of the model that said the padding."""

    def __init__(
        self, plan: WatchPlan, batch: TokenBatch, readings: list[tuple[int, Readings]],
        projections: OutputProjectionFinder | None, mask: str | None,
    ) -> None:  # fmt: skip
        self.plan, self.batch, self.readings = plan, batch, readings
        self.projections, self.mask = projections, mask
        self.layers: set[int] = set()  # layers whose self-attention was seen
        self.later = 0  # calls of attention after the first of a block: cross-attention, as a rule
        self.left_out: list[str] = []  # attention not of the block's tokens to themselves, in words
        self.other_shapes: list[tuple[int, ...]] = []  # shapes of patterns that are not of the block's tokens
        self.longer = False  # tokens attended to more than themselves, as a chunk after a cache does
        self.float32_inside = False  # whether a model in float64 computed its attention in float32
        self.defects: list[Tensor] = []  # the largest |row sum - 1| of each pattern
        self.kept: list[tuple[int, Tensor]] = []  # (layer, pattern on the CPU) where the plan keeps attention
        self.own = OwnHeads()  # what other processes must know of this one's heads, where several share the model
        self._unit = batch.unit
        self._waiting: list[WaitingRows] = []

    def read(self, layer: int, attention: AttentionCall) -> None:
        """Measure attention in this layer, if it is that of the block's tokens to themselves."""
        batch, token = self.batch.shape
        if attention.unused:
            if attention.sizes == (batch, token, token) and layer in self.layers:
                fault = f"block {layer} has a second softmax of their scores: watch metrics of tokens"
                raise WatchError(f"a block must have one attention of its own tokens; {fault}", subject="blocks")
            self.left_out.append("a softmax of scores whose pattern was not seen to multiply values")
        elif attention.self_attention is None and layer in self.layers:
            self.later += 1
        elif attention.self_attention is None:
            self._read(layer, attention)
        elif self._is_certain(layer, attention):
            if self.plan.measures(layer):
                self.check_padding(attention.hidden_tokens(), "a mask that hides tokens from all")
                self._read(layer, attention)
            else:
                self.layers.add(layer)

    def read_heads(self, layer: int, contributions: Tensor, part: PartOfSum | None = None) -> None:
        """Measure what each head of a layer adds, `[batch, head, token, width]` in float64. `part` is this process's
        part of their sum, where others have further heads."""
        if part is not None:
            self.own.parts[layer] = part
        valid = self.batch.valid_for(contributions)
        measured, _ = read_tensor("heads", contributions, valid, self.plan.metrics, self._unit)
        self.readings.append((layer, measured))

    def check_padding(self, unseen: Tensor | None, name: str) -> None:
        """Refuse padding, tokens `[batch, token]` that attention in a block may not attend to by a mask of this name,
        which the model's arguments did not say."""
        if unseen is None or self.mask is not None or self.plan.decoder or not self.plan.padding_from_model:
            return
        fault = f"attention in a block took {name} that none holds: give padding= or attention_mask="
        sentence = f"padding must be found in the model's arguments; {fault}"
        require(unseen.shape != self.batch.shape or not bool(unseen.any()), sentence, WatchError, "padding")

    def of_own_heads(self) -> OwnHeads:
        """What was read of the heads of this process, on the CPU."""
        for layer, rows in self.readings:
            for metric, reading in rows:
                if metric.of in OF_HEADS:
                    numbers = (reading.value, reading.log10, reading.floor)
                    self.own.readings[layer, metric.name] = tuple(x.cpu() for x in numbers)
        self.own.defect = max((x.cpu() for x in self.defects), default=None)
        self.own.float32_inside = self.float32_inside
        return self.own

    def join_heads(self, parts: Sequence[OwnHeads], blocks: Mapping[int, nn.Module]) -> None:
        """Take the heads of all processes that share the model for those of this one, where each has its own.

        Args:
            parts: What each process has read, in order.
            blocks: The block of each layer.

        Raises:
            WatchError: Processes have not read the same, or what their heads add is not what attention gave.
        """
        together = self.plan.tensor_parallel
        assert together is not None
        alike = all(part.readings.keys() == self.own.readings.keys() for part in parts)
        require(alike, "processes that share a model must read the same; they have not", WatchError, "ranks")
        split = {
            layer
            for layer in {layer for layer, _ in self.own.readings}
            if not together.has_all_heads(blocks[layer], [part.widths.get(layer, 0) for part in parts])
        }
        for layer, rows in self.readings:
            for k, (metric, reading) in enumerate(rows):
                if layer in split and metric.of in OF_HEADS:
                    columns = zip(*(part.readings[layer, metric.name] for part in parts), strict=True)
                    joined = (torch.cat(column, 1).to(reading.value.device) for column in columns)
                    rows[k] = (metric, Reading(*joined))
        for layer in split & self.own.parts.keys():
            total, output = (sum(getattr(part.parts[layer], name) for part in parts) for name in ("total", "output"))
            check_sum(total, output, self.own.parts[layer].dtype, self.own.parts[layer].where)
        self.defects = [part.defect for part in parts if part.defect is not None]
        self.float32_inside = any(part.float32_inside for part in parts)

    def check(self) -> None:
        """Refuse a call in which metrics of attention were asked for and no self-attention was seen."""
        if self.layers or not self.plan.wants_attention:
            return
        fault = self.left_out or [f"attention of shape {shape}" for shape in self.other_shapes] or ["none"]
        expected = f"attention of the blocks' {tuple(self.batch.shape)} tokens to themselves"
        raise WatchError(f"{expected} was asked for; {fault[0]} came: {UNSEEN}", subject="attention")

    def _is_certain(self, layer: int, attention: AttentionCall) -> bool:
        """True for self-attention of the block's tokens whose pattern can be read; others are noted."""
        batch, token = self.batch.shape
        sizes = attention.sizes
        if sizes is not None and sizes != (batch, token, token):
            self.longer |= sizes[:2] == (batch, token) and sizes[2] > token
            samples, queries, keys = sizes
            self.left_out.append(f"attention of {queries} tokens to {keys} in {samples} samples (windows, others)")
        elif not attention.self_attention:
            self.left_out.append(attention.remark or "attention to other tokens than the block's own")
        elif attention.altered_by is not None:
            between = f"in block {layer} {attention.altered_by} is between: watch metrics of tokens"
            raise WatchError(f"a pattern must come to the values as its softmax gave it; {between}", subject="pattern")
        elif layer in self.layers:
            fault = f"a second came in block {layer}: name finer blocks with blocks=, or watch metrics of tokens"
            raise WatchError(f"a block must have one attention of its tokens to themselves; {fault}", subject="blocks")
        else:
            return True
        return False

    def _read(self, layer: int, attention: AttentionCall) -> None:
        """Measure attention, unless its shape shows that it is not of the block's tokens: off its scores what can be
        read so, off its pattern the rest."""
        rest = [metric for metric in self.plan.metrics if metric.of == "attention"]
        from_scores = attention.scores is not None and any(metric.from_scores for metric in self.plan.metrics)
        scores = attention.scores() if attention.scores is not None and from_scores else None
        pattern = attention.pattern().detach() if scores is None else None
        shape = tuple(pattern.shape) if pattern is not None else scores.shape if scores is not None else ()
        batch, token = self.batch.shape
        if len(shape) != 4 or (shape[0], *shape[2:]) != (batch, token, token):
            self.other_shapes.append(shape)
            return
        self.layers.add(layer)
        if not self.plan.measures(layer):
            return
        if self.plan.tensor_parallel is not None and attention.head_outputs is not None:
            self.own.widths[layer] = math.prod(attention.head_outputs().shape[-2:])
        if scores is not None:
            done = self._read_scores(layer, attention, scores)
            rest = [metric for metric in rest if metric not in done]
            if rest or not done or "attention" in self.plan.keep:
                pattern = attention.pattern().detach()
        elif self.plan.wants("scores"):
            name = next(metric.name for metric in self.plan.metrics if metric.of == "scores")
            fault = f"nothing says how block {layer} makes them: watch metrics of attention or tokens"
            raise WatchError(f"{name} needs the scores of attention; {fault}", subject="scores")
        if pattern is not None:
            self._read_pattern(layer, pattern, rest)
        if not self.plan.wants("heads"):
            return
        left_out = self.plan.left_out.heads.get(layer, ())
        if attention.contributions is not None:
            with isolated(self.batch.device):
                contributions = attention.contributions().detach().to(torch.float64)
                self.read_heads(layer, without_heads(contributions, left_out, 1))
        elif attention.head_outputs is not None:
            assert self.projections is not None  # metrics of heads are asked for
            self.projections.head_outputs = without_heads(attention.head_outputs(), left_out, 2)
        else:
            fault = "the observer of this attention gives the pattern alone: watch metrics of tokens or attention"
            raise WatchError(f"what each head adds needs the heads' outputs; {fault}", subject="heads")

    def _read_scores(self, layer: int, attention: AttentionCall, scores: AnyScores) -> list[Metric]:
        """Read the metrics that need no pattern, and note how far rows are from sum one. Returns what was read: not the
        metrics of attention where scores do not give what attention gave, are too large for differences of them, or are
        of padding too."""
        chosen = [metric for metric in self.plan.metrics if metric.from_scores is not None]
        kind, calls = self.plan.known_scores.get(layer, (None, 0))
        known = attention.by_kernel and kind == scores.kind and self.batch.all_valid
        known = known and self.batch.unit > unit_of(torch.float64)  # else float32 inside must be found out first
        calls = calls + 1 if known else 0
        with isolated(scores.device):
            valid, dtype = self.batch.valid_on(scores.device), torch.float64
            miss: Tensor | None = None
            if attention.products is not None and (not known or (calls + layer) % IN_TURN == 0):
                miss, dtype = scores_miss(scores, attention.products, None if self.batch.all_valid else valid)
            if miss is not None and not known:
                share, largest = miss.tolist()
                if not self._are_right(Miss(share, largest, dtype)):  # the pattern may be read, and nothing of scores
                    for metric in (metric for metric in chosen if metric.of == "scores"):
                        fault = f"in block {layer} it misses by {share:.1e} of its size"
                        expected = f"{metric.name} needs scores whose softmax, times the values, is what attention gave"
                        raise WatchError(f"{expected}; {fault}: watch metrics of attention or tokens", subject="scores")
                    return []
            if attention.products is not None:
                self.plan.known_scores[layer] = (scores.kind, calls)
            packed = scores.sequence is not None  # then scores know the first key of each query's own
            numbers = row_statistics(scores, None if packed else valid.to(torch.int8).argmax(-1, keepdim=True))
            statistics, sinks = numbers, sink_weights(scores, numbers)
            if not known:
                statistics, coarse = self._without_padding(scores, numbers, valid)
                if coarse:
                    chosen = [metric for metric in chosen if metric.of == "scores"]
            self._waiting.append(WaitingRows(layer, chosen, statistics, sinks, miss if known else None, dtype))
            if sum(rows.statistics.largest.numel() for rows in self._waiting) >= WAITING_ROWS:
                self.finish()
        return chosen

    def _are_right(self, miss: Miss) -> bool:
        """True if scores give what attention gave; also notes whether a model in float64 attends in float32."""
        in_float64 = self.batch.unit == unit_of(torch.float64)
        if in_float64 and miss.share > max(FLOAT64_MISS, miss.by_scores(torch.float64)):
            self.float32_inside = True
            self._unit = max(self._unit, unit_of(torch.float32))
        return miss.is_rounding

    def _without_padding(self, scores: AnyScores, numbers: RowStatistics, valid: Tensor) -> tuple[RowStatistics, bool]:
        """The numbers of rows with the largest score of keys that are tokens; and whether differences of scores have
        too few digits, or padding too much weight, for metrics of attention."""
        counts = valid[:, None] & ~numbers.blind
        coarse = unit_of(numbers.largest.dtype) * numbers.largest.abs() > COARSEST
        if not self.batch.all_valid and not bool(valid.all()):  # what of a row goes to padding
            of_tokens = row_statistics(scores.of_keys(valid))
            kept = (of_tokens.log_sum - numbers.log_sum).exp()
            numbers = replace(numbers, largest=of_tokens.largest)
            coarse |= ~(kept >= 1 - PADDED)  # NaN where all of it does
        return numbers, bool((coarse & counts).any())

    def finish(self) -> None:
        """Compute the metrics of rows that wait, those of all layers alike together.

        Raises:
            WatchError: In a layer where scores were right before, they no longer give what attention gave.
        """
        waiting, self._waiting = self._waiting, []
        unchecked = [rows for rows in waiting if rows.miss is not None]
        misses = torch.stack([rows.miss for rows in unchecked if rows.miss is not None]).tolist() if unchecked else []
        for rows, (share, largest) in zip(unchecked, misses, strict=True):
            if not self._are_right(Miss(share, largest, rows.dtype)):
                self.plan.known_scores.clear()
                fault = f"in block {rows.layer} it now misses by {share:.1e} of its size: measure again"
                sentence = "scores that gave what attention gave must still do so"
                raise WatchError(f"{sentence}; {fault}", subject="scores")
            if unit_of(rows.statistics.largest.dtype) * largest > COARSEST:  # the pattern itself is read the next time
                self.plan.known_scores.pop(rows.layer, None)
        alike: dict[Any, list[WaitingRows]] = {}
        for rows in waiting:
            largest = rows.statistics.largest
            names = tuple(metric.name for metric in rows.metrics)
            alike.setdefault((names, largest.shape, largest.dtype, largest.device), []).append(rows)
        for several in alike.values():
            self._read_rows(several)

    def _read_rows(self, several: Sequence[WaitingRows]) -> None:
        """Compute metrics from the rows of layers whose numbers have one shape, as if they were one batch."""
        first, batch = several[0], len(several[0].statistics.largest)
        with isolated(first.statistics.largest.device):
            columns = zip(*((*vars(rows.statistics).values(), rows.sinks) for rows in several), strict=True)
            *numbers, sinks = (to_float64_device(torch.cat(column)) for column in columns)
            statistics = RowStatistics(*numbers)
            valid = self.batch.valid_for(statistics.largest).repeat(len(several), 1)
            broken = ~(statistics.log_sum.isfinite() | ~(valid[:, None] & ~statistics.blind)).flatten(1).all(1)
            taken = sinks.masked_fill(statistics.blind, 1.0).masked_fill(~valid[:, None], 0.0)
            self.defects.append(taken.nan_to_num(0.0).max().to(torch.float64))
            readings = from_statistics(first.metrics, statistics, valid, self._unit)
            measured = nan_where_broken(readings, broken)
        for k, rows in enumerate(several):
            samples = slice(k * batch, (k + 1) * batch)
            self.readings.append((rows.layer, [(metric, reading.of_samples(samples)) for metric, reading in measured]))

    def _read_pattern(self, layer: int, pattern: Tensor, metrics: list[Metric]) -> None:
        """Read these metrics of a pattern, note how far its rows are from sum one, and keep it if asked."""
        with isolated(pattern.device):
            valid, wide = self.batch.valid_for(pattern), to_float64_device(pattern)
            self.defects.append(row_sum_defect(wide, valid))
            if pattern.dtype == torch.float64 and _is_float32(pattern):
                self.float32_inside = True
                self._unit = max(self._unit, unit_of(torch.float32))
            if metrics:
                measured, _ = read_tensor("attention", wide, valid, metrics, self._unit)
                self.readings.append((layer, measured))
        if "attention" in self.plan.keep:
            self.kept.append((layer, pattern.to("cpu", copy=True)))


def _is_float32(pattern: Tensor) -> bool:
    """True if every entry of a float64 pattern is a float32: many models take softmax in float32."""
    several = max(1, TOGETHER // max(1, pattern[0, 0].numel() if pattern.numel() else 1))
    return all(bool((part.float() == part).all()) for part in torch.split(pattern.flatten(0, 1), several))
