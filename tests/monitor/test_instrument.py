"""Instruments: one's own are read as those that are shipped, and one that fails takes no other with it."""

import warnings
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import rankscope
from rankscope import Monitor, plugins
from rankscope.errors import MonitorError, PluginWarning, TrainingWarning
from rankscope.live import OBSERVERS
from rankscope.monitor import INSTRUMENTS, Alarm, Instrument, MetricValues, default_rules
from rankscope.monitor.block_jacobians import BlockJacobians
from rankscope.monitor.embeddings import ProbeEmbeddings
from rankscope.monitor.measurement import UNMEASURED
from rankscope.monitor.probe import Probe
from rankscope.monitor.weight_gradients import WeightGradients
from rankscope.monitor.weight_spectra import WeightSpectra
from tests.monitor.small import encoder, loss_of, tokens
from tests.raising import raises
from tests.strangers import installed


class Counter(Instrument):
    """Counts its measurements, and does what it is told to at each of its steps."""

    metrics = ("count",)

    def __init__(self, name: str = "counter", fails: str = "") -> None:
        self.name, self.fails, self.count, self.recorded, self.closed = name, fails, 0, list[bool](), False

    def unless(self, method: str) -> None:
        if self.fails == method:
            raise ZeroDivisionError(method)

    def attach(self) -> None:
        self.unless("attach")

    def record(self, on: bool) -> None:
        self.unless("record")
        self.recorded.append(on)

    def read(self, step: int) -> MetricValues:
        self.unless("read")
        self.count += 1
        values = MetricValues()
        values.add(None, f"{self.name} count", self.count)
        values.add(1, f"{self.name} of samples", torch.arange(4.0), torch.ones(4))
        if self.fails == "shape":
            values.add(0, "cube", torch.zeros(2, 2, 2))
        if self.fails == "name":
            values.add(1, "mu", 0.0)
        return values

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.unless("load_state_dict")
        self.count = state.get("count", 0)

    def close(self) -> None:
        self.closed = True
        self.unless("close")


