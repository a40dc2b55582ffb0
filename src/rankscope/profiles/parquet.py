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


def read(path: str | Path, schema: Mapping[str, Any], kind: str) -> tuple[pl.DataFrame, Manifest]:
    """What `write` wrote; `kind` is the class that it must be of, for the sentence if it is not."""
    what = kind.lower()
    if not Path(path).is_file():
        raise FileError(f"a {what} is read from a Parquet file; there is none at {path}")
    try:
        metadata = pl.read_parquet_metadata(path)
        table = pl.read_parquet(path, glob=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise FileError(
            f"{path} must be a Parquet file written by {kind}.save; it cannot be read ({error})"
        ) from error
    if KEY not in metadata or table.schema != pl.Schema(schema):
        raise FileError(f"{path} must be a {what} written by {kind}.save; it is another kind of table")
    try:
        manifest = json.loads(metadata[KEY])
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict):
        raise FileError(f"{path} must hold a manifest, a JSON object; it is damaged: run it again")
    return table, manifest
