"""A tidy table and its manifest in one Parquet file: how every table of a run is kept."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import polars as pl

from rankscope.errors import FileError
from rankscope.files import atomic
from rankscope.runs.manifest import Manifest

K = TypeVar("K", bound="SavedTable")
KEY = "rankscope"
"""Where the manifest lies in the file's metadata."""


def write(path: str | Path, table: pl.DataFrame, manifest: Manifest) -> Path:
    """Write one file, manifest inside, atomically."""
    with atomic(path) as temporary:
        table.write_parquet(temporary, metadata={KEY: json.dumps(manifest.to_dict())})
    return Path(path)


def whole(path: str | Path, made: str = "") -> tuple[pl.DataFrame, Manifest | None]:
    """Any table, and its manifest if it has one; `made` says in the sentence, if it cannot be read, what
    would have been right."""
    with _readable(path, made):
        found, metadata = pl.read_parquet(path, glob=False), pl.read_parquet_metadata(path)
    return found, _manifest(path, metadata[KEY]) if KEY in metadata else None


def manifest_in(path: str | Path) -> Manifest:
    """The manifest in a file, without its table."""
    with _readable(path):
        metadata = pl.read_parquet_metadata(path)
    return _manifest(path, metadata.get(KEY, ""))


@contextmanager
def _readable(path: str | Path, made: str = "") -> Iterator[None]:
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise FileError(
            f"{path} must be a Parquet file{made}; it cannot be read ({said}): it is damaged, run it again"
        ) from error


def _manifest(path: str | Path, text: str) -> Manifest:
    try:
        return Manifest.from_dict(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise FileError(
            f"{path} must hold a manifest, a JSON object; it is damaged or of another version ({error}): run "
            "it again"
        ) from error


@dataclass(frozen=True, eq=False, repr=False)
class SavedTable:
    """A table with a manifest of its own: a profile, a summary, certificates."""

    schema: ClassVar[Mapping[str, Any]]
    """Its columns and their types."""
    later: ClassVar[Sequence[str]] = ()
    """Those that files of earlier versions do not have: null there."""
    grows: ClassVar[bool] = False
    """Whether it may have columns beside these, which its manifest names: factors."""
    table: pl.DataFrame
    manifest: Manifest

    def save(self, path: str | Path) -> Path:
        """Write one Parquet file, manifest inside, atomically."""
        return write(path, self.table, self.manifest)

    @classmethod
    def read(cls: type[K], path: str | Path) -> K:
        """What `save` wrote."""
        kind = cls.__name__
        what = kind.lower()
        if not Path(path).is_file():
            raise FileError(f"a {what} is read from a Parquet file; there is none at {path}")
        table, manifest = whole(path, f" written by {kind}.save")
        missing = [name for name in cls.later if name not in table.columns]
        if missing and set(table.columns) == set(cls.schema) - set(missing):
            table = table.with_columns(pl.lit(None, cls.schema[name]).alias(name) for name in missing)
        beside = manifest.more.get("factors", ()) if cls.grows and manifest is not None else ()
        own = table.drop(beside, strict=False)
        if manifest is None or own.schema != pl.Schema(cls.schema):
            raise FileError(f"{path} must be a {what} written by {kind}.save; it is another kind of table")
        return cls(table, manifest)
