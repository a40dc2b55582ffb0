"""Once a measurement has succeeded no error reaches the training: it is an alarm that waits while the disk is full."""

import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor

import rankscope
from rankscope import Monitor
from rankscope.errors import FileError, MonitorError, TrainingWarning
from rankscope.monitor import Alarm, Measurement, default_rules
from rankscope.monitor.alarm_rules import TokenSize
from rankscope.monitor.measurement import UNMEASURED, Failures
from rankscope.monitor.writers import JSONLines
from tests.full_disk import full_disk
from tests.monitor import training
from tests.monitor.small import encoder, loss_of, tokens
from tests.raising import raises


def test_a_failure_is_one_alarm_while_it_lasts() -> None:
    steps = [0]
    failures = Failures(lambda: steps[-1])

    def at(step: int, fails: bool = True) -> None:
        steps.append(step)
        with failures.contained("it fails"):
            if fails:
                raise ValueError("no\nmore")

    with pytest.raises(ValueError, match="no"):
        at(0)
    assert not failures.take()
    failures.measured = True
    at(0, fails=False)
    with pytest.warns(TrainingWarning) as warned:
        at(1)
        at(2)
    assert len(warned) == 1 and [(alarm.step, alarm.since) for alarm in failures.take()] == [(1, 0)]
    assert failures.sentences == {"it fails": "Step 2: it fails since step 0: ValueError: no. The training goes on."}
    at(3, fails=False)
    assert not failures.sentences
    with pytest.warns(TrainingWarning):
        at(4)
    assert [(alarm.step, alarm.since) for alarm in failures.take()] == [(4, 3)] and not failures.take()


def table(run: Path) -> pl.DataFrame:
    return rankscope.read(run).tables["training"]


class Ailing(torch.nn.Module):
    """A model that cannot be called while it is ill."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.ill = encoder(), False

    def forward(self, X: Tensor) -> Tensor:
        if self.ill:
            raise ValueError("no memory is left")
        return self.encoder(X)


def alarms(run: Path) -> list[dict[str, Any]]:
    return rankscope.read(run).tables["alarms"].to_dicts()


def test_a_measurement_that_fails_later_is_an_alarm_and_training_goes_on(tmp_path: Path) -> None:
    model = Ailing()
    with Monitor(model, "mu", 10, tokens(99), run=tmp_path, alarms=()) as monitor:
        monitor.step(10, loss=1.0)
        model.ill = True
        with pytest.warns(TrainingWarning) as warned:
            monitor.step(20, loss=2.0)
            monitor.step(30)
            assert monitor.measure_now() is None
        assert len(warned) == 1 and len(monitor.notes) == 1
        model.ill = False
        monitor.step(40, loss=4.0)
        assert not monitor.notes
        model.ill = True
        with pytest.warns(TrainingWarning):
            monitor.step(50)
    rows = table(tmp_path)
    assert rows.filter(metric="mu")["step"].unique().sort().to_list() == [0, 10, 40]
    assert rows.filter(metric="loss")["value"].to_list() == [1.0, 2.0, 4.0]  # one of step 20 that was read all the same
    said = [(row["rule"], row["step"], row["since"]) for row in alarms(tmp_path)]
    assert said == [(UNMEASURED, 20, 10), (UNMEASURED, 50, 40)]


def test_a_step_that_cannot_be_counted_is_an_alarm_and_training_goes_on(tmp_path: Path) -> None:
    with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path) as monitor:
        monitor.step(2)
        with pytest.warns(TrainingWarning):
            monitor.step(1)
        monitor.step(4)
        with pytest.warns(TrainingWarning):
            monitor.step(6, loss="low")
        monitor.step(8)
    assert table(tmp_path)["step"].unique().sort().to_list() == [0, 2, 4, 8]


class Sick(list[str]):
    """The instruments of a monitor that are made to fail, and a GPT-2 under that monitor, which reads all it can."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.model: Any = training.gpt2().eval()
        self.model.transformer.h[0].mlp.unused = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model.register_forward_pre_hook(lambda *_: self.unless("the probe"))
        self.model.transformer.h[0].register_forward_hook(
            lambda module, args, output: output + torch.randn(()) if "Jacobians of blocks" in self else output
        )
        self.monitor = Monitor(
            self.model, "mu", 1, training.probe(), run=run, optimizer=self.optimizer, spectra=True, jacobians=True,
            embeddings=lambda output: self.unless("embeddings", output.logits.mean(1)), paths_every=1,
            loss=lambda output: self.unless("gradients at the probe's tokens", output.logits.square().mean()),
        )  # fmt: skip

    def unless(self, instrument: str, gives: Any = None) -> Any:
        if instrument in self:
            raise ValueError("it is ill")
        return gives

    def step(self, *failing: str) -> None:
        ids, mlp = training.batch(1), self.model.transformer.h[0].mlp
        mlp.unused.weight.data = torch.ones(2, 2)
        training.loss_of(self.model(ids).logits, ids).backward()
        self.extend(failing)
        if "gradients and updates of weights" in self:
            mlp.c_fc.weight.grad = mlp.c_fc.weight.grad.to_sparse()  # which has no norm by output
        self.optimizer.step()
        if "spectra of weights" in self:
            mlp.unused.weight.data = mlp.unused.weight.data[:0]
        self.monitor.step(loss=torch.ones(2, 2, 2) if "numbers given to monitor.step" in self else 0.5)
        self.clear()


