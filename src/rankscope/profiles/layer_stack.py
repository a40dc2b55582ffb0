"""Reads all layers of a batch at once, where they were computed at once.

Called by `propagation.py` on a GPU, after a pass was replayed (`deviation/replay.py`) and has all its layers.
There the readings of a layer are hundreds of small kernels, which the host starts one by one: that takes
longer than the pass that is read. So layers of one form are stacked along the samples, read in one go
(`LayerStep.readings` of the stack), and their readings taken apart again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from rankscope.deviation import DeviationStep, State
from rankscope.deviation.replay import tensors_of
from rankscope.deviation.second_pass import SecondPassLayer
from rankscope.metrics import Metric, Reading
from rankscope.nets import Step
from rankscope.nets.devices import free_memory
from rankscope.nets.streaming import PatternNumbers
from rankscope.nets.weights import outline
from rankscope.profiles.readings import Readings, in_order
from rankscope.profiles.steps import LayerStep
from rankscope.shapes import Bool

SHARE = 1 / 32  # the part of the memory that is free, which layers side by side may take

Structure = TypeVar("Structure")
Bare = TypeVar("Bare", Step, DeviationStep)


class DifferentLayersError(Exception):
    """Layers that cannot be stacked, since they differ in form."""


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
            groups.setdefault(_form(_content(step, attention)), []).append(index)
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


@dataclass(frozen=True, eq=False)
class StackSecondPass:
    """The second pass of several layers, stacked, as `SecondPassLayer` is that of one."""

    steps: Sequence[DeviationStep]  # the layers of the first pass
    layers: Sequence[SecondPassLayer]
    attention: bool  # whether attention is asked for
    restored_numbers: PatternNumbers | None = None

    @cached_property
    def resolved(self) -> Bool[Tensor, " batch"]:
        """True where float64 resolves what the tokens differ by."""
        return torch.cat([layer.resolved for layer in self.layers])

    @cached_property
    def lost(self) -> Bool[Tensor, " batch"]:
        """True where nothing is known of the sample."""
        return torch.cat([layer.lost for layer in self.layers])

    @property
    def before(self) -> State:
        """Tokens before the first of the layers: they are asked for their shape."""
        return self.layers[0].before

    @cached_property
    def plain(self) -> Step | None:
        """The layers by plain rules of float64."""
        plain = [_bare(layer.plain, self.attention) for layer in self.layers if layer.plain is not None]
        return joined(plain) if plain else None

    def perturbed_for(self, where: Tensor) -> DeviationStep:
        """The layers by perturbed rules, right for those that hold a sample in `where`."""
        return self._made("perturbed", where)

    def perturbed_again_for(self, where: Tensor) -> DeviationStep:
        """The layers by perturbed rules once more, perturbed in another way."""
        return self._made("perturbed_again", where)

    def _made(self, name: str, where: Tensor) -> DeviationStep:
        """Nobody looks at the other layers: those of the first pass stand in for them."""
        wanted = where.reshape(len(self.layers), -1).any(1).tolist()
        steps: list[DeviationStep] = [
            getattr(layer, name) if want else step
            for want, layer, step in zip(wanted, self.layers, self.steps, strict=True)
        ]
        return joined([_bare(step, self.attention) for step in steps])


def _need_attention(metrics: Sequence[Metric]) -> bool:
    return any(metric.of == "attention" for metric in metrics)


def _content(step: LayerStep, attention: bool) -> tuple[DeviationStep, Step | None, bool]:
    """What is read of a layer, and whether it has no second pass."""
    assert isinstance(step.step, DeviationStep)
    plain = None if step.second is None else step.second.plain
    return _bare(step.step, attention), plain and _bare(plain, attention), step.second is None


def _bare(step: Bare, attention: bool) -> Bare:
    """A step without its index and what is read off each layer by itself."""
    kept = step.attention if attention else None
    return step._replace(layer=0, attention=kept, heads=None, routing=None, cross=None)


def _stacked(steps: Sequence[LayerStep], attention: bool) -> LayerStep:
    """Layers as samples of one."""
    first = [step.step for step in steps if isinstance(step.step, DeviationStep)]
    second = [step.second for step in steps if isinstance(step.second, SecondPassLayer)]
    return replace(
        steps[0],
        valid=torch.cat([step.valid for step in steps]),
        step=joined([_bare(step, attention) for step in first]),
        second=StackSecondPass(first, second, attention) if second else None,
    )


def _split(reading: Reading, count: int) -> list[Reading]:
    parts = (
        [None] * count if part is None else part.chunk(count)
        for part in (reading.value, reading.log10, reading.floor, reading.digits)
    )
    return [Reading(*of_layer) for of_layer in zip(*parts, strict=True)]


def joined(parts: Sequence[Structure]) -> Structure:
    """Structures of one form as one, their tensors one after the other along the samples."""
    if any(_form(part) != _form(parts[0]) for part in parts[1:]):
        raise DifferentLayersError
    return _joined(parts)


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, tuple):
        make = getattr(type(first), "_make", tuple)
        return make(_joined(entries) for entries in zip(*parts, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return type(first)(**{name: _joined([getattr(part, name) for part in parts]) for name in names})
    return first


def _form(structure: Any) -> Any:
    """The same for what can be joined; without an axis of samples there is nothing to join along."""
    return outline(structure, lambda t: (t.shape, t.dtype) if t.ndim else object())
