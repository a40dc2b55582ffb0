"""Figure 8: every singular value of the tokens, layer by layer.

What Figure 4 sums up: no singular value vanishes, yet the first outgrows the rest.
"""

import numpy as np
import polars as pl
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from rankscope.figures import Figure, panels
from rankscope_studies.study import Comparison, Setup, Study, StudyResult, StudyTexts
from rankscope_studies.wu2024.networks import PAPER, StudyInputs, note_values, spectra
from rankscope_studies.wu2024.panels import title

TEXTS = StudyTexts("wu2024", "fig8")


def _run(setup: Setup, inputs: StudyInputs = PAPER) -> StudyResult:
    samples = 200 if setup.full else 4
    keys = ("network", "layer", "index")
    by_index = spectra(setup, samples, inputs).group_by(*keys, maintain_order=True)
    mean = by_index.agg(pl.col("singular_value").log10().mean().alias("log10")).sort(*keys, maintain_order=True)
    names = sorted(mean["network"].unique().to_list(), key=lambda name: (name.endswith("untrained"), name))
    comparisons = [_compared(mean.filter(network=name), name) for name in names]
    notes = TEXTS.notes(samples=samples, **note_values({}))
    return StudyResult({"fig8": _figure(mean, names)}, {"singular_values": mean}, comparisons, notes)


def curves(mean: pl.DataFrame) -> np.ndarray:
    """log10 of the singular values, `[layer, index]`."""
    layers = int(mean["layer"].max()) + 1  # type: ignore[arg-type]
    return mean.sort("layer", "index")["log10"].to_numpy().reshape(layers, -1)


def first_share(logs: np.ndarray) -> np.ndarray:
    """The share of `||X||_F^2` in the first direction, by layer."""
    return 1 / (10 ** (2 * (logs - logs[:, :1]))).sum(1)


def _compared(mean: pl.DataFrame, name: str) -> Comparison:
    logs = curves(mean)
    share = first_share(logs)
    least = float(10 ** (logs[:, -1] - logs[:, 0]).min())
    trained = not name.endswith("untrained")
    return TEXTS.compare(
        "values", least > 1e-12 if trained else None, name=name, least=least, first=share[0], last=share[-1],
        depth=len(share) - 1, most=share.max(), why="" if trained else "untrained: the paper drew trained models",
    )  # fmt: skip


def _figure(mean: pl.DataFrame, names: list[str]) -> Figure:
    figure, row = panels(len(names), width=2.9, height=3.1)
    for axes, name in zip(row, names, strict=True):
        logs = curves(mean.filter(network=name))
        colours = colormaps["viridis"](np.linspace(0, 0.92, len(logs)))
        for values, colour in zip(logs, colours, strict=True):
            axes.plot(np.arange(1, len(values) + 1), 10**values, color=colour, linewidth=1.2)
        axes.set(xscale="log", yscale="log", xlabel="index")
        axes.set_xticks([1, 4, 16, 64, 128], ["1", "4", "16", "64", "128"])
        axes.minorticks_off()
        title(axes, name)
    row[0].set_ylabel("singular value of the tokens")
    scale = ScalarMappable(Normalize(0, 1), colormaps["viridis"])
    bar = figure.colorbar(scale, ax=row[-1], ticks=[0, 0.92], label="layer", boundaries=np.linspace(0, 0.92, 100))
    bar.ax.set_yticklabels(["first", "last"])
    return figure


STUDY = Study("wu2024", "fig8", "all singular values by layer (Figure 8)", _run, seconds=25.0)
