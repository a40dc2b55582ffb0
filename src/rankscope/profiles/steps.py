"""One layer of a pass as readers see it, in floating point or in deviation arithmetic.

What several readers need is computed once, what none asks for never.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation import DeviationStep
from rankscope.deviation.attention import DeviationPattern
from rankscope.deviation.by_rows import PatternByRows
from rankscope.deviation.confirm import Confirmation
from rankscope.deviation.readings import read
from rankscope.metrics import Metric
from rankscope.metrics.tokens import Tokens, tokens_of, unit_of
from rankscope.nets import Step, Transformer
from rankscope.nets.plain import contributions
from rankscope.nets.streaming import Numbers
from rankscope.profiles.agreement import Second, checked, confirmed
from rankscope.profiles.rows import Found, read_tokens, readings, row_sum_defect, with_holes
from rankscope.profiles.shapes import Shape, shape_of
from rankscope.shapes import Bool, Float

DEFECT = "row_sum_defect"


@dataclass(frozen=True, eq=False)
class LayerStep:
    """What a batch of samples gives at one layer; layer 0 is the input, without attention and heads."""

    net: Transformer
    """As it runs: in its arithmetic, on its device."""
    start: int
    """The number of the batch's first sample."""
    real: Bool[Tensor, "batch token"]
    """Which tokens count."""
    step: Step | DeviationStep
    seen: Second | None = None
    """The same layer of a second pass, rounded otherwise; None where there is none."""
    rows: Numbers | None = None
    """Numbers of attention, where P itself is too large to be held."""
    confirmation: Confirmation | None = None
    """The same layer in float64 beside doubled precision, where that was asked for."""
    among: Callable[[int, Sequence[Metric]], Found] | None = None
    """Readings of a layer of this batch, by its number, where all layers are read together."""

    @property
    def layer(self) -> int:
        """Its number."""
        return self.step.layer

    @property
    def unit(self) -> float:
        """The eps of the arithmetic."""
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
        return P if P is None or isinstance(P, Tensor) else P.matrix()

    def readings(self, chosen: Sequence[Metric]) -> Found:
        """Those metrics that this layer has, in the order asked."""
        if self.among is not None:
            return self.among(self.layer, chosen)
        if isinstance(self.step, DeviationStep):
            found = _read(chosen, self.step)
            if self.confirmation is not None:
                chosen = [each for each, _ in found]
                return confirmed(found, _read(chosen, self.confirmation.single), self.confirmation)
            return found if self.seen is None else self._witnessed(found, self.step, self.seen)
        there = read_tokens(*self._ready, chosen, self.unit)
        if self.attention is not None:
            there += readings("attention", self.attention, self.real, chosen, self.unit)[0]
        if self.rows is not None:
            there += self._of_rows(chosen, self.rows)
        if self.step.heads is not None:
            added = contributions(self.net.weights.layers[self.layer - 1], self.step.heads)
            there += readings("heads", added, self.real, chosen, self.unit)[0]
        if self.step.routing is not None:
            there += readings("routing", self.step.routing, self.real, chosen, self.unit)[0]
        order = [each.name for each in chosen]
        return sorted(there, key=lambda pair: order.index(pair[0].name))

    def _of_rows(self, chosen: Sequence[Metric], rows: Numbers) -> Found:
        """Metrics of attention off what was found of its rows."""
        every = [
            (each, each.from_rows(rows.of_rows[each.name], self.real, self.unit))
            for each in chosen
            if each.name in rows.of_rows
        ]
        every += [
            (each, each.from_heads(rows.of_heads[each.name], self.unit))
            for each in chosen
            if each.name in rows.of_heads
        ]
        sums = rows.of_rows.get(DEFECT)
        if not every or sums is None:
            return every
        return with_holes(every, (sums.isnan() & self.real[:, None]).any(-1).any(-1))

    def _witnessed(self, found: Found, step: DeviationStep, seen: Second) -> Found:
        chosen = [each for each, _ in found]
        plain = None
        if seen.plain is not None:  # as much of it as there is of the first pass
            attention = None if step.attention is None else seen.plain.attention
            heads = None if step.heads is None else seen.plain.heads
            routing = None if step.routing is None else seen.plain.routing
            there = seen.plain._replace(attention=attention, heads=heads, routing=routing)
            rows = None if step.rows is None else seen.restored_numbers
            plain = replace(self, step=there, seen=None, rows=rows).readings(chosen)
        return checked(found, plain, step, seen)

    @property
    def finite(self) -> Bool[Tensor, ""]:
        """Whether no number of any token overflows."""
        if isinstance(self.step, DeviationStep):
            state = self.step.state
            return state.x.value.isfinite().all() & state.R.value.isfinite().all()
        return ~self._ready[1].any()

    @property
    def row_sum_defect(self) -> Float[Tensor, ""] | None:
        """The largest |row sum of P - 1|. In deviation arithmetic rows differ by what sums to zero: all have
        the sum of the one that they share."""
        P: Any = self.step.attention
        if isinstance(self.step, DeviationStep):
            P = P or self.step.rows
        if self.rows is not None:
            each = self.rows.of_rows.get(DEFECT)
            return None if each is None else (each * self.real[:, None]).nan_to_num(0.0).max()
        if isinstance(P, DeviationPattern | PatternByRows):
            there = self.real.any(-1)[:, None]
            return ((P.p.sum(-1) - 1).abs() * there).nan_to_num(0.0).max() if P.p.numel() else P.p.sum()
        return None if self.attention is None else row_sum_defect(self.attention, self.real)

    @cached_property
    def residual(self) -> Shape:
        """The residual as a shape and a scale."""
        if isinstance(self.step, DeviationStep):
            state = self.step.state
            _, R = state.centred()
            whole = torch.linalg.vector_norm(state.scaled_tokens, dim=(1, 2)).log()
            return shape_of(self.layer, R.value, R.log, whole + state.log)
        kept = self.real[..., None]
        X = self.step.state.double() * kept
        mean = X.sum(1, keepdim=True) / self.real.sum(-1).clamp(min=1)[:, None, None]
        whole = torch.linalg.vector_norm(X, dim=(1, 2)).log()
        return shape_of(self.layer, (X - mean) * kept, torch.zeros_like(whole), whole)

    @cached_property
    def _ready(self) -> tuple[Tokens, Tensor]:
        """Ordinary tokens ready to be measured, and which samples are broken."""
        return tokens_of(self.tokens, self.real)


def _read(chosen: Sequence[Metric], step: DeviationStep) -> Found:
    """Those that the layer has."""
    every = [(each, read(each, step)) for each in chosen]
    return [(each, reading) for each, reading in every if reading is not None]
