"""Any task, any architecture: interrupted and resumed, one network or several at once."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import rankscope
from rankscope import read
from rankscope.errors import ArchitectureError, LabError, TrainingWarning
from rankscope.lab import Copying, Digits, Induction, Initialisation, NextCharacter, Recipe, Task, Training
from rankscope.lab.model import reads_ahead
from rankscope.monitor.alarms import AlarmRule, Fault
from rankscope.nets import Architecture, Experts, Transformer
from rankscope.remedies import REMEDIES
from rankscope_studies.dong2021.tasks import Memorization
from tests.raising import raises

TASK = Copying(symbols=4, length=3)
RECIPE = Recipe(steps=8, batch_size=4, lr=1e-2, measure_every=2, checkpoint_every=3, max_norm=0.5)
WIDE = torch.float64


def made(run: Path | None = None, task: Task = TASK, **more: Any) -> Training:
    fields: dict[str, Any] = {"remedies": ["attnscale"], "alarms": tuple} | more
    return Training(task, task.architecture(2, 8, 2), RECIPE, run=run, **fields)


def states(training: Training) -> list[dict[str, torch.Tensor]]:
    return [{**model.state_dict()} for model in training.models]


def same(a: Training, b: Training, within: float = 0.0) -> None:
    for mine, theirs in zip(states(a), states(b), strict=True):
        assert mine.keys() == theirs.keys()
        for name, each in mine.items():
            torch.testing.assert_close(each, theirs[name], rtol=within, atol=within)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "more",
    [
        {"initialisation": Initialisation(dropout=0.2)},
        pytest.param({"seeds": [0, 5], "initialisation": Initialisation(sigma_reparam="one")}, marks=pytest.mark.slow),
        {"task": Memorization(12, 48)},
    ],
    ids=["dropout", "seeds, sigma", "padding"],
)
def test_a_run_that_was_broken_off_goes_on_as_if_it_had_not_been(tmp_path: Path, more: Any) -> None:
    whole, first = made(tmp_path / "whole", **more).finish(), made(tmp_path / "parts", **more)
    begun = iter(first)
    assert list(islice(begun, 5)) == [1, 2, 3, 4, 5]  # the checkpoint is of step 3; step 4 was looked at
    begun.close()
    again = made(tmp_path / "parts", **more)
    assert again.steps == 3 and list(again) == [4, 5, 6, 7, 8]
    same(whole, again)
    for seed in more.get("seeds", [""]):
        inside = f"seed-{seed}" if seed != "" else "."
        looks = [read(tmp_path / run / inside).tables["training"] for run in ("whole", "parts")]
        assert looks[0].equals(looks[1])
        assert looks[0]["step"].unique().sort().to_list() == [0, 2, 4, 6, 8]
        named = {"loss", "lr", "relative_mu", "entropy", "head_mu", "grad_query_key", "update_value_output"}
        assert named | {"grad_tokens"} <= {*looks[0]["metric"]}
    assert list(first) == [6, 7, 8]  # the same object goes on where it is
    same(whole, first)
    assert made(tmp_path / "parts", **more | {"remedies": []}).steps == 0  # other work


KILLED = """
import os, signal
from pathlib import Path
from tests.lab.test_training import made
for step in made(Path({folder!r})):
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_bit(tmp_path: Path) -> None:
    script = KILLED.format(folder=str(tmp_path / "killed"))
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(Path(rankscope.__file__).parents[1]), str(root)])
    died = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env={**os.environ, "PYTHONPATH": paths}, capture_output=True
    )
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    again = made(tmp_path / "killed")
    assert again.steps == 3
    same(made().finish(), again.finish())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("task", "initialisation"),
    [
        (TASK, Initialisation(sigma_reparam="one")),
        (Induction(symbols=9, shortest=2, longest=6, context=12), Initialisation()),
        (Digits(patch=4), Initialisation(scheme="bert")),
    ],
)
def test_one_of_several_learns_what_it_learns_alone(task: Task, initialisation: Initialisation) -> None:
    """Its own samples, gradients and clipping."""
    kwargs: Any = {"task": task, "initialisation": initialisation, "dtype": WIDE}
    together = made(seeds=[3, 0], **kwargs).finish()
    for place, seed in enumerate(together.seeds):
        alone = made(seeds=[seed], **kwargs).finish()
        for name, each in alone.models[0].state_dict().items():
            mine = together.models[place].state_dict()[name]
            torch.testing.assert_close(mine, each, rtol=1e-10, atol=1e-10)
        losses = torch.stack(together.losses)[:, place]
        torch.testing.assert_close(losses, torch.stack(alone.losses)[:, 0], rtol=1e-10, atol=1e-10)
        assert together.evaluate(8)[place] == pytest.approx(alone.evaluate(8)[0], rel=1e-9)


