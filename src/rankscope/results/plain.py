"""Results as strict JSON and back: tables by column, and numbers that JSON does not know as words.

>>> made = plain_table(pl.DataFrame({"layer": [0, 1], "value": [1.0, float("nan")]}), {"value": pl.Float64})
>>> made
{'types': {'layer': 'Int64'}, 'columns': {'layer': [0, 1], 'value': [1.0, 'nan']}}
>>> table_of(made, {"value": pl.Float64})["value"].is_nan().to_list()
[False, True]
"""

import math
from collections.abc import Mapping
from typing import Any

import polars as pl


def plain_value(value: Any) -> Any:
    """The value as JSON knows it; NaN and infinity become the words `nan`, `inf` and `-inf`, which `float` reads."""
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def plain_table(table: pl.DataFrame, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a table, with the types of those that its schema does not name."""
    types = {name: str(kind) for name, kind in table.schema.items() if name not in schema}
    columns = {name: plain_value(values) for name, values in table.to_dict(as_series=False).items()}
    return {"types": types, "columns": columns}


def table_of(content: Mapping[str, Any], schema: Mapping[str, Any]) -> pl.DataFrame:
    """The table that `plain_table` gave."""
    known = {**schema, **{name: getattr(pl, kind) for name, kind in content["types"].items()}}
    columns = content["columns"].items()
    return pl.DataFrame([pl.Series(name, [_typed(value, known[name]) for value in values], known[name], strict=True)
                         for name, values in columns])  # fmt: skip


def _typed(value: Any, kind: Any) -> Any:
    """A value of a column of this type, its words numbers again."""
    if isinstance(kind, pl.List) and value is not None:
        return [_typed(item, kind.inner) for item in value]
    if isinstance(kind, pl.Struct) and value is not None:
        return {field.name: _typed(value[field.name], field.dtype) for field in kind.fields}
    return float(value) if isinstance(value, str) and kind.is_float() else value
