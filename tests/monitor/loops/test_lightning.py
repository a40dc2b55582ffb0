"""The monitor in a Lightning Trainer: it changes nothing, and a resumed run has the table of a whole one."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import polars
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

import rankscope
from rankscope.errors import MonitorError
from rankscope.monitor import Measurement
from rankscope.monitor.loops.lightning import LightningMonitor
from tests.monitor.loops import tasks
from tests.raising import raises

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*is deprecated"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
METRICS = ["relative_mu", "entropy"]


class Learner(pl.LightningModule):
    """The tiny GPT-2, and every loss that its steps had."""

    def __init__(self, checkpointed: bool = False, dropout: float = 0.1, dies_at: int | None = None) -> None:
        super().__init__()
        self.model = tasks.model(dropout)
        self.losses: list[float] = []
        self.dies_at = dies_at
        if checkpointed:
            self.model.gradient_checkpointing_enable()

    def forward(self, **given: Tensor) -> Any:
        return self.model(**given)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        if self.dies_at == self.global_step:
            raise RuntimeError("the power is gone")
        loss = self(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self(**batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(
    learner: Learner, folder: Path, *callbacks: pl.Callback, steps: int = 12, resume: Path | None = None, **more: Any
) -> pl.Trainer:
    torch.manual_seed(3)
    more = {"limit_val_batches": 0 if "val_check_interval" not in more else 2, **more}
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, default_root_dir=folder,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        callbacks=list(callbacks), **quiet, **more,
    )  # fmt: skip
    training, validation = (DataLoader(tasks.Texts(number), batch_size=2) for number in (6, 4))
    trainer.fit(learner, training, validation, ckpt_path=resume, weights_only=False)
    return trainer


def table(run: Path) -> polars.DataFrame:
    return rankscope.read(run).tables["training"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulated", "checkpointed", "precision"),
    [(2, False, "bf16-mixed"), pytest.param(2, True, "32-true", marks=pytest.mark.slow)],
)
def test_losses_and_weights_are_the_same_to_the_last_bit(
    tmp_path: Path, accumulated: int, checkpointed: bool, precision: Any
) -> None:
    learners = []
    monitor = LightningMonitor(metrics=METRICS, probe=tasks.probe(), every=5, run=tmp_path / "run")
    for callbacks in ([], [monitor]):
        learners.append(Learner(checkpointed))
        fit(
            learners[-1], tmp_path, *callbacks,
            steps=20, precision=precision, accumulate_grad_batches=accumulated,
        )  # fmt: skip
    bare, watched = learners
    assert len(set(bare.losses)) > 20 and bare.losses == watched.losses
    assert tasks.same(bare, watched)
    rows = table(tmp_path / "run")
    assert rows["step"].unique().sort().to_list() == list(range(0, 21, 5))
    # Three batches in each epoch: two accumulated, then the last alone.
    steps = [bare.losses[k : k + n] for k in range(0, len(bare.losses), 3) for k, n in ((k, 2), (k + 2, 1))]
    means = [sum(each) / len(each) for each in steps]
    shown = rows.filter(polars.col("metric") == "loss").sort("step")["value"].to_list()
    assert shown == pytest.approx([sum(means[k : k + 5]) / 5 for k in range(0, 20, 5)], rel=1e-6)
    rates = rows.filter(polars.col("metric") == "lr").sort("step")["value"].to_list()
    assert rates[0] == pytest.approx(sum(1e-3 / n for n in range(1, 6)) / 5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_probe_is_read_in_the_arithmetic_of_the_training(tmp_path: Path, precision: Any) -> None:
    monitor = LightningMonitor(part="model", metrics="relative_mu", probe=tasks.probe(), every=10, run=tmp_path / "run")
    learner = Learner()
    fit(learner, tmp_path, monitor, steps=1, precision=precision)
    found = table(tmp_path / "run").filter((polars.col("step") == 0) & (polars.col("metric") == "relative_mu"))
    fresh = tasks.model().eval()
    mixed = precision == "bf16-mixed"
    fresh = fresh if mixed else fresh.to(torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed), rankscope.watch(fresh) as w:
        fresh(**tasks.probe())
    means = w.profile().curve("relative_mu").mean(0).tolist()
    assert found.sort("layer")["value"].to_list() == pytest.approx(means, rel=1e-12)


def test_gradients_and_updates_are_those_of_lightnings_optimiser(tmp_path: Path) -> None:
    """Lightning makes gradients inside of `optimizer.step(closure)`, and clips them there."""

    class Around(Learner):
        def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
            steps.begins()
            super().optimizer_step(epoch, index, optimizer, closure)
            steps.ends()

    learner, run = Around(), tmp_path / "run"
    steps = tasks.Steps(learner.model.transformer.h)
    monitor = LightningMonitor(metrics=METRICS, probe=tasks.probe(), every=2, run=run)
    fit(learner, tmp_path, monitor, steps=4, accumulate_grad_batches=2, gradient_clip_val=0.01)
    steps.hold(table(run), every=2)
    assert max(map(max, steps.gradients)) < 0.01
    assert table(run).filter(metric="lr")["step"].to_list() == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("dies_at", [7, pytest.param(11, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_table_of_an_undisturbed_one(tmp_path: Path, dies_at: int) -> None:
    """Checkpoints every three steps, the ends of epochs, measurements every four; the folder is released when
    it dies. Lightning does not restore generators: without dropout."""

    def run(name: str, dies_at: int | None = None, resume: Path | None = None) -> Path:
        monitor = LightningMonitor(metrics=METRICS, probe=tasks.probe(), every=4, run=tmp_path / name)
        saved = ModelCheckpoint(tmp_path / f"{name}-saved", "{step}", save_top_k=-1, every_n_train_steps=3)
        fit(Learner(dropout=0.0, dies_at=dies_at), tmp_path, monitor, saved, resume=resume)
        return tmp_path / f"{name}-saved"

    run("whole")
    with pytest.raises(RuntimeError, match="the power is gone"):
        run("broken", dies_at)
    assert table(tmp_path / "broken")["step"].max() == dies_at - dies_at % 4
    run("broken", resume=tmp_path / "broken-saved" / f"step={dies_at - dies_at % 3}.ckpt")
    assert table(tmp_path / "broken").equals(table(tmp_path / "whole"))


def test_training_ends_where_the_monitor_says_so(tmp_path: Path) -> None:
    measured = []

    def stop(measurement: Measurement) -> None:
        measured.append(measurement.step)
        if measurement.step == 6 and monitor.monitor is not None:
            monitor.monitor.should_stop = True

    monitor = LightningMonitor(metrics=METRICS, probe=tasks.probe(), every=3, run=tmp_path / "run", writers=[stop])
    trainer = fit(Learner(), tmp_path, monitor)
    assert trainer.global_step == 6 and measured == [0, 3, 6]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("metrics", ["relative_mu", METRICS], ids=["of tokens", "of attention"])
def test_training_batches_are_measured_and_those_of_validation_are_not(tmp_path: Path, metrics: Any) -> None:
    monitor = LightningMonitor(metrics=metrics, every=2, run=tmp_path / "run")
    fit(Learner(), tmp_path, monitor, steps=4, accumulate_grad_batches=3, val_check_interval=1)
    rows = table(tmp_path / "run")
    states = rows.filter((polars.col("metric") == "relative_mu") & (polars.col("layer") == 1))
    assert states["step"].to_list() == [2, 4]
    assert states["samples"].to_list() == [6, 6]  # three batches of two in each step that is looked at


def test_several_optimisers_make_a_step_together(tmp_path: Path) -> None:
    class Two(Learner):
        automatic_optimization = False

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = super().training_step(batch, index)
            self.manual_backward(loss)
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
            return loss

        def configure_optimizers(self) -> Any:
            halves = self.model.transformer.h.parameters(), self.model.transformer.wte.parameters()
            return [torch.optim.SGD(each, lr) for each, lr in zip(halves, (1e-2, 1e-3), strict=True)]

    learner, run = Two(), tmp_path / "run"
    fit(learner, tmp_path, LightningMonitor(metrics="relative_mu", every=2, run=run), steps=8)
    rows = table(run)
    assert rows.filter(metric="relative_mu", layer=1)["samples"].to_list() == [2, 2]
    losses = rows.filter(metric="loss")
    assert losses["step"].to_list() == [2, 4]
    assert losses["value"].to_list() == pytest.approx([sum(learner.losses[k : k + 2]) / 2 for k in (0, 2)])
    assert rows.filter(metric="lr")["value"].to_list() == [1e-2, 1e-2]
    assert (rows.filter(metric="grad_mlp")["value"] > 0).to_list() == [True] * 4


@pytest.mark.slow
def test_several_steps_of_one_optimiser_in_a_batch_count_by_that_stride(tmp_path: Path) -> None:
    class Thrice(Learner):
        automatic_optimization = False

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            optimizer: Any = self.optimizers()
            for _ in range(3):
                loss = super().training_step(batch, index)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    for name, probe in (("probe", tasks.probe()), ("inline", None)):
        monitor = LightningMonitor(metrics="relative_mu", probe=probe, every=4, run=tmp_path / name)
        fit(Thrice(), tmp_path, monitor, steps=15)
        rows = table(tmp_path / name)
        due = [6, 9, 12]
        assert rows.filter(metric="loss")["step"].to_list() == due
        states = rows.filter(metric="relative_mu", layer=1)
        assert states["step"].to_list() == ([0, *due] if name == "probe" else due)
        gradients = rows.filter(metric="grad_mlp", layer=1)
        assert gradients["step"].to_list() == due and (gradients["value"] > 0).all()


@pytest.mark.parametrize("options", [{"evry": 10}, {"model": 1}, {"part": 3}, {"part": "nowhere"}])
def test_a_wrong_argument_is_one_sentence(options: dict[str, Any], tmp_path: Path) -> None:
    with raises(MonitorError, subject=next(iter(options))):
        fit(Learner(), tmp_path, LightningMonitor(**options, run=tmp_path / "run"), steps=1)


def test_the_package_of_the_older_name_takes_it_too(tmp_path: Path) -> None:
    older = pytest.importorskip("pytorch_lightning")
    monitor = LightningMonitor(metrics=METRICS, probe=tasks.probe(), every=2, run=tmp_path / "run")

    class Older(older.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tasks.model()

        forward = Learner.forward
        configure_optimizers = Learner.configure_optimizers

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self(**batch).loss

    trainer = older.Trainer(
        accelerator="cpu", devices=1, max_steps=4, max_epochs=-1, default_root_dir=tmp_path,
        callbacks=[monitor], enable_checkpointing=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Older(), DataLoader(tasks.Texts(6), batch_size=2))
    assert table(tmp_path / "run")["step"].unique().sort().to_list() == [0, 2, 4]


def test_options_without_their_names_are_refused_at_once() -> None:
    for given in ((tasks.probe(),), ("mu", tasks.probe())):
        with raises(MonitorError, subject="options"):
            LightningMonitor(*given)
    with raises(MonitorError, subject="options"):
        LightningMonitor("mu", metrics="mu")
    assert LightningMonitor("mu", every=3).options == {"metrics": "mu", "every": 3}


def test_the_trainer_may_stop_by_what_is_measured(tmp_path: Path) -> None:
    name, run = "relative_mu/layer_02", tmp_path / "run"
    monitor = LightningMonitor(metrics="relative_mu", probe=tasks.probe(), every=2, run=run, part="model")
    stopping = EarlyStopping(name, patience=1, min_delta=1e9, check_on_train_epoch_end=True)
    trainer = fit(Learner(), tmp_path, monitor, stopping, steps=12)  # three steps in each epoch
    assert trainer.global_step == 6  # nothing falls by 1e9
    values = table(run).filter(metric="relative_mu", layer=2).sort("step")["value"].to_list()
    assert float(trainer.callback_metrics[name]) == pytest.approx(values[-1], rel=1e-6)
