"""A run folder: `Store` writes it, `read` and `Run` read it. Nothing else writes or reads run folders.

    manifest.json         what was run: an entry for each command that wrote here, its manifest and its files
    NAME.parquet          a table, with its manifest inside
    NAME/000000.parquet   a table that grows, chunk by chunk, each written once (`journal.py`)
    NAME.json             a document

`manifest.json` has the SHA-256 of each of these files, and the rows of each table. Figures and reports, which
can be made again, are not listed. Every file is written under a temporary name and moved into place. It is
removed from `manifest.json` before it is written and listed again afterwards, so that the manifest never
describes other content.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import polars as pl

from rankscope.errors import FileError, one_of
from rankscope.files import write_text
from rankscope.runs.lock import is_held, lock_if_free, unlock
from rankscope.runs.manifest import Manifest, Record
from rankscope.runs.tables import JOURNAL, SavedTable, frame_of, read_lines, read_parquet, write_parquet

MANIFEST = "manifest.json"
MAIN = ("sweep", "profile", "summary", "training")  # the first that there is is what `Run.table()` gives


@dataclass(frozen=True, kw_only=True)
class File(Record):
    """What `manifest.json` says of a file: its checksum and, of a table, its rows."""

    sha256: str = ""
    rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """What one command wrote: its manifest, its kind of result, and its files by their path in the folder."""

    manifest: Manifest
    kind: str = ""  # One of `rankscope.results.KINDS`; empty in folders of versions that named none
    files: dict[str, File] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """The contents of a run folder, as `read` gives them."""

    folder: Path
    entries: dict[str, RunEntry]

    def __repr__(self) -> str:
        """The folder, and a line for each command that wrote there: when, of what, and its tables with their rows."""
        lines = [f"Run({str(self.folder)!r})"]
        for name, entry in self.entries.items():
            rows = dict[str, int]()
            for file, listed in entry.files.items():
                if file.endswith(".parquet"):
                    table = file.partition("/")[0].removesuffix(".parquet")
                    rows[table] = rows.get(table, 0) + (listed.rows or 0)
            classes = (str(network.model.get("class")) for network in entry.manifest.networks if network.model)
            of = entry.manifest.title or entry.manifest.model or next(classes, "")
            tables = ", ".join(f"{table} ({count:,} rows{self._since(table)})" for table, count in rows.items())
            parts = of, entry.manifest.created[:16].replace("T", " "), tables
            lines.append(f"  {name}: {' · '.join(filter(None, parts))}")
        return "\n".join(lines if self.entries else [*lines, "  nothing is listed in it"])

    def _since(self, table: str) -> str:
        """How many steps a table has grown by since its rows were gathered and counted, in words."""
        path = self.folder / table / JOURNAL
        steps = path.read_bytes().count(b"\n") if path.is_file() else 0
        return f" and {steps:,} steps since" if steps else ""

    @property
    def manifests(self) -> dict[str, Manifest]:
        """The manifests by the command that wrote them: `measure`, `corpus`, `paths`, ..."""
        return {name: entry.manifest for name, entry in self.entries.items()}

    @property
    def names(self) -> list[str]:
        """The names of the tables in the folder."""
        files = [path.stem for path in sorted(self.folder.glob("*.parquet")) if path.is_file()]
        grown = [name.split("/")[0] for entry in self.entries.values() for name in entry.files if "/" in name]
        return list(dict.fromkeys([*files, *grown]))

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """Every table by its name, each read when it is asked for."""
        return _Tables(self)

    def table(self, name: str | None = None) -> pl.DataFrame:
        """A table, its checksum verified; of one that grows, all rows that are written so far. By default
        that of the measurements: `profile` for example, or `sweep` with a column for each factor."""
        if name is None:
            name = next((main for main in MAIN if main in self.names), ", ".join(MAIN))
        return self.table_and_notes(name)[0]

    def table_and_notes(self, name: str) -> tuple[pl.DataFrame, list[str]]:
        """A table, and at most one sentence: which line of its journal is damaged and left out, and how many more."""
        if name not in self.names:
            raise FileError(one_of(f"a table of {self.folder}", name, self.names), subject=name)
        chunks, path = self.chunks(name) or [f"{name}.parquet"], self.folder / name / JOURNAL
        table = pl.concat(read_parquet(self.path(chunk))[0] for chunk in chunks)
        lines, damaged = read_lines(path, self.gathered(name), table.schema)
        if "/" in chunks[0] and (now := read(self.folder)).chunks(name) != chunks:  # gathered in between
            return now.table_and_notes(name)
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        notes = [
            f"{path}: line {line_number}{more} is no row of the table and left out." for line_number in damaged[:1]
        ]
        return pl.concat([table, frame_of(lines, table.schema)]) if lines else table, notes

    def gathered(self, name: str) -> int:
        """The last step that the chunks of a table that grows hold; -1 if they hold none."""
        for chunk in reversed(self.chunks(name)):
            table = read_parquet(self.path(chunk))[0]
            if "step" in table.columns and len(table):
                return int(table["step"].max())  # type: ignore[arg-type]
        return -1

    def chunks(self, name: str) -> list[str]:
        """The files of a table that grows, in order; none if it is one file."""
        files = [file for entry in self.entries.values() for file in entry.files]
        return sorted(file for file in files if file.startswith(f"{name}/"))

    def path(self, file: str, advice: str = "run it again") -> Path:
        """The path of a file whose checksum is as listed; `advice` ends the sentence of the error."""
        path = self.folder / file
        listed = next((entry.files[file] for entry in self.entries.values() if file in entry.files), None)
        if listed is not None and not (path.is_file() and checksum(path) == listed.sha256):
            sentence = f"{path} must be as it was written; its checksum is another than in {MANIFEST}: {advice}"
            raise FileError(sentence, subject=file)
        return path


class _Tables(Mapping[str, pl.DataFrame]):
    """The tables of a run, read one by one."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __getitem__(self, name: str) -> pl.DataFrame:
        return self.run.table(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.run.names)

    def __len__(self) -> int:
        return len(self.run.names)


