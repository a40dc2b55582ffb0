"""The whole table: what is asked, gathered part by part, judged and written."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polars as pl

from rankscope.errors import StudyError
from rankscope.figures.matplotlib import save
from rankscope.files import write_text
from rankscope.remedies import REMEDIES, remedy
from rankscope.runs import Store
from rankscope.runs.manifest import begun
from rankscope.studies.remedies import learnt
from rankscope.studies.remedies.cold import SAMPLES, TOKENS, subject
from rankscope.studies.remedies.comparisons import comparisons
from rankscope.studies.remedies.costs import costs
from rankscope.studies.remedies.drawn import figures
from rankscope.studies.remedies.initial import HEADS, INIT, NONE, WIDTH, depths
from rankscope.studies.remedies.parts import Part, each, parts
from rankscope.studies.remedies.shown import shown
from rankscope.studies.remedies.table import PLACED, Tables, rows
from rankscope.studies.remedies.trained import SLOWER, gathered, recipes, trained
from rankscope.studies.reproduce import described
from rankscope.studies.study import Outcome, Setup

TRAINED_ONLY = ("sigmareparam",)
"""A parametrisation: nothing of it is seen before training."""


@dataclass(frozen=True)
class Asked:
    """What is to be in the table."""

    remedies: tuple[str, ...] = tuple(REMEDIES)
    """As `--remedy` has them."""
    model: str = "minilm"
    """Onto which they are put cold."""
    seeds: int = 3
    train: bool = False
    depths: tuple[int, ...] | None = None
    """Of networks that are trained; as the setup's size has it where they are left out."""
    steps: int | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        for each_one in self.remedies:
            remedy(each_one)  # refused by its own sentence
        if not self.remedies or len(set(self.remedies)) < len(self.remedies):
            raise StudyError(f"remedies must be different ones, at least one; got {', '.join(self.remedies)}")
        for name, number in (("seeds", self.seeds), ("workers", self.workers)):
            if number < 1:
                raise StudyError(f"{name} must be at least 1; got {number}")
        if self.depths is not None and (not self.depths or min(self.depths) < 1):
            raise StudyError(f"depths must be whole numbers from 1 on; got {self.depths}")

    @property
    def trained(self) -> tuple[str, ...]:
        """What is trained: with all remedies those as well that only training shows."""
        more = TRAINED_ONLY if set(REMEDIES) <= set(self.remedies) else ()
        return (NONE, *self.remedies, *more)


def plan(setup: Setup, asked: Asked) -> list[Part]:
    """All that is computed here, trainings apart; the model is loaded for it, or refused."""
    layers = subject(asked.model, setup.device)[0].arch.layers
    return parts(asked.remedies, asked.seeds, asked.model, layers, setup.full)


def gather(
    setup: Setup, asked: Asked, planned: Sequence[Part], tell: Callable[[Part], None] = lambda _: None
) -> Tables:
    """Compute or read every part; `tell` hears of each when it is there."""
    found: dict[str, dict[str, pl.DataFrame]] = {}
    for part, table in each(setup, planned, asked.workers):
        found.setdefault(part.kind, {})[str(part)] = table
        tell(part)
    joined = {
        kind: pl.concat([tables[str(part)] for part in planned if part.kind == kind])
        for kind, tables in found.items()
    }
    learned, slower, timed = trainings(setup, asked)
    return Tables(
        joined["initial"],
        joined["theorems"],
        joined["cold"],
        joined.get("variance"),
        learnt.whole(learned),
        learnt.priced(timed),
        learnt.whole(slower),
    )


def trainings(
    setup: Setup, asked: Asked
) -> tuple[pl.DataFrame | None, pl.DataFrame | None, pl.DataFrame | None]:
    """What trainings gave, what those with a smaller learning rate gave, and what steps cost: run where that
    is asked for, else what the folder has kept of an earlier run, on whatever machine; None where there is
    nothing."""
    if not asked.train:
        kept = [gathered(setup.folder, how) for how in ("trained", f"at={SLOWER.sizes.lr:g}")]
        kept = [each.filter(pl.col("remedy").is_in(asked.trained)) for each in kept]
        table, slower = (each if len(each) else None for each in kept)
        return table, slower, _kept_costs(setup.folder)
    train = partial(
        trained, setup, asked.trained, range(asked.seeds), steps=asked.steps, workers=asked.workers
    )
    table, slower = train(depths=asked.depths), None
    if setup.full and asked.depths is None:
        slower = train(settings=SLOWER.settings, depths=SLOWER.depths, sizes=SLOWER.sizes)
    return table, slower, costs(setup, asked.trained)


