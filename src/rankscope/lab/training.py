"""`Training`: networks of one architecture learn a task, under a monitor, one or several at once.

Everything is drawn from the seed: weights, and from the seed and the number of a step its samples and
dropout. A run that goes on from a checkpoint gives what an unbroken one gives, on the CPU to the bit.
"""

import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.errors import LabError
from rankscope.lab.ahead import refuse_reading_ahead
from rankscope.lab.captured import Captured
from rankscope.lab.loop import goes_on, kept, looped, write_checkpoint
from rankscope.lab.model import Model
from rankscope.lab.module import evaluated
from rankscope.lab.recipe import Recipe
from rankscope.lab.reparametrised import reparametrise
from rankscope.lab.stack import Alone, Stacked
from rankscope.lab.tasks import Batch, Task
from rankscope.lab.tasks.task import STEPS
from rankscope.lab.writing import METRICS, PROBED
from rankscope.live.monitor import AlarmSource, Monitor
from rankscope.nets import Architecture, Transformer
from rankscope.nets.dropout import Dropout
from rankscope.remedies import Remedy

DECAYED = ("weight", "table", "original")
"""Parameters that decay, by the last part of their names: not biases, gains, positions and remedies' own."""


@dataclass(frozen=True)
class Beginning:
    """What networks are before they learn."""

    init: str = "xavier/sqrt(L)"
    """A scheme of `nets/initial.py`."""
    spread: float | None = None
    """Of the entries of embedding and positions; where it is left out, `1 / sqrt(width)`."""
    dropout: float = 0.0
    """The chance that an entry is zero in training (`nets/dropout.py`)."""
    sigma: str | None = None
    """sigmaReparam, and what its g starts from, "sigma" or "one" (`reparametrised.py`)."""


class Tried(NamedTuple):
    """How a network does on samples that are held out."""

    loss: float
    accuracy: float


