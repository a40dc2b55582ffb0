"""`MetricValues`, what instruments read, reduced to sums; `Measurement`, what one measurement of a training run holds;
`RunWriter`, which writes it; and `Failures`, which keeps errors of the monitor away from the training.

Many values of one number become sums that can be merged: over samples, micro-batches and processes. Of n values with
mean m and `M = sum (v - m)^2`, and n', m', M' of n' further values,

    n'' = n + n',    m'' = m + (m' - m) n' / n'',    M'' = M + M' + (m' - m)^2 n n' / n''

(Chan et al. 1979), so parts in any grouping give the numbers of all values at once. NaN and infinity are counted apart.

Instruments put values into a `MetricValues`; `Monitor` calls `sums()` once per measurement, and `merged_over_ranks`.
It makes a `Measurement` of the sums (`rows_of`), and gives it to its `RunWriter` and
to the writers of `rankscope.monitor.writers`. Each table of the run folder is a `Journal`: rows are appended as
lines, and gathered into Parquet files. (`rankscope checkpoints` writes run folders in the same way.)

`Monitor` does what may fail inside `Failures.contained`. Once the model was measured, an error there becomes a warning
and an alarm about the monitor itself, which `Monitor` writes at the end of the call. While the disk is full it waits
there (`RunWriter.write_alarms`).
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import torch
import torch.distributed as dist
from torch import Tensor

from rankscope.errors import MonitorError, TrainingWarning
from rankscope.live import gathered, processes, world_size
from rankscope.profiles import Readings
from rankscope.runs import Journal, Manifest, Store
from rankscope.shapes import Float
from rankscope.sources import first_line
from rankscope.trainings import ALARMS, CERTIFICATES, CERTIFICATES_TABLE, TRAINING, TrainingRun, in_stack

ENTRY = "training"  # the entry of the run folder's manifest
UNMEASURED = "not measured"  # the name of alarms about the monitor itself
WIDTH = 7  # numbers of one sum: count, mean, M, least, most, mean of the floors, count of NaN and infinity
CPU = torch.device("cpu")  # said, because a person may have called `torch.set_default_device` before this import
EMPTY = torch.tensor([0, 0, 0, torch.inf, -torch.inf, 0, 0], dtype=torch.float64, device=CPU)  # the sum over no value
Sums = Float[Tensor, "key 7"]


class Key(NamedTuple):
    """The layer, head and metric that a running sum is of; `layer` is None for numbers of the whole run."""

    layer: int | None
    head: int | None
    metric: str


def sums_over_samples(value: Float[Tensor, "sample key"], floor: Float[Tensor, "sample key"]) -> Float[Tensor, "key 7"]:
    """The running sum of each column of values, its numbers in the order of `WIDTH`; that of no sample is `EMPTY`, and
    that of no finite value differs from it in the last number alone."""
    if not len(value):
        return EMPTY.to(value.device).expand(value.shape[1], WIDTH)
    broken = ~value.isfinite()
    count = (~broken).sum(0)
    divisor = count.clamp(min=1)
    finite = value.masked_fill(broken, 0.0)
    mean = finite.sum(0) / divisor
    squares = (finite - mean).square().masked_fill(broken, 0.0).sum(0)
    least = value.masked_fill(broken, torch.inf).amin(0)
    most = value.masked_fill(broken, -torch.inf).amax(0)
    floors = floor.masked_fill(broken, 0.0).sum(0) / divisor
    return torch.stack([count.double(), mean, squares, least, most, floors, broken.sum(0).double()], -1)


def merge_sums(a: Float[Tensor, "... 7"], b: Float[Tensor, "... 7"]) -> Float[Tensor, "... 7"]:
    """The running sums over the values of both `a` and `b`, which are of the same keys."""
    n, m = a[..., 0], b[..., 0]
    divisor = (n + m).clamp(min=1)
    mean, floor = (a[..., k] + (b[..., k] - a[..., k]) * m / divisor for k in (1, 5))
    squares = a[..., 2] + b[..., 2] + (b[..., 1] - a[..., 1]).square() * n * m / divisor
    least, most = torch.minimum(a[..., 3], b[..., 3]), torch.maximum(a[..., 4], b[..., 4])
    return torch.stack([n + m, mean, squares, least, most, floor, a[..., 6] + b[..., 6]], -1)


def merged_over_ranks(keys: list[Key], sums: Sums) -> tuple[list[Key], Sums]:
    """The keys of all ranks, and the running sums of each merged in the order of ranks: the same on every rank. Ranks
    with other layers, as pipeline stages have them, have other keys."""
    if world_size() == 1:
        return keys, sums
    digests = gathered(sha256(repr(keys).encode()).hexdigest())
    if len({*digests}) > 1:
        lists = []
        for digest in dict.fromkeys(digests):  # each list travels once, however many ranks have it
            theirs = [keys]
            dist.broadcast_object_list(theirs, src=digests.index(digest))
            lists += theirs[0]
        union = sorted(dict.fromkeys(lists), key=lambda key: (key.layer is None, key.layer or 0))
        rows = {key: row for row, key in enumerate(union)}
        local_sums, sums = sums, EMPTY.repeat(len(union), 1)
        sums[[rows[key] for key in keys]] = local_sums
        keys = union
    nccl = dist.get_backend() == "nccl"  # which gathers on the GPU only
    local = sums.to(torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu")
    parts = [torch.empty_like(local) for _ in range(world_size())]
    dist.all_gather(parts, local)
    merged, *rest = (part.cpu() for part in parts)
    for part in rest:
        merged = merge_sums(merged, part)
    return keys, merged


class MetricValues:
    """Values by layer and metric, in the order they came, on their device until `sums` reduces them together."""

    def __init__(self) -> None:
        # By (layer, metric, whether by head): values and floors, `[sample]` or `[sample, head]`.
        self.parts: dict[tuple[int | None, str, bool], list[tuple[Tensor, Tensor]]] = {}

    def __bool__(self) -> bool:
        return bool(self.parts)

    def add(self, layer: int | None, metric: str, value: Tensor | float, floor: Tensor | None = None) -> None:
        """Add values `[sample]` or `[sample, head]` of a metric, such as those of one micro-batch, or one number.

        Args:
            layer: The layer, 0 for what the first block takes; None for numbers of the whole run.
            metric: The name of the metric.
            value: The values.
            floor: For each of them, below what it is rounding noise; 0 if left out.
        """
        if not isinstance(value, Tensor) or value.ndim == 0:
            value = torch.as_tensor(value, dtype=torch.float64, device="cpu")[None]
        if value.ndim > 2:
            received = f"got a tensor {tuple(value.shape)} of {metric}"
            raise MonitorError(f"values must be a number, [sample] or [sample, head]; {received}", subject="value")
        floor = torch.zeros_like(value) if floor is None else floor
        self.parts.setdefault((layer, metric, value.ndim == 2), []).append((value, floor))

    def add_once(self, layer: int | None, metric: str, value: Tensor | None, counts: bool, floor: float = 0.0) -> None:
        """Add one number that several ranks have, as a sample of the one that `counts`; there may be none."""
        sample = torch.zeros(0, dtype=torch.float64, device=CPU) if value is None or not counts else value[None]
        self.add(layer, metric, sample, torch.full_like(sample, floor))

    def add_readings(self, layer: int, readings: Readings) -> None:
        """Add what was read of a layer, metric by metric."""
        for metric, reading in readings:
            self.add(layer, metric.name, reading.value, reading.floor)

    def without_samples(self) -> "MetricValues":
        """Return the metrics without any value, for samples that another process counts."""
        empty = MetricValues()
        empty.parts = {key: [(value[:0], floor[:0]) for value, floor in parts] for key, parts in self.parts.items()}
        return empty

    def of_stage(self, first_block: int, layers: Collection[int] | None = None) -> "MetricValues":
        """Return the values of a pipeline stage, with the numbers that its layers have in the whole network.

        Args:
            first_block: The number of blocks before the stage. What its first block takes is the last layer of the
                stage before, which measures that.
            layers: Layers of the whole network to keep; all if left out.
        """
        placed = MetricValues()
        for (layer, metric, by_head), parts in self.parts.items():
            network_layer = None if layer is None else layer + first_block
            measured = layers is None or network_layer is None or network_layer in layers
            if measured and not (first_block and layer == 0):
                placed.parts[network_layer, metric, by_head] = parts
        return placed

    def update(self, values: "MetricValues", stack: str = "") -> None:
        """Add all values of another collection, with the name of their stack in the names of metrics of layers."""
        for (layer, metric, by_head), parts in values.parts.items():
            name = in_stack(metric, stack) if stack and layer is not None else metric
            self.parts.setdefault((layer, name, by_head), []).extend(parts)

    def keys(self) -> list[Key]:
        """What each row of `sums` is of."""
        return [
            Key(layer, head if by_head else None, metric)
            for (layer, metric, by_head), parts in self.parts.items()
            for head in range(parts[0][0].shape[1] if by_head else 1)
        ]

    def sums(self) -> Sums:
        """The seven numbers (`WIDTH`) of every key of `keys()`, over all values added, on the CPU. Metrics that have
        equally many samples on one device are reduced together."""
        columns = [tuple(map(_column, zip(*parts, strict=True))) for parts in self.parts.values()]
        groups: dict[tuple[int, torch.device], list[int]] = {}
        for k, (value, _) in enumerate(columns):
            groups.setdefault((len(value), value.device), []).append(k)
        sums: dict[int, Tensor] = {}
        for group in groups.values():
            value, floor = (torch.cat([columns[k][part] for k in group], 1) for part in (0, 1))
            widths = [columns[k][0].shape[1] for k in group]
            rows = torch.split(sums_over_samples(value, floor).cpu(), widths)
            sums |= dict(zip(group, rows, strict=True))
        return torch.cat([EMPTY.new_zeros(0, WIDTH), *(sums[k] for k in range(len(columns)))])


def joined_stacks(by_stack: Mapping[str, MetricValues]) -> MetricValues:
    """The values of all stacks of blocks, each with its stack in the names of its metrics."""
    values = MetricValues()
    for stack, of_stack in by_stack.items():
        values.update(of_stack, stack)
    return values


def _column(parts: Sequence[Tensor]) -> Float[Tensor, "sample key"]:
    """The values of all micro-batches as float64 columns, on the device of the first."""
    values = parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0].device) for part in parts])
    return (values[:, None] if values.ndim == 1 else values).double()


@dataclass(frozen=True)
class Alarm:
    """An alarm that a rule raised."""

    step: int  # at which it was raised
    since: int  # the step at which the fault was first there
    rule: str  # the name of the rule
    layer: int | None  # where the fault is; None if it is of no layer
    head: int | None  # None if it is of no head
    action: str  # what is done: warn, stop or call
    sentence: str  # what is wrong, in numbers, and what helps


@dataclass(frozen=True)
class Measurement:
    """One measurement of a training run, as writers receive it."""

    step: int  # after which the model was measured
    rows: pl.DataFrame  # a row for each number, with the columns of the table `training`
    alarms: tuple[Alarm, ...] = ()  # those that were raised at this measurement
    certificates: pl.DataFrame | None = None  # what theorems prove of the probe, if this measurement read paths


def rows_of(step: int, keys: Sequence[Key], sums: Sums) -> pl.DataFrame:
    """The rows of a measurement from its running sums, of which `keys` says what each is of."""
    count, mean, squares, least, most, floor, broken = sums.unbind(-1)
    spread = (squares / count.clamp(min=1)).sqrt()
    columns: dict[str, list[Any]] = {"step": [step] * len(keys)}
    columns |= {name: [getattr(key, name) for key in keys] for name in Key._fields}
    for name, numbers in {"value": mean, "spread": spread, "least": least, "most": most, "floor": floor}.items():
        columns[name] = [x if samples else None for x, samples in zip(numbers.tolist(), count.tolist(), strict=True)]
    columns |= {"samples": count.long().tolist(), "broken": broken.long().tolist()}
    return pl.DataFrame(columns, schema=TRAINING)


def alarm_rows(alarms: Sequence[Alarm]) -> pl.DataFrame:
    """Alarms as rows of the table `alarms`."""
    return pl.DataFrame([vars(alarm) for alarm in alarms], schema=ALARMS)


class RunWriter:
    """Writes a training run into its folder, which nobody else can write to until `close`. A run that is killed loses
    at most the measurement that was being written. If `certified`, certificates get a table of their own."""

    def __init__(self, folder: str | Path, manifest: Manifest, certified: bool = False) -> None:
        self.store = Store(folder)
        self.waiting: list[Alarm] = []  # alarms that could not be written yet
        try:
            self.measurements = Journal(self.store, ENTRY, "training", TRAINING, manifest, TrainingRun.kind)
            self.alarms = Journal(self.store, ENTRY, "alarms", ALARMS, manifest)
            names = [CERTIFICATES_TABLE] * (certified or CERTIFICATES_TABLE in self.store.run.names)
            self.certificates = [Journal(self.store, ENTRY, name, CERTIFICATES, manifest) for name in names]
        except BaseException:
            self.store.close()
            raise
        self.journals = [self.measurements, self.alarms, *self.certificates]

    def write(self, measurement: Measurement) -> None:
        """Write a measurement, its own rows last: so a crash leaves none without its alarms and certificates."""
        self.write_alarms(measurement.step, measurement.alarms)
        for journal in self.certificates:
            if measurement.certificates is not None and len(measurement.certificates):
                journal.append(measurement.step, measurement.certificates)
        self.measurements.append(measurement.step, measurement.rows)

    def write_alarms(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Write the alarms of a step. If it has some already, or the disk is full, they wait for the next call."""
        if self.store.closed:  # another process may be writing
            raise MonitorError(f"{self.store.folder} was closed with its monitor: make a new one", subject="run")
        self.waiting += alarms
        if not self.waiting:  # as after nearly every step of a training: nothing is read from the disk
            return
        last = self.alarms.last
        if last is None or last < step:
            self.alarms.append(step, alarm_rows(self.waiting))
            self.waiting = []

    def describe(self, **values: Any) -> None:
        """Put values into the manifest of the run, in place of earlier ones of the same names."""
        earlier = self.store.run.manifests[ENTRY]
        if (manifest := earlier.adding(**values)) != earlier:
            self.store.describe(ENTRY, manifest)

    def cut(self, step: int) -> None:
        """Remove the rows of all steps after this one."""
        self.waiting = [alarm for alarm in self.waiting if alarm.step <= step]
        for journal in self.journals:
            journal.cut(step)

    def close(self) -> None:
        """Gather the last lines into Parquet files, or on a full disk leave them lines, and release the folder."""
        if not self.store.closed:
            for journal in self.journals:
                with suppress(OSError):
                    journal.gather()
            self.store.close()


