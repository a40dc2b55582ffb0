"""A run folder: one writer, one reader.

    manifest.json         what was run: an entry for each command that wrote here, its manifest and its files
    NAME.parquet          a table, the manifest of what it is of inside
    NAME/000000.parquet   a table that grows, chunk by chunk, each written once (`journal.py`)
    NAME.json             a document

`manifest.json` has the SHA-256 of each of these files, and the rows of each table. Figures and reports, which
are made of them, are not in it. Every file is written beside its place and moved there whole; a file is taken
out of `manifest.json` before it is written and put back after, so that it never speaks of another's content.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import polars as pl

from rankscope.errors import FileError, one_of
from rankscope.files import write_text
from rankscope.runs.lines import FILE, frame_of, read_lines
from rankscope.runs.lock import lock, unlock
from rankscope.runs.manifest import Manifest
from rankscope.runs.record import Record
from rankscope.runs.tables import SavedTable, whole
from rankscope.runs.tables import write as write_table

MANIFEST = "manifest.json"
MAIN = ("sweep", "profile", "summary", "training")
"""Tables of what was measured."""


@dataclass(frozen=True, kw_only=True)
class File(Record):
    """What a file must be."""

    sha256: str = ""
    rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """What one command wrote."""

    manifest: Manifest
    files: dict[str, File] = field(default_factory=dict)
    """By their path in the folder."""


@dataclass(frozen=True)
class Run:
    """What there is in a run folder; see `read`."""

    folder: Path
    entries: dict[str, RunEntry]

    @property
    def manifests(self) -> dict[str, Manifest]:
        """By the command that wrote them: `measure`, `corpus`, `paths`, ..."""
        return {name: entry.manifest for name, entry in self.entries.items()}

    @property
    def names(self) -> list[str]:
        """The tables that there are."""
        found = [path.relative_to(self.folder) for path in sorted(self.folder.glob("*.parquet"))]
        grown = [name.split("/")[0] for entry in self.entries.values() for name in entry.files if "/" in name]
        return list(dict.fromkeys([*(path.stem for path in found), *grown]))

    def has(self, name: str) -> bool:
        """Whether there is such a table."""
        return (self.folder / f"{name}.parquet").is_file()

    def table(self, name: str | None = None) -> pl.DataFrame:
        """The table of that name, its checksum verified; of one that grew, all of it. Without a name what was
        measured: of a sweep all its rows, a column for each factor."""
        if name is None:
            name = next((each for each in MAIN if each in self.names), ", ".join(MAIN))
        if name not in self.names:
            raise FileError(one_of(f"a table of {self.folder}", name, self.names))
        chunks = self.chunks(name) or [f"{name}.parquet"]
        found = pl.concat(whole(self.path(chunk))[0] for chunk in chunks)
        lines = read_lines(self.folder / name / FILE, self.gathered(name))
        if "/" in chunks[0] and (now := read(self.folder)).chunks(name) != chunks:  # gathered in between
            return now.table(name)
        return pl.concat([found, frame_of(lines, found.schema)]) if lines else found

    def gathered(self, name: str) -> int:
        """The last step that the chunks of a table that grows by steps hold; -1 where they hold none."""
        for chunk in reversed(self.chunks(name)):
            table = whole(self.path(chunk))[0]
            if "step" in table.columns and len(table):
                return int(table["step"].max())  # type: ignore[arg-type]
        return -1

    def chunks(self, name: str) -> list[str]:
        """The files of a table that grew, in order."""
        return sorted(
            file for entry in self.entries.values() for file in entry.files if file.startswith(f"{name}/")
        )

    def path(self, file: str, advice: str = "run it again") -> Path:
        """Where the file lies, once it is certain that it is what was written; `advice` ends the sentence."""
        path = self.folder / file
        listed = next((entry.files[file] for entry in self.entries.values() if file in entry.files), None)
        if listed is not None and not (path.is_file() and checksum(path) == listed.sha256):
            raise FileError(
                f"{path} must be as it was written; its checksum is another than in {MANIFEST}: it is "
                f"damaged or was changed, {advice}"
            )
        return path


def read(folder: str | Path) -> Run:
    """The run in a folder that a command has written with `-o`.

    `manifests` say what was run, by command; `table(name)` gives a table, verified; `names` says which there
    are.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with Store(folder) as store:
    ...     store.write("measure", Manifest(model="minilm"), {"numbers": pl.DataFrame({"a": [1, 2]})})
    >>> run = read(folder)
    >>> run.manifests["measure"].model, run.table("numbers")["a"].to_list()
    ('minilm', [1, 2])
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileError(f"a run is read from its folder; there is none at {folder}")
    path = folder / MANIFEST
    given = document(path).get("entries") if path.is_file() else None
    if not isinstance(given, dict):  # none, or of a version that had one manifest for all
        return Run(folder, {})
    try:
        return Run(folder, {name: _entry(each) for name, each in given.items()})
    except ValueError as error:
        raise FileError(
            f"{path} must list what was run and its files; it is damaged or of another version ({error}): "
            "delete it, and run it again"
        ) from error


