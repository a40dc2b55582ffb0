"""What hears a training run and says when something goes wrong: the frame of a rule.

A rule looks for faults at every look. A fault that has lasted for `looks` looks in a row is said, once; and
again only after it was gone for as many. Of several of one kind that are to be said at one look, one alarm
names the first, and where else it is so. A rule of one's own is any object with `hear(rows, step)` that gives
a list of alarms; with `state_dict` and `load_state_dict` it lasts through a checkpoint.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import polars as pl

from rankscope.errors import MonitorError, one_of
from rankscope.live.monitor.looks import Alarm

Action = Literal["warn", "stop"] | Callable[[Alarm], object]
"""What is done: a warning, a warning and `monitor.should_stop`, or a call of a function (on every rank)."""


@runtime_checkable
class Hears(Protocol):
    """Anything that hears the rows of each look (the columns of the table `training`)."""

    def hear(self, rows: pl.DataFrame, step: int) -> list[Alarm]:
        """What there is to say at this step."""
        ...


@dataclass(frozen=True)
class Fault:
    """Something wrong at one look."""

    layer: int | None
    head: int | None
    said: str
    """What is wrong, in numbers: it follows "since step 30:"."""
    kind: str = ""
    """Those of one kind are said together."""
    at_once: bool = False
    """Whether it is said without waiting."""


class Rule(ABC):
    """One kind of fault: `faults` of the rows of a look, by a name that lasts while the fault does."""

    name: str
    helps: str
    """What helps, as a sentence."""
    metrics: tuple[str, ...] = ()
    """Of which it needs at least one."""

    def __init__(self, looks: int, action: Action) -> None:
        if type(looks) is not int or looks < 1:
            raise MonitorError(f"looks must be a number of looks in a row, 1 or more; got {looks!r}")
        if not callable(action) and action not in ("warn", "stop"):
            raise MonitorError(one_of("action", action, ("warn", "stop", "a function of the alarm")))
        self.looks, self.action = looks, action
        self.memory: dict[str, Any] = {}
        """Numbers to compare with, such as those of the first look."""
        self._lasting: dict[str, dict[str, Any]] = {}
        """Of each fault: since when, for how many looks, whether it was said, how long it has been gone."""

    @abstractmethod
    def faults(self, rows: "Rows") -> dict[str, Fault]:
        """What is wrong at this look."""

    def hear(self, rows: pl.DataFrame, step: int) -> list[Alarm]:
        """What there is to say at this step: an alarm for each kind of fault that is new."""
        found = self.faults(Rows(rows))
        for name in [*self._lasting]:
            if name not in found:
                self._gone(name)
        for name in found:
            lasting = self._lasting.setdefault(name, {"since": step, "looks": 0, "said": False, "gone": 0})
            lasting.update(looks=lasting["looks"] + 1, gone=0)
        new = [name for name, fault in found.items() if self._to_say(name, fault.at_once)]
        kinds: dict[str, list[str]] = {}
        for name in new:
            self._lasting[name]["said"] = True
            kinds.setdefault(found[name].kind, []).append(name)
        return [self._alarm(step, names, found) for names in kinds.values()]

    def _alarm(self, step: int, names: Sequence[str], found: Mapping[str, Fault]) -> Alarm:
        """Of faults of one kind: the first, and where else it is so."""
        first, since = found[names[0]], int(self._lasting[names[0]]["since"])
        others = ", ".join(_place(found[name]) for name in names[1:9]) + (
            " and more" if len(names) > 9 else ""
        )
        also = f" The same holds of {others}." if others else ""
        when = f"Step {step}" if since == step else f"Step {step}, since step {since}"
        sentence = f"{when}: {first.said}.{also} {self.helps}"
        action = self.action if isinstance(self.action, str) else "call"
        return Alarm(step, since, self.name, first.layer, first.head, action, sentence)

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, in plain numbers."""
        lasting = {name: dict(each) for name, each in self._lasting.items()}
        return {"memory": {name: dict(each) for name, each in self.memory.items()}, "lasting": lasting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what another did."""
        self.memory = {name: dict(each) for name, each in state["memory"].items()}
        self._lasting = {name: dict(each) for name, each in state["lasting"].items()}

    def first(self, what: str, numbers: Mapping[str, float]) -> dict[str, float]:
        """The numbers as they were when they came for the first time."""
        kept: dict[str, float] = self.memory.setdefault(what, {})
        for name, number in numbers.items():
            kept.setdefault(name, number)
        return kept

    def _gone(self, name: str) -> None:
        lasting = self._lasting[name]
        lasting["gone"] += 1
        if not lasting["said"] or lasting["gone"] >= self.looks:
            del self._lasting[name]

    def _to_say(self, name: str, at_once: bool) -> bool:
        lasting = self._lasting[name]
        return not lasting["said"] and (at_once or lasting["looks"] >= self.looks)


class Rows:
    """The rows of a look, by metric."""

    def __init__(self, rows: pl.DataFrame) -> None:
        self.by_metric: dict[str, list[dict[str, Any]]] = {}
        columns = ("layer", "head", "metric", "value", "samples", "broken")
        for row in rows.select(columns).iter_rows(named=True):
            self.by_metric.setdefault(row["metric"], []).append(row)

    def one_of(self, metrics: Sequence[str]) -> str | None:
        """The first of these that was measured."""
        return next((name for name in metrics if name in self.by_metric), None)

    def layers(self, metric: str) -> dict[int, float]:
        """By layer, the mean over heads where it is by head; layers with a sample that is no number have
        none."""
        heads: dict[int, list[float]] = {}
        broken = self.broken(metric)
        for row in self.by_metric.get(metric, []):
            if row["layer"] is not None and row["value"] is not None and row["layer"] not in broken:
                heads.setdefault(row["layer"], []).append(row["value"])
        return {layer: sum(each) / len(each) for layer, each in sorted(heads.items())}

    def heads(self, metric: str) -> dict[int, dict[int, float]]:
        """By layer and head."""
        found: dict[int, dict[int, float]] = {}
        for row in self.by_metric.get(metric, []):
            if row["layer"] is not None and row["head"] is not None and row["value"] is not None:
                found.setdefault(row["layer"], {})[row["head"]] = row["value"]
        return found

    def broken(self, metric: str) -> dict[int, str]:
        """Layers with samples that are no numbers, and how many of them: "2 of 8"."""
        return {
            row["layer"]: f"{row['broken']} of {row['broken'] + row['samples']}"
            for row in self.by_metric.get(metric, [])
            if row["layer"] is not None and row["broken"]
        }


def _place(fault: Fault) -> str:
    return f"layer {fault.layer}" if fault.head is None else f"head {fault.head} of layer {fault.layer}"