class Failures:
    """What fails in a monitor, and the alarms that say so; `current_step` gives the number of the last step."""

    def __init__(self, current_step: Callable[[], int]) -> None:
        self.measured = False  # True once the model was measured: from then on nothing is raised
        self.sentences: dict[str, str] = {}  # by fault, what fails now
        self.alarms: list[Alarm] = []  # raised since `take`
        self._current_step = current_step
        self._good_steps: dict[str, int] = {}  # by fault, the last step without it, or else the first with it

    @contextmanager
    def contained(self, fault: str, from_start: bool = False) -> Iterator[None]:
        """Inside, errors are raised until the model was measured, unless they are contained `from_start`; later they
        become an alarm, once while the fault lasts, that says since which step there is this `fault`."""
        try:
            yield
        except Exception as error:
            if not (self.measured or from_start):
                raise
            step = self._current_step()
            since = self._good_steps.setdefault(fault, step)
            why = f"{type(error).__name__}: {first_line(error)}"
            sentence = f"Step {step}: {fault} since step {since}: {why}. The training goes on."
            known = fault in self.sentences
            self.sentences[fault] = sentence
            if not known and processes.is_writer():
                self.alarms.append(Alarm(step, since, UNMEASURED, None, None, "warn", sentence))
                warnings.warn(sentence, TrainingWarning, stacklevel=5)
        else:
            self.sentences.pop(fault, None)
            self._good_steps[fault] = self._current_step()

    def take(self) -> list[Alarm]:
        """The alarms that were raised since this was called last."""
        alarms, self.alarms = self.alarms, []
        return alarms
