"""Cells of a sweep that is done, chosen by number or by their factors, as a `Profile`."""

from pathlib import Path

import polars as pl

from rankscope.engine.factors import described
from rankscope.errors import SweepError, one_of
from rankscope.profiles import Profile
from rankscope.profiles.profile import SCHEMA
from rankscope.runs import Network, Run, read

FEW = 12
"""Cells that are looked at side by side, at most."""


def choice_in(thing: str) -> tuple[Path, str] | None:
    """(run, choice) where this names cells of a sweep: `runs/study:17`, or `runs/study:depth=6,skip=0.5`."""
    folder, colon, choice = thing.rpartition(":")
    if not colon or not (Path(folder) / "sweep.parquet").is_file():
        return None
    return Path(folder), choice


def profile_of(folder: Path, choice: str) -> Profile:
    """These cells, each a variant, named by its number and the factors that differ within the sweep."""
    run = read(folder)
    cells = chosen(run, choice)
    varied = [name for name in run.manifests["sweep"].more.get("varied", []) if name in cells.columns]
    names = {
        row["cell"]: f"{folder.name}:{row['cell']} "
        f"({described({name: row[name] for name in varied if row[name] is not None})})"
        for row in cells.iter_rows(named=True)
    }
    rows = run.table("sweep").filter(pl.col("cell").is_in(list(names)))
    empty = next((number for number in names if number not in set(rows["cell"])), None)
    if empty is not None:
        why = cells.filter(cell=empty)["reason"][0] or "it is not done yet"
        raise SweepError(f"cell {empty} of {folder} must have been measured; it was not: {why}")
    named = pl.col("cell").replace_strict(names, return_dtype=pl.String).alias("variant")
    table = rows.with_columns(named).select(list(SCHEMA)).cast(pl.Schema(SCHEMA))
    metrics = tuple(table["metric"].unique(maintain_order=True))
    checks = {"arithmetic_asked": run.manifests["sweep"].more["asked"]["arithmetic"]}
    networks = [
        Network(variant=name, arithmetic=kind, metrics=metrics, checks=checks)
        for name, kind in table.select("variant", "arithmetic").unique(maintain_order=True).rows()
    ]
    return Profile(table, run.manifests["sweep"].adding(networks=tuple(networks)))


def chosen(run: Run, choice: str) -> pl.DataFrame:
    """The rows of these cells in the table of cells."""
    cells = run.table("cells")
    wanted = (
        dict(part.partition("=")[::2] for part in choice.split(",")) if "=" in choice else {"cell": choice}
    )
    for name, value in wanted.items():
        if name not in cells.columns:
            raise SweepError(one_of("a factor of this sweep", name, cells.columns))
        cells = cells.filter(_is(cells.schema[name], pl.col(name), value.strip()))
    if not 1 <= len(cells) <= FEW:
        raise SweepError(
            f"1 to {FEW} cells must be chosen, by number or by factors as depth=6,skip=0.5; {choice!r} "
            f"chooses {len(cells)} of {len(run.table('cells'))} in {run.folder}"
        )
    return cells


def _is(kind: pl.DataType, column: pl.Expr, value: str) -> pl.Expr:
    if not kind.is_numeric():
        return column.cast(pl.String) == value
    try:
        return column == float(value)
    except ValueError:
        return pl.lit(False)
