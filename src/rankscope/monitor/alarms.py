"""`AlarmRule`, the base of every rule that raises alarms, and `RuleSet`, which runs the rules of a monitor.

`Monitor` gives the rows of each measurement to its `RuleSet`, which gives them to each rule in turn (`on_measurement`)
and collects their alarms; once those are written, `RuleSet.act` warns or calls functions. A rule looks for faults in
every measurement. When a fault has been there in `patience` measurements in a row, the rule raises one alarm for it,
and another only after it was absent in as many: then the alarm is `over`, which `monitor.notes` says. Faults of one
kind in one measurement make one alarm, which names the first place and lists the rest. The built-in rules are in
`alarm_rules.py`.
"""

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import polars as pl

from rankscope.errors import MonitorError, TrainingWarning, one_of
from rankscope.monitor.instrument import Instrument
from rankscope.monitor.measurement import Alarm
from rankscope.trainings import in_stack

Action = Literal["warn", "stop"] | Callable[[Alarm], object]  # stop: warn, and set `monitor.should_stop`
COLUMNS = ("layer", "head", "metric", "value", "most", "floor", "samples", "broken")  # that rules read
LISTED = 8  # the most places, after the first, that one alarm lists


@runtime_checkable
class AlarmSource(Protocol):
    """Anything that can stand in `Monitor(alarms=[...])`: an `AlarmRule`, or an object of your own. With
    methods `state_dict` and `load_state_dict` it also lasts through a checkpoint."""

    def on_measurement(self, rows: pl.DataFrame, step: int) -> list[Alarm]:
        """The alarms to raise at this step; `rows` has the columns of the table `training`."""


@dataclass(frozen=True)
class Fault:
    """Something wrong in one measurement."""

    layer: int | None
    head: int | None
    description: str  # in numbers; follows "since step 30:" in the alarm
    kind: str = ""  # faults of one kind make one alarm
    immediate: bool = False  # needs no patience

    @property
    def place(self) -> str:
        """The layer, and the head if there is one, in words."""
        return f"layer {self.layer}" if self.head is None else f"head {self.head} of layer {self.layer}"


