"""`Monitor`: a training run, watched as it happens.

    monitor = Monitor(model, probe=batch, every=100, run="runs/mine")
    for ...:
        ...
        optimizer.step()
        monitor.step(loss=loss)

With a probe, a fixed batch is looked at every so many steps, in eval mode, and the training does not notice.
Without one, the training batches of those steps are measured as they pass.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankscope.errors import MonitorError
from rankscope.live.blocks import Blocks
from rankscope.live.compiled import is_compiled
from rankscope.live.modules import parts
from rankscope.live.monitor import ranks
from rankscope.live.monitor.alarms import Hears
from rankscope.live.monitor.backward import Loss
from rankscope.live.monitor.book import Book
from rankscope.live.monitor.gradients import Gradients
from rankscope.live.monitor.hearing import Hearing
from rankscope.live.monitor.inline import GRADIENT, Inline, Passing
from rankscope.live.monitor.looks import Look, rows_of
from rankscope.live.monitor.paths import Paths
from rankscope.live.monitor.probe import Probe
from rankscope.live.monitor.rules import default_rules
from rankscope.live.monitor.tally import Tallied
from rankscope.live.notes import described
from rankscope.live.spans import is_span
from rankscope.live.watch import planned
from rankscope.metrics import MetricsLike
from rankscope.profiles import DEFAULT_METRICS
from rankscope.runs import manifest_of, read

Sink = Callable[[Look], None]
"""Hears of every look; one with a `close` is closed with the monitor."""


class Monitor:
    """Looks at a model every so many steps of its training, and keeps what it sees in a run folder.

    `model` may be compiled, or wrapped for several processes; `metrics`, `layers`, `blocks`, `padding` and
    `layout` are those of `watch`. `probe` is a batch as the model is called with: a tensor, a dictionary of
    arguments, or a tuple of them; without one, training batches are measured. `run` is the folder that is
    written; `sinks` hear of every look as well. With `optimizer`, gradients of weights and how far its steps
    move them are measured too. So are gradients at each layer's tokens, of a probe with labels, or with
    `loss`, a function of what the model gives back; and, every `paths` steps, path shares by length and
    certificates of the probe, where `load` knows the model's family. `alarms` are rules that say when
    something goes wrong (`default_rules()` where left out; none: `()`). Where `run` holds an earlier part of
    this training, `step`, the steps that the model has made already, `load_state_dict` or `go_on(step)` says
    from where it goes on.

    >>> import tempfile, rankscope
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> with Monitor(model, "relative_mu", every=2, probe=torch.randn(2, 5, 8), run=tempfile.mkdtemp()) as m:
    ...     for _ in range(4):
    ...         m.step(loss=1.0)
    >>> rankscope.read(m.run).table("training")["step"].unique().sort().to_list()
    [0, 2, 4]
    """

    def __init__(
        self,
        model: nn.Module,
        metrics: MetricsLike = DEFAULT_METRICS,
        every: int = 100,
        probe: object = None,
        *,
        run: str | Path = "runs/training",
        sinks: Sequence[Sink] = (),
        optimizer: Any = None,
        loss: Loss | None = None,
        paths: int | None = None,
        alarms: Sequence[Hears] | None = None,
        layers: Sequence[int] | None = None,
        blocks: Blocks | None = None,
        padding: Tensor | Literal["model", "none"] = "model",
        layout: str | None = None,
        step: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise MonitorError(f"a monitor takes a torch module; received a {type(model).__name__}")
        if type(every) is not int or every < 1:
            raise MonitorError(f"every must be a number of steps, 1 or more; got {every!r}")
        self.model = ranks.inner(model)
        self.every, self.run, self.sinks = every, Path(run), tuple(sinks)
        self.plan, self.blocks = planned(
            self.model, metrics, layers, blocks=blocks, padding=padding, layout=layout
        )
        names = [each.name for each in self.plan.metrics]
        beyond = [each.name for each in self.plan.metrics if each.of != "tokens"]
        if probe is None and beyond and is_compiled(parts(model)):
            raise MonitorError(
                f"of training batches a compiled model shows its tokens alone; {beyond[0]} was asked for, "
                f"and this {type(self.model).__name__} is compiled: give a probe, or metrics of tokens"
            )
        if probe is None and any(map(is_span, self.blocks)) and is_compiled(parts(model)):
            raise MonitorError(
                "of training batches a compiled model shows blocks that are called; the layers of this "
                f"{type(self.model).__name__} are lists of parts: give a probe"
            )
        if loss is not None and (probe is None or not callable(loss)):
            raise MonitorError(
                "loss must be a function of what the model gives back on the probe; "
                + ("there is no probe: give probe=" if probe is None else f"got a {type(loss).__name__}")
            )
        self.hearing = Hearing(default_rules() if alarms is None else alarms)
        asked = {"metrics": names, "every": every, "probe": probe is not None}
        asked |= {"optimizer": optimizer is not None, "alarms": self.hearing.names}
        asked |= {"paths": paths, "loss": loss is not None}
        ranks.agree("metrics and steps", asked)
        self.probe = None if probe is None else Probe.of(probe, loss)
        ranks.agree("labels of the probe", self.probe is not None and self.probe.learns)
        self.paths = None if paths is None else Paths(model, self.probe, every, paths)
        self.inline = Inline(self.model, self.plan, self.blocks) if probe is None else None
        self.gradients = None if optimizer is None else Gradients(optimizer, self.blocks)
        self._notes = self._noted(names)
        self.steps = step
        self.should_stop = False
        """Whether a rule says that the training should end."""
        self._scalars: dict[str, list[Any]] = {}
        self._last: Look | None = None
        self._book = self._opened(names)
        self._behind: int | None = ranks.shared(self._book.last if self._book else None)
        """The last look of an earlier part of this run, until it is said from where it goes on."""
        if self._behind is None:
            self._begin()
        elif step > 0:
            self.go_on(step)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        how = "a probe" if self.probe is not None else "training batches"
        return f"Monitor({type(self.model).__name__}, {how} every {self.every} steps, at step {self.steps})"

    def step(self, step: int | None = None, *, loss: Any = None, **scalars: Any) -> None:
        """Call it after each step of the optimiser. `loss`, and whatever else is a number of the step (`lr`),
        is averaged from look to look; `step` is its number, where the loop counts otherwise than by one."""
        if self._behind is not None:
            raise MonitorError(
                f"{self.run} holds a run up to step {self._behind}: say from where it goes on "
                "(monitor.load_state_dict(...) of a checkpoint, or monitor.go_on(step)), or give another "
                "folder"
            )
        number = self.steps + 1 if step is None else int(step)
        if number <= self.steps:
            raise MonitorError(
                f"steps must grow; step {number} came after step {self.steps}: after going back to a "
                "checkpoint, call monitor.load_state_dict(...) or monitor.go_on(step)"
            )
        self.steps = number
        for name, value in {"loss": loss, **scalars}.items():
            if value is not None:
                self._scalars.setdefault(name, []).append(_number(value))
        if number % self.every == 0:
            self.look()
        else:
            self._ready()

    def look(self) -> Look:
        """Look now, whatever the step; at one that was looked at, that look again."""
        if self._last is not None and self._last.step == self.steps:
            return self._last
        found = self.probe.look(self.model, self.plan, self.blocks) if self.probe else self._inline().taken()
        if self.gradients is not None:
            found.update(self.gradients.taken(rate="lr" not in self._scalars))
        paths = self.paths if self.paths is not None and self.paths.due(self.steps) else None
        shares, certificates = (Tallied(), None) if paths is None else paths.look(self.steps)
        found.update(shares)
        ranks.agree("numbers in monitor.step", sorted(self._scalars))
        for name, values in sorted(self._scalars.items()):
            found.add(None, name, torch.stack([each.double().cpu() for each in values]))
        self._scalars = {}
        tallies = ranks.joined(found.packed())
        rows = rows_of(self.steps, found.keys(), tallies)
        look = self._last = Look(self.steps, rows, self.hearing.hear(rows, self.steps), certificates)
        if self._book is not None:
            self._book.write(look)
            for sink in self.sinks:
                sink(look)
        self.should_stop |= self.hearing.act(look.alarms, aloud=self._book is not None)
        self._ready()
        return look

    def go_on(self, step: int) -> None:
        """Go on after this step: what was written of later ones is taken away."""
        self._back(step, None)

    def _back(self, step: int, heard: Mapping[str, Any] | None) -> None:
        """After this step; rules remember what a checkpoint says they did, or hear the table again."""
        if self._book is not None:
            self._book.cut(step or -1)  # at step 0 it is looked at again
        if heard is not None and self.hearing.fits(heard):
            self.hearing.load_state_dict(heard)
        else:
            self.hearing.again(ranks.shared(None if self._book is None else read(self.run).table("training")))
        self.steps, self._behind, self._scalars, self._last = step, None, {}, None
        if step == 0:
            self._begin()
        self._ready()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of the training should hold, so that the run goes on without gap or double."""
        scalars = {name: list(each) for name, each in self._scalars.items()}
        return {"step": self.steps, "scalars": scalars, "alarms": self.hearing.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint that holds `state_dict()`."""
        self._back(int(state["step"]), state.get("alarms"))
        self._scalars = {name: [_number(one) for one in each] for name, each in state["scalars"].items()}

    def close(self) -> None:
        """Let the model and the folder go."""
        if self.inline is not None:
            self.inline.close()
        if self.gradients is not None:
            self.gradients.close()
        if self._book is not None:
            self._book.close()
        for sink in self.sinks:
            if callable(close := getattr(sink, "close", None)):
                close()

    def _opened(self, metrics: Sequence[str]) -> Book | None:
        """The folder, on the rank that writes; where it cannot be opened, every rank is told."""
        book, failed = None, None
        if ranks.writes():
            said = described(self.model)
            device = ", ".join(said["model"]["devices"])
            manifest = manifest_of(said, device, "as given", "as trained", metrics, {})
            try:
                book = Book(self.run, manifest, self.paths is not None)
            except Exception as error:
                failed = error
        told = ranks.shared(None if failed is None else str(failed))
        if failed is not None:
            raise failed
        if told is not None:
            raise MonitorError(told)
        return book

    @property
    def notes(self) -> list[str]:
        """What is not measured or heard, in sentences."""
        parts = [part for part in (self.probe, self.paths) if part is not None]
        return [*self._notes, *(said for part in parts for said in part.notes)]

    def _noted(self, metrics: Sequence[str]) -> list[str]:
        """What is not measured, and which rules hear nothing."""
        measured = [*metrics]
        passing = self.inline is not None and isinstance(self.inline.way, Passing)
        if passing or (self.probe is not None and self.probe.learns):
            measured.append(GRADIENT)
        if self.gradients is None:
            return self.hearing.notes(measured)
        measured += [f"grad_{group}" for _, group in self.gradients.parts]
        return [*self.gradients.notes, *self.hearing.notes(measured)]

    def _begin(self) -> None:
        """A probe is looked at before the first step, too."""
        if self.probe is not None:
            self.look()
        else:
            self._ready()

    def _ready(self) -> None:
        """Training batches and gradients are measured while a step is made that will be looked at."""
        on = (self.steps + 1) % self.every == 0
        if self.inline is not None:
            self.inline.on = on
        if self.gradients is not None:
            self.gradients.on = on

    def _inline(self) -> Inline:
        assert self.inline is not None
        return self.inline


def _number(value: Any) -> Tensor:
    """Kept where it is: bringing it over would make the device wait at every step."""
    return value.detach() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
