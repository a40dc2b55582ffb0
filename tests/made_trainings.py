"""Training runs by hand, through the run_writer that a monitor writes: no model, and every number known."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.monitor.measurement import Alarm, Measurement, RunWriter
from rankscope.runs import manifest_of
from rankscope.trainings import TRAINING

SENTENCE = "The tokens of layer 2 have become one since step 20 <b>bold</b>."
ALARM = Alarm(30, 20, "collapse", 2, None, "warn", SENTENCE)
Values = Callable[[int, int], float | None]


def falling(step: int, layer: int) -> float:
    """Falls by half from layer to layer, and from ten steps to ten steps."""
    return 0.5 ** (layer + step / 10)


def opened(folder: Path, metrics: Sequence[str] = ("relative_residual",), name: str = "SmallGPT") -> RunWriter:
    described = {"fingerprint": None, "architecture": None, "model": {"class": f"a.{name}", "parameters": 7}}
    return RunWriter(folder, manifest_of(described, "cpu", "as given", "as trained", metrics, {}))


def row(step: int, layer: int | None, metric: str, value: float | None, **more: Any) -> dict[str, Any]:
    known = {"spread": 0.0, "least": value, "most": value, "floor": 0.0, "samples": 1, "broken": 0}
    return {"step": step, "layer": layer, "head": None, "metric": metric, "value": value, **known, **more}


def measurement(
    step: int, layers: int = 3, values: Values = falling, alarms: Sequence[Alarm] = (), more: Sequence[Any] = ()
) -> Measurement:
    rows = [row(step, layer, "relative_residual", values(step, layer)) for layer in range(layers + 1)]
    rows += [row(step, None, "loss", 4.0 - step / 100), row(step, None, "lr", 1e-3), *more]
    return Measurement(step, pl.DataFrame(rows, schema=TRAINING), tuple(alarms))


def written(folder: Path, steps: Sequence[int] = range(0, 60, 10), **given: Any) -> Path:
    """A run that has come to its end, with one alarm if it came so far."""
    run_writer = opened(folder)
    for step in steps:
        run_writer.write(measurement(step, alarms=[ALARM] if step == ALARM.step else (), **given))
    run_writer.close()
    return folder


def learned(step: int, layers: int = 3) -> list[dict[str, Any]]:
    """Gradients and path shares of a measurement."""
    rows = [row(step, layer, "grad_mlp", 10.0 ** (-layer - step / 10)) for layer in range(1, layers + 1)]
    return rows + [row(step, None, f"paths_{length}", length / 6) for length in range(4)]


def spiking(step: int, spike: int | None = None) -> Measurement:
    """A measurement of a calm run of `every=10`. At `spike` its loss is tripled, after the largest logits of layers 2
    and 3 have been ten times as large for 300 steps and the gradients of layer 1 a tenth for 100."""
    before = 10**9 if spike is None else spike - step
    calm = [1 + 0.02 * math.sin(index * step) for index in range(1, 7)]  # no number of a calm run repeats
    rows = [row(step, None, "loss", 2.0 * calm[0] * (3 if before == 0 else 1)), row(step, None, "lr", 1e-3)]
    rows += [
        row(step, layer, "largest_logit", 4.0 * calm[layer] * (10 if layer > 1 and -50 < before <= 300 else 1))
        for layer in (1, 2, 3)
    ]
    rows += [
        row(step, layer, "grad_mlp", calm[layer + 3] * (0.1 if layer == 1 and -50 < before <= 100 else 1))
        for layer in (1, 2)
    ]
    return Measurement(step, pl.DataFrame(rows, schema=TRAINING))
