"""What a file of a run must be before anything is drawn of it: one that is not is a sentence that names it.

A number may be missing, as null or NaN: it becomes a gap in a figure. Names, places (a layer, a head, a
token) and switches may not, and places must be such that a curve can be made of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.errors import FileError
from rankscope.profiles import Profile, Summary
from rankscope.theory import Certificates

TEXTS = {"variant", "arithmetic", "metric", "text", "start", "paths", "theorem", "quantity", "kind"}
PLACES = {"sample", "layer", "head", "token", "index", "length"}
SWITCHES = {"below_floor", "met", "vacuous"}
"""Columns by what they hold; all others hold numbers."""
FURTHEST = 10**6
"""The largest place: no network is as deep, and no excerpt as long."""
LISTS = ("comparisons", "figures", "notes")


def table(path: Path, found: pl.DataFrame, columns: Mapping[str, Any] | tuple[str, ...]) -> pl.DataFrame:
    """The table with these columns, each of its kind: missing numbers are NaN, places are whole."""
    missing = [name for name in columns if name not in found.columns]
    if missing:
        raise FileError(
            f"{path} must have the columns {', '.join(columns)}; {', '.join(missing)} is missing: it is "
            "damaged or of another version, run it again"
        )
    return found.with_columns(_column(path, found[name], name) for name in columns)


def _column(path: Path, column: pl.Series, name: str) -> pl.Series:
    kind = column.dtype
    if name in TEXTS:
        expected, fits = "text", kind == pl.String
    else:
        expected, fits = "numbers", kind.is_numeric() or kind in (pl.Boolean, pl.Null)
    if not fits:
        raise FileError(f"{path} must hold {expected} in the column {name}; it holds {kind}: run it again")
    if name in TEXTS | SWITCHES | PLACES and column.null_count():
        raise FileError(
            f"{path} must have no gap in the column {name}; {column.null_count()} of {len(column)} are "
            "missing: it is damaged, run it again"
        )
    if name in SWITCHES and kind != pl.Boolean:
        return column != 0
    if name in PLACES:
        _places(path, column, name)
        return column.cast(pl.Int64)
    if name in TEXTS | SWITCHES or kind.is_integer():
        return column
    return column.cast(pl.Float64).fill_null(float("nan"))


def _places(path: Path, column: pl.Series, name: str) -> None:
    """Whole numbers from 0 on, within reason."""
    numbers = column.cast(pl.Float64)
    if not bool(((numbers >= 0) & (numbers <= FURTHEST) & (numbers == numbers.floor())).all()):
        raise FileError(
            f"{path} must hold whole numbers from 0 to {FURTHEST} in the column {name}; it holds others: it "
            "is damaged, run it again"
        )


def measured(path: Path, found: Profile | Summary) -> Profile | Summary:
    """The measurements, by layer of networks that are described."""
    rows = found.table
    if not len(rows) or not found.manifest.networks:
        raise FileError(f"{path} must hold measurements of a network; it has none: run it again")
    kept = table(path, rows, tuple(name for name in rows.columns if name != "head"))
    _heads(path, kept)
    if isinstance(found, Summary) and found.manifest.excerpts is None:
        raise FileError(
            f"{path} must say in its manifest of how many excerpts it is; it does not: it is damaged or of "
            "another version, run it again"
        )
    return type(found)(kept, found.manifest)


def _heads(path: Path, rows: pl.DataFrame) -> None:
    """Numbered for a metric of attention, none for one of tokens; as many rows as places, more or less."""
    _places(path, rows["head"].drop_nulls(), "head")
    lines = rows.group_by("variant", "arithmetic", "metric").agg(
        pl.col("head").is_null().any().alias("some"), pl.col("head").is_null().all().alias("all")
    )
    if not lines.filter(pl.col("some") & ~pl.col("all")).is_empty():
        raise FileError(f"{path} must number all heads of a metric or none; some have none: run it again")
    size = 1
    for name in {"sample", "layer", "head"} & set(rows.columns):
        size *= 1 + int(rows[name].drop_nulls().to_numpy().max(initial=0))
    if size > FURTHEST + 20 * len(rows):
        raise FileError(
            f"{path} must have a row for each layer; it has {len(rows)}, and {size} places for them: it is "
            "damaged, run it again"
        )


def certificates(path: Path, found: Certificates) -> Certificates:
    """Certificates, each an upper or a lower bound, at every layer from the first on."""
    if not len(found.table):
        raise FileError(f"{path} must hold certificates; it has no rows: run it again")
    given = tuple(name for name in found.table.columns if name not in ("why", "hypotheses"))
    rows = table(path, found.table, given)
    if not rows["kind"].is_in(["upper", "lower"]).all():
        raise FileError(
            f"{path} must hold upper and lower bounds in the column kind; it holds others: run it again"
        )
    if rows.group_by("theorem").agg(pl.struct("quantity", "kind").n_unique())["quantity"].max() != 1:
        raise FileError(f"{path} must have one quantity and kind for a theorem; it has several: run it again")
    layers = rows.group_by("theorem", "sample").agg(
        pl.col("layer").min().alias("first"), pl.col("layer").max().alias("last"), pl.len()
    )
    whole = layers.filter(pl.col("first") == 1, pl.col("last") == pl.col("len"))
    if len(whole) < len(layers) or rows.filter(sample=0).is_empty():
        raise FileError(
            f"{path} must have a row for each layer of each sample; some are missing: run it again"
        )
    each = rows["hypotheses"].drop_nulls().explode(empty_as_null=False)
    parts = [each.struct.field(name).null_count() for name in ("says", "number", "limit", "met")]
    if rows["hypotheses"].null_count() or any(parts):
        raise FileError(
            f"{path} must have no gap in the column hypotheses; some are missing: it is damaged, run it again"
        )
    return Certificates(rows, found.manifest)


def lengths(path: Path, rows: pl.DataFrame) -> pl.DataFrame:
    """Paths by length, how many of each written out in digits."""
    if not all(text.isascii() and text.isdigit() and len(text) < 4000 for text in rows["paths"].unique()):
        raise FileError(f"{path} must hold whole numbers in the column paths; it holds others: run it again")
    return rows


def outcome(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    """What came out of a study: lists where there must be lists, and objects in that of comparisons."""
    lists = all(isinstance(found.get(name, []), list) for name in LISTS)
    compared = found.get("comparisons", []) if lists else []
    if not lists or not all(
        isinstance(each, dict) and each.get("agrees") in (True, False, None) for each in compared
    ):
        raise FileError(
            f"{path} must list comparisons, figures and notes of a study; it does not: it is damaged or of "
            "another version, run it again"
        )
    return found
