"""Cells of a finished sweep, chosen by number or by their factors, as a `Profile` that can be compared.

`runs/study:17` is cell 17 of the run `runs/study`; `runs/study:depth=6,skip=0.5` are the cells with these
factors. `compare` asks `choice_in` whether an argument names cells, and `profile_of` for their numbers.
"""

from collections.abc import Iterable
from pathlib import Path

import polars as pl

from rankscope.engine.factors import described
from rankscope.errors import SweepError, require, require_one_of
from rankscope.profiles import SCHEMA, Profile
from rankscope.runs import Network, Run, read

MOST_CHOSEN = 12  # cells that are compared side by side


def choice_in(argument: str) -> tuple[Path, str] | None:
    """Split `RUN:CHOICE` at the first colon before which there is a sweep's folder; None where there is none.

    Both may hold colons: `C:/runs/study:mask=window:2` is the choice `mask=window:2`.
    """
    for at, character in enumerate(argument):
        if character == ":" and (Path(argument[:at]) / "sweep.parquet").is_file():
            return Path(argument[:at]), argument[at + 1 :]
    return None


def profile_of(folder: Path, choice: str) -> Profile:
    """The readings of the chosen cells; each cell is a variant, named by its number and varied factors."""
    run = read(folder)
    cells = chosen_cells(run, choice)
    varied = [name for name in run.manifests["sweep"].more.get("varied", []) if name in cells.columns]
    names = {
        row["cell"]: f"{folder.name}:{row['cell']} ({described({name: row[name] for name in varied})})"
        for row in cells.iter_rows(named=True)
    }
    rows = run.table("sweep").filter(pl.col("cell").is_in(list(names)))
    measured = set(rows["cell"])
    if missing := [cell for cell in names if cell not in measured]:
        why = cells.filter(cell=missing[0])["reason"][0] or "it is not done yet"
        raise SweepError(f"cell {missing[0]} of {folder} must have been measured; it was not: {why}", subject="cell")
    variant = pl.col("cell").replace_strict(names, return_dtype=pl.String).alias("variant")
    table = rows.with_columns(variant).select(list(SCHEMA)).cast(pl.Schema(SCHEMA))
    metrics = tuple(table["metric"].unique(maintain_order=True))
    checks = {"arithmetic_asked": run.manifests["sweep"].more["asked"]["arithmetic"]}
    networks = [
        Network(variant=name, arithmetic=arithmetic, metrics=metrics, checks=checks)
        for name, arithmetic in table.select("variant", "arithmetic").unique(maintain_order=True).rows()
    ]
    return Profile(table, run.manifests["sweep"].adding(networks=tuple(networks)))


def chosen_cells(run: Run, choice: str) -> pl.DataFrame:
    """The rows of the table of cells that a choice (a number, or factors with their values) selects."""
    cells = run.table("cells")
    total = len(cells)
    for name, value in parse_choice(choice, cells).items():
        require_one_of("a factor of this sweep", name, cells.columns, SweepError, name)
        cells = cells.filter(_equals(cells.schema[name].is_numeric(), pl.col(name), value))
    came = f"{choice!r} chooses {len(cells)} of {total} in {run.folder}"
    sentence = f"1 to {MOST_CHOSEN} cells must be chosen, by number or as depth=6,skip=0.5; {came}"
    require(1 <= len(cells) <= MOST_CHOSEN, sentence, SweepError, "choice")
    return cells


def parse_choice(choice: str, cells: pl.DataFrame) -> dict[str, str]:
    """The factors that a choice asks for, by name; a number alone is the factor `cell`.

    A value may hold commas, as that of a remedy with two options does: what follows a comma belongs to the
    value before it if some cell has such a value.

    >>> cells = pl.DataFrame({"remedy": ["shaped:alpha=1,beta=2", "none"], "depth": [6, 6]})
    >>> parse_choice("remedy=shaped:alpha=1,beta=2,depth=6", cells)
    {'remedy': 'shaped:alpha=1,beta=2', 'depth': '6'}
    >>> parse_choice("17", cells)
    {'cell': '17'}
    """
    if "=" not in choice:
        return {"cell": choice.strip()}
    wanted: dict[str, str] = {}
    factor = ""
    for part in choice.split(","):
        longer = f"{wanted.get(factor, '')},{part.strip()}"
        values: Iterable[str] = cells[factor].cast(pl.String).drop_nulls() if factor in cells.columns else []
        name, _, value = (piece.strip() for piece in part.partition("="))
        unknown_option = ":" in wanted.get(factor, "") and name not in cells.columns
        if unknown_option or any(known.startswith(longer) for known in values):
            wanted[factor] = longer
        else:
            factor = name
            wanted[factor] = value
    return wanted


def _equals(numeric: bool, column: pl.Expr, value: str) -> pl.Expr:
    """Whether a column has this value, as numbers where it holds numbers."""
    if not numeric:
        return column.cast(pl.String) == value
    try:
        return column == float(value)
    except ValueError:
        return pl.lit(False)
