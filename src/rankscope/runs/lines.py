"""Rows of a table as lines of JSON: what a table that grows has before it is gathered into Parquet."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

FILE = "journal.jsonl"
Line = dict[str, Any]
"""`{"step": ..., "rows": {column: [...]}}`."""


def line_of(step: int, rows: pl.DataFrame) -> Line:
    """The rows of a step."""
    columns = rows.drop("step").to_dict(as_series=False)
    return {
        "step": step,
        "rows": {name: [_named(each) for each in column] for name, column in columns.items()},
    }


def lines_of(table: pl.DataFrame) -> list[Line]:
    """A line for each step."""
    parts = table.partition_by("step", maintain_order=True)
    return [line_of(int(part["step"][0]), part) for part in parts]


def written(lines: Sequence[Line]) -> str:
    """As the file has them."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def read_lines(path: Path, after: int) -> list[Line]:
    """Those that are whole, of later steps than `after`."""
    if not path.is_file():
        return []
    found = []
    for text in path.read_text(encoding="utf-8").split("\n")[:-1]:
        try:
            line = json.loads(text)
        except ValueError:
            break  # half of a line, and something after it
        if line["step"] > after:
            found.append(line)
    return found


def frame_of(lines: Sequence[Line], schema: Mapping[str, Any]) -> pl.DataFrame:
    """The rows of all of them."""
    parts = [pl.DataFrame(schema=dict(schema))]
    for line in lines:
        columns = {
            name: [_number(each, schema[name]) for each in column] for name, column in line["rows"].items()
        }
        number = len(next(iter(columns.values()), []))
        parts.append(pl.DataFrame({"step": [line["step"]] * number, **columns}, schema=dict(schema)))
    return pl.concat(parts)


def _named(value: Any) -> Any:
    """JSON has no word for what is no number."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any, kind: Any) -> Any:
    return float(value) if isinstance(value, str) and kind.is_float() else value
