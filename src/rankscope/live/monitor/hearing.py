"""The rules of a monitor: each hears every look; what one says is done, and lasts through a checkpoint."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from rankscope.errors import MonitorError, TrainingWarning
from rankscope.live.monitor.alarms import Hears
from rankscope.live.monitor.looks import Alarm


class Hearing:
    """Rules in their order. Every rank hears the same rows, and so says the same."""

    def __init__(self, rules: Sequence[Hears]) -> None:
        for rule in rules:
            if not isinstance(rule, Hears):
                raise MonitorError(
                    f"alarms must be rules: objects with hear(rows, step); received a {type(rule).__name__}"
                )
        self.rules = list(rules)
        self._start = self.state_dict()

    @property
    def names(self) -> list[str]:
        """What each is called."""
        return [str(getattr(rule, "name", type(rule).__name__)) for rule in self.rules]

    def notes(self, metrics: Sequence[str]) -> list[str]:
        """Which rules hear nothing of what is measured."""
        found = []
        for name, rule in zip(self.names, self.rules, strict=True):
            wanted = getattr(rule, "metrics", ())
            if wanted and not {*wanted} & {*metrics}:
                found.append(
                    f"the rule {name!r} hears {' or '.join(wanted)}, which is not measured: it says nothing"
                )
        return found

    def hear(self, rows: pl.DataFrame, step: int) -> tuple[Alarm, ...]:
        """What all of them say of a look."""
        return tuple(alarm for rule in self.rules for alarm in rule.hear(rows, step))

    def act(self, alarms: Sequence[Alarm], aloud: bool) -> bool:
        """Warn (where `aloud`), or call what a rule says to call; whether the training should stop."""
        calls = {
            name: action
            for name, rule in zip(self.names, self.rules, strict=True)
            if callable(action := getattr(rule, "action", None))
        }
        for alarm in alarms:
            if alarm.rule in calls:
                calls[alarm.rule](alarm)
            elif aloud:
                warnings.warn(alarm.sentence, TrainingWarning, stacklevel=4)
        return any(alarm.action == "stop" for alarm in alarms)

    def again(self, table: pl.DataFrame) -> None:
        """From the start, hear all looks of a table; what is said was said before."""
        self.load_state_dict(self._start)
        for rows in table.partition_by("step", maintain_order=True):
            self.hear(rows, int(rows["step"][0]))

    def state_dict(self) -> dict[str, Any]:
        """What each remembers, of those that say it."""
        return {
            "rules": self.names,
            "states": [rule.state_dict() if hasattr(rule, "state_dict") else None for rule in self.rules],
        }

    def fits(self, state: Mapping[str, Any] | None) -> bool:
        """Whether a state is of these rules."""
        return state is not None and list(state["rules"]) == self.names

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what others did."""
        for rule, each in zip(self.rules, state["states"], strict=True):
            if each is not None and hasattr(rule, "load_state_dict"):
                rule.load_state_dict(each)
