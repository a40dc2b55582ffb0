"""Any stride of steps is measured and recorded; a folder with a run in it is continued; wrong arguments are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rankscope
from rankscope import Monitor
from rankscope.errors import FileError, MonitorError
from rankscope.live.processes import full_tensor, is_sharded
from rankscope.monitor.alarm_rules import GradientSize
from rankscope.monitor.probe import Probe
from rankscope.monitor.writers import JSONLines
from tests.monitor.small import encoder, loss_of, tokens
from tests.raising import raises

METRICS = {"tokens": "mu", "attention": ["mu", "entropy"]}
"""Of training batches read through operators, and through `watch`."""


def table(run: Path) -> pl.DataFrame:
    return rankscope.read(run).tables["training"]


def test_scalars_between_looks_are_in_the_state(tmp_path: Path) -> None:
    with Monitor(encoder(), "mu", every=4, probe=tokens(99), run=tmp_path) as monitor:
        monitor.step(loss=torch.tensor(1.0))
        state = monitor.state_dict()
    with Monitor(encoder(), "mu", every=4, probe=tokens(99), run=tmp_path) as again:
        again.load_state_dict(state)
        for _ in range(3):
            again.step(loss=5.0)
    assert table(tmp_path).filter(metric="loss")["value"].to_list() == [4.0]


@pytest.mark.parametrize("probe", [None, tokens(99)], ids=["inline", "probe"])
def test_a_default_device_of_the_loop_makes_no_difference(probe: Tensor | None, tmp_path: Path) -> None:
    """`torch.set_default_device("cuda")` is common; "meta" stands for a device that no number can be read from."""
    found = []
    for name, device in (("plain", "cpu"), ("elsewhere", "meta")):
        model, batch = encoder(), tokens(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options: dict[str, Any] = {"probe": probe, "optimizer": optimizer, "spectra": True, "run": tmp_path / name}
        metrics = ["mu", "relative_residual", "entropy"]
        with torch.device(device), Monitor(model, metrics, every=1, **options) as monitor:
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                monitor.step(loss=0.5)
        found.append(table(tmp_path / name))
    assert found[0].equals(found[1])


def test_a_folder_with_a_run_in_it_asks_from_where(tmp_path: Path) -> None:
    with Monitor(encoder(), "mu", every=2, probe=tokens(99), run=tmp_path) as monitor:
        monitor.step(2)
    with Monitor(encoder(), "mu", every=2, probe=tokens(99), run=tmp_path) as again:
        with raises(MonitorError, subject="run"):
            again.step()
        with raises(MonitorError, subject="run"):
            again.measure_now()
        again.resume(2)
        again.step()
    assert table(tmp_path)["step"].unique().sort().to_list() == [0, 2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("probe", [None, tokens(99)], ids=["inline", "probe"])
@pytest.mark.parametrize(("stride", "every"), [(10, 10), (3, 1), (4, 10)])
def test_a_loop_may_count_by_any_stride(
    kind: str, probe: Tensor | None, stride: int, every: int, tmp_path: Path
) -> None:
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given: dict[str, Any] = {"probe": probe, "optimizer": optimizer, "run": tmp_path}
    with Monitor(model, METRICS[kind], every, **given) as monitor:
        for step in range(stride, 10 * stride + 1, stride):
            optimizer.zero_grad()
            loss_of(model, tokens(step)).backward()
            optimizer.step()
            monitor.step(step)
    due = [k for k in range(stride, 10 * stride + 1, stride) if k // every > (k - stride) // every]
    rows = table(tmp_path)
    assert rows.filter(metric="grad_mlp", layer=1)["step"].to_list() == due
    assert rows.filter(metric="grad_mlp")["value"].null_count() == 0
    states = rows.filter(metric="mu", layer=1)
    assert states["step"].to_list() == ([0, *due] if probe is not None else due)
    assert set(states["samples"]) == {4}  # of one step alone


def stepped(model: torch.nn.Module, monitor: Monitor, step: int) -> None:
    loss_of(model, tokens(step)).backward()
    monitor.step(step)


@pytest.mark.parametrize("kind", METRICS)
def test_training_batches_of_a_step_that_was_not_recorded_are_measured_at_the_next(kind: str, tmp_path: Path) -> None:
    model = encoder()
    with Monitor(model, METRICS[kind], 100, run=tmp_path) as monitor:
        for step in (1, 2, 150, 151, 152):  # a leap that nothing announced
            stepped(model, monitor, step)
    rows = table(tmp_path).filter(metric="mu", layer=1)
    assert rows["step"].to_list() == [151] and rows["samples"].to_list() == [4]


@pytest.mark.parametrize("kind", METRICS)
def test_measuring_now_off_schedule(kind: str, tmp_path: Path) -> None:
    model = encoder()
    with Monitor(model, METRICS[kind], 100, run=tmp_path / "inline") as monitor:
        for step in (1, 2):
            stepped(model, monitor, step)
        assert monitor.measure_now() is None and monitor.recording
        for step in (3, 4):
            stepped(model, monitor, step)
    assert table(tmp_path / "inline").filter(metric="mu", layer=1)["step"].to_list() == [3]
    with Monitor(model, METRICS[kind], 100, tokens(99), run=tmp_path / "probe") as monitor:
        stepped(model, monitor, 7)
        measurement = monitor.measure_now()
        assert measurement is not None and measurement.step == 7 and monitor.measure_now() is measurement
    assert table(tmp_path / "probe")["step"].unique().to_list() == [0, 7]


@pytest.mark.parametrize("back_to", [0, 4, 5])
def test_json_lines_are_those_of_the_run_after_going_back_in_one_process(back_to: int, tmp_path: Path) -> None:
    writer = JSONLines(tmp_path / "lines.jsonl")
    with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path / "run", writers=[writer]) as monitor:
        for _ in range(7):
            monitor.step()
            if monitor.steps == 5:
                monitor.measure_now()
        monitor.resume(back_to)
        for _ in range(4):
            monitor.step()
    steps = [json.loads(line)["step"] for line in writer.path.read_text().splitlines()]
    assert steps == table(tmp_path / "run")["step"].unique().sort().to_list()
    assert len(steps) == len(set(steps)) and steps[0] == 0


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ({"model": "gpt2"}, "model"),
        ({"every": 0}, "every"),
        ({"every": 2.0}, "every"),
        ({"run": 3}, "run"),
        ({"step": -1}, "step"),
        ({"step": "3"}, "step"),
        ({"writers": ["tensorboard"]}, "writers"),
        ({"writers": "tensorboard"}, "writers"),
        ({"writers": [JSONLines]}, "writers"),
        ({"writers": JSONLines("lines.jsonl")}, "writers"),
        ({"alarms": [3]}, "alarms"),
        ({"alarms": 3}, "alarms"),
        ({"paths_every": 3}, "paths_every"),
    ],
)
def test_an_argument_of_a_wrong_type_is_one_sentence(options: dict[str, Any], subject: str, tmp_path: Path) -> None:
    given = {"model": encoder(), "metrics": "mu", "every": 2, "probe": tokens(1), "run": tmp_path, **options}
    with raises(MonitorError, subject=subject) as caught:
        Monitor(**given)
    assert len(str(caught.value).splitlines()) == 1


def test_a_step_to_resume_from_must_be_a_number(tmp_path: Path) -> None:
    with Monitor(encoder(), "mu", probe=tokens(1), run=tmp_path) as monitor:
        for step in (-1, 2.5, None):
            with raises(MonitorError, subject="step"):
                monitor.resume(step)  # type: ignore[arg-type]


def test_an_encoder_and_a_decoder_may_have_a_monitor_each(tmp_path: Path) -> None:
    model = torch.nn.Transformer(16, 2, 2, 3, 32, dropout=0.0, batch_first=True).double()
    pair = (tokens(1), tokens(2)[:, :4])
    for probe in (pair, None):
        runs = {side: tmp_path / f"{side} {probe is None}" for side in ("encoder", "decoder")}
        monitors = [Monitor(model, "mu", 1, probe, blocks=side, run=run) for side, run in runs.items()]
        model(*pair)
        for monitor in monitors:
            monitor.step()
            monitor.close()
        for side, run in runs.items():
            with torch.no_grad(), rankscope.watch(model, "mu", blocks=side) as w:
                model(*pair)
            means = w.profile().curve("mu").mean(0).tolist()
            assert table(run).filter(step=1).sort("layer")["value"].to_list() == pytest.approx(means, rel=1e-9)


def test_a_model_whose_only_child_is_called_module_is_measured_itself(tmp_path: Path) -> None:
    class Doubled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = encoder()

        def forward(self, X: Tensor) -> Tensor:
            return self.module(2 * X)

    with Monitor(Doubled(), "mu", probe=tokens(1), run=tmp_path / "wrapped"):
        pass
    with Monitor(encoder(), "mu", probe=2 * tokens(1), run=tmp_path / "alone"):
        pass
    assert table(tmp_path / "wrapped").equals(table(tmp_path / "alone"))


@pytest.mark.parametrize(
    ("probe", "options", "subject"),
    [
        ({"x": tokens(1)}, {}, "probe"),  # no argument of that name
        (torch.zeros(2, 5, 7, dtype=torch.float64), {}, "probe"),
        (tokens(1), {"loss": lambda output: output["logits"]}, "loss"),
        (tokens(1), {"loss": lambda output: (output - torch.zeros(3)).mean()}, "loss"),
    ],
)
def test_a_probe_of_the_wrong_kind_is_one_sentence(
    probe: Any, options: dict[str, Any], subject: str, tmp_path: Path
) -> None:
    with raises(MonitorError, subject=subject) as caught:
        Monitor(encoder(), "mu", 2, probe, run=tmp_path, **options)
    assert len(str(caught.value).splitlines()) == 1
    with Monitor(encoder(), "mu", 2, tokens(1), run=tmp_path):  # the folder is free, and holds nothing
        pass


def deep() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 5, enable_nested_tensor=False).double()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "probe"),
    [(deep, tokens(99)), (encoder, tokens(98)), (encoder, tokens(99)[:3]), (encoder, None)],
    ids=["another depth", "another probe", "a part of the probe", "training batches"],
)
def test_a_run_of_another_network_or_probe_is_not_continued(
    model: Callable[[], torch.nn.Module], probe: Tensor | None, tmp_path: Path
) -> None:
    with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path) as monitor:
        monitor.step(10)
    rows = table(tmp_path)
    with raises(MonitorError, subject="run"):
        Monitor(model(), "mu", 2, probe, run=tmp_path, step=10)
    assert table(tmp_path).equals(rows)
    with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, step=10) as monitor:
        monitor.step()
        monitor.step()
    assert table(tmp_path)["step"].unique().sort().to_list() == [0, 10, 12]


def test_a_probe_is_the_same_in_whatever_order_ranks_have_its_samples() -> None:
    X = tokens(99)
    assert Probe(X).description == Probe(X.flip(0)).description != Probe(2 * X).description
    whole = Probe({"x": X, "labels": torch.arange(4)}).description
    assert whole == Probe({"x": X.flip(0), "labels": torch.arange(4).flip(0)}).description
    assert whole != Probe({"x": X, "labels": torch.arange(1, 5)}).description
    assert Probe((X, torch.tensor(2.0))).description != Probe((X, torch.tensor(3.0))).description


@pytest.mark.parametrize("times", [1, 2])
def test_going_back_to_the_start_has_step_0_once(times: int, tmp_path: Path) -> None:
    writer = JSONLines(tmp_path / "lines.jsonl")
    with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path / "run", writers=[writer]) as monitor:
        for _ in range(times):
            monitor.resume(0)
        monitor.step(2)
    with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path / "run", writers=[writer]) as monitor:
        monitor.resume(0)
    rows = table(tmp_path / "run")
    assert rows["step"].to_list() == [0] * 4 and rows["layer"].to_list() == [0, 1, 2, 3]
    assert [json.loads(line)["step"] for line in writer.path.read_text().splitlines()] == [0]


def test_a_second_monitor_of_this_process_waits_for_close(tmp_path: Path) -> None:
    first = Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path)
    with raises(FileError, subject=str(tmp_path)):
        Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path)
    first.close()
    with Monitor(encoder(), "mu", 2, tokens(99), run=tmp_path, step=1):
        pass


def test_an_optimizer_that_makes_no_step_is_noted(tmp_path: Path) -> None:
    model = encoder()
    given, used = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    for name, steps in (("other", used), ("same", given)):
        with Monitor(model, "mu", 1, tokens(99), run=tmp_path / name, optimizer=given, alarms=()) as monitor:
            assert not monitor.notes
            for step in range(2):
                loss_of(model, tokens(step)).backward()
                steps.step()
                monitor.step()
            assert len(monitor.notes) == (1 if name == "other" else 0)


def test_steps_that_reach_no_multiple_are_noted(tmp_path: Path) -> None:
    with Monitor(encoder(), "mu", 100, tokens(99), run=tmp_path, alarms=()) as monitor:
        for epoch in range(1, 6):  # epochs, where steps were meant
            monitor.step(epoch)
        assert len(monitor.notes) == 1
        monitor.step(100)
        assert not monitor.notes


@pytest.mark.parametrize("kind", ["plain", "wrapped", "dtensor", "zero"])
def test_a_model_of_which_no_process_has_all_weights_is_known(kind: str, tmp_path: Path) -> None:
    """FSDP by the name of its wrapper, FSDP2 by weights that are DTensors, ZeRO-3 by what it leaves on each."""

    class FullyShardedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if kind == "wrapped":
        model = nn.Sequential(FullyShardedDataParallel(model))
    if kind == "zero":
        model[1].weight.ds_id = 7  # type: ignore[index]
    if kind == "dtensor":
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
        try:
            weight = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
            model[1].weight = nn.Parameter(weight)  # type: ignore[index]
            assert torch.equal(full_tensor(weight), torch.ones(2, 2))
        finally:
            dist.destroy_process_group()
    assert is_sharded(model) == (kind != "plain")


@pytest.mark.parametrize(
    ("given", "measured"),
    [({}, True), ({"probe": tokens(99)}, False), ({"probe": tokens(99), "loss": lambda Y: Y.square().mean()}, True)],
    ids=["training batches", "a probe", "a probe with a loss"],
)
def test_a_rule_on_gradients_that_are_not_measured_is_noted(
    given: dict[str, Any], measured: bool, tmp_path: Path
) -> None:
    """Gradients at tokens are those of training batches, or of a probe with a loss."""
    model = encoder()
    with Monitor(model, "mu", 1, run=tmp_path, alarms=[GradientSize()], **given) as monitor:
        noted = [note for note in monitor.notes if "which is not measured" in note]
        assert len(noted) == (0 if measured else 1), monitor.notes
        loss_of(model, tokens(1)).backward()
        monitor.step()
    assert ("grad_tokens" in {*table(tmp_path)["metric"]}) == measured


def test_an_unknown_option_is_named_with_those_that_exist(tmp_path: Path) -> None:
    options: dict[str, Any] = {"spectrum": True}
    with raises(MonitorError, subject="spectrum") as caught:
        Monitor(encoder(), run=tmp_path, **options)
    assert all(name in str(caught.value) for name in ("every", "spectra", "attention_mask"))