class AlarmRule(ABC):
    """A rule that raises an alarm when a fault lasts; a rule of your own defines `faults`.

    Args:
        patience: In how many measurements in a row a fault must be there before the alarm is raised.
        action: "warn", "stop" (warn, and set `monitor.should_stop`), or a function of the alarm.

    Raises:
        MonitorError: `patience` is not a positive whole number, or `action` is neither.

    >>> class HighLoss(AlarmRule):
    ...     name, metrics, advice = "the loss is high", ("loss",), "Lower the learning rate."
    ...     def faults(self, rows):
    ...         loss = rows.run_value("loss")
    ...         return {"loss": Fault(None, None, f"the loss is {loss}")} if loss and loss > 5 else {}
    >>> from rankscope.trainings.training import TRAINING
    >>> rows = pl.DataFrame([{"step": 10, "metric": "loss", "value": 7.5}], schema=TRAINING)
    >>> HighLoss(patience=1, action="warn").on_measurement(rows, 10)[0].sentence
    'Step 10: the loss is 7.5. Lower the learning rate.'
    """

    name: str  # what the rule is called in alarms; two rules of a monitor should have different names
    advice: str  # what helps against the fault, as a sentence
    metrics: tuple[str, ...] = ()  # the metrics of which the rule needs at least one
    stack = ""  # which of several stacks of blocks it looks at; part of the names of its alarms
    tokens: int | None = None  # of the longest sample of the measurement; None if it is not known

    def __init__(self, patience: int = 2, action: Action = "warn") -> None:
        if type(patience) is not int or patience < 1:
            raise MonitorError(f"patience must be 1 or more measurements; got {patience!r}", subject="patience")
        if not callable(action) and action not in ("warn", "stop"):
            raise MonitorError(one_of("action", action, ("warn", "stop", "a function of the alarm")), subject="action")
        self.patience, self.action = patience, action
        self.baselines: dict[str, dict[str, Any]] = {}  # numbers to compare with, or lists; part of a checkpoint
        # By fault: `since` which step, measurements `present` and `absent`, whether an alarm was `raised`, its `place`.
        self._history: dict[str, dict[str, Any]] = {}
        self.over: dict[str, str] = {}  # by fault, a sentence on an alarm whose fault has gone

    def __post_init__(self) -> None:
        """Begin with a rule that is a dataclass, its thresholds, `patience` and `action` the fields."""
        AlarmRule.__init__(self, self.patience, self.action)

    @abstractmethod
    def faults(self, rows: "MeasurementRows") -> dict[str, Fault]:
        """The faults in a measurement, each under a name that stays the same while the fault lasts."""

    def on_measurement(self, rows: pl.DataFrame, step: int) -> list[Alarm]:
        """The alarms to raise at this step: one for each kind of fault whose patience is used up. A measurement without
        the rule's metrics, because they could not be read, does not count."""
        measured = MeasurementRows(rows)
        if self.metrics and not {*self.metrics} & {*measured.by_metric}:
            return []
        faults = self.faults(measured)
        for name, history in [*self._history.items()]:
            history["absent"] += name not in faults
            if history["absent"] >= (self.patience if history["raised"] else 1):
                del self._history[name]  # absent for long enough to be raised again
                if history["raised"]:
                    which = f"the alarm {in_stack(self.name, self.stack)!r} of {history.get('place', name)}"
                    self.over[name] = f"{which}, since step {history['since']}, is over at step {step}"
        kinds: dict[str, list[str]] = {}
        for name, fault in faults.items():
            new = {"since": step, "present": 0, "raised": False, "absent": 0}
            history = self._history.setdefault(name, new)
            history.update(present=history["present"] + 1, absent=0)
            if not history["raised"] and (fault.immediate or history["present"] >= self.patience):
                history.update(raised=True, place="the whole run" if fault.layer is None else fault.place)
                self.over.pop(name, None)
                kinds.setdefault(fault.kind, []).append(name)
        return [self._alarm(step, names, faults) for names in kinds.values()]

    def state_dict(self) -> dict[str, Any]:
        """The rule's baselines and faults as plain numbers, for a checkpoint."""
        return deepcopy({"memory": self.baselines, "history": self._history, "over": self.over})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the baselines and faults that `state_dict` gave."""
        self.baselines, self._history = deepcopy(state["memory"]), deepcopy(state["history"])
        self.over = dict(state.get("over", {}))  # of checkpoints of 0.3.0, which have none

    def first_values(self, name: str, numbers: Mapping[Any, float]) -> dict[str, float]:
        """Each value as it was when it first came; `name` tells several such collections apart."""
        first = self.baselines.setdefault(name, {})
        for key, value in numbers.items():
            first.setdefault(str(key), value)
        return first

    def _alarm(self, step: int, names: Sequence[str], faults: Mapping[str, Fault]) -> Alarm:
        """One alarm for faults of one kind: the first one's description, and the places of the rest."""
        first, since = faults[names[0]], int(self._history[names[0]]["since"])
        places = ", ".join(faults[name].place for name in names[1 : LISTED + 1])
        more = " and more" if len(names) > LISTED + 1 else ""
        also = f" The same holds of {places}{more}." if places else ""
        when = f"Step {step}" if since == step else f"Step {step}, since step {since}"
        when += f", {self.stack}" if self.stack else ""
        sentence = f"{when}: {first.description}.{also} {self.advice}"
        action = "call" if callable(self.action) else self.action
        return Alarm(step, since, in_stack(self.name, self.stack), first.layer, first.head, action, sentence)

    def for_stack(self, stack: str) -> "AlarmRule":
        """A copy of the rule, with baselines of its own, that looks at one of several stacks."""
        rule = copy(self)
        rule.load_state_dict(self.state_dict())
        rule.stack = stack
        return rule


