"""A look as named numbers, as tools for curves take them."""

from importlib import import_module
from typing import Any

from rankscope.extras import need
from rankscope.live.monitor.looks import Look
from rankscope.runs.training import PATHS

WHOLE = "monitor"
"""The group of what is of the whole run. Not `train`: loops write a `train/loss` of their own there."""


def scalars(look: Look) -> dict[str, float]:
    """Every value of a look that is a number, by a name whose first part is what pages group by:

    relative_mu/layer_03    head_mu/layer_03/head_02    paths/length_02    monitor/loss
    """
    columns = (look.rows[name].to_list() for name in ("metric", "layer", "head", "value"))
    return {
        name(metric, layer, head): value
        for metric, layer, head, value in zip(*columns, strict=True)
        if value is not None
    }


def name(metric: str, layer: int | None, head: int | None) -> str:
    """Of one number; padded, so that names sort as layers do.

    >>> name("mu", 3, None), name("paths_2", None, None), name("loss", None, None)
    ('mu/layer_03', 'paths/length_02', 'monitor/loss')
    """
    length = metric.removeprefix(PATHS)
    if layer is None and length != metric and length.isdecimal():
        return f"{PATHS[:-1]}/length_{int(length):02}"
    if layer is None:
        return f"{WHOLE}/{metric}"
    return f"{metric}/layer_{layer:02}" + ("" if head is None else f"/head_{head:02}")


def imported(package: str) -> Any:
    """An optional package; a sentence where it is not installed."""
    need("this sink", package.partition(".")[0])
    return import_module(package)
