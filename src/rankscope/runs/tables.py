"""How tables of a run are written: Parquet files with their manifest inside, and lines of JSON.

`Store` and `Run` (`store.py`) read and write whole files with `write_parquet` and `read_parquet`. A table
that grows (`journal.py`) has its last rows as lines of JSON, one line for each step, until they are gathered
into a Parquet file.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import polars as pl

from rankscope.errors import FileError
from rankscope.files import atomic
from rankscope.runs.manifest import Manifest

METADATA_KEY = "rankscope"  # the key of the manifest in a Parquet file's metadata
JOURNAL = "journal.jsonl"  # the file with the lines of a table that grows, in the table's folder
NO_ROWS = (  # what reading a line raises that another program wrote, or half of one
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, pl.exceptions.PolarsError,
    pl.exceptions.PanicException,
)  # fmt: skip
Line = dict[str, Any]  # the rows of one step: `{"step": ..., "rows": {column: [...]}}`


def write_parquet(path: str | Path, table: pl.DataFrame, manifest: Manifest) -> Path:
    """Write a table with its manifest inside, atomically."""
    with atomic(path) as temporary:
        try:
            table.write_parquet(temporary, metadata={METADATA_KEY: json.dumps(manifest.to_dict())})
        except (OSError, pl.exceptions.PolarsError) as error:  # polars has errors of its own for a full disk
            reason = str(error).rpartition("error: ")[2]
            sentence = f"{path} must be a place that can be written; {reason}: choose another"
            raise FileError(sentence, subject=str(path)) from error
    return Path(path)


def read_parquet(path: str | Path, kind: str = "") -> tuple[pl.DataFrame, Manifest | None]:
    """A table, and its manifest if it has one; `kind` says in the error what the file should have been."""
    with _damage_reported(path, kind):
        table, metadata = pl.read_parquet(path, glob=False), pl.read_parquet_metadata(path)
    return table, _manifest(path, metadata[METADATA_KEY]) if METADATA_KEY in metadata else None


def manifest_in(path: str | Path) -> Manifest:
    """The manifest in a Parquet file, without reading its table."""
    with _damage_reported(path):
        metadata = pl.read_parquet_metadata(path)
    return _manifest(path, metadata.get(METADATA_KEY, ""))


@contextmanager
def _damage_reported(path: str | Path, kind: str = "") -> Iterator[None]:
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        sentence = f"{path} must be a Parquet file{kind}; it cannot be read ({reason}): run it again"
        raise FileError(sentence, subject=str(path)) from error


def _manifest(path: str | Path, text: str) -> Manifest:
    try:
        return Manifest.from_dict(json.loads(text))
    except (ValueError, RecursionError) as error:
        sentence = f"{path} must hold a manifest, a JSON object; it is damaged ({error}): run it again"
        raise FileError(sentence, subject=str(path)) from error


@runtime_checkable  # so that beartype can hold arguments to it
class SavedTable(Protocol):
    """What has a table and a manifest of its own, as profiles and certificates do."""

    @property
    def table(self) -> pl.DataFrame:
        """The table that the manifest is of."""

    @property
    def manifest(self) -> Manifest:
        """What was run on what."""


def line_of(step: int, rows: pl.DataFrame) -> Line:
    """The rows of a step as a line. JSON has no NaN and no infinity: these become text."""
    columns = rows.drop("step").to_dict(as_series=False)
    return {"step": step, "rows": {name: [_json_value(x) for x in xs] for name, xs in columns.items()}}


def lines_of(table: pl.DataFrame) -> list[Line]:
    """The rows of a table as a line for each step."""
    parts = table.partition_by("step", maintain_order=True)
    return [line_of(int(part["step"][0]), part) for part in parts]


def text_of(lines: Sequence[Line]) -> str:
    """The text of a journal file with these lines."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def read_lines(path: Path, after: int, schema: Mapping[str, Any]) -> tuple[list[Line], list[int]]:
    """The complete lines of a journal file whose step is later than `after`, and the numbers, from 1, of the lines that
    hold no rows of this schema; a damaged line hides no other."""
    lines, damaged = [], []
    texts = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for line_number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            if type(line["step"]) is not int:
                raise TypeError("a step must be a whole number")
            if line["step"] > after:
                frame_of([line], schema)
                lines.append(line)
        except NO_ROWS:
            damaged.append(line_number)
    return lines, damaged


def frame_of(lines: Sequence[Line], schema: Mapping[str, Any]) -> pl.DataFrame:
    """The rows of all lines as one table."""
    parts = [pl.DataFrame(schema=dict(schema))]
    for line in lines:
        columns = {name: [_table_value(x, schema[name]) for x in xs] for name, xs in line["rows"].items()}
        rows = len(next(iter(columns.values()), []))
        parts.append(pl.DataFrame({"step": [line["step"]] * rows, **columns}, schema=dict(schema)))
    return pl.concat(parts)


def _json_value(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _table_value(value: Any, kind: Any) -> Any:
    if isinstance(value, list | dict):  # polars takes a minute to refuse what is nested deep
        raise TypeError("an entry must be a number, a text or nothing")
    return float(value) if isinstance(value, str) and kind.is_float() else value