def read(folder: str | Path) -> Run:
    """The run in a folder, as a command with `-o`, a `Monitor` or `Store` has written it.

    Args:
        folder: The run folder.

    Returns:
        A `Run`: `names` are its tables, `table(name)` one of them, `manifests` what was run, by command.

    Raises:
        FileError: There is no such folder, or its manifest is damaged.

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
        what = "a file: its class reads it, as in Profile.read(file)" if folder.is_file() else "not there"
        raise FileError(f"{folder} must be the folder of a run; it is {what}", subject=str(folder))
    path = folder / MANIFEST
    entries = document(path).get("entries") if path.is_file() else None
    if not isinstance(entries, dict):  # none, or of a version that had one manifest for all
        return Run(folder, {})
    try:
        return Run(folder, {name: _entry(entry) for name, entry in entries.items()})
    except ValueError as error:
        sentence = f"{path} must list what was run and its files; it is damaged ({error}): delete it, run it again"
        raise FileError(sentence, subject=str(path)) from error


class Store:
    """The writer of a run folder; from when it is made until it is closed, the folder has no other."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock = lock_if_free(self.folder)
        if self._lock is None:
            ways = "call close() on it, or give another folder"
            sentence = f"{self.folder} must have one writer at a time; another monitor or run writes there: {ways}"
            raise FileError(sentence, subject=str(self.folder))
        try:
            self.run = read(self.folder)
            path = self.folder / MANIFEST
            if path.is_file() and {"entries", "networks"}.isdisjoint(document(path) or {"entries"}):
                sentence = f"{path} must be a run's; it is of something else and would be lost: give another folder"
                raise FileError(sentence, subject=str(path))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True once the folder is released."""
        return self._lock is None

    def close(self) -> None:
        """Release the folder for other writers."""
        if self._lock is not None:
            unlock(self.folder, self._lock)
            self._lock = None

    def require_place(self) -> None:
        """Raise FileError if the folder was renamed, deleted or made again since it was locked, so that nothing is
        written where it is no longer, or into the run of another writer."""
        if self._lock is None or not is_held(self.folder, self._lock):
            gone = "closed: open it anew" if self._lock is None else "moved, deleted or replaced: put it back"
            sentence = f"{self.folder} must stay the folder that was opened, to be written; it was {gone}"
            raise FileError(sentence, subject=str(self.folder))

    def write(
        self,
        entry: str,
        manifest: Manifest,
        tables: Mapping[str, pl.DataFrame | SavedTable],
        documents: Mapping[str, dict[str, Any]] | None = None,
        kind: str = "",
    ) -> None:
        """Write an entry, its tables and its documents (as JSON), in place of an earlier one of that name.
        Files that only the earlier entry had are removed, except for tables that grow. `kind` is that of the result."""
        self.require_place()
        documents = documents or {}
        before = self.run.entries.get(entry, RunEntry(manifest=manifest)).files
        grown = {file: listed for file, listed in before.items() if "/" in file}
        new = [f"{name}.parquet" for name in tables] + [f"{name}.json" for name in documents]
        self._list({**self._without(new), entry: RunEntry(manifest=manifest, kind=kind, files=grown)})
        for name in before.keys() - grown.keys() - set(new):
            (self.folder / name).unlink(missing_ok=True)
        files = {f"{name}.parquet": self._table(f"{name}.parquet", table, manifest) for name, table in tables.items()}
        for name, content in documents.items():
            write_text(self.folder / f"{name}.json", _json(content))
            files[f"{name}.json"] = File(sha256=checksum(self.folder / f"{name}.json"))
        self._list({**self.run.entries, entry: RunEntry(manifest=manifest, kind=kind, files={**grown, **files})})

    def append(
        self, entry: str, name: str, table: pl.DataFrame | SavedTable, manifest: Manifest, kind: str = ""
    ) -> None:
        """Write one more chunk of a table that grows, and list it under an entry, of this kind if it is new."""
        file = f"{name}/{len(self.run.chunks(name)):06}.parquet"
        written = self._table(file, table, manifest)
        before = self.run.entries.get(entry, RunEntry(manifest=manifest, kind=kind))
        self._list({**self.run.entries, entry: replace(before, files={**before.files, file: written})})

    def describe(self, entry: str, manifest: Manifest) -> None:
        """Give an entry another manifest; its files stay."""
        self._list({**self.run.entries, entry: replace(self.run.entries[entry], manifest=manifest)})

    def drop(self, file: str) -> None:
        """Remove a file from the manifest and from the folder."""
        self.require_place()
        self._list(self._without([file]))
        (self.folder / file).unlink(missing_ok=True)

    def _table(self, file: str, table: pl.DataFrame | SavedTable, manifest: Manifest) -> File:
        if not isinstance(table, pl.DataFrame):
            manifest, table = table.manifest, table.table
        self.require_place()
        path = write_parquet(self.folder / file, table, manifest)
        return File(sha256=checksum(path), rows=len(table))

    def _without(self, files: list[str]) -> dict[str, RunEntry]:
        """The entries without these files; an entry that had no other file is left out."""
        entries = {}
        for name, entry in self.run.entries.items():
            rest = {file: listed for file, listed in entry.files.items() if file not in files}
            if rest or not entry.files:
                entries[name] = replace(entry, files=rest)
        return entries

    def _list(self, entries: dict[str, RunEntry]) -> None:
        listed = {
            name: {
                **({"kind": entry.kind} if entry.kind else {}),
                "manifest": entry.manifest.to_dict(),
                "files": {file: content.to_dict() for file, content in entry.files.items()},
            }
            for name, entry in entries.items()
        }
        if entries != self.run.entries:
            self.require_place()
            write_text(self.folder / MANIFEST, _json({"entries": listed}))
            self.run = Run(self.folder, entries)


def document(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises FileError if it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        sentence = f"{path} must be JSON; it cannot be read ({error}): delete it, and run it again"
        raise FileError(sentence, subject=str(path)) from error
    if not isinstance(content, dict):
        sentence = f"{path} must hold a JSON object; it holds a {type(content).__name__}"
        raise FileError(sentence, subject=str(path))
    return content


def checksum(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _entry(content: object) -> RunEntry:
    if not isinstance(content, dict) or not isinstance(content.get("files", {}), dict):
        raise ValueError("an entry must have a manifest and files")
    files = {name: File.from_dict(file) for name, file in content.get("files", {}).items()}
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path.suffix not in (".parquet", ".json"):
            raise ValueError(f"a file must lie in the folder; {name!r} does not")
    kind = str(content.get("kind", ""))
    return RunEntry(manifest=Manifest.from_dict(content.get("manifest")), kind=kind, files=files)