class RuleOfStacks:
    """Applies one alarm rule to each of several stacks of blocks, such as an encoder and a decoder, with baselines
    for each stack. An alarm that all stacks raise alike, at no layer, is about the whole run, and raised once."""

    def __init__(self, rule: AlarmRule, stacks: Sequence[str]) -> None:
        self.name, self.metrics, self.action = rule.name, rule.metrics, rule.action
        self.by_stack = {stack: rule.for_stack(stack) for stack in stacks}
        self.alarm_names = [self.name, *(in_stack(self.name, stack) for stack in stacks)]

    def on_measurement(self, rows: pl.DataFrame, step: int) -> list[Alarm]:
        """The alarms of all stacks; each is given the rows of its own layers, and those of the whole run."""
        of_run: Counter[Alarm] = Counter()
        alarms: list[tuple[Alarm, Alarm]] = []  # as it is, and as it were of the whole run
        for stack, rule in self.by_stack.items():
            end = f"/{stack}"
            layer_rows = rows.filter(pl.col("layer").is_not_null(), pl.col("metric").str.ends_with(end))
            layer_rows = layer_rows.with_columns(pl.col("metric").str.strip_suffix(end))
            for alarm in rule.on_measurement(pl.concat([layer_rows, rows.filter(pl.col("layer").is_null())]), step):
                plain = replace(alarm, rule=self.name, sentence=alarm.sentence.replace(f", {stack}:", ":", 1))
                of_run[plain] += alarm.layer is None
                alarms.append((alarm, plain))
        everywhere = len(self.by_stack)
        return [*dict.fromkeys(plain if of_run[plain] == everywhere else alarm for alarm, plain in alarms)]

    def state_dict(self) -> dict[str, Any]:
        """The state of each stack's rule."""
        return {stack: rule.state_dict() for stack, rule in self.by_stack.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the rule of each stack from what `state_dict` gave."""
        for stack, rule in self.by_stack.items():
            rule.load_state_dict(state[stack])


class MeasurementRows:
    """The rows of one measurement by metric, as `AlarmRule.faults` reads them."""

    def __init__(self, rows: pl.DataFrame) -> None:
        self.by_metric: dict[str, list[dict[str, Any]]] = {}
        for row in rows.select(COLUMNS).iter_rows(named=True):
            self.by_metric.setdefault(row["metric"], []).append(row)

    def run_value(self, metric: str) -> float | None:
        """A number of the whole run, such as the loss; None if it was not measured or not finite."""
        rows = self.by_metric.get(metric, [])
        return next((row["value"] for row in rows if row["layer"] is None), None)

    def layers(self, metric: str, column: Literal["value", "floor"] = "value") -> dict[int, float]:
        """The value at each layer, or its floor, the mean over heads; layers with a sample that is not finite are left
        out. A value at or below its floor is rounding noise, and no result."""
        by_layer: dict[int, list[float]] = {}
        broken = self.broken(metric)
        for row in self._of_layers(metric):
            if row["value"] is not None and row["layer"] not in broken:
                by_layer.setdefault(row["layer"], []).append(row[column] or 0.0)
        return {layer: sum(values) / len(values) for layer, values in sorted(by_layer.items())}

    def heads(self, metric: str, column: Literal["value", "most"] = "value") -> dict[int, dict[int, float]]:
        """The values of a metric of heads, by layer and then by head: means over samples, or the largest."""
        by_layer: dict[int, dict[int, float]] = {}
        for row in self._of_layers(metric):
            if row["head"] is not None and row[column] is not None:
                by_layer.setdefault(row["layer"], {})[row["head"]] = row[column]
        return by_layer

    def broken(self, metric: str) -> dict[int, str]:
        """The layers with samples that are not finite, and how many of them: "2 of 8"."""
        rows = [row for row in self._of_layers(metric) if row["broken"]]
        return {row["layer"]: f"{row['broken']} of {row['broken'] + row['samples']}" for row in rows}

    def _of_layers(self, metric: str) -> list[dict[str, Any]]:
        return [row for row in self.by_metric.get(metric, []) if row["layer"] is not None]


class RuleSet(Instrument):
    """The rules of a monitor, in order: an instrument that looks at what the others have read. Every rank gives them
    the same rows, so all raise the same alarms. Where there are several `stacks`, each `AlarmRule` looks at one after
    the other; other sources are given all rows."""

    name, subject, must_work = "alarms", "alarm rules are", True

    def __init__(self, rules: Sequence[AlarmSource], stacks: Sequence[str] = ()) -> None:
        for rule in rules if isinstance(rules, Sequence) else [rules]:
            if not isinstance(rules, Sequence) or not isinstance(rule, AlarmSource) or isinstance(rule, type):
                expected = "alarms must be rules: objects with on_measurement(rows, step), in a list"
                raise MonitorError(f"{expected}; received a {type(rule).__name__}", subject="alarms")
        self.rules: list[AlarmSource] = [
            RuleOfStacks(rule, stacks) if stacks and isinstance(rule, AlarmRule) else rule for rule in rules
        ]
        rule_parts = [part for rule in self.rules for part in getattr(rule, "by_stack", {"": rule}).values()]
        self._alarm_rules = [rule for rule in rule_parts if isinstance(rule, AlarmRule)]  # of every stack
        self._initial_state = self.state_dict()

    def attach(self) -> None:
        """Note the rules none of whose metrics is measured."""
        measured = {metric.name for metric in next(iter(self.monitor.plans.values())).metrics}
        measured.update(*(part.metrics for part in self.monitor.instruments))
        for name, rule in zip(self.names, self.rules, strict=True):
            if (needed := getattr(rule, "metrics", ())) and not {*needed} & measured:
                lacks = f"{' or '.join(needed)}, which is not measured: it raises nothing"
                self.remarks.append(f"the rule {name!r} needs {lacks}")

    @property
    def names(self) -> list[str]:
        """The name of each rule; its class's if it has none."""
        return [str(getattr(rule, "name", type(rule).__name__)) for rule in self.rules]

    def on_measurement(self, rows: pl.DataFrame, step: int) -> tuple[Alarm, ...]:
        """The alarms that all rules raise at this measurement."""
        return tuple(alarm for rule in self.rules for alarm in rule.on_measurement(rows, step))

    def set_tokens(self, tokens: Mapping[str, int | None]) -> None:
        """Tell the rules how many tokens the longest sample has, by the name of its stack ("" where there is one)."""
        for rule in self._alarm_rules:
            rule.tokens = tokens.get(rule.stack)

    @property
    def notes(self) -> list[str]:
        """Sentences on rules that raise nothing, and on alarms whose faults have gone."""
        return self.remarks + [sentence for rule in self._alarm_rules for sentence in rule.over.values()]

    def act(self, alarms: Sequence[Alarm], warn: bool) -> bool:
        """Call the function of each alarm whose rule has one, warn of the others, and return whether to stop training.

        `warn` is False on all processes of a distributed training but the one that writes.
        """
        actions = {
            alarm_name: getattr(rule, "action", None)
            for name, rule in zip(self.names, self.rules, strict=True)
            for alarm_name in getattr(rule, "alarm_names", [name])
        }
        for alarm in alarms:
            if callable(action := actions.get(alarm.rule)):
                action(alarm)
            elif warn:
                warnings.warn(alarm.sentence, TrainingWarning, stacklevel=4)
        return any(alarm.action == "stop" for alarm in alarms)

    def state_dict(self) -> dict[str, Any]:
        """The names of the rules, and the state of those that have a `state_dict`."""
        states = [rule.state_dict() if hasattr(rule, "state_dict") else None for rule in self.rules]
        return {"rules": self.names, "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of each rule that has one. Without a state of these rules, they are as they were after the
        measurements that the run folder has; no alarm acts again."""
        known = bool(state) and list(state["rules"]) == self.names
        for rule, of_rule in zip(self.rules, (state if known else self._initial_state)["states"], strict=True):
            if of_rule is not None and hasattr(rule, "load_state_dict"):
                rule.load_state_dict(of_rule)
        if not known:
            for rows in self.monitor.measured_rows().partition_by("step", maintain_order=True):
                self.on_measurement(rows, int(rows["step"][0]))
