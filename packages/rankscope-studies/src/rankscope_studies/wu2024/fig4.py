"""Figure 4: full rank is kept while tokens turn into one direction.

Of each network as it stands, by layer: the share of inputs whose tokens have full rank, their smallest singular value,
and the mean |cosine| of pairs. Whether a matrix has full rank depends on the arithmetic that one asks with: it is
answered with float64's tolerance, `max(n, d) eps s_1`, and with float32's, in which models run.
"""

import polars as pl
import torch

from rankscope.figures import Figure, panels
from rankscope_studies.study import Comparison, Setup, Study, StudyResult, StudyTexts, mean_by_layer
from rankscope_studies.wu2024.networks import PAPER, StudyInputs, note_values, spectra
from rankscope_studies.wu2024.panels import line_style, powers_of_ten, title

TEXTS = StudyTexts("wu2024", "fig4")


def _run(setup: Setup, inputs: StudyInputs = PAPER) -> StudyResult:
    samples = 200 if setup.full else 4
    table = by_input(spectra(setup, samples, inputs))
    names = table["network"].unique(maintain_order=True).to_list()
    comparisons = [_compared(table.filter(network=name), name) for name in names]
    notes = TEXTS.notes(samples=samples, **note_values({}))
    return StudyResult({"fig4": _figure(table, names)}, {"ranks": table}, comparisons, notes)


def by_input(values: pl.DataFrame) -> pl.DataFrame:
    """A row of each input at each layer: full rank or not, the smallest singular value, the mean |cosine|."""
    most, least = pl.col("singular_value").max(), pl.col("singular_value").min()
    tolerances = {"full_rank": torch.finfo(torch.float64).eps, "full_rank_float32": torch.finfo(torch.float32).eps}
    full = {name: least > pl.col("size").first() * eps * most for name, eps in tolerances.items()}
    return values.group_by("network", "layer", "sample", maintain_order=True).agg(
        *(is_full.cast(pl.Float64).alias(name) for name, is_full in full.items()),
        least.alias("sigma_min"),
        (least / most).alias("relative_sigma_min"),
        pl.col("mean_abs_cosine").first(),
    )


def _compared(table: pl.DataFrame, name: str) -> Comparison:
    columns = ("full_rank", "full_rank_float32", "mean_abs_cosine")
    rank, single, cosine = (mean_by_layer(table, column) for column in columns)
    kept, rises, untrained = min(rank) > 0.5, cosine[-1] > cosine[0], name.endswith("untrained")
    why = "untrained" if untrained else "level" if kept and not rises else ""
    return TEXTS.compare(
        "angles", None if untrained else kept and rises, name=name, rank=min(rank), single=min(single),
        first=cosine[0], most=max(cosine), last=cosine[-1], depth=len(cosine) - 1,
        smallest=min(mean_by_layer(table, "relative_sigma_min")), lost="" if kept or untrained else "rank is lost: ",
        why=TEXTS.sentence("angles", why) if why else "",
    )  # fmt: skip


def _figure(table: pl.DataFrame, names: list[str]) -> Figure:
    figure, (rank, sigma, cosine) = panels(3, width=4.4, height=3.8)
    for k, name in enumerate(names):
        part = table.filter(network=name)
        layers = range(int(part["layer"].max()) + 1)  # type: ignore[arg-type]
        look = line_style(k) | {"linestyle": "--" if name.endswith("untrained") else "-"}
        logs = part.with_columns(pl.col("sigma_min").log10().alias("log10"))
        rank.plot(layers, mean_by_layer(part, "full_rank"), **look)
        sigma.plot(layers, mean_by_layer(logs, "log10"), **look)
        cosine.plot(layers, mean_by_layer(part, "mean_abs_cosine"), label=name, **look)
    title(rank, "Inputs of full rank", xlabel="layer", ylabel="share of inputs", ylim=(-0.03, 1.05))
    title(sigma, "Smallest singular value", xlabel="layer", ylabel=r"$\sigma_{\min}(X)$")
    powers_of_ten(sigma)
    title(cosine, "Angles of pairs", xlabel="layer", ylabel=r"mean $|\cos(x_i, x_j)|$", ylim=(0, 1))
    cosine.legend(fontsize=8, frameon=False, loc="best")
    return figure


STUDY = Study("wu2024", "fig4", "rank, smallest singular value and angles by layer (Figure 4)", _run, seconds=27.0)
