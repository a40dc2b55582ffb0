"""How excerpts of a corpus differ: the statistics of one metric at the last layer."""

from rankscope.figures import power
from rankscope.profiles import Summary

HEADINGS = ("5 %", "25 %", "median", "75 %", "95 %", "mean", "deviation", "at floor", "excerpts")


def last_layer(summary: Summary, metric: str) -> dict[str, list[list[str]] | list[str]]:
    """A line per variant and arithmetic: quantiles from their logs, which do not underflow."""
    lines = []
    for variant, arithmetic in summary.lines(metric):
        last = {
            column: float(summary.curve(metric, column, variant=variant, arithmetic=arithmetic)[-1])
            for column in ("mean", "deviation", "below_floor", "count")
        }
        logs = [
            float(summary.curve(metric, f"log10_{name}", variant=variant, arithmetic=arithmetic)[-1])
            for name in ("q05", "q25", "q50", "q75", "q95")
        ]
        numbers = [f"{last[name]:.3g}" for name in ("mean", "deviation")]
        share, count = f"{last['below_floor']:.0%}", f"{last['count']:.0f}"
        name = variant if len(summary.arithmetics) == 1 else f"{variant}, {arithmetic}"
        lines.append([name, *map(power, logs), *numbers, share, count])
    return {"headings": list(HEADINGS), "lines": lines}
