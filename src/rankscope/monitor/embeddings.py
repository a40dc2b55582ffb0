"""Collapse across samples of the probe: the numbers of `rankscope.metrics.samples`, measured during a training.

`Probe` calls `take` after each call of the model, inside `preserved_training_state`: embeddings are the mean of each
sample's tokens at every layer, or what a function makes of the model's output. Once all ranks are known to have theirs,
`read` joins the samples of all ranks and computes, of every layer or, of a function, as numbers of the run:

| metric                                | of                                                                       |
|---------------------------------------|--------------------------------------------------------------------------|
| `rankme`, `alpha_req`, `uniformity`   | a row for each sample; of several views of a sample, the first           |
| `lidar`, `alignment`                  | all views of each sample, if a function gives `[sample, view, width]`    |

None of them is a mean over samples, so that parts cannot be merged: all rows must come together.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import combinations
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from rankscope.errors import MetricError, MonitorError, require
from rankscope.live import (
    Hook,
    StackWatch,
    arithmetic_of,
    isolated,
    own_parameters,
    processes,
    submodules,
    to_float64_device,
)
from rankscope.metrics import alignment, alpha_req, distance_floor, lidar, rankme, rankme_floor, uniformity, unit_of
from rankscope.monitor.instrument import Instrument
from rankscope.monitor.measurement import MetricValues
from rankscope.monitor.probe import of_output
from rankscope.monitor.training_state import preserved_training_state
from rankscope.sources import first_line

EmbeddingFunction = Callable[[Any], Tensor]  # takes what the model returns; gives `[sample, width]`, or with views
EmbeddingsLike = Literal["mean"] | EmbeddingFunction
SHARPNESS = 2.0  # the t of uniformity, that of its authors
LAST = 50  # the last eigenvalue of alpha-ReQ's fit, that of its authors


class ProbeEmbeddings(Instrument):
    """Takes embeddings of the probe at every measurement, and computes what tells collapse across samples.

    Args:
        how: "mean", or a function of what the model returns.
    """

    name, subject, must_work = "embeddings", "embeddings are", True

    def __init__(self, how: EmbeddingsLike = "mean") -> None:
        wrong = f"embeddings must be 'mean', or a function of what the model returns for the probe; got {how!r}"
        require(how == "mean" or callable(how), wrong, MonitorError, "embeddings")
        self.function: EmbeddingFunction | None = None if how == "mean" else how
        self.keeps = () if self.function else ("embeddings",)
        # By stack and layer, None for the output of a function: what was taken last.
        self._rows: dict[tuple[str, int | None], Tensor] = {}
        self._failure: Exception | None = None  # of the function, when it was called last
        self._dtype = torch.float64  # the coarsest that embeddings were computed in

    def __repr__(self) -> str:
        return f"{self.name} by {'a function' if self.function else 'mean'}"

    def attach(self) -> None:
        """Begin to listen to the calls of the probe."""
        expected = "embeddings must be 'mean', or a function of what the model returns for the probe"
        if self.monitor.probe is None:
            raise MonitorError(f"{expected}; there is no probe: give probe=", subject="embeddings")
        self.monitor.probe.listeners.append(self.take)

    def take(self, watches: Mapping[str, StackWatch], output: Any) -> None:
        """Take the embeddings, stack by stack, of the watched call of the model that has just returned `output`."""
        self._failure = None
        if self.function is None:
            self._rows = {(k, layer): rows for k, watch in watches.items() for layer, rows in watch.embeddings.items()}
            self._dtype = max((watch.totals.arithmetic or torch.float64 for watch in watches.values()), key=unit_of)
            return
        watch, *_ = watches.values()
        try:
            with torch.no_grad(), preserved_when_called(watch.model):
                rows = of_output("embeddings", self.function, output)
            floating = isinstance(rows, Tensor) and rows.is_floating_point()
            if not floating or rows.ndim not in (2, 3) or not rows.numel():
                shape = f"{rows.dtype} of {tuple(rows.shape)}" if isinstance(rows, Tensor) else ""
                received = shape or f"a {type(rows).__name__}"
                expected = "embeddings must give a floating tensor [sample, width], or [sample, view, width]"
                raise MonitorError(f"{expected}; got {received}", subject="embeddings")
        except Exception as error:  # what else the probe shows is read all the same
            self._failure = error
            return
        blocks = [block for stack_watch in watches.values() for block in stack_watch.plan.blocks]
        rows = rows.detach()
        self._rows, self._dtype = {("", None): rows}, arithmetic_of(own_parameters(submodules(*blocks)), rows)

    def read(self, step: int) -> MetricValues:
        """The numbers of the embeddings that were taken last, of the samples of all ranks together; called by all.

        Raises:
            MonitorError: The function failed, or gave something else than embeddings.
        """
        taken, self._rows = self._rows, {}
        with processes.failing_together():
            if self._failure is not None:
                raise self._failure
        if processes.world_size() > 1:
            shapes = {key: tuple(rows.shape[1:]) for key, rows in taken.items()}
            processes.require_agreement("embeddings", shapes)
            local_rows = {key: rows.cpu() for key, rows in taken.items()} if self.monitor.counts_samples else None
            parts = [part for part in processes.gathered(local_rows) if part is not None]
            taken = {k: torch.cat([part[k] for part in parts]).to(rows.device) for k, rows in taken.items()}
        values = MetricValues()
        for (stack, layer), rows in taken.items():
            of_stack = MetricValues()
            with isolated(rows.device):
                self._add(of_stack, layer, to_float64_device(rows))
            values.update(of_stack, stack)
        return values

    def _add(self, values: MetricValues, layer: int | None, rows: Tensor) -> None:
        """Add the numbers of embeddings `[sample, width]` or `[sample, view, width]`; NaN if an entry is."""
        views, dtype = rows if rows.ndim == 3 else rows[:, None], self._dtype
        (samples, count, width), Z = views.shape, views[:, 0]
        if samples < 2:
            received = "the probe gave one: give a probe of more"
            raise MonitorError(f"collapse across samples needs several of them; {received}", subject="probe")
        if samples < width:
            self._note(f"rankme is at most {samples}, the number of the probe's samples, and not the width {width}")
        finite = bool(rows.isfinite().all())
        near = distance_floor(dtype)
        last = min(LAST, width - 1)  # tokens after a LayerNorm have no part in one direction
        numbers: list[tuple[str, Callable[[], Tensor], float]] = [
            ("rankme", lambda: rankme(Z), rankme_floor(samples, width, dtype)),
            ("alpha_req", lambda: alpha_req(Z, last=last, dtype=dtype), 0.0),
            ("uniformity", lambda: uniformity(Z, SHARPNESS), SHARPNESS * near),
        ]
        if rows.ndim == 3 and count > 1:
            numbers += [("lidar", lambda: lidar(views, dtype=dtype), 0.0)]
            pairs = combinations(views.unbind(1), 2)
            numbers += [("alignment", lambda: torch.stack([alignment(*pair) for pair in pairs]).mean(0), near)]
        for name, compute, floor in numbers:
            try:
                scalar = compute() if finite else torch.tensor(torch.nan, dtype=torch.float64)
            except MetricError as error:  # too few eigenvalues for a line
                self._note(f"{name} is not measured: {first_line(error)}")
                continue
            # Where collapse leaves nothing to compute a number from, there is none; that is no overflow.
            value = None if finite and bool(scalar.isnan()) else scalar.cpu()
            values.add_once(layer, name, value, processes.is_writer(), floor)

    def _note(self, sentence: str) -> None:
        self.remarks += [sentence] * (sentence not in self.remarks)


@contextmanager
def preserved_when_called(model: nn.Module) -> Iterator[None]:
    """Inside, a module that is no part of the model, such as a projector, is put into eval mode when it is called
    first, and afterwards is as it was: batch statistics would otherwise follow the probe."""
    known = {id(module) for module in submodules(model)}
    with ExitStack() as stack:

        def on_call(module: nn.Module, _: Any) -> None:
            if id(module) not in known:
                known.update(map(id, submodules(module)))
                stack.enter_context(preserved_training_state(module))

        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Using `torch.compile")  # that a hook of all modules fires twice
        stack.callback(register_module_forward_pre_hook(Hook(on_call, get_ident())).remove)
        yield
