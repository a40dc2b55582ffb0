"""`Trial`: a network of some depth, with a remedy, in a setting, is trained from scratch with several seeds,
and what became of it is measured.

| setting    | the network                                                     | the task           |
|------------|-----------------------------------------------------------------|--------------------|
| `pre`      | norms before branches, skips, a last norm: GPT-2's              | the next character |
| `post`     | norms after skips: BERT's, under a causal mask                  | the next character |
| `no skips` | as `pre`, with no skip around attention and none around the MLP | the next character |
| `images`   | as `pre`, with no mask: a vision transformer's                  | digits             |

One row of its table is one number of one seed:

| quantity                        | what it is                                                        |
|---------------------------------|-------------------------------------------------------------------|
| `loss`, `accuracy`              | on held-out samples, at the end                                   |
| `loss_start`                    | the same loss before the first step                               |
| `diverged`                      | 1 where a loss was not finite: nothing is measured at the end     |
| `gradient_first_start` and such | of the first or `last` layer, at the `start` or the `end`         |
| `relative_residual_at_K`        | `log10` after layer K, deviation arithmetic, average of samples   |
| `relative_residual`             | the same after the last layer                                     |
| `entropy`                       | of attention, average of samples, layers and heads                |
| `path_share_K`                  | of the output, what paths through K heads are; they sum to one    |
| `parameters`                    | of one network, with embedding and head                           |
| `parameters_added`              | how many more than without the remedy                             |

Gradients are `log10` of the norm of the held-out loss's gradient at all that is trained of a layer, in float64.

What cannot be had is a row without a value, with the reason in `refused`; where the remedy does not go onto
the setting at all, there is one row without a quantity and a seed.

One recipe for all is a limit: the same rate, warm-up, length and initial weights for every remedy, depth and
setting, tuned for none of them. A remedy that would shine at another rate is not seen to.
"""

import copy
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import ArchitectureError, ClosureError, LabError, PathError, one_of
from rankscope.lab import Batch, Digits, Initialisation, Model, NextCharacter, Recipe, Task, Training, release_memory
from rankscope.nets import Architecture, Transformer, shapes
from rankscope.paths import decompose
from rankscope.profiles import measure

SETTINGS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm_place": "post", "final_norm": False},
    "no skips": {"attention_skip": 0.0, "mlp_skip": 0.0},
    "images": {},
}
"""Fields of the architecture."""
NONE, SIGMA = "none", "sigmareparam"
"""No remedy, and the one that is a parametrisation; `sigmareparam:one` has g start at one, not at sigma."""
SCHEMA = {
    "remedy": pl.String, "setting": pl.String, "depth": pl.Int64, "seed": pl.Int64, "quantity": pl.String,
    "value": pl.Float64, "refused": pl.String,
}  # fmt: skip
CHECK_EVERY = 20  # Steps between checks of the losses: each is waited for on a GPU
Row = tuple[int | None, str | None, float | None, str | None]  # Seed, quantity, value, and why there is none


class TrialDeadlineError(LabError):
    """A trial that its deadline has ended before its last step."""


@dataclass(frozen=True)
class TrialSizes:
    """Sizes of a network, of its training and of what is held out."""

    width: int = 128
    heads: int = 4
    context: int = 64
    batch: int = 32
    steps: int = 600
    lr: float = 1e-3
    warmup: float = 0.1
    scheme: str = "xavier"  # Of the initial weights, without a factor for depth: some remedies are one
    embedding_std: float = 1.0
    """Of embedding and positions at first: where a remedy takes norms out, tokens would else begin small."""
    evaluation_samples: int = 256  # Held-out samples for loss and accuracy
    probe_samples: int = 4  # Held-out samples for residuals, entropy, gradients and paths

    @property
    def recipe(self) -> Recipe:
        """AdamW, a warm-up and a cosine, gradients cut to length one."""
        return Recipe(steps=self.steps, batch_size=self.batch, lr=self.lr, warmup=self.warmup, max_norm=1.0)


