"""Curves side by side: who keeps tokens apart longer, in a table and a sentence."""

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope.profiles import Profile


class Line(NamedTuple):
    """One curve: its name, its log10 by layer, and from where it is uniform, and only noise."""

    name: str
    arithmetic: str
    log10: list[float]
    first_layer: int
    uniform_from: int | None
    floor_from: int | None

    @property
    def last_layer(self) -> int:
        """The depth of its network."""
        return self.first_layer + len(self.log10) - 1


def judged(profile: "Profile", metric: str, threshold: float) -> list[Line]:
    """Every line of the profile, in order."""
    from rankscope.metrics import metric as metric_named

    first = 0 if metric_named(metric).of == "tokens" else 1  # there is no attention at layer 0
    lines = []
    variants = [variant for variant, _ in profile.lines(metric)]
    for variant, arithmetic in profile.lines(metric):
        curve = profile.curve(metric, "log10", variant=variant, arithmetic=arithmetic)[:, first:]
        mean = curve.transpose(0, 1).flatten(1).nanmean(1).tolist()
        noise = profile.at_floor(metric, variant=variant, arithmetic=arithmetic).tolist()
        floor = next((layer for layer, part in enumerate(noise) if part), None)
        several = variants.count(variant) > 1
        name = f"{variant} in {arithmetic}" if several else variant
        below = uniform_from(mean, threshold, first) if is_share(metric) else None
        lines.append(Line(name, arithmetic, mean, first, below, floor))
    return lines


def is_share(metric: str) -> bool:
    """Whether a metric says how far apart tokens are as a share of their size: of these alone a threshold
    makes tokens uniform."""
    return metric.startswith("relative_") or metric == "high_frequency_share"


def uniform_from(log10: list[float], threshold: float, first: int = 0) -> int | None:
    """The layer from which on a curve stays below the threshold; None where it ends above, or in NaN.

    >>> uniform_from([0.0, -4.0, -2.0, -4.0, -5.0], 1e-3)
    3
    """
    below = [value < math.log10(threshold) for value in log10]
    if not below[-1]:
        return None
    return first + next((k + 1 for k in reversed(range(len(below))) if not below[k]), 0)


def lines_table(lines: list[Line], metric: str, threshold: float) -> "Table":
    """A line per curve: its shape, its ends, from where tokens are uniform, and from where it is noise."""
    from rankscope.cli.show import drawn, sparkline, titled
    from rankscope.figures import power
    from rankscope.metrics import metric as metric_named

    title = f"{metric}: {metric_named(metric).symbol}, geometric mean over samples"
    table = titled(title, f"uniform: below {threshold:g} from that layer on" if is_share(metric) else "")
    table.add_column("", overflow="fold")
    table.add_column("by layer", no_wrap=True)
    noisy = any(line.floor_from is not None for line in lines)
    for heading in ("first", "last") if noisy else ("first", "middle", "last"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("layers", justify="right", no_wrap=True)
    if is_share(metric):
        table.add_column("uniform", no_wrap=True)
    if noisy:
        table.add_column("at floor", no_wrap=True)
    for line in lines:
        curve = line.log10
        ends = [curve[0], curve[-1]] if noisy else [curve[0], curve[len(curve) // 2], curve[-1]]
        cells = [line.name, sparkline(drawn(curve)), *map(power, ends), str(line.last_layer)]
        if is_share(metric):
            cells.append("no" if line.uniform_from is None else f"from {line.uniform_from}")
        if noisy:
            cells.append("" if line.floor_from is None else f"from {line.floor_from}")
        table.add_row(*map(_plain, cells))
    return table


def _plain(cell: str) -> str:
    """A name may hold brackets, which are not meant as colours."""
    from rich.markup import escape

    return escape(cell)


def verdict(lines: list[Line], metric: str, threshold: float) -> str:
    """Who keeps tokens apart longer, in a sentence."""
    from rankscope.figures import power

    whole = [line for line in lines if not math.isnan(line.log10[-1])]
    broken = [line.name for line in lines if math.isnan(line.log10[-1])]
    lost = f" Numbers overflow in {', '.join(broken)}." if broken else ""
    if not whole:
        return f"No verdict.{lost}"
    ends = sorted(whole, key=lambda line: -line.log10[-1])
    most, least = ends[0], ends[-1]
    if not is_share(metric):
        said = f"At the last layer {metric} is largest in {most.name} ({power(most.log10[-1])})"
        return f"{said} and smallest in {least.name} ({power(least.log10[-1])}).{lost}"
    apart = [line for line in ends if line.uniform_from is None]
    same = sorted(
        (line for line in whole if line.uniform_from is not None), key=lambda line: -(line.uniform_from or 0)
    )
    if not same:
        said = f"All stay further apart than {threshold:g} to their last layer"
        if len(whole) > 1:
            said += f"; {most.name} most ({power(most.log10[-1])}), {least.name} least "
            said += f"({power(least.log10[-1])})"
        return f"{said}.{lost}"
    fallen = ", ".join(f"{line.name} from layer {line.uniform_from} of {line.last_layer}" for line in same)
    if apart:
        kept = ", ".join(f"{line.name} ({power(line.log10[-1])})" for line in apart)
        verb = "keeps" if len(apart) == 1 else "keep"
        return f"{kept} {verb} tokens apart to the last layer; uniform to {threshold:g}: {fallen}.{lost}"
    longest = [line.name for line in same if line.uniform_from == same[0].uniform_from]
    if len(longest) == len(same):
        return f"All make tokens uniform to {threshold:g}: {fallen}.{lost}"
    verb = "keeps" if len(longest) == 1 else "keep"
    return f"{', '.join(longest)} {verb} tokens apart longest; uniform to {threshold:g}: {fallen}.{lost}"
