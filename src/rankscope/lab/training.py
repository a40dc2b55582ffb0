"""Train a small GPT under a monitor: it guesses the next character of a text.

A batch is drawn from the seed and the number of its step, and so is its dropout: a run that goes on from a
checkpoint gives what an unbroken one gives.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from rankscope.files import atomic
from rankscope.lab.gpt import GPT, Shape
from rankscope.lab.text import Characters
from rankscope.live.monitor import Hears, Monitor

METRICS = ("relative_mu", "mu", "entropy", "first_token_mass", "head_mu")
"""What every rule of a monitor hears."""
PROBED = 4
"""Excerpts that are looked at."""


@dataclass(frozen=True)
class Recipe:
    """How it is trained: AdamW, a warm-up, then a cosine down to nothing."""

    steps: int = 600
    batch: int = 16
    rate: float = 1e-3
    warmup: float = 0.05
    """The share of all steps in which the rate rises."""
    decay: float = 0.01
    clip: float = 1.0
    """The longest gradient."""
    seed: int = 0
    every: int = 20
    """Steps between looks."""
    keep_every: int = 100
    """Steps between checkpoints."""


def training(
    shape: Shape,
    recipe: Recipe,
    text: Characters,
    run: str | Path,
    *,
    alarms: Sequence[Hears] | None = None,
    model: GPT | None = None,
) -> Generator[int, None, None]:
    """Train, and give the number of each step after it is made; the monitor writes to `run`, where the
    checkpoint lies too. A run of the same shape and recipe goes on from there, another begins again.

    `model` is what is trained, a fresh one of this shape where there is none."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = GPT(shape) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, weight_decay=recipe.decay)
    checkpoint = Path(run) / "checkpoint.pt"
    about = {"shape": asdict(shape), "recipe": asdict(recipe)}
    kept = _kept(checkpoint, about)
    if kept is not None:
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    probe = text.excerpts(PROBED, shape.context, seed=recipe.seed * 100003 - 1)
    earlier = (Path(run) / "manifest.json").exists()
    with Monitor(
        model, METRICS, recipe.every, probe, run=run, optimizer=optimizer, alarms=alarms, blocks="blocks"
    ) as monitor:
        if kept is not None:
            monitor.load_state_dict(kept["monitor"])
        elif earlier:
            monitor.go_on(0)
        model.train()
        for step in range(monitor.steps, recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * pace(step, recipe.steps, recipe.warmup)
            drawn = recipe.seed * 100003 + step
            excerpts = text.excerpts(recipe.batch, shape.context + 1, drawn)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(drawn)
                guessed = model(excerpts[:, :-1])
            loss = F.cross_entropy(guessed.flatten(0, 1), excerpts[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            monitor.step(loss=loss)
            if (step + 1) % recipe.keep_every == 0 or step + 1 == recipe.steps or monitor.should_stop:
                state = {**about, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                with atomic(checkpoint) as temporary:
                    torch.save({**state, "monitor": monitor.state_dict()}, temporary)
            yield step + 1
            if monitor.should_stop:
                return


def pace(step: int, steps: int, warmup: float) -> float:
    """The share of the rate at a step: a straight rise, then half a cosine."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _kept(checkpoint: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """What was left of the same work."""
    if not checkpoint.is_file():
        return None
    state: dict[str, Any] = torch.load(checkpoint, weights_only=True)
    return state if all(state[name] == each for name, each in about.items()) else None
