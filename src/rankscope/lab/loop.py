"""The training loop: every network of the lab is trained by it, alone or as one of several."""

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope.files import atomic
from rankscope.lab.captured import stepped
from rankscope.lab.recipe import Recipe, pace
from rankscope.live.monitor import Monitor

CHECKPOINT = "checkpoint.pt"


def looped(
    recipe: Recipe,
    optimizer: torch.optim.Optimizer,
    losses: Callable[[int], Tensor],
    prepare: Callable[[], None],
    *,
    start: int = 0,
    monitors: Sequence[Monitor] = (),
    keep: Callable[[int], None] = lambda _: None,
    advance: Callable[[int], Tensor] | None = None,
) -> Generator[int, None, None]:
    """Steps from `start` on, each given when it is made.

    `losses` gives the loss of every network at a step, `prepare` clips gradients; each monitor hears of its
    network's loss, and `keep` writes a checkpoint. It ends early where each monitor says that it should.
    `advance`, where it is given, makes a whole step in place of the usual one, and gives its losses."""
    for step in range(start, recipe.steps):
        rate = recipe.rate * pace(step, recipe.steps, recipe.warmup)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        found = stepped(losses(step), optimizer, prepare) if advance is None else advance(step)
        for monitor, loss in zip(monitors, found, strict=False):
            monitor.step(loss=loss)
        over = bool(monitors) and all(each.should_stop for each in monitors)
        if (step + 1) % recipe.keep_every == 0 or step + 1 == recipe.steps or over:
            keep(step + 1)
        yield step + 1
        if over:
            return


def write_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Atomically: one that is interrupted leaves the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic(folder / CHECKPOINT) as temporary:
        torch.save(dict(state), temporary)


def kept(folder: Path, about: Mapping[str, Any], device: torch.device | str = "cpu") -> dict[str, Any] | None:
    """What was left in a folder of the same work, as `about` tells it from other work."""
    checkpoint = folder / CHECKPOINT
    if not checkpoint.is_file():
        return None
    state: dict[str, Any] = torch.load(checkpoint, map_location=device, weights_only=True)
    return state if all(state.get(name) == each for name, each in about.items()) else None


def goes_on(monitor: Monitor, earlier: bool, state: Mapping[str, Any] | None) -> None:
    """From a checkpoint's state, or from the start again where the folder holds an `earlier` run."""
    if state is not None:
        monitor.load_state_dict(state)
    elif earlier:
        monitor.resume(0)
