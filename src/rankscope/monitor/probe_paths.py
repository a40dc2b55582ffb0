"""Path shares and certificates of the probe, measured every `paths_every` steps.

When they are due, the model's weights are copied to the CPU in float64, as a canonical network whose output is compared
with the model's on the probe itself (`sources/inputs.py`), and of that network are read

    paths_0, paths_1, ...    the share of the output that paths of each length carry, biases included:
                             <T_l, Y> / <Y, Y>, T_l the sum of their terms, Y the output; they add up to 1
    certificates             what `certify` proves, a row for each theorem: how far it holds, what it says at
                             the last layer at which it says something, and what is measured there

If the model cannot be copied any more, because its weights are NaN for example, the rows have no numbers and
`remarks` say why.
"""

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import MonitorError, RankscopeError, require
from rankscope.live import arguments_of, isolated, processes
from rankscope.monitor.instrument import Instrument
from rankscope.monitor.measurement import MetricValues
from rankscope.monitor.training_state import preserved_training_state
from rankscope.nets import Architecture
from rankscope.paths import decompose
from rankscope.runs import Manifest
from rankscope.sources import first_line, network_on_batch
from rankscope.theory import Certificates, certify
from rankscope.trainings import CERTIFICATES

CPU = torch.device("cpu")
BUDGET = 2e11  # multiplications of one measurement, about a minute of one core


class ProbePaths(Instrument):
    """Measures paths and certificates of a probe every so many steps: of as many of its first samples as take no
    more multiplications than `budget`, one at least. What `load` cannot take over is refused, on every rank alike.

    Args:
        every: Steps between two measurements, a multiple of the monitor's; by default the monitor's.
        budget: Multiplications that one measurement may take.
    """

    name, subject, of_samples, must_work = "paths", "paths and certificates are", False, True

    def __init__(self, every: int | None = None, budget: float = BUDGET) -> None:
        self.every, self.budget = every, budget
        self.certificates: pl.DataFrame | None = None  # of the last measurement, if it was due

    def attach(self) -> None:
        """Copy the model once; refuse one that cannot be copied, or a training without a probe."""
        self.monitor.require_one_stack("paths_every")
        self.every = self.monitor.every if self.every is None else self.every
        fits = type(self.every) is int and self.every > 0 and self.every % self.monitor.every == 0
        sentence = f"paths_every must be a multiple of every={self.monitor.every}; got {self.every!r}"
        require(fits, sentence, MonitorError, "paths_every")
        processes.require_agreement("metrics and steps", self.every)
        if (probe := self.monitor.probe) is None:
            raise MonitorError("paths are those of a probe; there is none: give probe=", subject="probe")
        self.model, model = self.monitor.model, self.monitor.wrapped
        received = f"those of {type(model).__name__} are sharded: have `rankscope paths` read its checkpoints"
        sentence = f"paths need all weights on one process; {received}"
        require(not processes.is_sharded(model), sentence, MonitorError, "paths_every")
        self.batch = arguments_of(self.model, probe.args, probe.kwargs)
        try:
            with preserved_training_state(self.model), isolated(CPU):  # no autocast, no default device of the loop
                canonical = network_on_batch(self.model, self.batch)
            self.lengths, samples = canonical.net.arch.layers + 1, len(canonical.X)
            self.samples = self._affordable_samples(canonical.net.arch, samples, canonical.X.shape[1])
        except RankscopeError as error:
            sentence = f"paths need a model and batch that load can take over; {error}"
            raise MonitorError(sentence, subject="paths_every") from error
        for name, argument in self.batch.items():
            if isinstance(argument, Tensor) and argument.ndim and len(argument) == samples:  # an entry for each sample
                self.batch[name] = argument[: self.samples]

    def read(self, step: int) -> MetricValues:
        """Path shares by length, if they are due, with the rows of `certificates`; the training does not notice."""
        values, self.certificates = MetricValues(), None
        if self.every is None or not self.monitor.schedule.crossed(self.every):
            return values
        shares = torch.full((self.lengths, self.samples), torch.nan, dtype=torch.float64)
        table, failure = None, None
        try:
            with preserved_training_state(self.model), isolated(CPU):  # no autocast, no default device of the loop
                net, X, padding = network_on_batch(self.model, self.batch)
                lengths = decompose(net, X, padding).by_length().table.filter(start="all").sort("length")
                shares = torch.tensor(lengths["share"].to_list(), dtype=torch.float64).view_as(shares)
                table = certify(net, X, padding).table.drop("hypotheses")
        except (RankscopeError, RuntimeError, MemoryError) as error:  # too little memory ends no training
            failure = f"step {step}: paths or certificates are not measured: {first_line(error)}"
        tables = [theirs for theirs in processes.gathered(table) if theirs is not None]
        self.remarks += [why for why in dict.fromkeys(processes.gathered(failure)) if why is not None]
        for length, share in enumerate(shares):
            values.add(None, f"paths_{length}", share)
        self.certificates = pl.DataFrame(schema=CERTIFICATES)
        if len(tables) == processes.world_size():
            certificates = Certificates(pl.concat(tables), Manifest())  # samples of two ranks may share a number
            broken = certificates.broken().group_by("theorem").agg(pl.len().alias("broken"))
            rows = certificates.summary().join(broken, on="theorem", how="left", maintain_order="left")
            rows = rows.with_columns(pl.lit(step).alias("step"), pl.col("broken").fill_null(0))
            self.certificates = rows.select(pl.col(name).cast(kind) for name, kind in CERTIFICATES.items())
        return values

    def _affordable_samples(self, arch: Architecture, samples: int, tokens: int) -> int:
        """How many samples of the probe the budget allows; what that leaves out is noted."""
        layer = tokens * arch.width * (4 * arch.width + 2 * arch.mlp_width + 2 * tokens)
        sample = arch.layers**2 * layer
        affordable = min(samples, max(1, int(self.budget // sample)))
        if affordable < samples:
            first = f"the first {affordable} of the probe's {samples} samples"
            self.remarks.append(f"paths and certificates are of {first}: more take longer than a minute")
        if sample > self.budget:
            take = f"{tokens} tokens take some {sample / self.budget:.0f} minutes of one core at each measurement"
            self.remarks.append(f"paths and certificates of a sample of {take}: shorter samples are quicker")
        return affordable
