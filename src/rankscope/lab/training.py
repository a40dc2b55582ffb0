"""`Training`: networks of one architecture learn a task, under a monitor, one or several at once.

Everything is drawn from the seed: weights, and from the seed and the number of a step its samples and
dropout. A run that resumes from a checkpoint gives what an unbroken one gives, on the CPU to the bit.

A step: the task draws samples (`tasks/`), the learner runs the networks on them, gradients are clipped, the optimiser
moves the parameters (`steps.py`), and each monitor hears of its loss.
"""

import hashlib
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from rankscope.errors import LabError, require, require_one_of
from rankscope.files import atomic
from rankscope.lab.model import Initialisation, Model, eval_mode
from rankscope.lab.steps import CapturedStep, SingleLearner, StackedLearner, optimizer_step
from rankscope.lab.tasks import Batch, Task
from rankscope.lab.tasks.base import STEPS
from rankscope.monitor import AlarmSource, Monitor
from rankscope.nets import Architecture, Dropout, Transformer
from rankscope.remedies import Remedy

MONITOR_METRICS = ("relative_mu", "mu", "entropy", "first_token_mass", "head_mu")
"""Metrics that the rules of a monitor need."""
PROBE_SAMPLES = 4  # Held-out samples that a monitor measures
DECAYED = ("weight", "table", "original")
"""Parameters that decay, by the last part of their names: not biases, gains, positions and remedies' own."""
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Recipe:
    """The training of a network: AdamW, a warm-up, then a cosine down to zero.

    Raises:
        LabError: A number is one that no training has: no steps, no samples, no learning rate.

    >>> recipe = Recipe(steps=100, warmup=0.1)
    >>> [round(recipe.lr_scale(step), 2) for step in (0, 4, 9, 55, 99)]
    [0.1, 0.5, 1.0, 0.5, 0.0]
    """

    steps: int = 300
    batch_size: int = 16  # Samples of a step
    lr: float = 1e-3  # The largest learning rate
    warmup: float = 0.05  # The share of all steps in which the learning rate rises
    weight_decay: float = 0.01  # Decoupled; of matrices and tables alone
    max_norm: float = 1.0  # The longest gradient: longer ones are scaled down to it
    seed: int = 0  # What weights, samples and dropout are drawn from
    measure_every: int = 20  # Steps between measurements of the monitor
    checkpoint_every: int = 100  # Steps between checkpoints
    frozen: tuple[str, ...] = ()  # Parameters that stay as they start, by the last part of their names: `("gain",)`

    def __post_init__(self) -> None:
        for name, least in {"steps": 1, "batch_size": 1, "seed": 0}.items():
            count = getattr(self, name)
            fits = isinstance(count, int) and least <= count < 2**31
            require(fits, f"{name} must be a whole number from {least} on; got {count!r}", LabError, name)
        above = isinstance(self.lr, int | float) and 0 < self.lr < math.inf
        require(above, f"lr must be a number above zero; got {self.lr!r}", LabError, "lr")

    def lr_scale(self, step: int) -> float:
        """The share of the learning rate at a step: a straight rise, then half a cosine."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))


class TaskEvaluation(NamedTuple):
    """How a network does on held-out samples."""

    loss: float
    accuracy: float


class RunOptions(TypedDict, total=False):
    """Options of `Training`: where networks are trained, and what is kept of it; `USUAL` has what stands for each that
    is left out."""

    run: str | Path | None
    """A folder for the checkpoint, from which the same training resumes, and for what the monitor of each network
    writes (in `run`, or in `run/seed-K`); None: nothing is kept."""
    monitored: bool  # With False, `run` has the checkpoint alone
    metrics: Sequence[str]  # What monitors measure
    alarms: Callable[[], Sequence[AlarmSource]] | None  # Makes the rules of each monitor; None: the usual ones
    device: torch.device | str  # Where networks are trained
    dtype: torch.dtype  # The precision of their parameters
    capture: bool
    """Record steps on a GPU once and replay them (`steps.py`), where there is neither a `run` nor dropout."""
    model: Callable[..., Model]
    """Makes the model of each seed, called as `Model` is: a subclass, or a partial of one, such as
    `partial(PathModel, lengths=(0, 1, 1))` of the studies."""


USUAL: RunOptions = {
    "run": None, "monitored": True, "metrics": MONITOR_METRICS, "alarms": None, "device": "cpu",
    "dtype": torch.float32, "capture": False, "model": Model,
}  # fmt: skip


class Training:
    """A training of one or several networks; iterate over it to train, and it gives the number of each step.

    Args:
        task: What is learnt (`tasks/`, or a `Task` of one's own).
        arch: What `task.architecture` gives at some depth, or any other.
        recipe: Steps, learning rate and such.
        seeds: One network for each, and several learn at once (`steps.py`); the recipe's seed if left out.
        remedies: Put onto every network, as by `net.with_remedy`.
        initialisation: What networks are before they learn.
        options: Where networks are trained and what is kept: `RunOptions` has them one by one.

    Raises:
        LabError: Seeds are not different numbers, or an option is none.
        ArchitectureError: A remedy does not go onto the architecture, or has tokens read later ones.

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
        initialisation: Initialisation | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        for name in options:
            require_one_of("option of Training", name, USUAL, LabError)
        chosen: RunOptions = {**USUAL, **options}
        self.task, self.recipe, self.initialisation = task, recipe or Recipe(), initialisation or Initialisation()
        self.seeds = [self.recipe.seed] if seeds is None else list(seeds)
        sentence = f"seeds must be different numbers, at least one; got {self.seeds}"
        require(self.seeds and len(set(self.seeds)) == len(self.seeds), sentence, LabError, "seeds")
        run, dtype, self.make_model, self.alarms = chosen["run"], chosen["dtype"], chosen["model"], chosen["alarms"]
        self.run, self.monitored = None if run is None else Path(run), chosen["monitored"] and run is not None
        self.device, self.metrics = torch.device(chosen["device"]), tuple(chosen["metrics"])
        drawn = remedies, self.recipe.frozen, dtype, self.make_model
        models = (self.initialisation.model(arch, task.interface, seed, *drawn) for seed in self.seeds)
        self.models = [model.to(self.device) for model in models]
        self.learner = StackedLearner(self.models) if len(self.seeds) > 1 else SingleLearner(self.models[0])
        replayed = chosen["capture"] and self.device.type == "cuda" and run is None and not self.initialisation.dropout
        self.optimizer = self._optimizer(replayed)
        self.captured = CapturedStep(self._batch_losses, self.optimizer, self._clip) if replayed else None
        self.steps = 0
        """Steps made so far."""
        self.losses: list[Tensor] = []
        """The losses of each seed `[seed]`, for every step that this process made."""
        self._key = self._description(dtype)
        self._monitor_states: list[dict[str, Any]] = []
        """What monitors remember of the steps made."""
        self._resume()

    def __repr__(self) -> str:
        arch = self.models[0].net.arch
        return (
            f"Training({self.task.name}, {arch.layers} layers, width {arch.width}, "
            f"seeds {', '.join(map(str, self.seeds))}, at step {self.steps} of {self.recipe.steps})"
        )

    def __iter__(self) -> Generator[int, None, None]:
        recipe = self.recipe
        with ExitStack() as stack:
            monitors = [self._monitor(k, stack) for k in range(len(self.seeds))] if self.monitored else []
            for model in self.models:
                model.train()
            try:
                for step in range(self.steps, recipe.steps):
                    lr = recipe.lr * recipe.lr_scale(step)
                    for group in self.optimizer.param_groups:  # where steps are captured, a tensor that they read
                        group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else lr
                    losses = self._make_step(step, any(monitor.recording for monitor in monitors))
                    self.losses.append(losses)
                    for monitor, loss in zip(monitors, losses, strict=False):
                        monitor.step(loss=loss)
                    self.steps = step + 1
                    stopped = bool(monitors) and all(monitor.should_stop for monitor in monitors)
                    if self.steps % recipe.checkpoint_every == 0 or self.steps == recipe.steps or stopped:
                        self._checkpoint(monitors)
                    yield self.steps
                    if stopped:
                        return
            finally:
                self._monitor_states = [monitor.state_dict() for monitor in monitors]

    def finish(self) -> "Training":
        """Make all steps that are left."""
        for _ in self:
            pass
        return self

    def networks(self) -> list[Transformer]:
        """The trained network of each seed, without embedding and head."""
        return [model.network() for model in self.models]

    @torch.no_grad()
    def evaluate(self, samples: int = 256) -> list[TaskEvaluation]:
        """Loss and accuracy of each network on so many held-out samples."""
        batch = self.task.held_out(samples).to(self.device)
        evaluations = []
        for model in self.models:
            with eval_mode(model):
                logits = model(batch.inputs, batch.padding)
            scores = self.task.loss(logits, batch), self.task.accuracy(logits, batch)
            evaluations.append(TaskEvaluation(*map(float, scores)))
        return evaluations

    @torch.no_grad()
    def tokens(self, samples: int = PROBE_SAMPLES) -> tuple[list[Tensor], Tensor | None]:
        """Tokens X of held-out samples as each network is given them, and their padding: what `measure`,
        `certify` and `decompose` take beside `networks()`."""
        batch = self.task.held_out(samples).to(self.device)
        tokens = []
        for model in self.models:
            with eval_mode(model):
                tokens.append(model.tokens(batch.inputs))
        return tokens, batch.padding

    def _optimizer(self, replayed: bool) -> torch.optim.Optimizer:
        named = {name: tensor for name, tensor in self.learner.parameters().items() if tensor.requires_grad}
        decayed = [name for name in named if name.rpartition(".")[2] in DECAYED]
        groups = [
            {"params": [named[name] for name in decayed], "weight_decay": self.recipe.weight_decay},
            {"params": [tensor for name, tensor in named.items() if name not in decayed], "weight_decay": 0.0},
        ]
        if not replayed:
            return torch.optim.AdamW(groups, lr=self.recipe.lr)
        lr = torch.tensor(self.recipe.lr, device=self.device)
        return torch.optim.AdamW(groups, lr=lr, fused=True, capturable=True)

    def _make_step(self, step: int, show_gradients: bool) -> Tensor:
        """Losses of each seed before the step."""
        batches = self._batches(step)
        if self.captured is not None:
            return self.captured(batches)
        p = self.initialisation.dropout
        drops = [Dropout.seeded(p, seed * STEPS + step, self.device) if p else None for seed in self.seeds]

        def clip() -> None:
            self._clip()
            if show_gradients and isinstance(self.learner, StackedLearner):
                self.learner.show_gradients()

        return optimizer_step(self._batch_losses(batches, drops), self.optimizer, clip)

    def _batches(self, step: int) -> list[Batch]:
        return [self.task.batch(self.recipe.batch_size, seed, step).to(self.device) for seed in self.seeds]

    def _batch_losses(self, batches: Sequence[Batch], drops: Sequence[Dropout | None] | None = None) -> Tensor:
        logits = self.learner.logits(batches, drops or [None] * len(batches))
        return torch.stack([self.task.loss(*pair) for pair in zip(logits, batches, strict=True)])

    def _clip(self) -> None:
        self.learner.clip(self.recipe.max_norm)

    def _monitor(self, k: int, stack: ExitStack) -> Monitor:
        """The monitor of network k, at the step at which the training is."""
        assert self.run is not None
        probe: Batch = self.task.held_out(PROBE_SAMPLES).to(self.device)
        inputs = {"inputs": probe.inputs}
        inputs |= {} if probe.padding is None else {"padding": probe.padding}
        folder = self.run if len(self.seeds) == 1 else self.run / f"seed-{self.seeds[k]}"
        earlier = (folder / "manifest.json").exists()
        monitor = Monitor(
            self.models[k], self.metrics, self.recipe.measure_every, inputs, run=folder,
            optimizer=self.optimizer, loss=lambda logits: self.task.loss(logits, probe),
            alarms=None if self.alarms is None else self.alarms(), blocks="net.layers",
            padding="none" if probe.padding is None else probe.padding,
        )  # fmt: skip
        stack.enter_context(monitor)
        if self._monitor_states:
            monitor.load_state_dict(self._monitor_states[k])
        elif earlier:
            monitor.resume(0)
        return monitor

    def _checkpoint(self, monitors: Sequence[Monitor]) -> None:
        if self.run is None:
            return
        state = {
            "step": self.steps,
            "models": [model.state_dict() for model in self.models],
            "optimizer": self.optimizer.state_dict(),
            "monitors": [monitor.state_dict() for monitor in monitors],
        }
        self.run.mkdir(parents=True, exist_ok=True)
        with atomic(self.run / CHECKPOINT) as temporary:
            torch.save({**self._key, **state}, temporary)

    def _resume(self) -> None:
        """Go on from the checkpoint that the same training has left in its folder, if there is one."""
        if self.run is None or not (self.run / CHECKPOINT).is_file():
            return
        state = torch.load(self.run / CHECKPOINT, map_location=self.device, weights_only=True)
        if any(state.get(name) != value for name, value in self._key.items()):
            return
        for model, tensors in zip(self.models, state["models"], strict=True):
            model.load_state_dict(tensors)  # in place: views of a stack stay such
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self._monitor_states = int(state["step"]), state["monitors"]

    def _description(self, dtype: torch.dtype) -> dict[str, Any]:
        """What tells this training from others: it resumes from a checkpoint of the same. A long text of the task
        goes in by its digest."""
        told: dict[str, Any] = {"is": repr(self.task)}
        if is_dataclass(self.task):
            sizes = {field.name: getattr(self.task, field.name) for field in fields(self.task)}
            told = {name: hashlib.sha256(size.encode()).hexdigest() if isinstance(size, str) else size
                    for name, size in sizes.items()}  # fmt: skip
        return {
            "task": {"name": self.task.name, **told},
            "architecture": self.models[0].net.arch.to_dict(),
            "recipe": asdict(replace(self.recipe, seed=0)),
            "initialisation": asdict(self.initialisation),
            "seeds": self.seeds,
            "dtype": str(dtype),
            **({} if self.make_model is Model else {"model": repr(self.make_model)}),
        }