class Store:
    """The writer of a run folder, the only one from when it is made until it is closed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock: int | None = lock(self.folder)
        try:
            self.run = read(self.folder)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether others may write."""
        return self._lock is None

    def close(self) -> None:
        """Let others write."""
        if self._lock is not None:
            unlock(self.folder, self._lock)
            self._lock = None

    def write(
        self,
        entry: str,
        manifest: Manifest,
        tables: Mapping[str, pl.DataFrame | SavedTable],
        documents: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """An entry, in place of an earlier one of that name: its tables, and documents as JSON.

        A file that another entry had under the same name is this one's from now on; what the earlier entry
        had and this one has not is removed, but for tables that grow.
        """
        documents = documents or {}
        before = self.run.entries.get(entry, RunEntry(manifest=manifest)).files
        grown = {file: kept for file, kept in before.items() if "/" in file}
        new = [f"{name}.parquet" for name in tables] + [f"{name}.json" for name in documents]
        self._list({**self._without(new), entry: RunEntry(manifest=manifest, files=grown)})
        for name in before.keys() - grown.keys() - set(new):
            (self.folder / name).unlink(missing_ok=True)
        files = {
            f"{name}.parquet": self._table(f"{name}.parquet", each, manifest) for name, each in tables.items()
        }
        for name, each in documents.items():
            write_text(self.folder / f"{name}.json", _json(each))
            files[f"{name}.json"] = File(sha256=checksum(self.folder / f"{name}.json"))
        self._list({**self.run.entries, entry: RunEntry(manifest=manifest, files={**grown, **files})})

    def append(self, entry: str, name: str, table: pl.DataFrame | SavedTable, manifest: Manifest) -> None:
        """One more chunk of a table that grows."""
        file = f"{name}/{len(self.run.chunks(name)):06}.parquet"
        kept = self._table(file, table, manifest)
        before = self.run.entries.get(entry, RunEntry(manifest=manifest))
        self._list({**self.run.entries, entry: replace(before, files={**before.files, file: kept})})

    def drop(self, file: str) -> None:
        """Take a file away."""
        self._list(self._without([file]))
        (self.folder / file).unlink(missing_ok=True)

    def _table(self, file: str, given: pl.DataFrame | SavedTable, manifest: Manifest) -> File:
        table, own = (given, manifest) if isinstance(given, pl.DataFrame) else (given.table, given.manifest)
        path = write_table(self.folder / file, table, own)
        return File(sha256=checksum(path), rows=len(table))

    def _without(self, files: list[str]) -> dict[str, RunEntry]:
        """The entries less these files; one that had nothing else is gone."""
        left = {}
        for name, entry in self.run.entries.items():
            kept = {file: each for file, each in entry.files.items() if file not in files}
            if kept or not entry.files:
                left[name] = replace(entry, files=kept)
        return left

    def _list(self, entries: dict[str, RunEntry]) -> None:
        listed = {
            name: {
                "manifest": entry.manifest.to_dict(),
                "files": {file: each.to_dict() for file, each in entry.files.items()},
            }
            for name, entry in entries.items()
        }
        if entries != self.run.entries:
            write_text(self.folder / MANIFEST, _json({"entries": listed}))
            self.run = Run(self.folder, entries)


def document(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a sentence where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(
            f"{path} must be JSON; it cannot be read ({error}): delete it, and run it again"
        ) from error
    if not isinstance(found, dict):
        raise FileError(f"{path} must hold a JSON object; it holds a {type(found).__name__}")
    return found


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json(given: dict[str, Any]) -> str:
    return json.dumps(given, indent=1, ensure_ascii=False) + "\n"


def _entry(given: object) -> RunEntry:
    if not isinstance(given, dict) or not isinstance(given.get("files", {}), dict):
        raise ValueError("an entry must have a manifest and files")
    files = {name: File.from_dict(each) for name, each in given.get("files", {}).items()}
    for name in files:
        if not _inside(PurePosixPath(name)):
            raise ValueError(f"a file must lie in the folder; {name!r} does not")
    return RunEntry(manifest=Manifest.from_dict(given.get("manifest")), files=files)


def _inside(path: PurePosixPath) -> bool:
    return not path.is_absolute() and ".." not in path.parts and path.suffix in (".parquet", ".json")