def read_at(run: Path, step: int) -> set[str]:
    return {*table(run).filter(pl.col("value").is_not_null(), step=step)["metric"]}


JACOBIANS, PATHS = {"jacobian_norm", "jacobian_alignment"}, {"paths_0", "paths_1", "paths_2"}


@pytest.mark.parametrize(
    ("failing", "gone"),
    {
        "the probe": {"mu", "grad_tokens", "rankme", "uniformity"} | JACOBIANS,
        "Jacobians of blocks": JACOBIANS | PATHS,  # the copy that paths are of is compared with the model as well
        "embeddings": {"rankme", "uniformity"},
        "gradients at the probe's tokens": {"grad_tokens"},
        "gradients and updates of weights": {
            f"{kind}_{group}" for kind in ("grad", "update") for group in ("query_key", "value_output", "mlp")
        },
        "spectra of weights": {
            f"{kind}_{group}"
            for kind in ("spectral_norm", "stable_rank")
            for group in ("query_key", "value_output", "mlp")
        },
        "numbers given to monitor.step": {"loss"},
    }.items(),
)
def test_an_instrument_that_fails_takes_no_other_with_it(failing: str, gone: set[str], tmp_path: Path) -> None:
    sick = Sick(tmp_path)
    with sick.monitor as monitor:
        sick.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingWarning)
            sick.step(failing)
        assert any(failing in note for note in monitor.notes)
        sick.step()
    assert read_at(tmp_path, 1) - read_at(tmp_path, 2) == gone
    for_good = JACOBIANS | ({"grad_tokens"} if failing.startswith("gradients at") else set())  # are given up
    assert gone - for_good <= read_at(tmp_path, 3)


def test_training_batches_that_fail_take_no_other_with_them(tmp_path: Path) -> None:
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, "mu", 1, run=tmp_path, optimizer=optimizer, spectra=True, alarms=()) as monitor:
        loss_of(model, tokens(0)).backward()
        optimizer.step()
        monitor.step(loss=1.0)
        optimizer.step()
        with pytest.warns(TrainingWarning):
            monitor.step(loss=2.0)  # the model was not called
    assert read_at(tmp_path, 1) - read_at(tmp_path, 2) == {"mu", "grad_tokens"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("probed", [True, False])
def test_one_weight_that_is_no_number_stops_a_training_at_once(bad: float, probed: bool, tmp_path: Path) -> None:
    model = encoder()
    options: Any = {"probe": tokens(99) if probed else None, "spectra": True, "jacobians": probed}
    options |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "embeddings": "mean" if probed else None}
    with Monitor(model, ["mu", "relative_mu"], 1, run=tmp_path, alarms=default_rules("stop"), **options) as monitor:
        for step in range(4):
            if step == 2:
                model.layers[1].linear1.weight.data[3, 2] = bad
            loss_of(model, tokens(step)).backward()
            with pytest.warns(TrainingWarning) if step == 2 else nullcontext():
                monitor.step()
            if monitor.should_stop:
                break
    assert step == 2 and {(row["rule"], row["since"]) for row in alarms(tmp_path)} >= {(TokenSize.name, 3)}
    last = table(tmp_path).filter(step=3)
    assert last.filter(metric="mu").select(pl.col("broken") > 0)["broken"].to_list() == [False, False, True, True]
    assert last.filter(metric="spectral_norm_mlp").sort("layer")["value"].is_null().to_list() == [False, True, False]