def trained(run: Path, options: dict[str, Any], steps: int = 3) -> tuple[Monitor, list[torch.Tensor]]:
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "gradients" in options:
        options = {"instruments": [*options["instruments"], WeightGradients(optimizer)]}
    with Monitor(model, "mu", 1, run=run, **options) as monitor:
        for step in range(steps):
            loss_of(model, tokens(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=step)
    return monitor, list(model.parameters())


def rows(run: Path) -> pl.DataFrame:
    return rankscope.read(run).tables["training"]


def test_readings_of_ones_own_are_in_the_table_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    counter, told, options = Counter(), list[float](), dict[str, Any]()
    writers = [lambda measurement: told.extend(measurement.rows.filter(metric="counter count")["value"])]
    model = encoder()
    options |= {"probe": tokens(99), "run": tmp_path / "run", "alarms": ()}
    with Monitor(model, "mu", 2, **options, instruments=[counter], writers=writers) as monitor:
        for _ in range(4):
            monitor.step()
        state = monitor.state_dict()
        monitor.step(6)
    assert counter.closed and told == [1.0, 2.0, 3.0, 4.0] and counter.recorded[:3] == [True, True, False]
    again = Counter()
    with Monitor(model, "mu", 2, **options, instruments=[again]) as monitor:
        monitor.load_state_dict(state)
        monitor.step(6)
    assert rows(tmp_path / "run").filter(metric="counter count")["value"].to_list() == [1.0, 2.0, 3.0, 4.0]
    first = rows(tmp_path / "run").filter(metric="counter of samples", step=0).row(0, named=True)
    assert (first["layer"], first["value"], first["samples"], first["floor"]) == (1, 1.5, 4, 1.0)


def test_switches_are_instruments(tmp_path: Path) -> None:
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    switches: dict[str, Any] = {"probe": tokens(99), "spectra": True, "jacobians": True, "embeddings": "mean"}
    made = [WeightSpectra(), BlockJacobians(), ProbeEmbeddings(), Probe(tokens(99))]
    for name, options in {"switches": switches, "named": {"instruments": ["spectra", "jacobians"]}}.items():
        given = options if name == "switches" else {"instruments": [*options["instruments"], *made[2:]]}
        with Monitor(model, "mu", 1, run=tmp_path / name, optimizer=optimizer, **given) as monitor:
            monitor.step()
    with Monitor(model, "mu", 1, run=tmp_path / "made", instruments=[*made[:3], Probe(tokens(99))]) as monitor:
        monitor.step()
    order = ["layer", "metric", "value"]
    named, switched = (rows(tmp_path / name).select(order).sort(order) for name in ("named", "switches"))
    assert named.equals(switched)
    assert {*rows(tmp_path / "made")["metric"]} == {*named["metric"]} - {"lr"} - {
        name for name in named["metric"] if name.startswith(("grad_", "update_"))
    }


@pytest.mark.parametrize("fails", ["attach", "record", "read", "shape", "name", "load_state_dict", "close"])
def test_one_that_fails_from_the_start_is_said_and_the_rest_is_measured(fails: str, tmp_path: Path) -> None:
    sick, after = Counter("sick", fails), Counter("after")
    with pytest.warns(TrainingWarning, match="the instrument 'sick' is not") as warned:
        _, weights = trained(tmp_path, {"probe": tokens(99), "instruments": [sick, after]})
        if fails == "load_state_dict":
            with Monitor(encoder(), "mu", 1, tokens(99), instruments=[sick], run=tmp_path, step=2):
                pass
    assert len(warned) == 1
    table = rows(tmp_path)
    assert {"mu", "after count"} <= {*table["metric"]}
    assert table.filter(metric="mu")["step"].unique().to_list()[:3] == [0, 1, 2]
    assert ("sick count" in table["metric"]) == (fails in ("record", "load_state_dict", "close"))
    assert UNMEASURED in rankscope.read(tmp_path).tables["alarms"]["rule"]
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, tokens(step)).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_an_instrument_with_alarms_is_a_rule(tmp_path: Path) -> None:
    class Loud(Counter):
        def on_measurement(self, rows: pl.DataFrame, step: int) -> list[Alarm]:
            high = rows.filter(metric="counter count")["value"].item() > 2
            return [Alarm(step, step, self.name, None, None, "warn", "It counts.")] if high else []

    with pytest.warns(TrainingWarning, match="It counts"):
        trained(tmp_path, {"probe": tokens(99), "instruments": [Loud()]})
    assert rankscope.read(tmp_path).tables["alarms"]["step"].to_list() == [2, 3]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["spektra"], "did you mean 'spectra'"),
        ([3], "received a int"),
        ([WeightSpectra], "received WeightSpectra"),
        ([Counter(), Counter()], "two are 'counter'"),
        ("spectra", "instruments must be a list"),
    ],
)
def test_what_is_no_instrument_is_refused(given: Any, names: str, tmp_path: Path) -> None:
    with raises(MonitorError, subject="instruments") as caught:
        Monitor(encoder(), "mu", 1, tokens(99), instruments=given, run=tmp_path / "run")
    assert names in str(caught.value) and not (tmp_path / "run").exists()


def test_an_instrument_of_a_package_is_found_by_its_name(tmp_path: Path) -> None:
    with installed(tmp_path / "site", "whole"):
        assert list(INSTRUMENTS) == ["spectra", "jacobians", "embeddings", "paths", "largest weight"]
        trained(tmp_path / "run", {"instruments": ["largest weight"]}, 2)
    assert rows(tmp_path / "run").filter(metric="largest_weight")["layer"].to_list() == [1, 2, 3] * 2


STRANGE = """
from contextlib import contextmanager
from rankscope.monitor import AlarmRule

class Rule(AlarmRule):
    name, advice = "strange", ""
    def faults(self, rows):
        raise OSError("no rule")

class Observer:
    def applies(self, model, blocks):
        return True
    @contextmanager
    def attach(self, blocks, on_attention):
        raise OSError("no attention")
        yield

observer = Observer()
"""


def test_a_rule_and_an_observer_of_a_package_that_fail_take_nothing_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "strange-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "strange_parts.py").write_text(STRANGE)
    lines = ["[rankscope.alarms]", "rule = strange_parts:Rule", "[rankscope.observers]", "o = strange_parts:observer"]
    (info / "entry_points.txt").write_text("\n".join(lines))
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path / "site")
        plugins.refresh()
        assert len(OBSERVERS) == 5 and default_rules()[-1].name == "strange"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with Monitor(encoder(), ["mu", "entropy"], 1, tokens(99), run=tmp_path / "run") as monitor:
                monitor.step()
                notes = monitor.notes
        kinds = [each.category for each in said]
        assert kinds.count(PluginWarning) == 1 and kinds.count(TrainingWarning) == 1
    plugins.refresh()
    assert any("attention is not seen by Observer, of a plugin: OSError: no attention" in note for note in notes)
    assert any("(strange) fails since step 0: OSError: no rule" in note for note in notes)
    assert rows(tmp_path / "run").group_by("metric").len().sort("metric").rows() == [("entropy", 12), ("mu", 8)]
