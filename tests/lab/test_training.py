"""A small GPT is trained under the monitor; a run that was killed goes on as if it had not been."""

from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from rankscope import read
from rankscope.errors import TrainingWarning
from rankscope.lab import GPT, Recipe, Shape, characters, training
from rankscope.lab.gpt import Block

TEXT = characters("the whale, the whale! " * 20)
SHAPE = Shape(len(TEXT.alphabet), context=8, layers=2, width=8, heads=2, dropout=0.1)
RECIPE = Recipe(steps=6, batch=2, every=2, keep_every=3)


def ran(folder: Path, steps: int | None = None) -> dict[str, Any]:
    """Some steps of a run; its looks, and its last checkpoint."""
    run = training(SHAPE, RECIPE, TEXT, folder, alarms=())
    for _ in islice(run, steps):
        pass
    run.close()
    return {"looks": read(folder).table("training"), "kept": torch.load(folder / "checkpoint.pt")}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    weights = zip(a["kept"]["model"].values(), b["kept"]["model"].values(), strict=True)
    return a["looks"].equals(b["looks"]) and all(torch.equal(x, y) for x, y in weights)


def test_a_run_that_was_broken_off_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = ran(tmp_path / "whole")
    ran(tmp_path / "parts", 5)  # the checkpoint is of step 3; step 4 was looked at
    assert same(ran(tmp_path / "parts"), whole)
    assert whole["looks"]["step"].unique().sort().to_list() == [0, 2, 4, 6]
    assert {"loss", "lr", "relative_mu", "grad_query_key"} <= {*whole["looks"]["metric"]}
    (tmp_path / "parts" / "checkpoint.pt").unlink()
    assert same(ran(tmp_path / "parts"), whole)  # from the start, in the same folder


def test_a_block_without_skips_does_not_see_what_it_was_given() -> None:
    x = torch.randn(2, 5, 8)
    without: Any = Block(Shape(10, context=8, width=8, heads=2, skips=False))
    with torch.no_grad():
        without.mlp[2].weight.zero_()
    whole: Any = Block(Shape(10, context=8, width=8, heads=2))
    with torch.no_grad():
        whole.mlp[2].weight.zero_()
        whole.mlp[2].bias.zero_()
        whole.attn.out_proj.weight.zero_()
        whole.attn.out_proj.bias.zero_()
    assert torch.equal(whole(x), x)
    assert torch.equal(without(x), without.mlp[2].bias.expand_as(x))


def test_a_guess_does_not_see_what_follows() -> None:
    model = GPT(SHAPE).eval()
    ids = torch.randint(5, (1, 8))
    changed = ids.clone()
    changed[0, 5:] = 4 - changed[0, 5:]
    assert torch.allclose(model(ids)[0, :5], model(changed)[0, :5], atol=1e-6)
    assert not torch.allclose(model(ids)[0, 5:], model(changed)[0, 5:], atol=1e-3)


@pytest.mark.slow
def test_without_skips_tokens_collapse_and_the_monitor_says_so(tmp_path: Path) -> None:
    text = characters()
    said = {}
    for skips in (True, False):
        shape = Shape(len(text.alphabet), context=32, width=48, skips=skips)
        folder = tmp_path / str(skips)
        with nullcontext() if skips else pytest.warns(TrainingWarning):
            for _ in training(shape, Recipe(steps=100, batch=8, every=20), text, folder):
                pass
        said[skips] = read(folder).table("alarms").filter(pl.col("rule") == "tokens collapse")
    assert said[True].is_empty() and len(said[False]) == 1
