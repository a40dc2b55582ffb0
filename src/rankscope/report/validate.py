"""What a file of a run must be before anything is drawn of it: one that is not is a sentence that names it.

A number may be missing, as null or NaN: it becomes a gap in a figure. Names, places (a layer, a head, a
token) and switches may not, and places must be such that a curve can be made of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.depths.tables import MARKS
from rankscope.errors import FileError, require
from rankscope.profiles import Profile, Summary
from rankscope.theory import Certificates

PLACES = {"sample", "layer", "head", "token", "index", "length"}  # Columns that say where a number is
FURTHEST = 10**6  # The largest place: no network is as deep, and no excerpt as long
AGAIN, DAMAGED = "run it again", "it is damaged, run it again"
OTHER = "it is damaged or of another version, run it again"


def _check(path: Path, holds: bool, must: str, found: str, advice: str = AGAIN) -> None:
    """A sentence on the file where it is not as it must be."""
    require(holds, f"{path} must {must}; {found}: {advice}", FileError, str(path))


def table(path: Path, found: pl.DataFrame, schema: Mapping[str, Any]) -> pl.DataFrame:
    """The table with these columns, each of its type: missing numbers are NaN, places are whole."""
    missing = ", ".join(name for name in schema if name not in found.columns)
    _check(path, not missing, f"have the columns {', '.join(schema)}", f"{missing} is missing", OTHER)
    return found.with_columns(_column(path, found[name], kind) for name, kind in schema.items())


def _column(path: Path, column: pl.Series, kind: Any) -> pl.Series:
    name, held = column.name, column.dtype
    fits = held == pl.String if kind == pl.String else held.is_numeric() or held in (pl.Boolean, pl.Null)
    _check(path, fits, f"hold {'text' if kind == pl.String else 'numbers'} in the column {name}", f"it holds {held}")
    whole = name in PLACES or (kind in (pl.String, pl.Boolean) and name not in MARKS)
    gaps = f"{column.null_count()} of {len(column)} are missing"
    _check(path, not (whole and column.null_count()), f"have no gap in the column {name}", gaps, DAMAGED)
    if name in PLACES:
        _places(path, column, name)
    column = column.cast(kind)
    return column.fill_null(float("nan")) if kind == pl.Float64 else column


def _places(path: Path, column: pl.Series, name: str) -> None:
    """Whole numbers from 0 on, within reason."""
    numbers = column.cast(pl.Float64)
    fits = bool(((numbers >= 0) & (numbers <= FURTHEST) & (numbers == numbers.floor())).all())
    must = f"hold whole numbers from 0 to {FURTHEST} in the column {name}"
    _check(path, fits, must, "it holds others", DAMAGED)


def measured(path: Path, found: Profile | Summary) -> Profile | Summary:
    """The measurements, by layer of networks that are described."""
    rows = found.table
    present = len(rows) > 0 and len(found.manifest.networks) > 0
    _check(path, present, "hold measurements of a network", "it has none")
    (schema,) = found.schemas.values()
    kept = table(path, rows, {name: kind for name, kind in schema.items() if name != "head"})
    _heads(path, kept)
    counted = not isinstance(found, Summary) or found.manifest.excerpts is not None
    _check(path, counted, "say in its manifest of how many excerpts it is", "it does not", OTHER)
    return type(found)(kept, found.manifest)


def _heads(path: Path, rows: pl.DataFrame) -> None:
    """Numbered for a metric of attention, none for one of tokens; as many rows as places, more or less."""
    _places(path, rows["head"].drop_nulls(), "head")
    lines = rows.group_by("variant", "arithmetic", "metric").agg(
        pl.col("head").is_null().any().alias("some"), pl.col("head").is_null().all().alias("all")
    )
    alike = lines.filter(pl.col("some") & ~pl.col("all")).is_empty()
    _check(path, alike, "number all heads of a metric or none", "some have none")
    size = 1
    for name in {"sample", "layer", "head"} & set(rows.columns):
        size *= 1 + int(rows[name].drop_nulls().to_numpy().max(initial=0))
    held = f"it has {len(rows)}, and {size} places for them"
    _check(path, size <= FURTHEST + 20 * len(rows), "have a row for each layer", held, DAMAGED)


def certificates(path: Path, found: Certificates) -> Certificates:
    """Certificates, each an upper or a lower bound, at every layer from the first on."""
    _check(path, len(found.table) > 0, "hold certificates", "it has no rows")
    (schema,) = found.schemas.values()
    rows = table(path, found.table, {name: schema[name] for name in schema if name not in ("why", "hypotheses")})
    known = rows["kind"].is_in(["upper", "lower"]).all()
    _check(path, known, "hold upper and lower bounds in the column kind", "it holds others")
    consistent = rows.group_by("theorem").agg(pl.struct("quantity", "kind").n_unique())["quantity"].max() == 1
    _check(path, consistent, "have one quantity and kind for a theorem", "it has several")
    layers = rows.group_by("theorem", "sample").agg(
        pl.col("layer").min().alias("first"), pl.col("layer").max().alias("last"), pl.len()
    )
    complete = layers.filter(pl.col("first") == 1, pl.col("last") == pl.col("len"))
    every = len(complete) == len(layers) and not rows.filter(sample=0).is_empty()
    _check(path, every, "have a row for each layer of each sample", "some are missing")
    entry = rows["hypotheses"].drop_nulls().explode(empty_as_null=False)
    parts = [entry.struct.field(name).null_count() for name in ("says", "number", "limit", "met")]
    full = not rows["hypotheses"].null_count() and not any(parts)
    _check(path, full, "have no gap in the column hypotheses", "some are missing", DAMAGED)
    return Certificates(rows, found.manifest)


def lengths(path: Path, rows: pl.DataFrame) -> pl.DataFrame:
    """Paths by length, how many of each written out in digits."""
    digits = all(text.isascii() and text.isdigit() and len(text) < 4000 for text in rows["paths"].unique())
    _check(path, digits, "hold whole numbers in the column paths", "it holds others")
    return rows
