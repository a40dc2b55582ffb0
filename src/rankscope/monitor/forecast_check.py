"""`ForecastCheck`: whether a training goes as it was forecast, measurement by measurement.

It is an instrument that is given every measurement together with the rules of alarms (`alarms.py`). Two
things are compared. At the first measurement, before weights have moved: what tells tokens apart at each layer, with
the table of the forecast; if that differs by more than another draw of weights does, the forecast was of another
network. From half of the planned steps on: whether the loss is below what counts as learning, with the probability.

What is compared is kept as plain numbers, so that a checkpoint restores it. `described` is what goes into the
manifest of the run, where `rankscope.trainings.training`, `rankscope follow` and the report find its sentences.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol, runtime_checkable

import polars as pl

from rankscope.errors import MonitorError
from rankscope.monitor.alarms import MeasurementRows
from rankscope.monitor.instrument import Instrument
from rankscope.monitor.measurement import Alarm

METRIC = "relative_residual"  # of which the table of a forecast has log10 by layer
SPREAD = 0.3
"""Other weights and samples of the same design change log10 of the residual by up to this times 1 + |log10|: by up to
0.25 times in 80 comparisons of designs that `rankscope_studies.forecasts` draws."""
SURE = 0.7  # The least probability, of learning or of not learning, that an outcome can contradict


@runtime_checkable
class TrainingForecast(Protocol):
    """What a monitor compares a training with; `rankscope.forecast` returns one."""

    @property
    def probability(self) -> float:
        """The chance that the network learns."""

    @property
    def verdict(self) -> Sequence[str]:
        """What is expected, in sentences."""

    @property
    def table(self) -> pl.DataFrame:
        """By `layer`, layer 0 the input: `residual`, log10 of the relative residual; NaN where it is not known."""

    @property
    def steps(self) -> int:
        """Steps of the training that was forecast."""

    @property
    def learnt_below(self) -> float:
        """The loss below which a network has learnt something of its inputs; NaN where none is agreed on."""


class ForecastCheck(Instrument):
    """Compares measurements with a forecast; stands among the rules of a monitor.

    Args:
        forecast: What is expected of the training.
        whole: Whether every layer is measured, so that another number of layers is another network.

    Raises:
        MonitorError: The forecast is none, or its numbers are no numbers.
    """

    name = "the forecast does not hold"
    action = "warn"
    subject, must_work = "the forecast is", True

    def __init__(self, forecast: TrainingForecast, whole: bool = True) -> None:
        if not isinstance(forecast, TrainingForecast):
            received = f"received a {type(forecast).__name__}"
            raise MonitorError(f"forecast must be what rankscope.forecast returns; {received}", subject="forecast")
        self.probability, self.learnt_below = float(forecast.probability), float(forecast.learnt_below)
        self.steps, self.verdict, self.whole = int(forecast.steps), list(forecast.verdict), whole
        if not (0 <= self.probability <= 1 and self.steps > 0):
            received = f"got a probability of {self.probability:g} and {self.steps} steps"
            raise MonitorError(f"a forecast has a probability from 0 to 1, and steps; {received}", subject="forecast")
        table = forecast.table
        by_layer = table.select("layer", "residual").rows() if {"layer", "residual"} <= {*table.columns} else []
        self.expected = {int(layer): float(log) for layer, log in by_layer}
        self._findings: dict[str, Any] = {}  # what was compared so far; part of a checkpoint

    def attach(self) -> None:
        """Begin with the only stack of a model."""
        self.monitor.require_one_stack("forecast")
        self.whole &= self.monitor.layers is None

    def on_measurement(self, rows: pl.DataFrame, step: int) -> list[Alarm]:
        """The alarms of this measurement: layers that are not as forecast, or a loss that does not fall as forecast."""
        alarms = []
        if "layers" not in self._findings:
            self._findings["layers"] = layers = self._compared(MeasurementRows(rows), step)
            alarms += [layers["sentence"]] if layers["agrees"] is False else []
        losses = rows.filter(pl.col("metric") == "loss", pl.col("layer").is_null()).to_dicts()
        if losses and self._findings.get("loss", {}).get("step", 0) < self.steps:
            self._take_loss(losses[0], step)
            contradicted = self.holds is False and self.probability >= SURE
            if contradicted and not self._findings.get("raised"):
                self._findings["raised"] = True
                alarms.append(self._outcome())
        return [Alarm(step, step, self.name, None, None, self.action, f"Step {step}: {text}") for text in alarms]

    @property
    def agrees(self) -> bool | None:
        """Whether the layers of the network are as forecast before it is trained; None while that is not known."""
        agrees: bool | None = self._findings.get("layers", {}).get("agrees")
        return agrees

    @property
    def learnt(self) -> bool | None:
        """Whether the loss is below what counts as learning; None before half of the steps, or if it is not known."""
        loss = self._findings.get("loss")
        if loss is None or 2 * loss["step"] < self.steps or math.isnan(self.learnt_below) or not loss["above"]:
            return None
        return bool(loss["value"] < self.learnt_below)

    @property
    def holds(self) -> bool | None:
        """Whether the training goes as forecast; None while that is not known, if the probability leaves it open, or if
        the forecast was of another network."""
        if self.learnt is None or self.agrees is False or max(self.probability, 1 - self.probability) < SURE:
            return None
        return self.learnt == (self.probability >= SURE)

    @property
    def sentences(self) -> list[str]:
        """What is known by now of whether the forecast holds."""
        layers = self._findings.get("layers")
        return [*([layers["sentence"]] if layers else []), self._outcome()]

    @property
    def stage(self) -> tuple[object, ...]:
        """Changes when there is something new to say."""
        loss = self._findings.get("loss", {"step": 0})
        return self.agrees, self.learnt, loss["step"] >= self.steps

    def described(self) -> dict[str, Any]:
        """The forecast, and whether it holds, as a manifest has them."""
        layers = self._findings.get("layers", {})
        return {
            "probability": self.probability, "verdict": self.verdict, "steps": self.steps,
            "learnt_below": _number(self.learnt_below),
            "log10_residual": {str(layer): _number(log) for layer, log in self.expected.items()},
            "log10_difference": layers.get("differences", {}), "agrees": self.agrees, "learnt": self.learnt,
            "holds": self.holds, "sentences": self.sentences,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """What was compared so far, as plain numbers, for a checkpoint."""
        return deepcopy(self._findings)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._findings = deepcopy(dict(state))

    def _compared(self, rows: MeasurementRows, step: int) -> dict[str, Any]:
        """The layers of the first measurement beside those of the forecast: a sentence, and the difference by layer."""
        measured, floors = rows.layers(METRIC), rows.layers(METRIC, "floor")
        unknown = "Whether the network is the one that was forecast is not known"
        if not self.expected:
            return {"agrees": None, "sentence": f"{unknown}: the forecast has no table of layers."}
        if not measured:
            return {"agrees": None, "sentence": f"{unknown}: {METRIC} was not measured in any layer."}
        if step > 1:
            late = f"it was first measured at step {step}, and weights had moved"
            return {"agrees": None, "sentence": f"{unknown}: {late}; a probe is measured before the first step."}
        depth, last = max(self.expected), max(measured)
        if last > depth or (self.whole and last != depth):
            sentence = f"The forecast was not of this network: it has {last} layers, and the forecast {depth}."
            return {"agrees": False, "sentence": sentence}
        differences = {}
        for layer, value in measured.items():
            expected, size = self.expected.get(layer, math.nan), max(value, floors[layer])
            log = math.log10(size) if size > 0 else -math.inf
            # Nothing can be said where rounding decided what was measured, and what was expected is as small.
            if not math.isnan(expected) and (value > floors[layer] or expected > log):
                differences[layer] = log - expected
        if not differences:
            return {"agrees": None, "sentence": f"{unknown}: rounding decided the residual in every layer."}
        kept = {str(layer): _number(difference) for layer, difference in differences.items()}
        beyond = {layer: abs(d) - SPREAD * (1 + abs(self.expected[layer])) for layer, d in differences.items()}
        agrees = all(excess <= 0 for excess in beyond.values())
        most = {layer: abs(difference) for layer, difference in differences.items()} if agrees else beyond
        layer = max(most, key=lambda at: math.inf if math.isnan(most[at]) else most[at])
        apart = f"{measured[layer]:.2g} of their size" if measured[layer] > floors[layer] else "no more than rounding"
        log = self.expected[layer]
        forecast = "nothing" if log == -math.inf else f"{10**log:.2g}" if log > -300 else f"1e{log:.1f}"
        compared = f"{apart}, forecast: {forecast}"
        if agrees:
            by = f"{most[layer]:.2g} in log10 at most, at layer {layer} ({compared})"
            sentence = f"Before training, tokens of all layers are apart as forecast: the difference is {by}."
        else:
            difference = f"a difference of {differences[layer]:.2g} in log10"
            difference = "which no power of ten bridges" if math.isinf(differences[layer]) else difference
            by = f"at layer {layer} tokens are apart by {compared}, {difference}"
            sentence = f"The forecast was not of this network, or not of samples like these: {by}."
        return {"agrees": agrees, "sentence": sentence, "differences": kept}

    def _take_loss(self, row: Mapping[str, Any], step: int) -> None:
        """Remember the loss of a measurement: the mean over the steps since the last one."""
        before = self._findings.get("loss", {"step": 0, "above": False})
        value = math.inf if row["broken"] or row["value"] is None else float(row["value"])
        most = math.inf if row["broken"] or row["most"] is None else float(row["most"])
        above = before["above"] or most >= self.learnt_below
        self._findings["loss"] = {"step": step, "since": before["step"], "value": value, "above": above}

    def _outcome(self) -> str:
        """Whether the network learns, beside the probability, as a sentence."""
        loss, chance = self._findings.get("loss"), f"a probability of {self.probability:.2f}"
        if loss is None:
            return f"No loss was measured yet: {chance} that it learns was forecast."
        if math.isnan(self.learnt_below):
            return f"Whether it learns is not known: no loss says so for the task of the forecast, {chance}."
        size = f"{loss['value']:.3g}" if math.isfinite(loss["value"]) else "no number"
        now = f"step {loss['step']} of {self.steps}: the loss, {size} since step {loss['since']}, is"
        if not loss["above"]:
            least = f"was below {self.learnt_below:.3g}, what counts as learning, from the start"
            return f"Whether it learns is not known: the loss {least}, so it may be of another task than was forecast."
        below = "below" if loss["value"] < self.learnt_below else "not below"
        says = f"{now} {below} {self.learnt_below:.3g}, what counts as learning"
        if self.learnt is None:
            return f"{says[0].upper()}{says[1:]}; {chance} was forecast. Half of the steps are to be made first."
        ended = "In the end" if loss["step"] >= self.steps else "So far"
        against = {
            True: f"{ended} the forecast holds", False: f"{ended} the forecast does not hold",
            None: f"{ended} the forecast {'left it open' if self.agrees is not False else 'is of another network'}",
        }[self.holds]  # fmt: skip
        learns = "it learns" if self.learnt else "it does not learn"
        return f"{against}: {learns}, and {chance} that it would was forecast. {says[0].upper()}{says[1:]}."


def _number(value: float) -> float | None:
    """A number as JSON can have it."""
    return value if math.isfinite(value) else None
