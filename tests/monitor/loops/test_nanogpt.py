"""nanoGPT's loop under a monitor: accumulated, clipped, compiled."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn

import rankscope
from rankscope import Monitor
from tests.monitor.loops import nanogpt, tasks

ALL = ["relative_mu", "mu", "entropy", "largest_logit", "head_mu"]
PROBE = nanogpt.get_batch(samples=3, seed=5)
EVERY = 2


def monitored(run: Path, **options: Any) -> Any:
    return lambda model, optimizer: Monitor(model, every=EVERY, run=run, optimizer=optimizer, **options)


class Kept:
    """The model of the loop, found by its monitor, and the steps of its optimiser, measured by hand."""

    def __init__(self) -> None:
        self.steps: tasks.Steps | None = None

    def begins(self) -> None:
        if self.steps is not None:
            self.steps.begins()

    def ends(self) -> None:
        if self.steps is not None:
            self.steps.ends()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("probe", "backend"),
    [(True, ""), (False, ""), pytest.param(True, "aot_eager", marks=pytest.mark.slow), (False, "aot_eager")],
)
def test_the_training_is_the_same_to_the_last_bit(tmp_path: Path, probe: bool, backend: str) -> None:
    options: dict[str, Any] = {"metrics": ["relative_mu", "mu"] if backend and not probe else ALL, "spectra": True}
    if probe:
        options |= {"probe": PROBE, "loss": lambda output: output[1]}
    kept = Kept()

    def monitor(model: nn.Module, optimizer: torch.optim.Optimizer) -> Monitor:
        made: Monitor = monitored(tmp_path, **options)(model, optimizer)
        kept.steps = tasks.Steps(made.model.transformer["h"])  # type: ignore[index]
        return made

    bare = nanogpt.train(backend=backend)
    watched = nanogpt.train(monitor, backend=backend, around=kept)
    assert len(bare[0]) == 8 and bare[0] == watched[0]
    assert tasks.same(bare[1], watched[1]) and torch.equal(bare[2], watched[2])
    rows = rankscope.read(tmp_path).tables["training"]
    assert kept.steps is not None
    kept.steps.hold(rows, EVERY)  # gradients as clipped, updates, loss and rate, each once
    measured = rows.filter(metric="mu")
    # Both micro-batches of a step count; the evaluations between steps do not.
    assert measured["samples"].unique().to_list() == [3 if probe else 4]
    assert measured["step"].unique().sort().to_list() == list(range(0 if probe else EVERY, 9, EVERY))
    lr = rows.filter(metric="lr").sort("step")
    assert lr["value"].to_list() == pytest.approx([nanogpt.get_lr(step - 1) for step in lr["step"].to_list()])
    assert {*options["metrics"], "spectral_norm_mlp"} <= {*rows["metric"]}
    assert ("grad_tokens" in {*rows["metric"]}) == probe


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_trains_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    bare = nanogpt.train(dtype=dtype)
    watched = nanogpt.train(monitored(tmp_path, metrics=ALL, probe=PROBE, spectra=True), dtype=dtype)
    assert bare[0] == watched[0] and tasks.same(bare[1], watched[1])


def test_the_first_measurement_is_what_watch_sees(tmp_path: Path) -> None:
    nanogpt.train(monitored(tmp_path, metrics=ALL, probe=PROBE), steps=1)
    torch.manual_seed(1337)
    model = nanogpt.GPT().eval()
    with torch.no_grad(), rankscope.watch(model, ALL) as w:
        model(*PROBE)
    rows = rankscope.read(tmp_path).tables["training"].filter(pl.col("step") == 0)
    for name in ALL:
        mine = rows.filter(metric=name).sort("layer", "head")["value"].to_list()
        curve = w.profile().curve(name).mean(0)  # of heads, layer by layer
        assert mine == pytest.approx(curve[~curve.isnan()].tolist(), rel=1e-6) and len(mine) > nanogpt.LAYERS