@dataclass(frozen=True)
class Trial:
    """One remedy, in one setting, at one depth; seeds learn at once."""

    remedy: str  # As `--remedy` has it; `none`, and `sigmareparam`
    setting: str
    depth: int
    seeds: tuple[int, ...]
    sizes: TrialSizes

    @property
    def task(self) -> Task:
        """Which digit an image shows, or the next character of the bundled text."""
        return Digits() if self.setting == "images" else NextCharacter(self.sizes.context)

    @property
    def name(self) -> str:
        """As a file may be called: apart where the learning rate is not the usual one."""
        lr = self.sizes.lr
        how = "trained" if lr == TrialSizes().lr else f"at={lr:g}"
        return re.sub(r"[^\w.=]+", "-", f"{how}-{self.remedy}-{self.setting}-{self.depth}")

    def training(self, device: str = "cpu", capture: bool = True, dtype: torch.dtype = torch.float32) -> Training:
        """Not begun yet; an error of the remedy's where it does not go onto this setting."""
        sigma = {SIGMA: "sigma", f"{SIGMA}:one": "one", f"{SIGMA}:sigma": "sigma"}.get(self.remedy)
        arch = self._bare()
        remedies = [] if sigma is not None or self.remedy == NONE else [self.remedy]
        if remedies and self.setting == "no skips":
            changed = Transformer.random(arch).with_remedy(self.remedy).arch
            if changed.attention_skip or changed.mlp_skip:
                raise ArchitectureError(
                    f"{self.remedy} is a weight of skips, and brings them in; this setting is about networks without: "
                    "take another setting"
                )
        return Training(
            self.task, arch, self.sizes.recipe, seeds=self.seeds, remedies=remedies, device=device,
            initialisation=Initialisation(self.sizes.scheme, self.sizes.embedding_std, sigma_reparam=sigma),
            capture=capture, dtype=dtype,
        )  # fmt: skip

    def table(self, device: str = "cpu", until: float = math.inf) -> pl.DataFrame:
        """Train and measure; a `TrialDeadlineError` if that is not done by `until` (seconds since 1970)."""
        try:
            training = self.training(device)
        except ArchitectureError as error:
            return self._framed([(None, None, None, str(error))])
        try:
            return self._framed([*self._rows(training, until)])
        finally:
            del training
            release_memory(device)

    def _rows(self, training: Training, until: float) -> Iterator[Row]:
        sizes, task = self.sizes, training.task
        probe = task.held_out(sizes.probe_samples).to(training.device)
        count = sum(parameter.numel() for parameter in training.models[0].parameters())
        started = training.evaluate(sizes.evaluation_samples)
        for k, seed in enumerate(self.seeds):
            yield seed, "loss_start", started[k].loss, None
            yield seed, "parameters", float(count), None
            yield seed, "parameters_added", float(count - self._without(task)), None
            yield from gradients(seed, task, training.models[k], probe, "start")
        alive = train_until(training, until)
        ended = training.evaluate(sizes.evaluation_samples)
        tokens, nets = training.tokens(sizes.probe_samples)[0], training.networks()
        for k, seed in enumerate(self.seeds):
            well = alive[k] and math.isfinite(ended[k].loss)
            yield seed, "diverged", float(not well), None
            if well:
                yield seed, "loss", ended[k].loss, None
                yield seed, "accuracy", ended[k].accuracy, None
                yield from gradients(seed, task, training.models[k], probe, "end")
                yield from measurements(seed, nets[k], tokens[k])

    def _bare(self) -> Architecture:
        if self.setting not in SETTINGS:
            raise LabError(one_of("setting", self.setting, SETTINGS), subject="setting")
        sizes = self.sizes
        return self.task.architecture(self.depth, sizes.width, sizes.heads, **SETTINGS[self.setting])

    def _without(self, task: Task) -> int:
        """Parameters of the same network without the remedy."""
        interface, width = task.interface, self.sizes.width
        inside = sum(math.prod(shape) for shape in shapes(self._bare()).values())
        embedded = (interface.patch + 1) * width if interface.patch else interface.symbols * width
        return inside + embedded + (width + 1) * interface.classes

    def _framed(self, rows: list[Row]) -> pl.DataFrame:
        origin = self.remedy, self.setting, self.depth
        return pl.DataFrame([(*origin, *row) for row in rows], schema=SCHEMA, orient="row")


def train_until(training: Training, until: float = math.inf) -> list[bool]:
    """Make all steps, unless every network diverges before; whether all losses of each were finite."""
    alive = torch.ones(len(training.seeds), dtype=torch.bool)
    checked = 0
    for step in training:
        if step % CHECK_EVERY and step != training.recipe.steps:
            continue
        alive &= torch.stack(training.losses[checked:]).isfinite().all(0).cpu()
        checked = len(training.losses)
        if not alive.any():
            break
        if time.time() > until:
            raise TrialDeadlineError(f"the time was over at step {step} of {training.recipe.steps}", subject="until")
    return alive.tolist()


def gradients(seed: int, task: Task, model: Model, batch: Batch, when: str) -> Iterator[Row]:
    """At all that is trained of the first layer, and of the last."""
    wide = copy.deepcopy(model).double().eval()
    task.loss(wide(batch.inputs, batch.padding), batch).backward()  # type: ignore[no-untyped-call]
    for name, layer in (("first", wide.net.layers[0]), ("last", wide.net.layers[-1])):
        norms = [torch.linalg.vector_norm(weight.grad) for weight in layer.parameters() if weight.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        size = (math.log10(norm), None) if norm else (None, "the gradient is zero")
        yield seed, f"gradient_{name}_{when}", *size


def measurements(seed: int, net: Transformer, X: Tensor) -> Iterator[Row]:
    """Residuals and entropy on the CPU, paths where the network is; all in float64."""
    metrics = ["relative_residual", "entropy"]
    profile = measure(net.to(torch.float64, "cpu"), X.double().cpu(), metrics=metrics)
    logs = profile.curve("relative_residual", "log10")
    resolved = profile.curve("relative_residual", "below_floor") != 1
    for layer in range(logs.shape[1]):
        chosen = logs[resolved[:, layer], layer]
        mean = float(chosen.mean()) if len(chosen) else None
        why = None if len(chosen) else "tokens are zero, or no digit of their residual is sure"
        yield seed, f"relative_residual_at_{layer}", mean, why
    yield seed, "relative_residual", mean, why
    entropy = profile.curve("entropy")[:, 1:].mean()
    if entropy.isnan():
        yield seed, "entropy", None, "entropy is of weights of which none is negative; attention has some that are"
    else:
        yield seed, "entropy", float(entropy), None
    try:
        lengths = decompose(net.to(torch.float64), X.double()).by_length()
        why = None if lengths.output.any() else "the output is zero"
    except (PathError, ClosureError) as error:
        why = str(error)
    if why is not None:
        yield seed, "path_share", None, why
        return
    shares = lengths.table.filter(start="all")
    for length, share in shares.group_by("length").agg(pl.col("share").mean()).sort("length").iter_rows():
        yield seed, f"path_share_{length}", share, None
