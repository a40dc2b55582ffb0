"""Readers: what is taken from each layer while a network is propagated once.

A reader says what it needs and what that costs, takes it from one layer at a time, and has a result at the
end. `measure` is the reader of metrics and the reader of checks, and takes others along; one of your own is
any object with the four names of `Reader`. One that needs attention and can do with numbers of its rows
says of which metrics in `by_row`; else P is held whole.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rankscope.metrics import Metric
from rankscope.metrics.metric import ROUNDING, Of
from rankscope.profiles.rows import Entry
from rankscope.profiles.shapes import Shape, explored
from rankscope.profiles.steps import LayerStep


@runtime_checkable
class Reader(Protocol):
    """Takes what it needs from each layer of a pass."""

    @property
    def needs(self) -> frozenset[Of]:
        """tokens, attention, heads, routing: what no reader of a pass needs is not there for any."""

    @property
    def cost(self) -> str:
        """What it adds to the pass, in words: time at each layer, and what it keeps."""

    def read(self, step: LayerStep) -> None:
        """Look at one layer of one batch: layers in order, batch after batch; of a network whose layers are
        read from files, several batches at a layer before any at the next."""

    def result(self) -> Any:
        """What was found, when the pass has ended."""


class MetricReader:
    """Metrics of every layer, as entries of a table."""

    def __init__(self, chosen: Sequence[Metric]) -> None:
        self.metrics = chosen
        self.needs: frozenset[Of] = frozenset(each.of for each in chosen)
        asked = [each for each in chosen if each.of == "attention"]
        self.by_row = asked if all(each.streams for each in asked) else None
        """Metrics that can be read off rows of attention; None where one cannot."""
        self.cost = f"{len(chosen)} metrics at each layer; keeps three numbers a sample of each"
        self._found: list[Entry] = []

    def read(self, step: LayerStep) -> None:
        """Read each metric that the layer has."""
        self._found += [Entry(step.layer, step.start, *pair) for pair in step.readings(self.metrics)]

    def result(self) -> list[Entry]:
        """In the order of batches, layers, and metrics as asked."""
        return sorted(self._found, key=lambda each: (each.start, each.layer))


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
            self._padded += int((~step.real).sum())
            rounding = ROUNDING * step.unit
            self._rounding = max(
                rounding, min(1e-9, rounding * step.real.shape[1])
            )  # a row is a sum of so many
        defect = step.row_sum_defect
        if defect is not None:
            self._defects.append(defect)
        self._finite.append((step.layer, step.finite))

    def result(self) -> dict[str, Any]:
        """For the manifest."""
        # Where attention is fused nobody sees its rows, which a softmax makes to sum to one.
        defect = max((float(each) for each in self._defects), default=0.0)
        return {
            "padded_tokens": self._padded,
            "largest_row_sum_defect": defect,
            "first_layer_not_finite": min(
                (layer for layer, finite in self._finite if not bool(finite)), default=None
            ),
            "rows_sum_to_one": defect <= self._rounding,
        }


class ShapeReader:
    """The residual of the first samples as a shape and a scale, at `looked_at` layers: for the cloud."""

    needs: frozenset[Of] = frozenset(("tokens",))
    cost = "a norm at each layer; keeps the first samples' tokens of up to 33 layers"

    def __init__(self, samples: int = 1) -> None:
        self.samples = samples
        self._found: list[Shape] = []

    def read(self, step: LayerStep) -> None:
        """Keep the residual, on the CPU."""
        number = self.samples - step.start
        if number > 0 and step.layer in explored(step.net.arch.layers):
            layer, R, log10 = step.residual
            self._found.append(Shape(layer, R[:number].cpu().nan_to_num(0.0), log10[:number]))

    def result(self) -> list[Shape]:
        """By layer, all samples of a layer together."""
        layers = dict.fromkeys(each.layer for each in self._found)
        parts = [[each for each in self._found if each.layer == layer] for layer in layers]
        return [
            Shape(part[0].layer, torch.cat([e.R for e in part]), torch.cat([e.log10 for e in part]))
            for part in parts
        ]