@pytest.mark.slow
def test_monitors_of_several_see_what_that_of_one_sees(tmp_path: Path) -> None:
    """Gradients and updates of weights as well."""
    made(tmp_path / "all", seeds=[0, 4], dtype=WIDE).finish()
    made(tmp_path / "one", seeds=[4], dtype=WIDE).finish()
    mine, theirs = (read(tmp_path / each).tables["training"] for each in ("all/seed-4", "one"))
    keys = ["step", "layer", "head", "metric"]
    mine, theirs = mine.sort(keys), theirs.sort(keys)
    assert mine.select(keys).equals(theirs.select(keys)) and len(mine) > 100
    torch.testing.assert_close(
        mine["value"].to_torch(), theirs["value"].to_torch(), rtol=1e-8, atol=1e-10, equal_nan=True
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("task", "more"),
    [
        (Memorization(12, 48), {}),
        (TASK, {"initialisation": Initialisation(dropout=0.2)}),
        (TASK, {"mlp": "experts", "experts": Experts(number=3, chosen=2, width=4)}),
    ],
    ids=["padding", "dropout", "experts"],
)
def test_where_they_cannot_learn_at_once_they_do_one_after_the_other(task: Task, more: Any) -> None:
    initialisation = more.get("initialisation", Initialisation())
    arch = task.architecture(2, 8, 2, **{name: each for name, each in more.items() if name != "initialisation"})
    kwargs: Any = {"initialisation": initialisation, "dtype": WIDE}
    together = Training(task, arch, RECIPE, seeds=[3, 0], **kwargs).finish()
    for place, seed in enumerate(together.seeds):
        alone = Training(task, arch, RECIPE, seeds=[seed], **kwargs).finish()
        for name, each in alone.models[0].state_dict().items():
            mine = together.models[place].state_dict()[name]
            torch.testing.assert_close(mine, each, rtol=1e-10, atol=1e-10)


def test_reading_ahead_is_found_where_tokens_become_the_same() -> None:
    """After 48 layers without skips nothing of what was read is left, to float64."""
    deep = Copying().architecture(48, 8, 2, attention_skip=0.0, mlp_skip=0.0)
    assert reads_ahead(Transformer.random(deep).with_remedy("sinkhorn"))
    assert deep.mask == "causal" and not reads_ahead(Transformer.random(deep))


def fitting(name: str) -> Architecture:
    """A network that takes the remedy: some are for norms before a branch, some for norms after it."""
    before, after = (TASK.architecture(2, 8, 2), TASK.architecture(2, 8, 2, norm_place="post", final_norm=False))
    try:
        net = Transformer.random(before).with_remedy(name)
    except ArchitectureError:
        return after
    return TASK.architecture(2, 8, 2, mask="complete") if reads_ahead(net) else before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REMEDIES)
