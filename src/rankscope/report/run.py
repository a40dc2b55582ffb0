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

from rankscope.cards import counted
from rankscope.errors import FileError
from rankscope.profiles import Profile, Summary, parquet
from rankscope.profiles.cloud import SCHEMA as CLOUD
from rankscope.profiles.spectra import SCHEMA as SPECTRUM
from rankscope.report import sound
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
TITLE = 200
"""Characters of a name in a heading at most."""
PATHS = ("lengths", "heads")
"""Tables that another command may have put beside measurements; the others are pictures of these."""


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
    notes: list[str] = field(default_factory=list)
    """What of the folder is not shown, and why."""

    @property
    def title(self) -> str:
        """What was run, for a heading."""
        if self.outcomes and self.measured is None:
            return self._studied()
        origin = self.manifest.get("origin")
        origin = origin if isinstance(origin, dict) else {}
        name = Path(str(origin.get("name") or self.manifest.get("model") or self.folder.resolve().name)).name
        weights = origin.get("weights")
        given = self.manifest.get("title") or (f"{name}, {weights} weights" if weights else name)
        return self._kind(str(given)[:TITLE].strip() or self.folder.resolve().name)

    def _studied(self) -> str:
        if len(self.outcomes) > 1:
            return "The papers, run again"
        folder, outcome = self.outcomes[0]
        name = f"{outcome.get('paper', '')} {outcome.get('figure', folder.name)}"
        return f"{name.strip()[:TITLE]}, run again"

    def _kind(self, title: str) -> str:
        """The title with what was done to the network, where that is not to measure it on a few texts."""
        if isinstance(self.measured, Summary):
            text = self.manifest.get("text")
            path = text.get("path") if isinstance(text, dict) else None
            of = (
                ""
                if not isinstance(path, str)
                else f" of {'stdin' if path == '-' else Path(path).name[:TITLE]}"
            )
            return f"{title}: {counted(self.measured.excerpts, 'excerpt')}{of}"
        if self.measured is not None:
            return title
        if self.certificates and not self.tables:
            return f"{title}: bounds of {', '.join(self.certificates)[:TITLE]}"
        return f"{title}: paths" if "lengths" in self.tables else title


def read_run(folder: str | Path) -> Run:
    """What there is in a run directory; a sentence where it is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileError(f"a report is made of run directories; there is none at {folder}")
    own = folder / "outcome.json"
    if own.is_file():  # a study's own tables have names of their own
        return Run(folder, {}, outcomes=[(folder, sound.outcome(own, _json(own)))])
    notes: list[str] = []
    measured = _measured(folder, notes)
    tables: dict[str, pl.DataFrame] = {}
    for name, columns in TABLES.items():
        path = folder / f"{name}.parquet"
        if path.is_file():
            table = _table(path, columns, None if name in PATHS else measured, notes)
            tables |= {} if table is None else {name: table}
    found = [
        sound.certificates(path, Certificates.read(path))
        for path in sorted(folder.glob("certificates*.parquet"))
    ]
    certificates = {str(each.manifest.get("variant", "as given")): each for each in found}
    outcomes = [
        (path.parent, sound.outcome(path, _json(path))) for path in sorted(folder.rglob("outcome.json"))
    ]
    if measured is None and not tables and not certificates and not outcomes:
        raise FileError(
            f"{folder} must be a run directory, with profile.parquet, lengths.parquet, "
            "certificates.parquet or "
            "the like in it; it has none of them: measure, paths, bounds and reproduce write one with -o"
        )
    inside = measured.manifest if measured is not None else next((each.manifest for each in found), {})
    manifest = _json(folder / "manifest.json") if (folder / "manifest.json").is_file() else dict(inside)
    return Run(folder, manifest, measured, tables, certificates, outcomes, notes)


def write_tables(folder: str | Path, tables: Mapping[str, pl.DataFrame], manifest: dict[str, Any]) -> None:
    """Tables under their known names, each with the manifest of the run inside."""
    for name, table in tables.items():
        parquet.write(Path(folder) / f"{name}.parquet", table, manifest)


def _measured(folder: Path, notes: list[str]) -> Profile | Summary | None:
    """The measurements; of two runs into one folder, those of the later."""
    found: list[Profile | Summary] = []
    for kind, name in ((Profile, "profile.parquet"), (Summary, "summary.parquet")):
        if (folder / name).is_file():
            found.append(sound.measured(folder / name, kind.read(folder / name)))
    if len(found) == 2:
        found.sort(key=_created)
        shown = "profile.parquet" if isinstance(found[-1], Profile) else "summary.parquet"
        notes.append(f"Two runs were written into this folder; shown is the later, {shown}.")
    return found[-1] if found else None


def _created(measured: Profile | Summary) -> str:
    return str(measured.manifest.get("created", ""))


def _table(
    path: Path, columns: tuple[str, ...], measured: Profile | Summary | None, notes: list[str]
) -> pl.DataFrame | None:
    """The table; None where it is a picture of another run than the one whose measurements are shown."""
    found, metadata = parquet.whole(path)
    found = sound.table(path, found, columns)
    if path.stem in PATHS and found.is_empty():
        raise FileError(f"{path} must hold paths; it has no rows: run it again")
    if measured is not None and _made(metadata) not in ("", _created(measured)):
        notes.append(f"{path.name} is of another run than the numbers here, and left out.")
        return None
    return sound.lengths(path, found) if path.stem == "lengths" else found


def _made(metadata: dict[str, str]) -> str:
    """When the run was made that a table is of; nothing where it does not say."""
    try:
        manifest = json.loads(metadata.get(parquet.KEY, "{}"))
    except (ValueError, RecursionError):
        return ""
    return str(manifest.get("created", "")) if isinstance(manifest, dict) else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path} must be JSON; it cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise FileError(f"{path} must hold a JSON object; it holds a {type(found).__name__}")
    return found
