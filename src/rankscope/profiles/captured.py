"""A whole measurement of a batch on a GPU as one CUDA graph: both passes, the readings of all layers, and their marks.

Called by `measuring.py`. The passes and readings are thousands of small kernels, which take longer to start than to
run, and their result is a few numbers for each layer. So `captured_steps` hands all of it to `deviation/replay.py` as
one function of tensors (`_passes`), which records it, captures it and replays it. The numbers of all layers leave the
GPU in one copy (`_steps`). The layers themselves are copied out of the graph only if a reader asks for more than
readings.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.deviation import (
    DeviationStep,
    FloatSecondPass,
    PassInputs,
    StartingTensors,
    can_replay,
    joined,
    layers,
    replay_cache,
    with_second_pass,
)
from rankscope.metrics import Metric, Reading, Readings
from rankscope.nets import Step, Transformer
from rankscope.profiles.readers import CapturedNumbers, LayerStep, in_order


class Piece(NamedTuple):
    """Where readings of one metric in several layers lie among the numbers of a graph."""

    metric: int  # the index of the metric among those asked for
    layers: tuple[int, ...]
    shape: tuple[int, ...]  # the shape of a reading of one layer
    parts: int  # 3: value, log10 and floor; or 4, with digits


class CapturedPasses(NamedTuple):
    """The result of a graph."""

    numbers: Tensor  # of all readings; then by layer: 1 if finite; then how far rows are from summing to one
    pieces: tuple[Piece, ...]
    steps: tuple[Step | DeviationStep, ...]  # the layers themselves; empty if no reader looks at them


def captured_steps(
    inputs: PassInputs, valid: Tensor, start: int, metrics: Sequence[Metric], *, check: bool, hold: bool
) -> Iterator[LayerStep] | None:
    """The layers of one batch, whose first sample has the index `start`, with readings of these metrics; None where the
    passes cannot be captured. `valid` says which positions are tokens, in their original order; `check` runs a second
    pass beside the first, and `hold` keeps the layers themselves."""
    net = inputs.net
    counts = valid.is_cuda and any(metric.count for metric in metrics)  # which wait for numbers on the host
    # Both passes of all layers are in memory until their tokens are read.
    if counts or not can_replay(net, valid.shape, 2 * (net.arch.layers + 1)):
        return None
    key = "measure", tuple(map(id, metrics)), check, hold
    function = partial(_passes, net, tuple(metrics), check, hold)
    result = replay_cache.run(key, function, (inputs.tensors, valid), net)
    return _steps(net, result, metrics, valid, start)


def _passes(
    net: Transformer, metrics: Sequence[Metric], check: bool, hold: bool, given: tuple[StartingTensors, Tensor]
) -> CapturedPasses:
    """The measurement as a function of tensors: both passes through all layers, and what is read of each layer."""
    inputs, valid = PassInputs(net, *given[0]), given[1]
    of_tokens, by_layer = ([m for m in metrics if (m.of == "tokens") is of] for of in (True, False))
    zero = valid.new_zeros((), dtype=torch.float64)
    found: list[tuple[tuple[int, ...], Readings]] = []  # which layers, and readings of these, one after the other
    kept, steps, defects = [], [], []
    first = layers(inputs, replayed=False)
    both: Iterator[tuple[Any, Any]] = with_second_pass(inputs, together=True) if check else zip(first, repeat(None))
    for index, (step, second) in enumerate(both):
        layer = LayerStep(net, 0, valid, step, second)
        defects.append(zero if (defect := layer.row_sum_defect) is None else defect)
        found.append(((index,), layer.readings(by_layer)))
        # Patterns are read: those of all layers would take too much memory.
        tokens = type(step)(step.layer, step.state, None)
        kept.append(replace(layer, step=tokens, second=second and second.tokens_alone))
        steps += [step] if hold else []
    for arithmetic in (Step, DeviationStep) if of_tokens else ():
        group = tuple(index for index, layer in enumerate(kept) if isinstance(layer.step, arithmetic))
        if group:
            found.append((group, _side_by_side([kept[index] for index in group]).readings(of_tokens)))
    numbers: list[Tensor] = []
    pieces = []
    for indices, readings in found:
        for metric, reading in readings:
            parts = [part for part in (reading.value, reading.log10, reading.floor, reading.digits) if part is not None]
            numbers += [part.flatten() for part in parts]
            samples, *rest = reading.value.shape
            shape = (samples // len(indices), *rest)
            pieces.append(Piece(metrics.index(metric), indices, shape, len(parts)))
    numbers += [torch.stack([layer.finite.double() for layer in kept]), torch.stack(defects)]
    return CapturedPasses(torch.cat(numbers), tuple(pieces), tuple(steps))


def _side_by_side(layers: Sequence[LayerStep]) -> LayerStep:
    """One layer whose samples are the samples of several layers; of tokens alone, without attention."""
    first, seconds = layers[0], [layer.second for layer in layers]
    if isinstance(first.second, FloatSecondPass):
        floats = joined([second.layer for second in seconds if isinstance(second, FloatSecondPass)])
        return replace(first, valid=floats.valid, step=floats.step, second=replace(first.second, layer=floats))
    valid, step, second = joined([(layer.valid, layer.step, layer.second) for layer in layers])
    return replace(first, valid=valid, step=step, second=second)


def _steps(
    net: Transformer, result: CapturedPasses, metrics: Sequence[Metric], valid: Tensor, start: int
) -> Iterator[LayerStep]:
    """Yields the layers as readers see them, unpacked from the result of a graph."""
    numbers, at, count = result.numbers.cpu(), 0, net.arch.layers + 1
    readings: list[Readings] = [[] for _ in range(count)]
    for piece in result.pieces:
        size = piece.parts * len(piece.layers) * math.prod(piece.shape)
        parts = numbers[at : at + size].view(piece.parts, len(piece.layers), *piece.shape)
        at += size
        for index, of_layer in zip(piece.layers, parts.unbind(1), strict=True):
            readings[index].append((metrics[piece.metric], Reading(*of_layer.unbind())))
    finite, defects = numbers[at:].view(2, count)
    for index in range(count):
        known = CapturedNumbers(metrics, in_order(readings[index], metrics), finite[index] > 0, defects[index])
        step = result.steps[index] if result.steps else Step(index, valid, None)
        yield LayerStep(net, start, valid, step, known=known)