def _kept_costs(folder: Path) -> pl.DataFrame | None:
    files = sorted(folder.glob("parts/costs-*.parquet"))
    return pl.concat([learnt.priced(pl.read_parquet(file)) for file in files]) if files else None


def outcome(setup: Setup, asked: Asked, tables: Tables) -> Outcome:
    """Figures, tables, claims and what is said of them."""
    data = {
        "remedies": rows(tables), "initial": tables.initial, "cold": tables.cold, "theorems": tables.theorems,
        "laws": tables.laws,
    }  # fmt: skip
    data |= {"trained": tables.trained} if len(tables.trained) else {}
    data |= {"slower": tables.slower} if len(tables.slower) else {}
    data |= {"costs": tables.costs} if len(tables.costs) else {}
    return Outcome(
        figures(tables), data, comparisons(tables), notes(setup, asked, tables), shown(tables), said(tables)
    )


def said(tables: Tables) -> str:
    """What one would tell somebody who must choose: of trained networks; where nothing was trained, of those
    at initialisation."""
    lines = [*_trained_said(tables)] or [*_start_said(tables)]
    idle = [
        name for name in tables.remedies[1:]
        if all(tables.at_start(name, each) == tables.at_start(NONE, each) for each in PLACED)
        and (tables.cold.filter(remedy=name, quantity="moved")["value"] == 0).all()
        and len(tables.cold.filter(remedy=name, quantity="moved"))
    ]  # fmt: skip
    if idle:
        lines.append(f"Before training {_listed(idle)} {'does' if len(idle) == 1 else 'do'} nothing.")
    return " ".join(lines)


def _trained_said(tables: Tables) -> Iterator[str]:
    """Of settings in which a remedy decides: with which the deepest networks learn."""
    names = dict.fromkeys(tables.trained["remedy"])
    for setting, words in (("no skips", "without skips"), ("post", "with norms after their skips")):
        found = {name: learnt.learns(tables.trained, name, setting) for name in names}
        deepest = [name for name, reached in found.items() if reached and reached.whole]
        plain = found.get(NONE)
        if plain is not None and not plain.whole:
            depth = learnt.depths(tables.trained, setting)[-1]
            which = f"with {_listed(deepest)}" if deepest else "with none of them"
            yield f"Networks of {depth} layers {words} learn {which}."


def _start_said(tables: Tables) -> Iterator[str]:
    for setting, words in (("no skips", "Without skips"), ("post", "In whole post-norm networks")):
        kept = [
            name for name in tables.remedies
            if (found := tables.at_start(name, setting)) and all(one.whole for one in found)
        ]  # fmt: skip
        held = f"tokens stay apart for all {tables.deepest} layers with {_listed(kept)}"
        none = f"none of them keeps tokens apart for all {tables.deepest} layers"
        yield f"{words}, at initialisation, {held if kept else none}."


def notes(setup: Setup, asked: Asked, tables: Tables) -> list[str]:
    """What it was run on, and what was not run."""
    found = [
        f"At initialisation: {asked.seeds} networks ({INIT}) of {', '.join(map(str, depths(setup.full)))} "
        f"layers, width {WIDTH}, {HEADS} heads, on excerpts of Moby Dick; the same weights for all remedies.",
        f"Put cold on {asked.model}: {SAMPLES} excerpts of at most {TOKENS} tokens.",
    ]
    if not setup.full:
        found.append("Networks of 128 layers were not run: rankscope remedies --full.")
    left = tables.trained.filter(pl.col("refused").str.starts_with("not run"))
    if not len(tables.trained):
        found.append("Nothing was trained: rankscope remedies --train does it (hours on two cores).")
    else:
        found += recipes(setup.folder)
    if len(left):
        found.append(f"{len(left)} trainings were not finished: the same command goes on with them.")
    missing = [name for name in tables.remedies if name not in set(tables.trained["remedy"])]
    if len(tables.trained) and missing:
        found.append(f"Not trained: {', '.join(missing)}.")
    if not len(tables.costs):
        found.append(
            "Time per step was not taken, so there is no figure of depth against price: --train takes it."
        )
    return found


def write(setup: Setup, found: Outcome, command: str = "") -> Path:
    """Figures, tables, `remedies.csv` and `outcome.json` into the folder; answers with the folder."""
    with Store(setup.folder) as store:
        for name, figure in found.figures.items():
            save(figure, setup.folder / name)
        about = {"title": "Remedies side by side", **described(found)}
        manifest = begun(setup.device).adding(title=about["title"], command=command)
        store.write("remedies", manifest, found.tables, {"outcome": about})
    write_text(setup.folder / "remedies.csv", found.tables["remedies"].write_csv())
    return setup.folder


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
