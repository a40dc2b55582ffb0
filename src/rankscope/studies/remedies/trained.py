"""What remedies do to networks that are trained from scratch: a table over remedies, settings, depths and
seeds (`lab/trial.py` says what is in it).

    python -m rankscope.studies.remedies.trained --folder runs/remedies --device cuda --workers 10 --minutes 9

goes on where the last such call left off. Each remedy in each setting at each depth is a piece of work by
itself, kept in `FOLDER/parts` when it is done; a run that is killed loses those that it was at.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import polars as pl

from rankscope.errors import StudyError
from rankscope.lab.trial import NONE, SCHEMA, SETTINGS, SIGMA, Trial, TrialSizes
from rankscope.nets.remedies import REMEDIES
from rankscope.runs import tables
from rankscope.studies.study import Setup
from rankscope.workers import PieceResult, run_pieces

EVERY = (NONE, *REMEDIES, SIGMA)


@dataclass(frozen=True)
class Plan:
    """What is trained, where nothing else is asked for."""

    settings: tuple[str, ...]
    depths: tuple[int, ...]
    sizes: TrialSizes


FULL = Plan(tuple(SETTINGS), (6, 12, 24, 48), TrialSizes())
SLOWER = Plan(("post", "no skips"), (24,), TrialSizes(lr=3e-4))
"""Where depth decides who learns: whether a smaller learning rate changes who."""
QUICK = Plan(("pre",), (2, 6), TrialSizes(width=64, context=32, batch=8, steps=60, evaluation_samples=64))


def trained(
    setup: Setup,
    remedies: Sequence[str] = EVERY,
    seeds: Sequence[int] = (0, 1, 2),
    *,
    settings: Sequence[str] | None = None,
    depths: Sequence[int] | None = None,
    steps: int | None = None,
    sizes: TrialSizes | None = None,
    workers: int = 1,
    minutes: float = math.inf,
) -> pl.DataFrame:
    """remedy · setting · depth · seed · quantity · value · refused; what is left out is as the setup's size
    has it. What failed, or was not begun within so many minutes, has a row that says so, and is tried again
    by the next call."""
    plan = FULL if setup.full else QUICK
    chosen = sizes or plan.sizes
    chosen = chosen if steps is None else replace(chosen, steps=steps)
    trials = [
        Trial(remedy, setting, depth, tuple(seeds), chosen)
        for remedy, setting, depth in product(remedies, settings or plan.settings, depths or plan.depths)
    ]
    if len(set(trials)) < len(trials):
        raise StudyError(f"remedies, settings and depths must be different ones; got {', '.join(remedies)}")
    until = time.time() + 60 * minutes
    work = partial(_kept, setup.folder, setup.full, setup.device, until)
    found: dict[Trial, pl.DataFrame] = {}
    processes = workers if workers > 1 else 0
    for result in run_pieces(work, trials, processes, cost=lambda trial: trial.depth, deadline=until):
        found[result.piece] = _table(result)
        setup.say(_line(result, len(found), len(trials)))
    late = "it was not begun in time: the next run does it"
    return pl.concat([found[each] if each in found else _failed(each, late) for each in trials])


def gathered(folder: str | Path, how: str = "trained") -> pl.DataFrame:
    """All that was kept in a folder by trials, on whatever machine, in the order of remedies; `how` begins
    their names."""
    parts = [tables.read_parquet(part)[0] for part in sorted(Path(folder).glob(f"parts/{how}-*.parquet"))]
    places = {remedy: place for place, remedy in enumerate(EVERY)}
    parts.sort(key=lambda part: places.get(part["remedy"][0], len(places)))
    return pl.concat([pl.DataFrame(schema=SCHEMA), *parts])


def recipes(folder: str | Path) -> list[str]:
    """How networks were trained whose tables a folder has: a sentence for each way that there was."""
    found: dict[str, int] = {}
    for part in sorted(Path(folder).glob("parts/*.parquet")):
        if not part.name.startswith(("trained-", "at=")):
            continue
        table, manifest = tables.read_parquet(part)
        if manifest is None or manifest.key is None:
            continue
        key = manifest.key
        how, seeds = key["settings"]["sizes"], ", ".join(map(str, key["settings"]["seeds"]))
        said = (
            f"of width {how['width']}, {how['heads']} heads, {how['steps']} steps of AdamW, batches of "
            f"{how['batch']}, learning rate {how['lr']:g}, seeds {seeds} ({key['device']})"
        )
        found[said] = found.get(said, 0) + len(table.filter(quantity="diverged"))
    return [f"Trained: {number} networks {said}." for said, number in found.items() if number]


def _kept(folder: Path, full: bool, device: str, until: float, trial: Trial) -> pl.DataFrame:
    """A trial's table, from the folder where it has been done."""
    about = asdict(trial)
    return Setup(folder, full, device).kept(trial.name, lambda: trial.table(device, until), **about)


def _table(result: PieceResult[Trial, pl.DataFrame]) -> pl.DataFrame:
    return _failed(result.piece, result.error or "") if result.value is None else result.value


def _failed(trial: Trial, why: str) -> pl.DataFrame:
    row = (trial.remedy, trial.setting, trial.depth, None, None, None, f"not run: {why}")
    return pl.DataFrame([row], schema=SCHEMA, orient="row")


def _line(result: PieceResult[Trial, pl.DataFrame], done: int, of: int) -> str:
    """What one says of a trial that has ended."""
    trial, table = result.piece, _table(result)
    said = {name: table.filter(quantity=name)["value"] for name in ("loss", "diverged")}
    if table["quantity"].null_count():
        came = table["refused"][0]
    else:
        losses = ", ".join(f"{each:.3f}" for each in said["loss"])
        came = f"loss {losses or 'none'}, {int(said['diverged'].sum())} diverged"
    return f"{done}/{of} {result.seconds:6.1f} s  {trial.remedy}, {trial.setting}, {trial.depth}: {came}"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """For a machine of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rate", type=float, help="of learning")
    parser.add_argument("--remedies", nargs="+", default=EVERY)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS))
    parser.add_argument("--depths", nargs="+", type=int)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--quick", action="store_true", help="at small sizes")
    given = parser.parse_args()
    started = time.time()
    sizes = (QUICK if given.quick else FULL).sizes
    table = trained(
        Setup(given.folder, not given.quick, given.device, say=_say),
        given.remedies, given.seeds, settings=given.settings, depths=given.depths, steps=given.steps,
        sizes=replace(sizes, lr=given.rate or sizes.lr), workers=given.workers, minutes=given.minutes,
    )  # fmt: skip
    left = table.filter(pl.col("refused").str.starts_with("not run"))
    _say(f"{time.time() - started:.0f} s; {len(left)} left to do")


if __name__ == "__main__":
    main()