class Training:
    """Iterate over it to train: it gives the number of each step that was made.

    `arch` is what the task wants at some depth, or any other; `remedies` go onto every network, as in
    `net.remedied`. With `seeds` there is a network for each, and more than one learn at once (`stack.py`);
    the recipe's own is used where there are none. With `run` a monitor looks at each network (in `run`, or in
    `run/seed-K`), and the training goes on from the checkpoint there; `alarms` makes the rules of each
    monitor, the usual ones where it is left out. With `capture` steps on a GPU that nobody looks at and that
    have no dropout are recorded once and played again (`captured.py`).

    >>> from rankscope.lab.tasks import Copying
    >>> task = Copying(symbols=4, length=3)
    >>> training = Training(task, task.architecture(1, 8, 2), Recipe(steps=2), seeds=[0, 1])
    >>> list(training), [net.arch.layers for net in training.networks()]
    ([1, 2], [1, 1])
    """

    def __init__(
        self,
        task: Task,
        arch: Architecture,
        recipe: Recipe | None = None,
        *,
        seeds: Sequence[int] | None = None,
        remedies: Sequence[str | Remedy] = (),
        beginning: Beginning | None = None,
        run: str | Path | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        metrics: Sequence[str] = METRICS,
        alarms: Callable[[], Sequence[AlarmSource]] | None = None,
        capture: bool = False,
    ) -> None:
        self.task, self.recipe = task, recipe or Recipe()
        self.beginning = beginning or Beginning()
        self.seeds = [self.recipe.seed] if seeds is None else list(seeds)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise LabError(f"seeds must be different numbers, at least one; got {self.seeds}")
        self.run = None if run is None else Path(run)
        self.device, self.metrics, self.alarms = torch.device(device), tuple(metrics), alarms
        self.models = [self._model(arch, remedies, seed, dtype) for seed in self.seeds]
        self.learner = Stacked(self.models) if len(self.seeds) > 1 else Alone(self.models[0])
        fast = capture and self.device.type == "cuda" and run is None and not self.beginning.dropout
        self.optimizer = self._optimizer(fast)
        self.captured = Captured(self._of, self.optimizer, self._clip) if fast else None
        self.steps = 0
        """Made so far."""
        self.losses: list[Tensor] = []
        """By step, of each seed `[seed]`, those of this process."""
        self._about = self._described(dtype)
        self._heard: list[dict[str, Any]] = []
        """What monitors remember of the steps made."""
        state = None if self.run is None else kept(self.run, self._about, self.device)
        if state is not None:
            self._load(state)

    def __repr__(self) -> str:
        arch = self.models[0].net.arch
        return (
            f"Training({self.task.name}, {arch.layers} layers, width {arch.width}, "
            f"seeds {', '.join(map(str, self.seeds))}, at step {self.steps} of {self.recipe.steps})"
        )

    def __iter__(self) -> Generator[int, None, None]:
        with ExitStack() as stack:
            monitors = [] if self.run is None else [self._monitor(k, stack) for k in range(len(self.seeds))]
            for model in self.models:
                model.train()

            def prepare() -> None:
                self._clip()
                explored = bool(monitors) and (self.steps + 1) % self.recipe.every == 0
                if explored and isinstance(self.learner, Stacked):
                    self.learner.show_gradients()

            try:
                for step in looped(
                    self.recipe, self.optimizer, self._losses, prepare, start=self.steps, monitors=monitors,
                    keep=lambda step: self._keep(step, monitors),
                    advance=None if self.captured is None else self._advanced,
                ):  # fmt: skip
                    self.steps = step
                    yield step
            finally:
                self._heard = [each.state_dict() for each in monitors]

    def finish(self) -> "Training":
        """Make all steps that are left."""
        for _ in self:
            pass
        return self

    def networks(self) -> list[Transformer]:
        """What was learnt, of each seed: without embedding and head."""
        return [model.network() for model in self.models]

    @torch.no_grad()
    def tried(self, number: int = 256) -> list[Tried]:
        """Each network on so many samples that are held out."""
        batch = self.task.held_out(number).to(self.device)
        found = []
        for model in self.models:
            with evaluated(model):
                said = model(batch.inputs, batch.padding)
            found.append(Tried(float(self.task.loss(said, batch)), float(self.task.accuracy(said, batch))))
        return found

    def tokens(self, number: int = PROBED) -> tuple[list[Tensor], Tensor | None]:
        """Tokens X of held-out samples as each network is given them, and their padding: what `measure`,
        `certify` and `decompose` take beside `networks()`."""
        batch = self.task.held_out(number).to(self.device)
        found = []
        for model in self.models:
            with torch.no_grad(), evaluated(model):
                found.append(model.tokens(batch.inputs))
        return found, batch.padding

    def _model(
        self, arch: Architecture, remedies: Sequence[str | Remedy], seed: int, dtype: torch.dtype
    ) -> Model:
        net = Transformer.random(arch, seed, self.beginning.init)
        for each in remedies:
            net = net.with_remedy(each)
        if remedies and seed == self.seeds[0]:
            refuse_reading_ahead(net, " and ".join(map(str, remedies)))
        model = Model(net.to(dtype), self.task.interface, self.beginning.spread, seed=seed + 1)
        if self.beginning.sigma is not None:
            reparametrise(model, self.beginning.sigma)
        return model.to(self.device)

    def _clip(self) -> None:
        self.learner.clip(self.recipe.clip)

    def _optimizer(self, fast: bool) -> torch.optim.Optimizer:
        named = {name: each for name, each in self.learner.parameters().items() if each.requires_grad}
        decayed = [name for name in named if name.rpartition(".")[2] in DECAYED]
        groups = [
            {"params": [named[name] for name in decayed], "weight_decay": self.recipe.decay},
            {"params": [each for name, each in named.items() if name not in decayed], "weight_decay": 0.0},
        ]
        if not fast:
            return torch.optim.AdamW(groups, lr=self.recipe.rate)
        rate = torch.tensor(self.recipe.rate, device=self.device)
        return torch.optim.AdamW(groups, lr=rate, fused=True, capturable=True)

    def _batches(self, step: int) -> list[Batch]:
        return [self.task.batch(self.recipe.batch, seed, step).to(self.device) for seed in self.seeds]

    def _losses(self, step: int) -> Tensor:
        p = self.beginning.dropout
        drops = [Dropout.seeded(p, seed * STEPS + step, self.device) if p else None for seed in self.seeds]
        found = self._of(self._batches(step), drops)
        self.losses.append(found.detach())
        return found

    def _of(self, batches: Sequence[Batch], drops: Sequence[Dropout | None] | None = None) -> Tensor:
        said = self.learner.said(batches, drops or [None] * len(batches))
        return torch.stack([self.task.loss(*each) for each in zip(said, batches, strict=True)])

    def _advanced(self, step: int) -> Tensor:
        assert self.captured is not None
        self.losses.append(self.captured(self._batches(step)))
        return self.losses[-1]

    def _folder(self, place: int) -> Path:
        assert self.run is not None
        return self.run if len(self.seeds) == 1 else self.run / f"seed-{self.seeds[place]}"

    def _monitor(self, place: int, stack: ExitStack) -> Monitor:
        probe: Batch = self.task.held_out(PROBED).to(self.device)
        given = {"inputs": probe.inputs}
        given |= {} if probe.padding is None else {"padding": probe.padding}
        folder = self._folder(place)
        earlier = (folder / "manifest.json").exists()
        monitor = Monitor(
            self.models[place], self.metrics, self.recipe.every, given, run=folder,
            optimizer=self.optimizer, loss=lambda said: self.task.loss(said, probe),
            alarms=None if self.alarms is None else self.alarms(), blocks="net.layers",
            padding="none" if probe.padding is None else probe.padding,
        )  # fmt: skip
        stack.enter_context(monitor)
        goes_on(monitor, earlier, self._heard[place] if self._heard else None)
        return monitor

    def _keep(self, step: int, monitors: Sequence[Monitor]) -> None:
        if self.run is None:
            return
        state = {
            "step": step,
            "models": [model.state_dict() for model in self.models],
            "optimizer": self.optimizer.state_dict(),
            "monitors": [each.state_dict() for each in monitors],
        }
        write_checkpoint(self.run, {**self._about, **state})

    def _load(self, state: dict[str, Any]) -> None:
        for model, each in zip(self.models, state["models"], strict=True):
            model.load_state_dict(each)  # in place: views of a stack stay such
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self._heard = int(state["step"]), state["monitors"]

    def _described(self, dtype: torch.dtype) -> dict[str, Any]:
        """What tells this work from other work: a checkpoint of the same goes on."""
        return {
            "task": {"name": self.task.name, **_sizes(self.task)},
            "architecture": self.models[0].net.arch.to_dict(),
            "recipe": asdict(replace(self.recipe, seed=0)),
            "beginning": asdict(self.beginning),
            "seeds": self.seeds,
            "dtype": str(dtype),
        }


def _sizes(task: Task) -> dict[str, Any]:
    """The fields of a task; a long text by its digest."""
    if not is_dataclass(task):
        return {"is": repr(task)}
    found = {each.name: getattr(task, each.name) for each in fields(task)}
    return {
        name: hashlib.sha256(each.encode()).hexdigest() if isinstance(each, str) else each
        for name, each in found.items()
    }
