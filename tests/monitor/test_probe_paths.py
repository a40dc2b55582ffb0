"""Path shares and certificates of a probe while the model learns: of the model as it is at that step."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import rankscope
from rankscope import Monitor, certify, decompose, load
from rankscope.errors import MonitorError
from rankscope.monitor.probe_paths import ProbePaths
from tests.monitor.small import encoder, tokens
from tests.monitor.training import TOKENS, batch, gpt2, train
from tests.raising import raises


def padded(samples: int = 3) -> dict[str, Tensor]:
    """The second sample is padded at its beginning, the third at its end."""
    mask = torch.ones(3, TOKENS, dtype=torch.long)
    mask[1, :5] = mask[2, 7:] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    found = {"input_ids": batch(5, 3), "attention_mask": mask, "position_ids": places}
    return {name: each[:samples] for name, each in found.items()}


def shares(run: Path) -> pl.DataFrame:
    rows = rankscope.read(run).tables["training"].filter(pl.col("metric").str.starts_with("paths_"))
    return rows.with_columns(pl.col("metric").str.strip_prefix("paths_").cast(pl.Int64).alias("length"))


@pytest.mark.slow
def test_they_are_those_of_the_loaded_model_at_that_step(tmp_path: Path) -> None:
    model, nets, ours = gpt2().train(), {}, padded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, "mu", every=2, probe=ours, paths_every=4, run=tmp_path) as monitor:
        nets[0] = load(model)
        for step in range(1, 5):
            model(input_ids=batch(step), labels=batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
        nets[4] = load(model)
        assert not [each for each in monitor.notes if "paths" in each]
    found, bounds = shares(tmp_path), rankscope.read(tmp_path).tables["training_certificates"]
    for table in (found, bounds):
        assert table["step"].unique().sort().to_list() == [0, 4]
    for step, net in nets.items():
        X, padding = net.encode(ours["input_ids"], padding=ours["attention_mask"] == 0)
        there = decompose(net, X, padding).by_length().table.filter(start="all")
        theirs = there.group_by("length", maintain_order=True).agg(pl.col("share").mean())
        mine = found.filter(step=step).sort("length")
        assert mine["length"].to_list() == theirs["length"].to_list() == [0, 1, 2]
        assert ((mine["value"] - theirs["share"]).abs() < 1e-9).all()
        assert abs(sum(mine["value"].to_list()) - 1) < 1e-9 and mine["samples"].to_list() == [3, 3, 3]
    rows, summary = bounds.filter(step=4), certify(nets[4], X, padding).summary()
    for name in ("theorem", "met_to", "says_at"):
        assert rows[name].to_list() == summary[name].to_list()
    for name in ("log10_bound", "log10_measured"):
        assert all(a == b or abs(a - b) < 1e-6 for a, b in zip(rows[name], summary[name], strict=True))
    assert (bounds["broken"] == 0).all() and bounds.filter(met_to=0)["why"].null_count() == 0
    said = bounds.filter(pl.col("says_at").is_not_null())
    upper, lower = (said.filter(kind=kind) for kind in ("upper", "lower"))
    assert (upper["log10_measured"] <= upper["log10_bound"]).all()
    assert (lower["log10_measured"] >= lower["log10_bound"]).all() and len(lower)


SLOW = [pytest.param(loop, marks=pytest.mark.slow) for loop in ({}, {"compiled": "aot_eager"})]


@pytest.mark.parametrize("loop", [{"autocast": True, "inside": True}, *SLOW])
def test_the_training_does_not_notice(loop: dict[str, Any], tmp_path: Path) -> None:
    def monitor(model: nn.Module) -> Monitor:
        return Monitor(model, "mu", every=2, probe=padded(1), paths_every=4, run=tmp_path)

    assert train(steps=6, **loop).same(train(monitor, steps=6, **loop))
    assert shares(tmp_path)["value"].null_count() == 0
    assert shares(tmp_path)["step"].unique().sort().to_list() == [0, 4]


def test_weights_that_are_no_numbers_have_none(tmp_path: Path) -> None:
    model = gpt2()
    with Monitor(model, "mu", every=1, probe=padded(1), paths_every=1, run=tmp_path, alarms=()) as monitor:
        with torch.no_grad():
            next(model.transformer.h.parameters()).fill_(torch.nan)
        monitor.step()
        assert any("step 1: paths or certificates are not measured: the weights" in each for each in monitor.notes)
    rows = shares(tmp_path).filter(step=1)
    assert rows["value"].null_count() == 3 and rows["broken"].to_list() == [1, 1, 1]
    assert rankscope.read(tmp_path).tables["training_certificates"]["step"].unique().to_list() == [0]


def test_going_back_takes_certificates_away(tmp_path: Path) -> None:
    model = gpt2(layers=1)
    given: dict[str, Any] = {"metrics": "mu", "every": 1, "probe": padded(1), "run": tmp_path}
    with Monitor(model, **given, paths_every=1) as monitor:
        for _ in range(2):
            monitor.step()
    with Monitor(model, **given) as again:  # which reads no paths, and still takes away
        again.resume(1)
    steps = rankscope.read(tmp_path).tables["training_certificates"]["step"].unique().sort().to_list()
    assert steps == [0, 1] == shares(tmp_path)["step"].unique().sort().to_list()


def reading(probe: dict[str, Any], budget: float, run: Path) -> ProbePaths:
    """Paths that a monitor has read once."""
    paths = ProbePaths(budget=budget)
    Monitor(gpt2(), "mu", 1, probe, instruments=[paths], run=run, alarms=()).close()
    return paths


def test_of_a_large_probe_the_first_samples_are_read(tmp_path: Path) -> None:
    sample = 2**2 * 12 * 16 * (4 * 16 + 2 * 64 + 2 * 12)
    paths = reading(padded(), 2.5 * sample, tmp_path)
    assert "paths and certificates are of the first 2 of the probe's 3 samples" in paths.notes[0]
    values = paths.read(0)
    assert values.sums()[:, 0].tolist() == [2, 2, 2]


def unknown() -> nn.Module:
    model = gpt2()
    model.config.model_type = "unheard"
    return model


def unread() -> dict[str, Any]:
    """Rotary positions two by two, which the canonical network counts one by one."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "vocab_size": 30, "max_position_embeddings": 2 * TOKENS}
    places = 2 * torch.arange(TOKENS)[None]
    return {
        "model": LlamaForCausalLM(LlamaConfig(**sizes)),
        "probe": {"input_ids": batch(5, 1), "position_ids": places},
    }


