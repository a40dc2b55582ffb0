"""The four pictures of the front page, and moby-gpt along its training, from run folders.

`python docs/sitegen/front_pictures.py runs docs/images` draws those whose folder is there. `images/pictures.toml` has
the command that wrote each folder. A picture of the front page is one panel, at the size of a card.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl

from rankscope import DepthCard, Profile
from rankscope import figures as fig
from rankscope.depths.tables import depth_chart
from rankscope.figures.drawing import plot
from rankscope.figures.matplotlib import png, rendered
from rankscope.forecasts import AXES, map_chart
from rankscope.profiles.figures import curves_chart
from rankscope.trainings import read_training
from rankscope.trainings.figures import layer_map, run_curves

ALONE, BESIDE = (5.0, 3.3), (3.5, 2.9)  # Inches of a panel


def forecast_map(folder: Path) -> fig.Chart:
    """The probability of learning by depth and weight of the skips."""
    plane = json.loads((folder / "forecast.json").read_text(encoding="utf-8"))["map"]
    return map_chart(pl.DataFrame(plane), AXES["skip"].title, AXES["depth"].title)


def losses_of_layers(folder: Path) -> fig.Chart:
    """What the output loses without each layer."""
    card = DepthCard.read(folder)
    chart = depth_chart(card.layers, card.heads, card.sentence)
    return replace(chart, panels=chart.panels[:1])


def along_training(folder: Path) -> fig.Chart:
    """The loss, how far tokens are apart, and attention on the first token, by step."""
    training = read_training(folder)
    maps = {
        "what tokens differ by": layer_map(training, "relative_residual"),
        "attention on the first token": layer_map(training, "first_token_mass"),
    }
    panels = [titled(chart.panels[0], heading) for heading, chart in maps.items()]
    loss = run_curves(training, ["loss"])
    return replace(loss, panels=[replace(loss.panels[0], heading="held-out loss, nats a token"), *panels], columns=None)


def titled(panel: fig.Panel, heading: str) -> fig.Panel:
    """A panel under a heading that says what its colours mean, in place of the title of their bar."""
    marks = [replace(mark, title="") if isinstance(mark, fig.Heatmap) else mark for mark in panel.marks]
    return replace(panel, heading=heading, marks=marks)


PICTURES: dict[str, tuple[str, Callable[[Path], fig.Chart]]] = {
    "front_measure": (
        "minilm",
        lambda folder: curves_chart(Profile.read(folder / "profile.parquet").views("relative_residual")),
    ),
    "front_watch": ("demo-train/no-skips", lambda folder: layer_map(read_training(folder), "relative_mu")),
    "front_forecast": ("design", forecast_map),
    "front_depth": ("depth", losses_of_layers),
    "moby_gpt": ("moby-gpt", along_training),
}
"""Of each picture the folder of its run, and what is drawn of it."""


def main() -> None:
    """Draw them into the folder that is named second."""
    runs, images = map(Path, sys.argv[1:])
    for name, (folder, chart_of) in PICTURES.items():
        if (runs / folder).is_dir():
            chart = chart_of(runs / folder)
            width, height = BESIDE if len(chart.panels) > 1 else ALONE
            size = (width * len(chart.panels), height)
            (images / f"{name}.png").write_bytes(png(rendered(plot(chart, figsize=size))))


if __name__ == "__main__":
    main()
