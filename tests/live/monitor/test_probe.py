"""A probe that the training does not notice, and the numbers that `watch` gives."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn

import rankscope
from rankscope import Monitor, watch
from rankscope.errors import FileError, MetricError, MonitorError, RankscopeError, WatchError
from tests.live.monitor.training import TOKENS, gpt2, probe, probed, train
from tests.raising import raises

LOOPS: dict[str, dict[str, Any]] = {
    "a plain loop": {},
    "bfloat16 by autocast": {"autocast": True},
    "a loop inside one autocast": {"autocast": True, "inside": True},
    "accumulation": {"accumulate": 3, "steps": 12},
    "compiled": {"compiled": "aot_eager"},
}


@pytest.mark.parametrize("loop", LOOPS)
def test_losses_weights_and_generators_are_those_of_a_run_without_it(loop: str, tmp_path: Path) -> None:
    metrics = ["relative_mu", "entropy", "head_mu"]
    alone, watched = train(**LOOPS[loop]), train(probed(tmp_path, metrics=metrics), **LOOPS[loop])
    assert alone.same(watched)
    steps = rankscope.read(tmp_path).table("training")["step"].unique().sort().to_list()
    assert steps == list(range(0, LOOPS[loop].get("steps", 20) + 1, 10))


def test_activation_checkpointing_is_as_it_was(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = gpt2()
        made.gradient_checkpointing_enable()
        return made.train()

    assert train(model=model()).same(train(probed(tmp_path), model=model()))


def test_a_compiled_model_keeps_its_one_graph(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    train(probed(tmp_path, every=2), steps=6, compiled="aot_eager")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_the_numbers_are_those_of_watch(tmp_path: Path) -> None:
    metrics = ["relative_mu", "mu", "entropy", "head_mu"]
    model = gpt2()
    with Monitor(model, metrics, every=1, probe=probe(), run=tmp_path):
        pass
    with watch(model.eval(), metrics) as seen, torch.no_grad():
        model(**probe())
    keys = ["layer", "head", "metric"]
    theirs = seen.profile().table.group_by(keys, maintain_order=True).agg(
        pl.col("value").mean(), pl.col("value").min().alias("least"), pl.col("value").max().alias("most"),
        pl.col("value").std(ddof=0).alias("spread"), pl.col("value").len().alias("samples"),
    )  # fmt: skip
    ours = rankscope.read(tmp_path).table("training")
    both = ours.join(theirs, on=keys, nulls_equal=True, how="full", suffix="_watch", coalesce=True)
    assert len(both) == len(ours) == len(theirs)
    assert (both["samples"] == both["samples_watch"]).all()
    for name in ("value", "least", "most", "spread"):
        assert ((both[name] - both[f"{name}_watch"]).abs() < 1e-12).all()


def test_scalars_are_averaged_from_measurement_to_measurement(tmp_path: Path) -> None:
    with Monitor(gpt2(), every=4, probe=probe(), run=tmp_path) as monitor:
        for step in range(1, 9):
            monitor.step(loss=torch.tensor(float(step)), lr=0.1)
    losses = rankscope.read(tmp_path).table("training").filter(metric="loss")
    assert losses["step"].to_list() == [4, 8] and losses["value"].to_list() == [2.5, 6.5]
    assert losses["least"].to_list() == [1.0, 5.0] and losses["layer"].null_count() == 2


@pytest.mark.parametrize(
    ("options", "error", "subject"),
    [
        ({"probe": "text"}, MonitorError, "probe"),
        ({"probe": {"input_ids": [1, 2]}}, MonitorError, "probe"),
        ({"model": nn.Linear(2, 2)}, WatchError, None),
        ({"metrics": "mew"}, MetricError, None),
    ],
)
def test_bad_input_is_one_sentence(
    options: dict[str, Any], error: type[RankscopeError], subject: str | None, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"model": gpt2(), "probe": probe(), "run": tmp_path, **options}
    with raises(error, subject=subject) as raised:
        Monitor(**given)
    assert len(str(raised.value).splitlines()) == 1 and not (tmp_path / ".lock").exists()


def test_a_folder_has_one_monitor(tmp_path: Path) -> None:
    with Monitor(gpt2(), probe=probe(), run=tmp_path), raises(FileError, subject=str(tmp_path)):
        Monitor(gpt2(), probe=probe(), run=tmp_path)


def test_a_probe_is_a_copy(tmp_path: Path) -> None:
    given = probe()
    with Monitor(gpt2(), every=1, probe=given, run=tmp_path) as monitor:
        given["input_ids"].zero_()
        monitor.step()
    found = rankscope.read(tmp_path).table("training").filter(metric="mu").partition_by("step")
    assert found[0]["value"].to_list() == found[1]["value"].to_list()
    assert given["input_ids"].shape == (3, TOKENS)
