"""`rankscope compare` of training runs: the same metric at the same steps, and where they part."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.cli.inputs import split_names
from rankscope.cli.options import ResultOptions
from rankscope.cli.show import machine, say, show_tables
from rankscope.errors import FileError, MetricError

if TYPE_CHECKING:
    from rankscope.trainings import RunComparison, TrainingRun


def is_training(thing: str) -> bool:
    """True for a folder that holds a training run and no profile."""
    from rankscope.runs import read
    from rankscope.trainings import TRAINING_TABLE

    folder = Path(thing)
    return folder.is_dir() and not (folder / "profile.parquet").is_file() and TRAINING_TABLE in read(folder).names


def compare_trainings(things: list[str], metrics: str | None, results: ResultOptions) -> None:
    """Print training runs side by side; folders that are no training runs, and `-o`, are refused."""
    from rankscope.trainings import compare_runs, read_training

    for thing in things:
        if not is_training(thing):
            raise FileError(
                f"training runs are compared with training runs; {thing} is none: leave it out", subject=thing
            )
    if len(things) < 2:
        raise MetricError("compare must be given at least two training runs; got one", subject="things")
    if results.output is not None:
        raise FileError(
            f"-o goes with what compare measures; use rankscope report {' '.join(things)} -o PAGE", subject="output"
        )
    runs = [read_training(thing) for thing in things]
    comparison = compare_runs(runs, things, None if metrics is None else split_names("metrics", metrics)[0])
    names = unique_titles([Path(thing).resolve().name for thing in things], things)
    sentence, differ = comparison.verdict, _metric_disagreement(dict(zip(names, runs, strict=True)), comparison)
    if results.as_json:
        lines = [
            {
                "of": line.name,
                "values": dict(zip(things, line.values, strict=True)),
                "below_floor": dict(zip(things, line.noise, strict=True)),
                "parted_at": line.parted,
            }
            for line in comparison.lines
        ]
        more = {"verdict": sentence, "notes": list(comparison.notes), "disagreement": differ or None}
        return machine({"metric": comparison.metric, "steps": comparison.steps, "lines": lines, **more})
    show_tables(*replace(comparison, names=tuple(names)).sections()[0].tables)
    say("", sentence, *([differ] if differ else []), *([] if results.quiet else comparison.notes))


def _metric_disagreement(runs: "dict[str, TrainingRun]", comparison: "RunComparison") -> str:
    """A sentence on two metrics that rank the runs differently at the last step and layer that all have."""
    from rankscope.profiles import disagreement

    names = [name for run in runs.values() for name in run.metrics]
    shared = [name for name in dict.fromkeys([comparison.metric, *names]) if names.count(name) == len(runs)]
    layer = min(run.grid(comparison.metric).layers[-1] for run in runs.values())
    ends = {
        metric: {
            name: logs[comparison.steps[-1]]
            for name, run in runs.items()
            if comparison.steps[-1] in (logs := run.grid(metric).logs(layer))
        }
        for metric in shared
    }
    return disagreement(ends)


def unique_titles(titles: list[str], things: list[str]) -> list[str]:
    """The titles; where two are equal, the arguments themselves."""
    return [title if titles.count(title) == 1 else thing for title, thing in zip(titles, things, strict=True)]
