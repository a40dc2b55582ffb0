"""Attention of one call of the model, reduced to numbers: its pattern, and what each head adds.

`recorder.py` makes an `AttentionReadings` for each call and hands it what the observers of `attention/`
report, with the layer that runs. `read` decides whether that is the attention of the block's tokens to
themselves and reads its metrics; `read_heads` those of what each head adds, which the observer knows, or
which `attention/head_outputs.py` finds. When the call ends, the recorder calls `check`.
"""

import torch
from torch import Tensor

from rankscope.errors import WatchError
from rankscope.live.attention import AttentionCall
from rankscope.live.attention.head_outputs import OutputProjectionFinder
from rankscope.live.isolation import isolated, to_float64_device
from rankscope.live.plan import WatchPlan
from rankscope.live.state_readings import TOGETHER, TokenBatch
from rankscope.metrics.tokens import unit_of
from rankscope.profiles.readings import Readings, read_tensor, row_sum_defect

UNSEEN = "for a kernel of your own give an observer, attention=[Mine(), *OBSERVERS], or watch metrics of tokens"


class AttentionReadings:
    """Reads the metrics of attention and of heads in one call into `readings`. `projections` finds what takes the
    heads' outputs, where the observer does not know it; `mask` is the argument of the model that said the padding."""

    def __init__(
        self,
        plan: WatchPlan,
        batch: TokenBatch,
        readings: list[tuple[int, Readings]],
        projections: OutputProjectionFinder,
        mask: str | None,
    ) -> None:
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
        self._unit = batch.unit

    def read(self, layer: int, attention: AttentionCall) -> None:
        """Measure attention in this layer, if it is that of the block's tokens to themselves."""
        batch, token = self.batch.shape
        if attention.unused:
            if attention.sizes == (batch, token, token) and layer in self.layers:
                came = f"block {layer} has a second softmax of their scores: watch metrics of tokens"
                raise WatchError(f"a block must have one attention of its own tokens; {came}", subject="blocks")
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

    def read_heads(self, layer: int, contributions: Tensor) -> None:
        """Measure what each head of a layer adds, `[batch, head, token, width]` in float64."""
        valid = self.batch.valid_for(contributions)
        measured, _ = read_tensor("heads", contributions, valid, self.plan.metrics, self._unit)
        self.readings.append((layer, measured))

    def check_padding(self, mask: Tensor | None, name: str) -> None:
        """Refuse padding that attention in a block was called with and the model's arguments did not say."""
        if mask is None or self.mask is not None or self.plan.decoder or not self.plan.padding_from_model:
            return
        hidden = mask < 0 if mask.is_floating_point() else mask.bool()
        if hidden.shape == self.batch.shape and bool(hidden.any()):
            came = f"attention in a block took {name} that none holds: give padding= or attention_mask="
            raise WatchError(f"padding must be found in the model's arguments; {came}", subject="padding")

    def check(self) -> None:
        """Refuse a call in which metrics of attention were asked for and no self-attention was seen."""
        if self.layers or not (self.plan.wants("attention") or self.plan.wants("heads")):
            return
        came = self.left_out or [f"attention of shape {shape}" for shape in self.other_shapes] or ["none"]
        expected = f"attention of the blocks' {tuple(self.batch.shape)} tokens to themselves"
        raise WatchError(f"{expected} was asked for; {came[0]} came: {UNSEEN}", subject="attention")

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
            came = f"a second came in block {layer}: name finer blocks with blocks=, or watch metrics of tokens"
            raise WatchError(f"a block must have one attention of its tokens to themselves; {came}", subject="blocks")
        else:
            return True
        return False

    def _read(self, layer: int, attention: AttentionCall) -> None:
        """Measure a pattern, unless its shape shows that it is not of the block's tokens."""
        pattern = attention.pattern().detach()
        batch, token = self.batch.shape
        if pattern.ndim != 4 or (pattern.shape[0], *pattern.shape[2:]) != (batch, token, token):
            self.other_shapes.append(tuple(pattern.shape))
            return
        self.layers.add(layer)
        if not self.plan.measures(layer):
            return
        self._read_pattern(layer, pattern)
        if not self.plan.wants("heads"):
            return
        if attention.contributions is not None:
            with isolated(pattern.device):
                self.read_heads(layer, attention.contributions().detach().to(torch.float64))
        elif attention.head_outputs is not None:
            self.projections.head_outputs = attention.head_outputs()
        else:
            came = "the observer of this attention gives the pattern alone: watch metrics of tokens or attention"
            raise WatchError(f"what each head adds needs the heads' outputs; {came}", subject="heads")

    def _read_pattern(self, layer: int, pattern: Tensor) -> None:
        """Read the metrics of a pattern, note how far its rows are from sum one, and keep it if asked."""
        with isolated(pattern.device):
            valid, wide = self.batch.valid_for(pattern), to_float64_device(pattern)
            self.defects.append(row_sum_defect(wide, valid))
            if pattern.dtype == torch.float64 and _is_float32(pattern):
                self.float32_inside = True
                self._unit = max(self._unit, unit_of(torch.float32))
            if any(metric.of == "attention" for metric in self.plan.metrics):
                measured, _ = read_tensor("attention", wide, valid, self.plan.metrics, self._unit)
                self.readings.append((layer, measured))
        if "attention" in self.plan.keep:
            self.kept.append((layer, pattern.to("cpu", copy=True)))


def _is_float32(pattern: Tensor) -> bool:
    """True if every entry of a float64 pattern is a float32: many models take softmax in float32."""
    several = max(1, TOGETHER // max(1, pattern[0, 0].numel() if pattern.numel() else 1))
    return all(bool((part.float() == part).all()) for part in torch.split(pattern.flatten(0, 1), several))
