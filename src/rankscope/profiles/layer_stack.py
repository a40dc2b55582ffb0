"""Reads all layers of a batch at once, where they were computed at once.

Called by `propagation.py` on a GPU, after a pass was replayed (`deviation/replay.py`) and has all its layers.
There the readings of a layer are hundreds of small kernels, which the host starts one by one: that takes
longer than the pass that is read. So layers of one form are stacked along the samples, read in one go
(`LayerStep.readings` of the stack), and their readings taken apart again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rankscope.deviation import DeviationStep
from rankscope.deviation.replay import tensors_of
from rankscope.deviation.second_pass import DifferentLayersError, SecondPassLayer, StackSecondPass, bare, form, joined
from rankscope.metrics import Metric, Reading
from rankscope.nets import Step
from rankscope.nets.devices import free_memory
from rankscope.profiles.readings import Readings, in_order
from rankscope.profiles.steps import LayerStep

SHARE = 1 / 32  # the part of the memory that is free, which layers side by side may take


class LayerStack:
    """All layers of a batch, stacked along the samples where they are alike."""

    def __init__(self, steps: Sequence[LayerStep]) -> None:
        self.steps = [replace(step, stacked=None) for step in steps]
        self._readings: dict[tuple[int, ...], tuple[Sequence[Metric], list[Readings]]] = {}

    def readings(self, layer: int, metrics: Sequence[Metric]) -> Readings:
        """Readings of those metrics that a layer has, in the order asked."""
        key = tuple(map(id, metrics))
        if key not in self._readings:
            self._readings[key] = (metrics, self._read(metrics))
        return self._readings[key][1][layer]

    def _read(self, metrics: Sequence[Metric]) -> list[Readings]:
        shared = [metric for metric in metrics if metric.of in ("tokens", "attention")]
        # What heads add depends on a layer's weights.
        single = [metric for metric in metrics if metric.of not in ("tokens", "attention")]
        readings: list[Readings] = [step.readings(single) if single else [] for step in self.steps]
        for group in self._groups(_need_attention(shared)):
            for index, of_layer in zip(group, self._read_group(group, shared), strict=True):
                readings[index] += of_layer
        return [in_order(of_layer, metrics) for of_layer in readings]

    def _groups(self, attention: bool) -> Iterator[list[int]]:
        """Indices of layers of one form, as many at a time as there is room for."""
        groups: dict[Any, list[int]] = {}
        for index, step in enumerate(self.steps):
            groups.setdefault(form(_content(step, attention)), []).append(index)
        free = free_memory(self.steps[0].valid.device)
        for group in groups.values():
            size = sum(t.nbytes for t in tensors_of(_content(self.steps[group[0]], attention)))
            most = len(group) if free is None else max(1, int(free * SHARE) // max(1, size))
            yield from (group[start : start + most] for start in range(0, len(group), most))

    def _read_group(self, group: Sequence[int], metrics: Sequence[Metric]) -> list[Readings]:
        steps = [self.steps[index] for index in group]
        try:
            stack = _stacked(steps, _need_attention(metrics)) if len(steps) > 1 else None
            readings = [] if stack is None else stack.readings(metrics)
        except DifferentLayersError:
            stack = None
        if stack is None:
            return [step.readings(metrics) for step in steps]
        parts = [_split(reading, len(steps)) for _, reading in readings]
        read = [metric for metric, _ in readings]
        return [list(zip(read, of_layer, strict=True)) for of_layer in zip(*parts, strict=True)] or [[] for _ in steps]


def _need_attention(metrics: Sequence[Metric]) -> bool:
    return any(metric.of == "attention" for metric in metrics)


def _content(step: LayerStep, attention: bool) -> tuple[DeviationStep, Step | None, bool]:
    """What is read of a layer, and whether it has no second pass."""
    assert isinstance(step.step, DeviationStep)
    plain = None if step.second is None else step.second.plain
    return bare(step.step, attention), plain and bare(plain, attention), step.second is None


def _stacked(steps: Sequence[LayerStep], attention: bool) -> LayerStep:
    """Layers as samples of one."""
    first = [step.step for step in steps if isinstance(step.step, DeviationStep)]
    second = [step.second for step in steps if isinstance(step.second, SecondPassLayer)]
    return replace(
        steps[0],
        valid=torch.cat([step.valid for step in steps]),
        step=joined([bare(step, attention) for step in first]),
        second=StackSecondPass(first, second, attention) if second else None,
    )


def _split(reading: Reading, count: int) -> list[Reading]:
    parts = (
        [None] * count if part is None else part.chunk(count)
        for part in (reading.value, reading.log10, reading.floor, reading.digits)
    )
    return [Reading(*of_layer) for of_layer in zip(*parts, strict=True)]