class Fickle:
    """A writer and a rule that fails at these steps."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.seen = steps, list[int]()

    def __call__(self, measurement: Measurement) -> None:
        self.on_measurement(measurement.rows, measurement.step)

    def on_measurement(self, rows: pl.DataFrame, step: int) -> list[Alarm]:
        if step in self.steps:
            raise ConnectionError("the server is away")
        self.seen.append(step)
        return []


@pytest.mark.parametrize("place", ["writers", "alarms"])
def test_a_writer_or_a_rule_that_fails_takes_nothing_else_with_it(place: str, tmp_path: Path) -> None:
    before, fickle, after = Fickle(), Fickle(2, 4), Fickle()
    options: dict[str, Any] = {"alarms": (), place: [before, fickle, after]}
    monitor = Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, **options)
    with monitor, pytest.warns(TrainingWarning) as warned:
        for _ in range(8):
            monitor.step()
    assert len(warned) == 1
    assert before.seen == after.seen == [0, 2, 4, 6, 8] and fickle.seen == [0, 6, 8]
    assert table(tmp_path)["step"].unique().sort().to_list() == [0, 2, 4, 6, 8]
    assert [(row["rule"], row["since"]) for row in alarms(tmp_path)] == [(UNMEASURED, 0)]


class High:
    """A rule that raises one alarm, at step 4."""

    name = "high"

    def on_measurement(self, rows: pl.DataFrame, step: int) -> list[Alarm]:
        return [Alarm(step, step, "high", None, None, "call", "High.")] if step == 4 else []


def test_alarms_of_the_step_at_which_a_rule_fails_are_written(tmp_path: Path) -> None:
    monitor = Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, alarms=[Fickle(4), High()])
    with monitor, pytest.warns(TrainingWarning):
        monitor.step(4)
    assert [(row["step"], row["rule"]) for row in alarms(tmp_path)] == [(4, UNMEASURED), (4, "high")]


def test_a_writer_that_fails_when_it_is_closed_is_an_alarm(tmp_path: Path) -> None:
    class Unclosed(Fickle):
        def close(self) -> None:
            raise ConnectionError("the server is away")

    monitor = Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, alarms=(), writers=[Unclosed()])
    monitor.step()
    with pytest.warns(TrainingWarning):
        monitor.close()
    assert [row["rule"] for row in alarms(tmp_path)] == [UNMEASURED]


def test_a_monitor_that_was_closed_writes_no_more(tmp_path: Path) -> None:
    first = Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, alarms=())
    first.close()
    with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, alarms=(), step=1) as second:
        second.step(2, loss=1.0)
        with pytest.warns(TrainingWarning) as warned:
            first.step(4, loss=2.0)
            first.step(6, loss=2.0)
        second.step(4, loss=3.0)
    assert len(warned) == 1 and not alarms(tmp_path)
    assert table(tmp_path).filter(metric="loss")["value"].to_list() == [1.0, 3.0]


def test_a_writer_that_fails_from_the_start_is_raised_and_the_folder_is_free(tmp_path: Path) -> None:
    model = encoder()
    with pytest.raises(ConnectionError):
        Monitor(model, "mu", 2, tokens(99), run=tmp_path, writers=[Fickle(0)])
    with Monitor(model, "mu", 2, tokens(99), run=tmp_path) as monitor:
        monitor.resume(0)
    assert table(tmp_path)["step"].unique().to_list() == [0]


def test_a_disk_that_is_full_from_the_start_is_one_sentence_and_the_folder_is_free(tmp_path: Path) -> None:
    for room in (0, 50, 1000):
        with raises(FileError) as caught, full_disk(room):
            Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path / str(room))
        assert len(str(caught.value).splitlines()) == 1
        with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path / str(room)) as monitor:
            monitor.step(2)
        assert table(tmp_path / str(room))["step"].unique().sort().to_list() == [0, 2]


def test_a_disk_that_is_full_for_a_moment_loses_that_moment_alone(tmp_path: Path) -> None:
    writer, reported = JSONLines(tmp_path / "lines.jsonl"), list[str]()
    writers: list[Any] = [writer, lambda measurement: reported.extend(alarm.rule for alarm in measurement.alarms)]
    with Monitor(encoder(), "mu", 1, tokens(99), run=tmp_path / "run", writers=writers, alarms=[High()]) as monitor:
        for step in range(1, 9):
            if step in (4, 5):
                room = min(path.stat().st_size for path in (writer.path, tmp_path / "run/training/journal.jsonl"))
                with full_disk(room + 20), pytest.warns(TrainingWarning) if step == 4 else full_disk(room + 20):
                    monitor.step()
            else:
                monitor.step()
        following = rankscope.read(tmp_path / "run").tables["training"]["step"].unique().sort().to_list()
    assert following == [0, 1, 2, 3, 6, 7, 8] == table(tmp_path / "run")["step"].unique().sort().to_list()
    assert [json.loads(line)["step"] for line in writer.path.read_text().splitlines()] == following
    said = [(row["rule"], row["since"]) for row in alarms(tmp_path / "run")]
    assert said == [("high", 4), (UNMEASURED, 3), (UNMEASURED, 3)]  # of the rule, the folder and the file
    assert reported == ["high"]


def test_the_functions_of_alarms_are_the_users_own(tmp_path: Path) -> None:
    class Interrupting(High):
        def action(self, alarm: Alarm) -> None:
            raise InterruptedError

    with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, alarms=[Interrupting()]) as monitor:
        monitor.step(2)
        with pytest.raises(InterruptedError):
            monitor.step(4)


def test_a_probe_is_tried_when_a_run_is_resumed_not_in_mid_training(tmp_path: Path) -> None:
    model = Ailing()
    with Monitor(model, "mu", 10, tokens(99), run=tmp_path) as monitor:
        monitor.step(10)
    model.ill = True
    with raises(MonitorError, subject="probe"):
        Monitor(model, "mu", 10, tokens(99), run=tmp_path, step=10)
