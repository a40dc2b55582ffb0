"""How the command line shows things: one console, progress on stderr, curves as sparklines."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from rankscope.profiles import Profile

BLOCKS = "▁▂▃▄▅▆▇█"


def console() -> Console:
    """Where results go."""
    return Console(highlight=False)


def say(*lines: str) -> None:
    """Plain sentences, wrapped to the terminal."""
    for line in lines:
        console().print(line)


def machine(value: Any) -> None:
    """JSON on stdout; NaN and infinity, which JSON does not know, become null."""
    sys.stdout.write(json.dumps(_plain(value), ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A factory of progress callbacks: `bar = start("bert-base, san")`, then `bar(done, total)`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    out = Console(stderr=True)
    with Progress(*columns, console=out, transient=True, disable=quiet or not out.is_terminal) as bars:

        def start(description: str) -> Callable[[int, int], None]:
            task = bars.add_task(description, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield start


def sparkline(values: Sequence[float], *, log: bool) -> str:
    """One character per value, from 0 (or on a log scale from the least) to the largest.

    >>> sparkline([1.0, 0.1, 0.01], log=True)
    '█▅▁'
    """
    points = [math.log10(v) if log and v > 0 else math.nan if log else v for v in values]
    known = [point for point in points if math.isfinite(point)]
    low, high = (min(known) if log else min(0.0, *known), max(known)) if known else (0.0, 0.0)
    span = high - low or 1.0

    def block(point: float) -> str:
        return BLOCKS[round((point - low) / span * 7)] if math.isfinite(point) else " "

    return "".join(block(point) for point in points) if high > low else BLOCKS[3] * len(points)


def number(value: float) -> str:
    """Three digits, the way a person would write it.

    >>> number(0.4321), number(3.2e-12)
    ('0.432', '3.2e-12')
    """
    if not math.isfinite(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:.1e}"


def profile_table(profile: "Profile", metric: str) -> Table:
    """A line per variant and arithmetic: the curve, its ends, and from where it is only noise."""
    from rankscope.metrics import metric as metric_named

    each = metric_named(metric)
    table = Table(title=f"{metric}: {each.symbol}, mean over samples", title_justify="left", box=None)
    for heading, justify in (("variant", "left"), ("layers 0 →", "left")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for heading in ("first", "middle", "last"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("at the floor", justify="left", no_wrap=True)
    for variant in profile.variants:
        for arithmetic in profile.arithmetics:
            if not len(profile.table.filter(variant=variant, arithmetic=arithmetic, metric=metric)):
                continue
            curve = profile.curve(metric, variant=variant, arithmetic=arithmetic)
            noise = profile.curve(metric, "below_floor", variant=variant, arithmetic=arithmetic)
            if curve.ndim == 3:
                curve, noise = curve[:, 1:].nanmean(-1), noise[:, 1:].amax(-1)
            mean = curve.nanmean(0).tolist()
            drawn = mean if len(mean) <= 16 else [mean[k * (len(mean) - 1) // 15] for k in range(16)]
            from_layer = next((k for k, part in enumerate(noise.amax(0).tolist()) if part == 1), None)
            table.add_row(
                variant if len(profile.arithmetics) == 1 else f"{variant} · {arithmetic}",
                sparkline(drawn, log=max(mean) > 100 * min(mean) > 0),
                number(mean[0]),
                number(mean[len(mean) // 2]),
                number(mean[-1]),
                "" if from_layer is None else f"from layer {from_layer}",
            )
    return table
