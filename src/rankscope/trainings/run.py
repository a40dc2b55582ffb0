"""`TrainingRun`: a training as far as it is written, as a result; `read_training` reads one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import polars as pl

from rankscope.extras import counted
from rankscope.figures import Chart
from rankscope.results import Plot, Result, Section
from rankscope.runs import Manifest, Run
from rankscope.trainings.figures import layer_curves, layer_map
from rankscope.trainings.sections import ends_tables, training_sections, training_sentences
from rankscope.trainings.training import (
    ALARMS_TABLE,
    CERTIFICATES_TABLE,
    READ,
    TRAINING_TABLE,
    TrainingTables,
    read_tables,
)


@dataclass(frozen=True, eq=False, repr=False)
class TrainingRun(TrainingTables, Result):
    """A training run as far as it is written; see `read_training`."""

    kind = "training"
    schemas: ClassVar = {name: schema for name, (schema, _) in READ.items()}
    optional = (ALARMS_TABLE, CERTIFICATES_TABLE)

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """Measurements, alarms, and what is proved of the probe."""
        return {TRAINING_TABLE: self.table, ALARMS_TABLE: self.alarms, CERTIFICATES_TABLE: self.certificates}

    @classmethod
    def of_run(cls, run: Run, entry: str) -> Self:
        """The training in a run folder, whose tables may be growing."""
        return read_tables(run.folder, cls)

    @classmethod
    def made_of(cls, tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]) -> Self:
        """The training of these tables, which are in no folder."""
        empty = {name: pl.DataFrame(schema=cls.schemas[name]) for name in cls.optional}
        table, alarms, certificates = ({**empty, **tables}[name] for name in READ)
        return cls(Path(), manifest, table, alarms, certificates, tuple(details.get("notes", ())))

    @property
    def title(self) -> str:
        """What is trained, and how far."""
        far = f" up to step {self.steps[-1]:,}" if self.steps else ""
        return f"TrainingRun: {self.name}, {counted(len(self.steps), 'measurement')}{far}"

    @property
    def sentence(self) -> str:
        """How many alarms there were, the first of them, and how the loss went."""
        return training_sentences(self)

    def overview(self) -> Section:
        """The sentences, and the first metric by layer and step."""
        plots = [Plot("training", [("", chart)]) for chart in (self.charts() if self.metrics else [])]
        return Section(self.title, self.sentence, plots, ends_tables(self)[:1])

    def sections(self) -> list[Section]:
        """What was measured, layer by step, and loss spikes if there are any."""
        return training_sections(self)

    def charts(self, metric: str | None = None, *, curves: bool = False) -> list[Chart]:
        """A metric (the first, if left out) by layer and step as a map, or as a curve for each layer."""
        name = self.metric(metric)
        return [layer_curves(self, [name]) if curves else layer_map(self, name)]


def read_training(folder: str | Path) -> TrainingRun:
    """The training run in a folder, as far as it is written; raises FileError if there is none."""
    return read_tables(folder, TrainingRun)
