"""A summary as a figure: the median of each variant, and how far the excerpts lie about it."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankscope.figures import panels
from rankscope.profiles.lines import looks, summary_floor, summary_quantiles
from rankscope.profiles.plot import band, draw_floors, dress, trace
from rankscope.profiles.summary import Summary


def plot_summary(summary: Summary, metric: str, log: bool | None = None) -> Figure:
    """The metric by layer. `log=None` takes a log axis where the values span over two decades."""
    figure, (axes,) = panels()
    draw_summary(axes, summary, metric, log)
    return figure


def draw_summary(axes: Axes, summary: Summary, metric: str, log: bool | None = None) -> None:
    """Draw into given axes: the median, a band of the middle half and a fainter one of nine tenths.

    A median is hollow where at least half of the excerpts lie at their floor. Axes as in `draw_profile`.
    """
    logs = {line: summary_quantiles(summary, metric, line, log=True) for line in summary.lines(metric)}
    known = np.concatenate([np.ravel(list(each.values())) for each in logs.values()])
    known = known[np.isfinite(known)]
    span = float(np.ptp(known)) if len(known) else 0.0
    log = span > 2 if log is None else log
    strength = min(1.0, 4 / len(logs))  # many bands upon each other would hide the lines
    for number, (line, of_log) in zip(looks(summary, metric), logs.items(), strict=True):
        drawn = of_log if log else summary_quantiles(summary, metric, line, log=False)
        band(axes, drawn["q05"], drawn["q95"], number, 0.12 * strength)
        band(axes, drawn["q25"], drawn["q75"], number, 0.25 * strength)
        noise = summary.at_floor(metric, variant=line[0], arithmetic=line[1]).numpy()
        label = line[0] if len(summary.arithmetics) == 1 else f"{line[0]}, {line[1]}"
        trace(axes, np.where(np.isfinite(drawn["q50"]), drawn["q50"], np.nan), noise, number, label)
    if log:
        draw_floors(axes, {line: summary_floor(summary, metric, line) for line in logs})
    dress(axes, metric, span if log else None)
