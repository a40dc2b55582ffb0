"""Layers that were made at once are read at once.

On a GPU the readings of a layer are hundreds of small kernels, which the host starts one by one: that takes
longer than the pass that is read. A pass that was replayed (`deviation/replay.py`) has all its layers:
those that are alike are laid side by side, as if they were more samples, read in one go, and taken apart.
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
from rankscope.profiles.rows import Found
from rankscope.profiles.steps import LayerStep
from rankscope.shapes import Bool

SHARE = 1 / 32
"""The part of the memory that is free, which layers side by side may take."""

Structure = TypeVar("Structure")
Bare = TypeVar("Bare", Step, DeviationStep)


class UnlikeError(Exception):
    """Layers that cannot be laid side by side."""


class Together:
    """All layers of a batch."""

    def __init__(self, steps: Sequence[LayerStep]) -> None:
        self.steps = [replace(step, among=None) for step in steps]
        self._found: dict[tuple[int, ...], tuple[Sequence[Metric], list[Found]]] = {}

    def readings(self, layer: int, chosen: Sequence[Metric]) -> Found:
        """Those metrics that this layer has, in the order asked."""
        key = tuple(map(id, chosen))
        if key not in self._found:
            self._found[key] = (chosen, self._read(chosen))
        return self._found[key][1][layer]

    def _read(self, chosen: Sequence[Metric]) -> list[Found]:
        shared = [each for each in chosen if each.of in ("tokens", "attention")]
        # What heads add hangs on a layer's weights.
        alone = [each for each in chosen if each.of not in ("tokens", "attention")]
        found: list[Found] = [step.readings(alone) if alone else [] for step in self.steps]
        for group in self._alike(any(each.of == "attention" for each in shared)):
            for number, readings in zip(group, self._side_by_side(group, shared), strict=True):
                found[number] += readings
        order = [each.name for each in chosen]
        return [sorted(some, key=lambda pair: order.index(pair[0].name)) for some in found]

    def _alike(self, attention: bool) -> Iterator[list[int]]:
        """Numbers of layers that are alike, as many at a time as there is room for."""
        groups: dict[Any, list[int]] = {}
        for number, step in enumerate(self.steps):
            inside = _inside(step, attention)
            groups.setdefault(_form(inside), []).append(number)
        free = free_memory(self.steps[0].real.device)
        for group in groups.values():
            size = sum(t.nbytes for t in tensors_of(_inside(self.steps[group[0]], attention)))
            most = len(group) if free is None else max(1, int(free * SHARE) // max(1, size))
            yield from (group[start : start + most] for start in range(0, len(group), most))

    def _side_by_side(self, group: Sequence[int], chosen: Sequence[Metric]) -> list[Found]:
        steps = [self.steps[number] for number in group]
        try:
            whole = _laid(steps, any(each.of == "attention" for each in chosen)) if len(steps) > 1 else None
            found = [] if whole is None else whole.readings(chosen)
        except UnlikeError:
            whole = None
        if whole is None:
            return [step.readings(chosen) for step in steps]
        apart = [_apart(reading, len(steps)) for _, reading in found]
        metrics = [each for each, _ in found]
        return [list(zip(metrics, parts, strict=True)) for parts in zip(*apart, strict=True)] or [
            [] for _ in steps
        ]


@dataclass(frozen=True, eq=False)
class Several:
    """What a witness saw of several layers, side by side, as `SecondPassLayer` has it of one."""

    steps: Sequence[DeviationStep]
    """Of the first pass."""
    each: Sequence[SecondPassLayer]
    attention: bool
    """Whether it is asked for."""
    restored_numbers: PatternNumbers | None = None

    @cached_property
    def resolved(self) -> Bool[Tensor, " batch"]:
        """Whether float64 can see what the tokens differ by."""
        return torch.cat([seen.resolved for seen in self.each])

    @cached_property
    def lost(self) -> Bool[Tensor, " batch"]:
        """Whether nothing is known of the sample."""
        return torch.cat([seen.lost for seen in self.each])

    @property
    def before(self) -> State:
        """Of one layer: for its shape."""
        return self.each[0].before

    @cached_property
    def plain(self) -> Step | None:
        """By plain rules."""
        found = [_bare(seen.plain, self.attention) for seen in self.each if seen.plain is not None]
        return joined(found) if found else None

    def perturbed_for(self, where: Tensor) -> DeviationStep:
        """By shaken rules of deviation arithmetic, of layers that hold a sample for which that is asked."""
        return self._made("perturbed", where)

    def perturbed_again_for(self, where: Tensor) -> DeviationStep:
        """The same, shaken otherwise."""
        return self._made("perturbed_again", where)

    def _made(self, name: str, where: Tensor) -> DeviationStep:
        """Nobody looks at the other layers: what the first pass has stands in for them."""
        asked = where.reshape(len(self.each), -1).any(1).tolist()
        found: list[DeviationStep] = [
            getattr(seen, name) if here else step
            for here, seen, step in zip(asked, self.each, self.steps, strict=True)
        ]
        return joined([_bare(one, self.attention) for one in found])


def _inside(step: LayerStep, attention: bool) -> tuple[DeviationStep, Step | None, bool]:
    """What is read of a layer, and whether a witness saw it."""
    assert isinstance(step.step, DeviationStep)
    plain = None if step.seen is None else step.seen.plain
    return _bare(step.step, attention), plain and _bare(plain, attention), step.seen is None


def _bare(step: Bare, attention: bool) -> Bare:
    """Without its number and what is read off each layer by itself."""
    kept = step.attention if attention else None
    return step._replace(layer=0, attention=kept, heads=None, routing=None, cross=None)


def _laid(steps: Sequence[LayerStep], attention: bool) -> LayerStep:
    """Layers as samples of one."""
    first = [step.step for step in steps if isinstance(step.step, DeviationStep)]
    seen = [step.seen for step in steps if isinstance(step.seen, SecondPassLayer)]
    return replace(
        steps[0],
        real=torch.cat([step.real for step in steps]),
        step=joined([_bare(step, attention) for step in first]),
        seen=Several(first, seen, attention) if seen else None,
    )


def _apart(reading: Reading, number: int) -> list[Reading]:
    parts = (
        [None] * number if part is None else part.chunk(number)
        for part in (reading.value, reading.log10, reading.floor, reading.digits)
    )
    return [Reading(*each) for each in zip(*parts, strict=True)]


def joined(parts: Sequence[Structure]) -> Structure:
    """Structures of one form as one, their tensors one after the other along the samples."""
    if any(_form(each) != _form(parts[0]) for each in parts[1:]):
        raise UnlikeError
    return _joined(parts)


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, tuple):
        make = getattr(type(first), "_make", tuple)
        return make(_joined(each) for each in zip(*parts, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return type(first)(**{name: _joined([getattr(each, name) for each in parts]) for name in names})
    return first


def _form(structure: Any) -> Any:
    """The same for what can be joined; without an axis of samples there is nothing to join along."""
    return outline(structure, lambda t: (t.shape, t.dtype) if t.ndim else object())
