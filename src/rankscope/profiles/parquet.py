"""A tidy table and its manifest in one Parquet file: how profiles and summaries are kept."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.errors import FileError
from rankscope.files import atomic
from rankscope.profiles.manifest import Manifest

KEY = "rankscope"
"""Where the manifest lies in the file's metadata."""


def write(path: str | Path, table: pl.DataFrame, manifest: Manifest) -> Path:
    """Write one file, manifest inside, atomically."""
    with atomic(path) as temporary:
        table.write_parquet(temporary, metadata={KEY: json.dumps(manifest)})
    return Path(path)


def whole(path: str | Path, made: str = "") -> tuple[pl.DataFrame, dict[str, str]]:
    """Any table and its metadata; `made` says in the sentence, if it cannot be read, what would have been
    right."""
    try:
        return pl.read_parquet(path, glob=False), pl.read_parquet_metadata(path)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise FileError(
            f"{path} must be a Parquet file{made}; it cannot be read ({said}): it is damaged, run it again"
        ) from error


def read(path: str | Path, schema: Mapping[str, Any], kind: str) -> tuple[pl.DataFrame, Manifest]:
    """What `write` wrote; `kind` is the class that it must be of, for the sentence if it is not."""
    what = kind.lower()
    if not Path(path).is_file():
        raise FileError(f"a {what} is read from a Parquet file; there is none at {path}")
    table, metadata = whole(path, f" written by {kind}.save")
    if KEY not in metadata or table.schema != pl.Schema(schema):
        raise FileError(f"{path} must be a {what} written by {kind}.save; it is another kind of table")
    try:
        manifest = json.loads(metadata[KEY])
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict):
        raise FileError(f"{path} must hold a manifest, a JSON object; it is damaged: run it again")
    return table, manifest
