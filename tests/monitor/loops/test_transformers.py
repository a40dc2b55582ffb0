"""The monitor in a Hugging Face Trainer: it changes nothing; a resumed run has the table of a whole one."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import rankscope
from rankscope.errors import MonitorError
from rankscope.monitor import Measurement
from rankscope.monitor.loops.transformers import MonitorCallback
from tests.monitor.loops import tasks
from tests.raising import raises

METRICS = ["relative_mu", "entropy"]


class Losses(TrainerCallback):
    """Every loss that Trainer logs."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        self.seen += [logs["loss"]] if "loss" in logs else []


def trainer(folder: Path, *callbacks: TrainerCallback, texts: int = 40, **settings: Any) -> Trainer:
    given = {"max_steps": 12, "logging_steps": 1, "save_strategy": "no", "per_device_train_batch_size": 2}
    args = TrainingArguments(str(folder), report_to=[], disable_tqdm=True, use_cpu=True, **{**given, **settings})
    return Trainer(
        tasks.model(), args, train_dataset=tasks.Texts(texts), eval_dataset=tasks.Texts(4), callbacks=list(callbacks)
    )


def table(run: Path) -> pl.DataFrame:
    return rankscope.read(run).tables["training"]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}, id="accumulated, checkpointed"
        ),
        pytest.param({"bf16": True}, marks=pytest.mark.slow, id="bf16"),
    ],
)
def test_losses_and_weights_are_the_same_to_the_last_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    losses: list[list[float]] = []
    trained: list[Any] = []
    monitor = MonitorCallback(metrics=METRICS, probe=tasks.probe(), every=5, run=tmp_path / "run")
    for callbacks in ([], [monitor]):
        seen = Losses()
        one = trainer(tmp_path, seen, *callbacks, max_steps=10, learning_rate=1e-3, **settings)
        one.train()
        losses.append(seen.seen)
        trained.append(one.model)
    assert len(losses[0]) == 10 and len(set(losses[0])) > 7
    assert losses[0] == losses[1]
    assert tasks.same(*trained)
    rows = table(tmp_path / "run")
    assert rows["step"].unique().sort().to_list() == [0, 5, 10]
    # The loss of a measurement is the mean of what Trainer logged since the last.
    shown = rows.filter(pl.col("metric") == "loss").sort("step")["value"].to_list()
    assert shown == pytest.approx([sum(losses[0][k : k + 5]) / 5 for k in range(0, 10, 5)], rel=1e-12)


@pytest.mark.slow
def test_the_probe_is_read_in_the_arithmetic_of_the_training(tmp_path: Path) -> None:
    """`bf16=True` is autocast in the model's forward: step 0 is what `watch` sees under autocast."""
    monitor = MonitorCallback(metrics=METRICS, probe=tasks.probe(), every=10, run=tmp_path / "run")
    one = trainer(tmp_path, monitor, max_steps=1, bf16=True)
    one.train()
    found = table(tmp_path / "run").filter((pl.col("step") == 0) & (pl.col("metric") == "relative_mu"))
    means = {}
    for on in (True, False):
        fresh = tasks.model().eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=on), rankscope.watch(fresh) as w:
            fresh(**tasks.probe())
        means[on] = w.profile().curve("relative_mu").mean(0).tolist()
    assert found.sort("layer")["value"].to_list() == pytest.approx(means[True], rel=1e-12)
    assert means[True][1:] != pytest.approx(means[False][1:], rel=1e-6)


@pytest.mark.slow
def test_the_learning_rate_of_a_look_is_that_of_its_steps(tmp_path: Path) -> None:
    monitor = MonitorCallback(metrics=METRICS, probe=tasks.probe(), every=2, run=tmp_path / "run")
    trainer(tmp_path, monitor, max_steps=4, learning_rate=1e-3, lr_scheduler_type="linear").train()
    rows = table(tmp_path / "run").filter(pl.col("metric") == "lr").sort("step")
    assert rows["value"].to_list() == pytest.approx([1e-3 * (1 + 0.75) / 2, 1e-3 * (0.5 + 0.25) / 2])


