"""What `measure` reads of a batch on a GPU: passes and readings captured as one graph, and replayed.

Called by `propagation.py`. The layers of both passes and what is read of them are small kernels by the thousand, and
the readings are a few numbers of each layer. So the graph (`deviation/replay.py`) holds all of it, and its numbers
leave the GPU together; what other readers look at is copied only where there are such readers.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.deviation import DeviationStep
from rankscope.deviation.propagate import PassInputs, restored, run_block
from rankscope.deviation.replay import can_replay, replay_cache, weights_key
from rankscope.deviation.second_pass import FloatSecondPass, with_second_pass
from rankscope.deviation.state import State
from rankscope.metrics import Metric, Reading
from rankscope.nets import Step, Transformer
from rankscope.nets.padding import TokenOrder
from rankscope.nets.pass_settings import PassSettings
from rankscope.profiles.readings import Readings
from rankscope.profiles.steps import LayerNumbers, LayerStep

ALIVE = 20  # layers of one pass in whose memory both passes and all readings of a layer are computed


class CapturedInputs(NamedTuple):
    """The tensors that the passes of a batch start from."""

    state: State
    settings: PassSettings
    order: TokenOrder | None
    valid: Tensor  # which positions are tokens, in their original order


class LayerForm(NamedTuple):
    """Of which metrics a layer has readings, by their place among those asked for, and how many numbers each has."""

    metrics: tuple[tuple[int, tuple[int, ...], bool], ...]  # (place, shape, whether digits are known)
    has_defect: bool


class CapturedPasses(NamedTuple):
    """What a graph gives."""

    numbers: Tensor  # of all readings of all layers, one after the other
    forms: tuple[LayerForm, ...]  # how the numbers are arranged
    steps: tuple[Step | DeviationStep, ...]  # the layers themselves, if anybody looks at them


def captured_steps(
    inputs: PassInputs, valid: Tensor, start: int, metrics: Sequence[Metric], *, check: bool, hold: bool
) -> Iterator[LayerStep] | None:
    """The layers of one batch with readings of these metrics; None where the passes cannot be captured.

    Args:
        inputs: What the passes start from, on a GPU.
        valid: Which positions are tokens, in their original order.
        start: The index of the batch's first sample.
        metrics: What is read.
        check: Whether a second pass runs beside the first.
        hold: Whether the layers themselves are wanted.
    """
    net, (samples, tokens) = inputs.net, valid.shape
    if not can_replay(net, samples, tokens, max(ALIVE, 2 * net.arch.layers * hold)):
        return None
    key = ("measure", weights_key(net), tuple(map(id, metrics)), check, hold)
    function = partial(_passes, net, tuple(metrics), check, hold)
    given = CapturedInputs(inputs.state, inputs.settings, inputs.order, valid)
    result = replay_cache.run(key, function, given)
    return _steps(net, result, metrics, valid, start)


def _passes(
    net: Transformer, metrics: Sequence[Metric], check: bool, hold: bool, given: CapturedInputs
) -> CapturedPasses:
    """Both passes through all layers, and what is read of each."""
    inputs = PassInputs(net, given.state, given.settings, given.order)
    numbers: list[Tensor] = []
    forms: list[LayerForm] = []
    steps: list[Step | DeviationStep] = []
    for step, second in with_second_pass(inputs, together=True) if check else _first_pass(inputs):
        rows = second.layer.numbers if isinstance(second, FloatSecondPass) else None
        layer = LayerStep(net, 0, given.valid, step, second, rows)
        readings, defect = layer.readings(metrics), layer.row_sum_defect
        held = []
        for metric, reading in readings:
            parts = [reading.value, reading.log10, reading.floor, reading.digits]
            numbers += [part.flatten() for part in parts if part is not None]
            held.append((metrics.index(metric), tuple(reading.value.shape), reading.digits is not None))
        numbers += [layer.finite.double()[None], *([] if defect is None else [defect.double()[None]])]
        forms.append(LayerForm(tuple(held), defect is not None))
        steps += [step] if hold else []
    return CapturedPasses(torch.cat(numbers), tuple(forms), tuple(steps))


def _first_pass(inputs: PassInputs) -> Iterator[tuple[DeviationStep, None]]:
    """The layers of the first pass alone."""
    state = inputs.state
    yield restored(DeviationStep(0, state, None), inputs.order), None
    for block in inputs.net.blocks:
        step = run_block(block, inputs.rules, state)
        state = step.state
        yield restored(step, inputs.order), None


def _steps(
    net: Transformer, result: CapturedPasses, metrics: Sequence[Metric], valid: Tensor, start: int
) -> Iterator[LayerStep]:
    """The layers as readers see them, from what a graph gave."""
    numbers, at = result.numbers.cpu(), 0

    def taken(*shape: int) -> Tensor:
        nonlocal at
        count = torch.Size(shape).numel()
        at += count
        return numbers[at - count : at].view(shape)

    for index, layer in enumerate(result.forms):
        readings: Readings = []
        for place, shape, has_digits in layer.metrics:
            value, log10, floor = (taken(*shape) for _ in range(3))
            readings.append((metrics[place], Reading(value, log10, floor, taken(*shape) if has_digits else None)))
        finite, defect = taken() > 0, taken() if layer.has_defect else None
        known = LayerNumbers(metrics, readings, finite, defect)
        step = result.steps[index] if result.steps else Step(index, valid, None)
        yield LayerStep(net, start, valid, step, known=known)
