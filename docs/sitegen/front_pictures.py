"""The four pictures of the front page, from run folders: `python docs/sitegen/front_pictures.py runs docs/images`.

`images/pictures.toml` has the command that wrote each folder. A picture is one panel, at the size of a card.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import polars as pl

from rankscope import DepthCard, Profile
from rankscope.depths.figures import depth_chart
from rankscope.figures import description as fig
from rankscope.figures.matplotlib import png, rendered
from rankscope.figures.plot import plot
from rankscope.forecasts.figures import map_chart
from rankscope.forecasts.maps import AXES
from rankscope.profiles.figures import curves_chart
from rankscope.runs.figures import layer_map
from rankscope.runs.training import read_training

SIZE = (5.0, 3.3)  # Inches


def charts(runs: Path) -> dict[str, fig.Chart]:
    """By file, what is drawn of the runs in a folder."""
    profile = Profile.read(runs / "minilm" / "profile.parquet")
    card = DepthCard.read(runs / "depth")
    plane = json.loads((runs / "design" / "forecast.json").read_text(encoding="utf-8"))["map"]
    depth = depth_chart(card.layers, card.heads, card.sentence)
    return {
        "front_measure": curves_chart(profile.views("relative_residual")),
        "front_watch": layer_map(read_training(runs / "demo-train" / "no-skips"), "relative_mu"),
        "front_forecast": map_chart(pl.DataFrame(plane), AXES["skip"].title, AXES["depth"].title),
        "front_depth": replace(depth, panels=depth.panels[:1]),
    }


def main() -> None:
    """Draw them into the folder that is named second."""
    runs, images = map(Path, sys.argv[1:])
    for name, chart in charts(runs).items():
        (images / f"{name}.png").write_bytes(png(rendered(plot(chart, figsize=SIZE))))


if __name__ == "__main__":
    main()