@pytest.mark.slow
@pytest.mark.parametrize("logged", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_gradients_and_updates_are_those_of_trainers_optimiser(tmp_path: Path, logged: int) -> None:
    """Clipped, and where nothing was logged the learning rate is the optimiser's own."""

    class Around(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.steps = tasks.Steps(given["model"].transformer.h)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.steps.begins()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.steps.ends()

    around, run = Around(), tmp_path / "run"
    monitor = MonitorCallback(metrics=METRICS, probe=tasks.probe(), every=2, run=run)
    settings = {"max_steps": 4, "logging_steps": logged, "gradient_accumulation_steps": 2}
    trainer(tmp_path, monitor, around, **settings, max_grad_norm=0.01, learning_rate=1e-3).train()
    around.steps.hold(table(run), every=2)
    assert max(map(max, around.steps.gradients)) < 0.01
    assert table(run).filter(metric="lr")["step"].to_list() == [2, 4]
    assert table(run).filter(metric="loss")["step"].to_list() == ([2, 4] if logged == 1 else [4])


@pytest.mark.slow
@pytest.mark.parametrize("killed", [7, pytest.param(11, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_table_of_an_undisturbed_one(tmp_path: Path, killed: int) -> None:
    """Checkpoints every 3 steps, measurements every 4: some losses of a measurement come from before
    the checkpoint."""

    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == killed:
                raise KeyboardInterrupt

    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-3}

    def run(name: str, *more: TrainerCallback, resume: bool = False) -> MonitorCallback:
        monitor = MonitorCallback(metrics=METRICS, probe=tasks.probe(), every=4, run=tmp_path / name)
        one = trainer(tmp_path / f"{name}-checkpoints", monitor, *more, texts=10, **settings)
        try:
            one.train(resume_from_checkpoint=resume)
        except KeyboardInterrupt:
            monitor.close()
        return monitor

    run("whole")
    run("broken", Kill())
    assert table(tmp_path / "broken")["step"].max() == killed - killed % 4
    run("broken", resume=True)
    assert table(tmp_path / "broken").equals(table(tmp_path / "whole"))


@pytest.mark.slow
def test_a_new_training_does_not_write_over_an_old_one(tmp_path: Path) -> None:
    options = {"metrics": METRICS, "probe": tasks.probe(), "every": 2, "run": tmp_path / "run"}
    trainer(tmp_path, MonitorCallback(**options), max_steps=4).train()
    again = MonitorCallback(**options)
    with raises(MonitorError, subject="run"):
        trainer(tmp_path, again, max_steps=4).train()
    again.close()
    assert table(tmp_path / "run")["step"].max() == 4


@pytest.mark.parametrize("name", ["evry", "model", "step"])
def test_an_option_that_the_monitor_does_not_have_is_refused_at_once(name: str) -> None:
    with raises(MonitorError, subject=name):
        MonitorCallback(**{name: 10})


@pytest.mark.slow
def test_a_monitor_that_comes_later_begins_where_the_checkpoint_stands(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=4).train()
    monitor = MonitorCallback(metrics=METRICS, probe=tasks.probe(), every=4, run=tmp_path / "run")
    trainer(tmp_path, monitor, max_steps=8).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert table(tmp_path / "run")["step"].unique().sort().to_list() == [4, 8]


@pytest.mark.slow
def test_training_ends_where_the_monitor_says_so(tmp_path: Path) -> None:
    measured = []

    def stop(measurement: Measurement) -> None:
        measured.append(measurement.step)
        assert monitor.monitor is not None or measurement.step == 0
        if measurement.step == 6 and monitor.monitor is not None:
            monitor.monitor.should_stop = True

    monitor = MonitorCallback(metrics=METRICS, probe=tasks.probe(), every=3, run=tmp_path / "run", writers=[stop])
    one = trainer(tmp_path, monitor, max_steps=12)
    one.train()
    assert one.state.global_step == 6 and measured == [0, 3, 6]


SLOW = pytest.param(METRICS, marks=pytest.mark.slow, id="of attention")


@pytest.mark.slow
@pytest.mark.parametrize("metrics", [pytest.param("relative_mu", id="of tokens"), SLOW])
def test_training_batches_are_measured_and_those_of_evaluation_are_not(tmp_path: Path, metrics: Any) -> None:
    """Losses are logged at every second measurement."""
    monitor = MonitorCallback(metrics=metrics, every=2, run=tmp_path / "run")
    evaluated: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
    steps = {"max_steps": 8, "logging_steps": 4, "gradient_accumulation_steps": 2}
    trainer(tmp_path, monitor, **steps, **evaluated).train()
    rows = table(tmp_path / "run")
    states = rows.filter((pl.col("metric") == "relative_mu") & (pl.col("layer") == 1))
    assert states["samples"].to_list() == [4, 4, 4, 4]  # two batches of two in each step that is looked at
    assert rows.filter(pl.col("metric") == "loss")["step"].to_list() == [4, 8]


def test_options_without_their_names_are_refused_at_once() -> None:
    for given in ((tasks.probe(),), ("mu", tasks.probe())):
        with raises(MonitorError, subject="options"):
            MonitorCallback(*given)
    with raises(MonitorError, subject="options"):
        MonitorCallback("mu", metrics="mu")
    assert MonitorCallback("mu", every=3).options == {"metrics": "mu", "every": 3}


@pytest.mark.slow
def test_the_trainer_may_choose_and_stop_by_what_is_measured(tmp_path: Path) -> None:
    name = "relative_mu/layer_02"
    monitor = MonitorCallback(metrics="relative_mu", probe=tasks.probe(), every=2, run=tmp_path / "run")
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings |= {"metric_for_best_model": name, "load_best_model_at_end": True, "greater_is_better": True}
    one = trainer(tmp_path, monitor, EarlyStoppingCallback(1, 1e9), max_steps=12, learning_rate=1e-3, **settings)
    one.train()
    assert one.state.global_step == 4  # nothing grows by 1e9: the second evaluation ends it
    values = table(tmp_path / "run").filter(metric="relative_mu", layer=2).sort("step")["value"].to_list()
    assert one.state.best_metric == max(values[1:])
