"""Paths and certificates of the probe, at a slower pace: the model as it is now, taken over as `load` does.

At each such look the model's weights are copied to the CPU in float64, as a canonical network that is held
against the model on the probe itself (`sources/batch_network.py`). Of it come

    paths_0, paths_1, ...    the share of the output that paths of each length carry, biases included:
                             <T_l, Y> / <Y, Y>, T_l the sum of their terms, Y the output; they add up to 1
    certificates             what `certify` proves of it, a row for each theorem: how far it holds, what it
                             says at the last layer at which it says something, and what is measured there

and the copy is let go. A model that cannot be taken over any more, as one whose weights are no numbers, has
rows without numbers; `notes` says why.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn

from rankscope.errors import MonitorError, RankscopeError
from rankscope.live.isolation import isolated
from rankscope.live.mask import arguments_of
from rankscope.live.monitor import ranks
from rankscope.live.monitor.looks import CERTIFICATES
from rankscope.live.monitor.probe import Probe
from rankscope.live.monitor.tally import Tallied
from rankscope.live.monitor.untouched import untouched
from rankscope.nets import Architecture
from rankscope.paths import decompose
from rankscope.runs import Manifest
from rankscope.sources.batch_network import network_on_batch
from rankscope.sources.checkpoint import first_line
from rankscope.theory import certify
from rankscope.theory.certificates import Certificates

CPU = torch.device("cpu")
MOST = 2e11
"""Multiplications of a look, about a minute of one core: of a larger probe the first samples are taken, one
at least."""


class Paths:
    """What is read of a probe every `pace` steps."""

    def __init__(self, model: nn.Module, probe: Probe | None, every: int, pace: int) -> None:
        """Refuses a model that is not known, or a probe that it takes otherwise, in a sentence; every rank
        says the same."""
        if type(pace) is not int or pace < 1 or pace % every:
            raise MonitorError(
                f"paths must be a number of steps, a multiple of every={every}; got {pace!r}: paths are read "
                "at looks, only not at all of them"
            )
        if probe is None:
            raise MonitorError("paths are those of a probe; there is none: give probe=")
        if ranks.spread(model):
            raise MonitorError(
                f"paths need the weights whole; those of {type(model).__name__} are spread over ranks: leave "
                "paths= out, and have `rankscope paths` read its checkpoints"
            )
        self.pace, self.notes = pace, list[str]()
        self.model = ranks.inner(model)
        self.batch = arguments_of(self.model, probe.args, probe.kwargs)
        failed = None
        try:
            with self._aside():
                found = network_on_batch(self.model, self.batch)
            self.lengths, number = found.net.arch.layers + 1, len(found.X)
            self.samples = self._fitting(found.net.arch, number, found.X.shape[1])
        except RankscopeError as error:
            failed = str(error)
        told = next((each for each in ranks.each(failed) if each is not None), None)
        if told is not None:
            raise MonitorError(f"paths are read of models and batches that load can take over; {told}")
        self.batch = {name: _first(each, number, self.samples) for name, each in self.batch.items()}

    def due(self, step: int) -> bool:
        """Whether they are read at this step."""
        return step % self.pace == 0

    def look(self, step: int) -> tuple[Tallied, pl.DataFrame]:
        """Shares by length, and the rows of the certificates; the training does not notice."""
        shares = torch.full((self.lengths, self.samples), torch.nan, dtype=torch.float64)
        table, failed = None, None
        try:
            with self._aside():
                net, X, padding = network_on_batch(self.model, self.batch)
                rows = decompose(net, X, padding).by_length().table.filter(start="all").sort("length")
                shares = torch.tensor(rows["share"].to_list(), dtype=torch.float64).view_as(shares)
                table = certify(net, X, padding).table.drop("hypotheses")
        except (RankscopeError, RuntimeError, MemoryError) as error:  # too little memory ends no training
            failed = f"step {step}: paths or certificates are not measured: {first_line(error)}"
        tables = [each for each in ranks.each(table) if each is not None]
        self.notes += [said for said in dict.fromkeys(ranks.each(failed)) if said is not None]
        found = Tallied()
        for length, each in enumerate(shares):
            found.add(None, f"paths_{length}", each)
        return found, certificates(step, tables if len(tables) == ranks.number() else [])

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On the CPU, as it is without the loop's autocast and default device."""
        with untouched(self.model), isolated(CPU), CPU:
            yield

    def _fitting(self, arch: Architecture, samples: int, tokens: int) -> int:
        """How many samples a look can afford."""
        layer = tokens * arch.width * (4 * arch.width + 2 * arch.mlp_width + 2 * tokens)
        each = arch.layers**2 * layer
        number = min(samples, max(1, int(MOST // each)))
        if number < samples:
            self.notes.append(
                f"paths and certificates are of the first {number} of the probe's {samples} samples: more "
                "take longer than a minute"
            )
        if each > MOST:
            self.notes.append(
                f"paths and certificates of a sample of {tokens} tokens take some {each / MOST:.0f} minutes "
                "of one core at each look: shorter samples are quicker"
            )
        return number


def certificates(step: int, tables: list[pl.DataFrame]) -> pl.DataFrame:
    """A row for each theorem, of the samples of all ranks; none where one of them has none."""
    if not tables:
        return pl.DataFrame(schema=CERTIFICATES)
    found = Certificates(pl.concat(tables), Manifest())  # samples of other ranks may have the same numbers
    broken = found.broken().group_by("theorem").agg(pl.len().alias("broken"))
    rows = found.summary().join(broken, on="theorem", how="left", maintain_order="left")
    rows = rows.with_columns(pl.lit(step).alias("step"), pl.col("broken").fill_null(0))
    return rows.select(pl.col(name).cast(kind) for name, kind in CERTIFICATES.items())


def _first(given: Any, of: int, number: int) -> Any:
    """The first samples of what has one for each."""
    return given[:number] if isinstance(given, Tensor) and given.ndim and len(given) == of else given