@pytest.mark.parametrize(
    ("options", "subject", "names"),
    [
        ({"paths_every": 3}, "paths_every", ["every=2", "3"]),
        ({"paths_every": 0}, "paths_every", ["0"]),
        ({"probe": None}, "probe", []),
        ({"model": encoder(), "probe": tokens(1)}, "paths_every", ["TransformerEncoder", "config"]),
        ({"model": unknown()}, "paths_every", ["unheard"]),
        (unread(), "paths_every", ["LlamaForCausalLM", "input_ids, position_ids"]),
        ({"probe": {**padded(1), "attention_mask": torch.zeros(1, TOKENS)}}, "paths_every", ["token"]),
    ],
)
def test_what_cannot_be_taken_over_is_said_at_once(
    options: dict[str, Any], subject: str, names: list[str], tmp_path: Path
) -> None:
    given = {"model": gpt2(), "metrics": "mu", "every": 2, "probe": padded(), "paths_every": 2, **options}
    with raises(MonitorError, subject) as raised:
        Monitor(run=tmp_path / "run", **given)
    assert all(name in str(raised.value) for name in names)
    assert len(str(raised.value).splitlines()) == 1 and not (tmp_path / "run").exists()


def test_arguments_that_have_no_entry_for_each_sample_stay_whole(tmp_path: Path) -> None:
    """One row of positions stands for all samples, and a switch has no length."""
    sample = 2**2 * 12 * 16 * (4 * 16 + 2 * 64 + 2 * 12)
    given: dict[str, Any] = {"input_ids": batch(5, 3), "position_ids": torch.arange(TOKENS), "use_cache": False}
    paths = reading(given, 2.5 * sample, tmp_path)
    kept = paths.batch
    assert torch.equal(kept["input_ids"], given["input_ids"][:2]) and kept["use_cache"] is False
    assert torch.equal(kept["position_ids"], torch.arange(TOKENS))
    values = paths.read(0)
    assert values.sums()[:, 0].tolist() == [2, 2, 2]