def test_every_remedy_trains_alone_and_among_several(name: str) -> None:
    """What it trains is moved, and seed 7 of two gives what it gives alone."""
    recipe, arch = replace(RECIPE, steps=3), fitting(name)
    together, alone = (
        Training(TASK, arch, recipe, seeds=seeds, remedies=[name], dtype=WIDE) for seeds in ([2, 7], [7])
    )
    before = {key: each.clone() for key, each in alone.models[0].state_dict().items()}
    together.finish()
    alone.finish()
    after = alone.models[0].state_dict()
    own = [key for key in after if ".parts." in key]
    assert not own or any(not torch.equal(after[key], before[key]) for key in own)
    for key, each in after.items():
        assert bool(each.isfinite().all())
        torch.testing.assert_close(together.models[1].state_dict()[key], each, rtol=1e-10, atol=1e-10)


def test_seeds_must_differ() -> None:
    with raises(LabError, subject="seeds"):
        made(seeds=[1, 1])


def test_what_was_learnt_is_measured_and_saved(tmp_path: Path) -> None:
    training = made(dtype=WIDE, initialisation=Initialisation(sigma_reparam="one")).finish()
    (net,), ((X,), padding) = training.networks(), training.tokens(3)
    assert training.evaluate(3) == training.evaluate(3)
    again = rankscope.load(net.save(tmp_path / "net"))
    batch = TASK.held_out(3)
    model = training.models[0].eval()
    said = model.head(again.run(X, padding).output)
    torch.testing.assert_close(said, model(batch.inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("task", [Copying(8, 8), Induction(16, 4, 8, 20), Digits()], ids=lambda task: task.name)
def test_small_networks_learn(task: Task) -> None:
    training = Training(task, task.architecture(2, 32, 4), Recipe(steps=400, batch_size=32, lr=3e-3)).finish()
    (tried,) = training.evaluate()
    assert tried.accuracy > 0.9 > 5 * task.chance


@pytest.mark.slow
def test_without_skips_tokens_collapse_and_the_monitor_says_so(tmp_path: Path) -> None:
    task = NextCharacter(context=32)
    for skip in (1.0, 0.0):
        arch, run = task.architecture(6, 48, attention_skip=skip, mlp_skip=skip), tmp_path / str(skip)
        with nullcontext() if skip else pytest.warns(TrainingWarning):
            Training(task, arch, Recipe(steps=100, batch_size=8), run=run).finish()
        alarms = read(run).tables["alarms"].filter(rule="tokens collapse")
        assert len(alarms) == (0 if skip else 1)


class Late(AlarmRule):
    """Stops a training at its second look."""

    name, metrics, advice = "late", ("loss",), "Stop."

    def faults(self, rows: Any) -> dict[str, Fault]:
        return {"late": Fault(None, None, "it is late")}


def test_a_training_that_an_alarm_stops_leaves_a_checkpoint_of_its_last_step(tmp_path: Path) -> None:
    """It is measured at steps 0, 2, 4, ..., and has checkpoints of steps 3, 6, ... else."""
    first = made(tmp_path, alarms=lambda: [Late(patience=2, action="stop")])
    with pytest.warns(TrainingWarning):
        stopped = list(first)
    assert stopped[-1] < RECIPE.steps and stopped[-1] % RECIPE.checkpoint_every
    again = made(tmp_path, alarms=lambda: [Late(patience=2, action="stop")])
    assert again.steps == stopped[-1]
    same(first, again)


def test_a_training_that_ended_between_two_checkpoints_has_ended(tmp_path: Path) -> None:
    assert RECIPE.steps % RECIPE.checkpoint_every
    whole = made(tmp_path).finish()
    again = made(tmp_path)
    assert again.steps == RECIPE.steps and list(again) == []
    same(whole, again)


def test_the_rate_rises_then_falls_to_nothing() -> None:
    recipe = Recipe(steps=100, warmup=0.1)
    rates = [recipe.lr_scale(step) for step in range(100)]
    assert rates[0] == 0.1
    assert max(rates) == rates[9] == 1
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] < 0.001
