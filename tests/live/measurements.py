"""Measurements as a monitor makes them."""

import polars as pl

from rankscope.monitor import Alarm, Measurement
from rankscope.trainings import TRAINING

NAMES = ["monitor/loss", "relative_mu/layer_00", "relative_mu/layer_03", "head_mu/layer_03/head_01"]
SENTENCE = "tokens of layer 3 are the same since step 10"


def measurement(step: int) -> Measurement:
    """Its values are the step and a quarter, a half, ...; one was no number and is null."""
    keys = [("loss", None, None), ("relative_mu", 0, None), ("relative_mu", 3, None), ("head_mu", 3, 1)]
    rows = [
        {"step": step, "metric": metric, "layer": layer, "head": head, "value": step + k / 4}
        for k, (metric, layer, head) in enumerate(keys)
    ]
    rows.append({"step": step, "metric": "mu", "layer": 3, "head": None, "value": None})
    alarm = Alarm(step, 10, "collapse", 3, None, "warn", SENTENCE)
    return Measurement(step, pl.DataFrame(rows, schema=TRAINING), (alarm,) if step == 20 else ())


def value(name: str, step: int) -> float:
    return step + NAMES.index(name) / 4
