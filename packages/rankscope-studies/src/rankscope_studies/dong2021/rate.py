"""The rate: the residual of pure attention against `3^L` and Thm 2.3; single paths against their length.

Random attention without skips, MLPs and norms, of usual size. By layer: `log ||res X_l||`, its ratio from
layer to layer (3 under the law), and the certificates of Thm 2.3 and of the oscillation bound. At the
size that BERT's embedding has, Thm 2.3 is true and says nothing; so the tokens are also scaled down until
`4 kappa gamma beta H ||res X||^2 / sqrt d` is 0.1, where it proves the law.

Beside it, single paths: the relative residual of `P_path X W_path` against the number of heads in the path, which falls
exponentially, not doubly: the attention matrices of the full network do not follow the path.
"""

import math
from itertools import pairwise
from pathlib import Path

import polars as pl
import torch

from rankscope.figures import FAINT, MARKERS, PALETTE, Figure, panels
from rankscope.nets import Transformer
from rankscope.paths import decompose
from rankscope.sources import bundled_excerpts, fresh, load
from rankscope.theory import certify, log_base, log_gamma, observe
from rankscope_studies.study import Comparison, Setup, Study, StudyResult, StudyTexts

BOUNDS = ("dong2021-2.3", "oscillation", "dobrushin")
TEXTS = StudyTexts("dong2021", "rate")


def _run(setup: Setup) -> StudyResult:
    name, tokens = ("bert-base", 128) if setup.full else ("bert-mini", 32)
    law = setup.cached("law", lambda: _law(name, tokens))
    trained = setup.models[0] if setup.models else "minilm"
    count = 200 if setup.full else 30
    paths = setup.cached("paths", lambda: _paths(trained, tokens, count, setup.device))
    notes = TEXTS.notes(name=name, tokens=tokens, trained=Path(trained).name)
    return StudyResult({"rate": _figure(law, paths)}, {"law": law, "paths": paths}, _comparisons(law, paths), notes)


def _law(name: str, tokens: int) -> pl.DataFrame:
    """Residual and bounds by layer, at the usual size of tokens and where Thm 2.3 says something."""
    net = fresh(name)  # certificates are for one excerpt, on the CPU
    san = net.variant("san").variant(layers=12)
    X, _ = net.encode(bundled_excerpts(tokens)[:1], tokens)
    tables = []
    for size, scale in (("usual", 1.0), ("small", small_scale(san, X))):
        table = certify(san, scale * X, theorems=BOUNDS).table
        table = table.select("theorem", "layer", "quantity", "met", "vacuous", "log10_bound", "log10_measured")
        tables.append(table.with_columns(size=pl.lit(size), scale=pl.lit(scale)))
    return pl.concat(tables)


def small_scale(san: Transformer, X: torch.Tensor) -> float:
    """The scale of tokens at which Thm 2.3's base times the squared residual is 0.1, gamma then being 1."""
    facts = observe(san, X[0])
    bases = [log_base(facts, layer, 0.0) for layer in facts.layers]
    scale = math.exp(-0.5 * (max(bases) + 2 * facts.sizes[0].residual - math.log(0.1)))
    small = observe(san, scale * X[0])
    assert max(map(log_gamma, small.layers)) == 0.0, "tokens so small leave gamma at one"
    return scale


def _paths(name: str, tokens: int, count: int, device: str = "cpu") -> pl.DataFrame:
    net = load(name, device=device).variant("san+skip")
    X, padding = net.encode(bundled_excerpts(tokens)[:1], tokens)
    return decompose(net, X, padding).residuals(count=count)


def slopes(logs: list[float]) -> list[float]:
    """The ratio of each log to the one before."""
    return [after / before for before, after in pairwise(logs)]


def _measured(law: pl.DataFrame, size: str) -> list[float]:
    return law.filter(size=size, theorem=BOUNDS[0]).sort("layer")["log10_measured"].to_list()


def _comparisons(law: pl.DataFrame, paths: pl.DataFrame) -> list[Comparison]:
    last = slopes(_measured(law, "usual"))[-1]
    bound = law.filter(size="small", theorem=BOUNDS[0]).sort("layer")
    usual = law.filter(size="usual", theorem=BOUNDS[0])
    middle = _medians(paths)["log10"]
    ends = [f"1e{middle[at]:.1f} at length {at % len(middle)}" for at in (1, -1)]
    return [
        TEXTS.compare("law", abs(last - 3) < 0.01, last=last),
        TEXTS.compare(
            "theorem", bool(bound["met"].all()) and not bool(bound["vacuous"][-1]), met=usual["met"].sum(),
            layers=len(usual), vacuous=usual["vacuous"].sum(), growth=slopes(bound["log10_bound"].to_list())[-1],
        ),
        TEXTS.compare("paths", bool(middle[-1] < middle[1]), ends=", ".join(ends)),
    ]  # fmt: skip


def _medians(paths: pl.DataFrame) -> pl.DataFrame:
    return paths.group_by("length").agg(pl.col("log10").median()).sort("length")


def _figure(law: pl.DataFrame, paths: pl.DataFrame) -> Figure:
    figure, (left, middle, right) = panels(3, width=4.8)
    for axes, size in ((left, "usual"), (middle, "small")):
        measured = _measured(law, size)
        layers = range(1, len(measured) + 1)
        lost = [-log10 for log10 in measured]
        axes.plot(layers, lost, color="black", linewidth=2.2, marker="o", markersize=4, label="measured",
                  zorder=4)  # fmt: skip
        for k, name in enumerate(BOUNDS):
            part = law.filter(size=size, theorem=name, met=True, vacuous=False).sort("layer")
            label = name if len(part) else f"{name} (vacuous)"
            axes.plot(part["layer"], -part["log10_bound"], color=PALETTE[k], markersize=4, linewidth=1.3,
                      marker=MARKERS[k + 1], label=label)  # fmt: skip
        law3 = [lost[-1] * 3.0 ** (layer - len(measured)) for layer in layers]
        axes.plot(layers, law3, color=FAINT, linestyle="--", linewidth=1, label=r"$\propto 3^l$", zorder=1)
        axes.set(yscale="log", xlabel="layer", ylabel=r"$-\log_{10}\,\|\mathrm{res}\,X\|$")
        axes.set_title(f"tokens of {size} size", loc="left", fontsize=10)
        axes.legend(fontsize=8, frameon=False, loc="best")
    seen = paths.filter(pl.col("log10").is_finite())
    right.scatter(seen["length"], seen["log10"], s=12, color=PALETTE[1], alpha=0.5)
    middles = _medians(seen)
    right.plot(middles["length"], middles["log10"], color=PALETTE[1])
    right.set(xlabel="heads in the path", ylabel=r"$\log_{10}$ of a path's relative residual")
    right.set_title("single paths", loc="left", fontsize=10)
    return figure


STUDY = Study("dong2021", "rate", "the law of 3^L, Thm 2.3, and single paths", _run, seconds=15.0)
