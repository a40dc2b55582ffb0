"""Train a small GPT under a monitor: it guesses the next character of a text.

A batch is drawn from the seed and the number of its step, and so is its dropout: a run that goes on from a
checkpoint gives what an unbroken one gives.
"""

from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.lab.gpt import GPT, Shape
from rankscope.lab.loop import goes_on, kept, looped, write_checkpoint
from rankscope.lab.recipe import Recipe
from rankscope.lab.tasks.task import STEPS
from rankscope.lab.text import Characters
from rankscope.live.monitor import AlarmSource, Monitor

METRICS = ("relative_mu", "mu", "entropy", "first_token_mass", "head_mu")
"""What every rule of a monitor hears."""
PROBED = 4
"""Excerpts that are looked at."""


def training(
    shape: Shape,
    recipe: Recipe,
    text: Characters,
    run: str | Path,
    *,
    alarms: Sequence[AlarmSource] | None = None,
    model: GPT | None = None,
) -> Generator[int, None, None]:
    """Train, and give the number of each step after it is made; the monitor writes to `run`, where the
    checkpoint lies too. A run of the same shape and recipe goes on from there, another begins again.

    `model` is what is trained, a fresh one of this shape where there is none."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net = GPT(shape) if model is None else model
    optimizer = torch.optim.AdamW(net.parameters(), lr=recipe.rate, weight_decay=recipe.decay)
    about = {"shape": asdict(shape), "recipe": asdict(recipe)}
    state = kept(Path(run), about)
    if state is not None:
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    probe = text.excerpts(PROBED, shape.context, seed=recipe.seed * STEPS - 1)
    earlier = (Path(run) / "manifest.json").exists()

    def losses(step: int) -> Tensor:
        drawn = recipe.seed * STEPS + step
        excerpts = text.excerpts(recipe.batch, shape.context + 1, drawn)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(drawn)
            guessed = net(excerpts[:, :-1])
        return F.cross_entropy(guessed.flatten(0, 1), excerpts[:, 1:].flatten())[None]

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)

    with Monitor(
        net, METRICS, recipe.every, probe, run=run, optimizer=optimizer, alarms=alarms, blocks="blocks"
    ) as monitor:
        goes_on(monitor, earlier, None if state is None else state["monitor"])
        net.train()

        def keep(step: int) -> None:
            learnt = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            write_checkpoint(Path(run), {**about, **learnt, "monitor": monitor.state_dict()})

        yield from looped(recipe, optimizer, losses, clip, start=monitor.steps, monitors=[monitor], keep=keep)
