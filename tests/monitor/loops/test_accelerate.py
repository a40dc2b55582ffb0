"""A loop of one's own, with Accelerate around it: `Monitor` alone."""

from pathlib import Path

import polars as pl
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader

import rankscope
from tests.monitor.loops import tasks

EVERY = 5


def train(run: Path | None, precision: str) -> tuple[list[float], nn.Module]:
    """20 steps of two batches each."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2, cpu=True)
    model = tasks.model()
    made = torch.optim.AdamW(model.parameters(), 1e-3), DataLoader(tasks.Texts(80), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, *made)
    monitor = None
    if run is not None:
        monitor = rankscope.Monitor(model, "relative_mu", EVERY, tasks.probe(), run=run, optimizer=optimizer)
    losses, steps = [], tasks.Steps(accelerator.unwrap_model(model).transformer.h)
    torch.manual_seed(2)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            losses.append(float(loss.detach()))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                steps.begins()
            optimizer.step()
            if accelerator.sync_gradients:
                steps.ends()
            optimizer.zero_grad()
        if accelerator.sync_gradients and monitor is not None:
            monitor.step(loss=loss)
    if monitor is not None:
        monitor.close()
        steps.hold(rankscope.read(run).tables["training"], EVERY)  # type: ignore[arg-type]
    return losses, accelerator.unwrap_model(model)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("no", marks=pytest.mark.slow), "bf16"])
def test_losses_and_weights_are_the_same_to_the_last_bit(tmp_path: Path, precision: str) -> None:
    bare, watched = train(None, precision), train(tmp_path, precision)
    assert len(bare[0]) == 40 and bare[0] == watched[0]
    assert tasks.same(bare[1], watched[1])
    rows = rankscope.read(tmp_path).tables["training"]
    assert rows["step"].unique().sort().to_list() == list(range(0, 21, EVERY))
    # Step 0 is what `watch` sees in that arithmetic.
    fresh = tasks.model().eval()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.no_grad(), autocast, rankscope.watch(fresh, "relative_mu") as w:
        fresh(**tasks.probe())
    first = rows.filter((pl.col("step") == 0) & pl.col("layer").is_not_null()).sort("layer")
    assert first["value"].to_list() == pytest.approx(w.profile().curve("relative_mu").mean(0).tolist())
