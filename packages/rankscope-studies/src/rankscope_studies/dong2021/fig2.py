"""Figure 2: the relative residual by layer, with and without skips and MLPs.

BERT, ALBERT and XLNet of base size, freshly initialised, and trained networks; excerpts of 128 tokens; eval
mode. Plotted is `||H_l - mean||_{1,inf} / ||H_l||_{1,inf}` for l = 0..12, of single excerpts and their mean,
of four curves: SAN, SAN+MLP, SAN+skip, transformer. In two readings:

- **published**: what the published code removes. "No skip" drops the skip around attention and keeps the norm
  and the MLP's own skip; "no MLP" drops MLP, its skip and its norm (in ALBERT it leaves `norm(act(a) + a)`).
- **defined**: as the paper's text defines SAN: no skip, no MLP, no norm.

Each in float32, as published, and in deviation arithmetic on a log axis, where curves do not end in a floor.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import polars as pl

from rankscope.extras import installed
from rankscope.figures import FAINT, MARKERS, PALETTE, Figure, panels, tick
from rankscope.nets import DEFINED, Transformer
from rankscope.profiles import measure
from rankscope.sources import MINILM
from rankscope_studies.dong2021.networks import FAMILIES, Subject, published_variant, random_subject, trained_subjects
from rankscope_studies.study import Comparison, Setup, Study, StudyResult, StudyTexts, mean_by_layer, published

TOKENS = 128
TOLERANCE = 0.1  # How far the mean over seeds may be from a published curve; the paper's one network has its own seed
FALLEN = 0.1  # The relative residual below which tokens count as having become the same
TEXTS = StudyTexts("dong2021", "fig2")


def _run(setup: Setup) -> StudyResult:
    texts, seeds = (32, 4) if setup.full else (2, 2)
    parts = {
        f"{family}-{seed}": partial(_random, family, seed, texts, setup.device)
        for family, seed in product(FAMILIES, range(seeds))
    }
    if setup.models or installed("transformers", MINILM):
        parts["trained"] = partial(_trained, setup, texts)
    table = setup.cached_parts(parts, texts=texts, each="excerpt")
    figures = {
        f"{mode}_{weights}": _figure(table, mode, weights == "trained")
        for mode, weights in product(("published", "defined"), ("initialised", "trained"))
        if (table["trained"] == (weights == "trained")).any()
    }
    by_network = table.filter("trained").select("network", "reads").unique(maintain_order=True).iter_rows()
    reads = "; ".join(f"{network} on {what}" for network, what in by_network) or "none was at hand"
    notes = TEXTS.notes(seeds=seeds, texts=texts, tokens=TOKENS, reads=reads)
    return StudyResult(figures, {"curves": table}, list(_comparisons(table)), notes)


def _random(family: str, seed: int, texts: int, device: str) -> pl.DataFrame:
    return _curves(random_subject(family, seed, texts, TOKENS, device), seed)


def _trained(setup: Setup, texts: int) -> pl.DataFrame:
    subjects = trained_subjects(setup.models, texts, TOKENS, setup.device)
    return pl.concat([_curves(subject, 0) for subject in subjects])


def _curves(subject: Subject, seed: int) -> pl.DataFrame:
    """Every curve in both readings and both arithmetics, by excerpt and layer."""
    tables = []
    for (mode, curve, net), arithmetic in product(_networks(subject), ("float32", "deviation")):
        table = measure(net, subject.X, subject.padding, "relative_residual", arithmetic).table
        rows = table.rename({"sample": "excerpt"}).sort("excerpt", "layer")
        labels = {"network": subject.name, "family": subject.family, "trained": subject.trained, "seed": seed}
        labels |= {"mode": mode, "curve": curve, "arithmetic": arithmetic, "reads": subject.reads}
        columns = {name: pl.lit(value) for name, value in labels.items()}
        tables.append(rows.select("excerpt", "layer", "value", "log10", "below_floor").with_columns(**columns))
    return pl.concat(tables)


def _networks(subject: Subject) -> Iterator[tuple[str, str, Transformer]]:
    for curve in DEFINED:
        yield "published", curve, published_variant(subject, curve)
        if curve != "transformer":
            yield "defined", curve, subject.net.variant(curve)


def _comparisons(table: pl.DataFrame) -> Iterator[Comparison]:
    fresh = table.filter(trained=False, mode="published", arithmetic="float32")
    for family in ("bert", "albert"):
        published_curves = published("dong2021")["figure2_init"][family]
        for curve in ("san+skip", "transformer"):
            ours, theirs = mean_by_layer(fresh.filter(family=family, curve=curve)), published_curves[curve]
            apart = [abs(mine - value) for mine, value in zip(ours, theirs, strict=True)]
            yield TEXTS.compare(
                "by_layer", max(apart) < TOLERANCE, family=family, curve=curve, theirs=_listed(theirs),
                ours=_listed(ours), apart=max(apart), layer=apart.index(max(apart)),
            )  # fmt: skip
        for curve in ("san", "san+mlp"):
            theirs = published_curves[f"{curve}_at_layer_1"]
            mine = mean_by_layer(fresh.filter(family=family, curve=curve))[1]
            agrees = 0.4 < mine / theirs < 2.5
            why = "the same number to a factor" if agrees else ""
            yield TEXTS.compare("layer_1", agrees, family=family, curve=curve, theirs=theirs, ours=mine, why=why)
    deep = table.filter(trained=False, arithmetic="deviation", mode="defined", curve="san", family="bert")
    yield TEXTS.compare("pure_attention", None, last=mean_by_layer(deep, "log10")[-1])
    yield from _trained_comparisons(table)


def _trained_comparisons(table: pl.DataFrame) -> Iterator[Comparison]:
    """The trained networks are others than the paper's: what it says of its own is looked for in them."""
    part = table.filter(trained=True, mode="published", arithmetic="float32")
    for network in part["network"].unique(maintain_order=True):
        mine = part.filter(network=network)
        family = mine["family"][0]
        theirs = published("dong2021")["figure2_pretrained"][family]
        ends = mine.filter(pl.col("layer") == pl.col("layer").max())
        held = ends.filter(curve="transformer")["value"].to_list()
        fallen = {curve: ends.filter(curve=curve)["value"].to_list() for curve in ("san", "san+mlp")}
        agrees = min(held) > FALLEN > max(map(max, fallen.values()))
        apart = sum(value > FALLEN for value in fallen["san"])
        without = f": without attention's skip {apart} of {len(held)} excerpts do not collapse, the others do"
        yield TEXTS.compare(
            "skips_hold", agrees, network=network, transformer=theirs["transformer"][-1], san=theirs["san"][-1],
            mlp=theirs["san+mlp"][-1], family=family.upper(), held=_range(held), excerpts=len(held),
            fallen=", ".join(f"{curve.upper()} {_range(values)}" for curve, values in fallen.items()),
            why="" if agrees or not apart else without,
        )  # fmt: skip


