"""In what joined profiles differ beside variant and arithmetic: seeds, sizes, steps, a column for each."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from rankscope.errors import MetricError

VALUES = (str, int, float, bool)


def with_factors(
    tables: Sequence[pl.DataFrame], factors: Mapping[str, Sequence[Any]], schema: Mapping[str, Any]
) -> list[pl.DataFrame]:
    """The tables, each with its value of every factor."""
    for name, values in factors.items():
        if name in schema:
            raise MetricError(f"a factor must have a name of its own; {name!r} is a column of every profile")
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != len(tables):
            got = f"{len(values)} values" if isinstance(values, list | tuple) else repr(values)
            raise MetricError(
                f"a factor must have a value for each of the {len(tables)} profiles, as in "
                f"{name}={list(range(len(tables)))[:3]}; got {got}"
            )
        if len({type(value) for value in values}) > 1 or not all(isinstance(each, VALUES) for each in values):
            raise MetricError(
                f"values of a factor must be of one kind, numbers or words; got {name}={values!r}"
            )
    found = [
        table.with_columns(pl.lit(values[place]).alias(name) for name, values in factors.items())
        for place, table in enumerate(tables)
    ]
    columns = {tuple(sorted(set(table.columns) - set(schema))) for table in found}
    if len(columns) > 1:
        said = " and ".join(", ".join(names) or "none" for names in sorted(columns))
        raise MetricError(f"profiles to join must have the same factors; received {said}")
    return [table.select(*schema, *sorted(set(table.columns) - set(schema))) for table in found]


def line_names(lines: Sequence[Mapping[str, Any]], factors: Sequence[str]) -> list[str]:
    """What each line is called: its variant, and the factors in which lines differ.

    >>> both = [{"variant": "san", "seed": 0, "width": 8}, {"variant": "san", "seed": 1, "width": 8}]
    >>> line_names(both, ["seed", "width"])
    ['seed 0', 'seed 1']
    """
    differ = [name for name in factors if len({line[name] for line in lines}) > 1]
    alone = bool(differ) and len({line["variant"] for line in lines}) == 1
    return [
        ", ".join([line["variant"]] * (not alone) + [f"{name} {line[name]}" for name in differ])
        for line in lines
    ]
