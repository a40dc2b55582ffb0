"""A run directory: tables under known names. What is there is read; what is not is left out of the report.

    profile.parquet, summary.parquet   a metric by layer, of samples or of a corpus
    cloud.parquet, spectrum.parquet    tokens on two axes, singular values
    lengths.parquet, heads.parquet     paths
    certificates*.parquet              bounds, a file for each variant
    **/outcome.json                    studies of the papers
    manifest.json                      what was run

`measure`, `paths`, `bounds`, `reproduce` and `demo` write them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.errors import FileError
from rankscope.profiles import Profile, Summary, parquet
from rankscope.profiles.cloud import SCHEMA as CLOUD
from rankscope.profiles.spectra import SCHEMA as SPECTRUM
from rankscope.theory import Certificates

LENGTHS = ("sample", "length", "start", "paths", "norm", "relative_residual", "below_floor", "share")
HEADS = (
    "sample",
    "layer",
    "head",
    "norm",
    "share",
    "residual_share",
    "contraction",
    "averaging",
    "dobrushin",
)
TABLES: dict[str, tuple[str, ...]] = {
    "cloud": tuple(CLOUD), "spectrum": tuple(SPECTRUM), "lengths": LENGTHS, "heads": HEADS
}  # fmt: skip
"""The columns that each table must have."""
TEXTS = {"variant", "text", "start", "paths"}
"""Columns of text; all others hold numbers."""


@dataclass(frozen=True, eq=False)
class Run:
    """What a directory holds."""

    folder: Path
    manifest: dict[str, Any]
    measured: Profile | Summary | None = None
    tables: dict[str, pl.DataFrame] = field(default_factory=dict)
    """cloud, spectrum, lengths, heads: those there are."""
    certificates: dict[str, Certificates] = field(default_factory=dict)
    """By variant."""
    outcomes: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    """Studies, each with its folder."""

    @property
    def title(self) -> str:
        """What was run, for a heading."""
        if self.outcomes and self.measured is None:
            return "The papers, run again"
        origin = self.manifest.get("origin")
        origin = origin if isinstance(origin, dict) else {}
        name = Path(str(origin.get("name") or self.manifest.get("model") or self.folder.resolve().name)).name
        weights = origin.get("weights")
        return str(self.manifest.get("title") or (f"{name}, {weights} weights" if weights else name))


def read_run(folder: str | Path) -> Run:
    """What there is in a run directory; a sentence where it is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileError(f"a report is made of run directories; there is none at {folder}")
    if (folder / "outcome.json").is_file():  # a study's own tables have names of their own
        return Run(folder, {}, outcomes=[(folder, _json(folder / "outcome.json"))])
    measured: Profile | Summary | None = None
    if (folder / "profile.parquet").is_file():
        measured = Profile.read(folder / "profile.parquet")
    elif (folder / "summary.parquet").is_file():
        measured = Summary.read(folder / "summary.parquet")
    if measured is not None and not (len(measured.table) and measured.manifest.get("networks")):
        raise FileError(f"{folder} must hold measurements of a network; its table has none: run it again")
    tables = {
        name: _table(folder / f"{name}.parquet", columns)
        for name, columns in TABLES.items()
        if (folder / f"{name}.parquet").is_file()
    }
    found = [Certificates.read(path) for path in sorted(folder.glob("certificates*.parquet"))]
    certificates = {str(each.manifest.get("variant", "as given")): each for each in found}
    outcomes = [(path.parent, _json(path)) for path in sorted(folder.rglob("outcome.json"))]
    if measured is None and not tables and not certificates and not outcomes:
        raise FileError(
            f"{folder} must be a run directory, with profile.parquet, lengths.parquet, "
            "certificates.parquet or "
            "the like in it; it has none of them: measure, paths, bounds and reproduce write one with -o"
        )
    own = measured.manifest if measured is not None else next((each.manifest for each in found), {})
    manifest = _json(folder / "manifest.json") if (folder / "manifest.json").is_file() else dict(own)
    return Run(folder, manifest, measured, tables, certificates, outcomes)


def write_tables(folder: str | Path, tables: Mapping[str, pl.DataFrame], manifest: dict[str, Any]) -> None:
    """Tables under their known names, each with the manifest of the run inside."""
    for name, table in tables.items():
        parquet.write(Path(folder) / f"{name}.parquet", table, manifest)


def _table(path: Path, columns: tuple[str, ...]) -> pl.DataFrame:
    try:
        table = pl.read_parquet(path, glob=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise FileError(f"{path} must be a Parquet file; it cannot be read ({error})") from error
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise FileError(f"{path} must have the columns {', '.join(columns)}; {', '.join(missing)} is missing")
    for name in columns:
        kind = table[name].dtype
        if not (kind == pl.String if name in TEXTS else kind.is_numeric() or kind == pl.Boolean):
            expected = "text" if name in TEXTS else "numbers"
            raise FileError(
                f"{path} must hold {expected} in the column {name}; it holds {kind}: run it again"
            )
    return table


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path} must be JSON; it cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise FileError(f"{path} must hold a JSON object; it holds a {type(found).__name__}")
    return found