def _range(values: list[float]) -> str:
    """The smallest and the largest; one number where they print alike."""
    low, high = (f"{value:.2f}" if value > 0.005 else f"{value:.0e}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _listed(values: list[float]) -> str:
    return " ".join(f"{value:.2f}".removeprefix("0") for value in values)


def _figure(table: pl.DataFrame, mode: str, trained: bool) -> Figure:
    """A row of networks; above the values as published, below powers of ten in deviation arithmetic."""
    rows = table.filter(trained=trained)
    networks = rows["network"].unique(maintain_order=True).to_list()
    figure, axes = panels(len(networks), width=4.6, height=3.6, rows=2)
    published_curves = published("dong2021")["figure2_init"] if not trained else {}
    for column, network in enumerate(networks):
        top, bottom = axes[column], axes[len(networks) + column]
        family = rows.filter(network=network)["family"][0]
        for k, curve in enumerate(DEFINED):
            part = rows.filter(network=network, curve=curve, mode="published" if curve == "transformer" else mode)
            style: dict[str, Any] = {"color": PALETTE[k], "marker": MARKERS[k], "linewidth": 1.5}
            style["linestyle"] = "--" if curve == "san+mlp" else "-"
            style["markersize"] = 7 if curve == "san" else 4  # they may coincide: both are seen
            for panel, arithmetic, what in ((top, "float32", "value"), (bottom, "deviation", "log10")):
                curves = part.filter(arithmetic=arithmetic)
                for _, single in curves.group_by("seed", "excerpt", maintain_order=True):
                    panel.plot(single["layer"], single[what], color=PALETTE[k], linewidth=0.6, alpha=0.6)
                panel.plot(mean_by_layer(curves, what), label=curve, **style)
            theirs = published_curves.get(family, {}).get(curve) if mode == "published" else None
            if theirs is not None:
                top.plot(theirs, color=FAINT, linestyle="none", marker=MARKERS[k], markersize=6,
                         markerfacecolor="none", label=f"{curve}, published")  # fmt: skip
        top.set_title(f"{network}, {'trained' if trained else 'initialised'}", loc="left", fontsize=10)
        top.set_ylim(0, max(1.02, 1.02 * top.dataLim.y1))
        bottom.set_yscale("symlog", linthresh=1.0)
        low = min(float(value) for value in rows.filter(network=network)["log10"] if math.isfinite(value))
        bottom.set_ylim(min(low * 1.6, -1.2), 0.3)
        bottom.yaxis.set_major_formatter(tick)
        bottom.set_xlabel("layer")
    axes[0].set_ylabel("relative residual, float32\nmean (thin: single excerpts)")
    axes[len(networks)].set_ylabel("the same, deviation arithmetic\ngeometric mean (thin: single excerpts)")
    axes[0].legend(fontsize=7.5, frameon=False, loc="best")
    return figure


STUDY = Study("dong2021", "fig2", "relative residual by layer", _run, seconds=105.0)
