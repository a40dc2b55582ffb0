"""Readers: what is taken from each layer while a network is run once.

`propagation.py` shows every `LayerStep` to every reader, and the caller asks each for its result. A reader says what it
needs and what that costs, takes it from one layer at a time, and has a result at the end. `measure` runs the reader of
metrics and the reader of checks, and takes others along; one of your own is any object with the four names of `Reader`.
One that needs attention and can do with numbers of its rows says of which metrics in `by_row`; else P is held whole.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from rankscope.metrics import ROUNDING, Metric, Of
from rankscope.profiles.readings import ReadingRow
from rankscope.profiles.steps import LayerStep


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
