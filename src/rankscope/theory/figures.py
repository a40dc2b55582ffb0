"""What certificates say, as every output shows it: a view of each theorem, sentences, figures and sections.

`Certificates`, `CollapseDepth`, a training's run, the report and the explorer show what is described here: bounds next
to what is measured, where theorems prove collapse, and which hypotheses fail.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope import figures as fig
from rankscope.errors import TheoremError, require
from rankscope.figures import label, power, sparklines
from rankscope.results import Plot, Section, Table, sentence

EXACT = "exact-factors"  # The theorem whose bound is the measurement itself: no proof of anything else
RANK = "affine_rank"  # The one quantity that is a count: it has no place on an axis of powers
COLUMNS = ("theorem", "sample", "layer", "quantity", "kind", "met", "vacuous", "log10_bound",
           "log10_measured", "log10_size", "slack")  # fmt: skip
"""Columns of the CSV."""
SHARES = {"relative_residual": "residual", "relative_mu": "mu"}
"""Metrics that are a share of the tokens' size, and what theorems call their numerator."""
LOWEST = -1e300  # Bounds of fewer decades are drawn here: an axis has no numbers beyond


@dataclass(frozen=True)
class Quantity:
    """How a quantity that theorems bound is written."""

    symbol: str
    short: str
    words: str
    tex: str


QUANTITIES = {
    "residual": Quantity("‖res X‖₁,∞", "res", "residual ‖res X‖₁,∞", r"$\|\mathrm{res}\,X\|_{1,\infty}$"),
    "mu": Quantity("‖res X‖F", "µ", "µ, the residual in Frobenius norm", r"$\mu(X) = \|\mathrm{res}\,X\|_F$"),
    "diameter": Quantity(
        "largest distance", "D", "largest distance of two tokens", r"largest distance of two tokens, $\max |x_i - x_j|$"
    ),
    RANK: Quantity("rank res X", "rank", "affine rank", r"$\mathrm{rank\,res}\,X$"),
}


def quantity(name: str) -> Quantity:
    """How a quantity is written; one of a theorem of your own is written as its name."""
    return QUANTITIES.get(name) or Quantity(name, name, name, label(name))


def plotted_quantities(table: pl.DataFrame) -> list[str]:
    """The quantities that get a panel: those with a bound that holds, or else the first one."""
    known = [*QUANTITIES, *table["quantity"].unique(maintain_order=True)]
    sizes = table.filter(pl.col("quantity") != RANK)
    met, every = (set(rows["quantity"]) for rows in (sizes.filter("met"), sizes))
    return [name for name in dict.fromkeys(known) if name in met] or [name for name in known if name in every][:1]


@dataclass(frozen=True)
class BoundView:
    """One theorem on one network and input."""

    theorem: str
    quantity: str
    kind: str
    met_to: int  # Its hypotheses hold from layer 1 to this one for every sample; 0: nowhere
    says_at: int | None  # The last layer at which it says more than is trivial
    log10_measured: float | None  # There, or where it says nothing at `met_to`: of the sample with the most slack
    log10_bound: float | None
    decades: float | None  # Between the two
    why: str | None  # The first hypothesis that fails, with its number
    by_layer: list[tuple[float | None, float | None]]
    """(measured, bound), means over samples of log10, as far as it holds."""

    @property
    def state(self) -> str:
        """One of "says", "vacuous" and "refused"."""
        return "refused" if not self.met_to else "vacuous" if self.says_at is None else "says"

    @property
    def layer(self) -> int | None:
        """The layer that the numbers are of."""
        return self.says_at or self.met_to or None

    @property
    def layers(self) -> str:
        """The layers in which the theorem holds."""
        return "1" if self.met_to == 1 else f"1–{self.met_to}"

    @property
    def sign(self) -> str:
        """How the quantity stands to the bound."""
        return "≤" if self.kind == "upper" else "≥"

    @property
    def measured(self) -> str:
        """The measured value as text, a rank as a whole number."""
        return self._number(self.log10_measured)

    @property
    def bound(self) -> str:
        """The bound as text, a rank as a whole number."""
        return self._number(self.log10_bound)

    @property
    def proved(self) -> str:
        """The bound as text, or "vacuous" where it says nothing."""
        return self.bound if self.state == "says" else "vacuous"

    @property
    def slack(self) -> str:
        """The decades between measurement and bound, as text."""
        if self.state != "says" or self.decades is None:
            return ""
        return "< 0.01" if 0 < self.decades < 0.01 else f"{self.decades:.3g}"

    def _number(self, log10: float | None) -> str:
        if log10 is None or math.isnan(log10):
            return "–"
        return str(round(10**log10)) if self.quantity == RANK else power(log10)


def bound_views(summary: pl.DataFrame, table: pl.DataFrame | None = None) -> list[BoundView]:
    """One view per theorem, from `Certificates.summary()` and its table; without curves from a summary alone, as a
    training run has it."""
    named = ("theorem", "quantity", "kind", "met_to", "says_at", "log10_measured", "log10_bound", "why")
    logs = ("log10_measured", "log10_bound")
    means = None if table is None else table.group_by("theorem", "layer").agg(pl.col(logs).mean()).sort("layer")
    views = []
    for row in summary.iter_rows(named=True):
        curve = None if means is None else means.filter(theorem=row["theorem"]).head(row["met_to"]).select(logs)
        shown = {name: row[name] for name in named}
        views.append(BoundView(**shown, decades=row.get("slack"), by_layer=[] if curve is None else curve.rows()))
    return views


def bounds_sentence(bounds: Sequence[BoundView], where: str = "here") -> str:
    """A sentence: how many theorems hold, and how many of these say something."""
    states = [bound.state for bound in bounds]
    says, holds = states.count("says"), len(states) - states.count("refused")
    if not holds:
        return f"None of {len(states)} theorems holds {where}."
    hold = "holds" if holds == 1 else "hold"
    return f"Of {len(states)} theorems {holds} {hold} {where}, {says} of them with a bound that is not vacuous."


def proved_sentence(guarantees: pl.DataFrame, samples: int) -> str:
    """A sentence: the best bound of each quantity at the last layer where one holds for every sample.

    `guarantees` is `Certificates.guarantees()`; of several samples the bound is the weakest, which holds for all."""
    columns = ["quantity", "kind", "layer", "theorem"]
    bounds = guarantees.filter(pl.col("theorem") != EXACT).group_by(columns, maintain_order=True)
    weakest = pl.when(kind="upper").then(pl.col("log10_bound").max()).otherwise(pl.col("log10_bound").min())
    every = bounds.agg(pl.col("sample").n_unique(), weakest.first().alias("bound")).filter(sample=samples)
    proved = []
    for (name, kind), rows in every.group_by("quantity", "kind", maintain_order=True):
        last = rows.filter(layer=rows["layer"].max()).sort("bound", descending=kind == "lower").row(0, named=True)
        bound = str(round(10 ** last["bound"])) if name == RANK else power(last["bound"])
        side = "most" if kind == "upper" else "least"
        shown = f"{quantity(str(name)).symbol} is at {side} {bound}"
        proved.append(f"{shown} after layer {last['layer']} ({last['theorem']})")
    if not proved:
        return "Nothing is proved of these tokens: no theorem holds here with a bound that says something."
    whose = "" if samples == 1 else f" of each of {samples} samples"
    return f"Proved{whose} (res X: the tokens less their mean): {'; '.join(proved)}."


def bounds_chart(table: pl.DataFrame, sample: int = 0) -> fig.Chart:
    """By layer, on an axis of powers of ten, a panel for each quantity: the measurement, the tokens' own
    size, and the bounds of each theorem as far as its hypotheses are met, lower ones dashed; hollow marks
    where a bound is vacuous. `table` is `Certificates.table`."""
    samples = table["sample"].unique().to_list()
    require(sample in samples, f"sample must lie in 0..{len(samples) - 1}; got {sample}", TheoremError, "sample")
    table = table.filter(sample=sample)
    shown = plotted_quantities(table)
    require(shown, "a figure needs a size to draw; ranks alone were certified", TheoremError, "theorems")
    panels, index = [], 0
    for name in shown:
        rows = table.filter(quantity=name)
        first = rows.filter(theorem=rows["theorem"][0]).sort("layer")
        lines = []
        for theorem in rows["theorem"].unique(maintain_order=True):
            part = rows.filter(theorem=theorem).sort("layer")
            if part["met"].any() and part["log10_bound"].is_finite().any():  # a bound of zero has no place on the axis
                lines.append(_bound(part, theorem, index))
                index += 1
        lines.append(_line(first, "log10_measured", "measured", "ink", marker="dot", width=2.6))
        # Seen on the former.
        lines.append(_line(first, "log10_size", "tokens' own size", "faint", dash="dot", width=1.4))
        logs = np.concatenate([line.y for line in lines])
        depth = int(first["layer"].to_numpy().max(initial=1))
        words = quantity(name)
        heading = fig.Formula(words.words, words.tex.strip("$") if words.tex.startswith("$") else "")
        panels.append(fig.Panel(fig.Axis("layer", last=depth), fig.Axis(powers=fig.Powers(logs)), lines, heading))
    says = f"Bounds and measurement by layer, of {', '.join(quantity(name).words for name in shown)}."
    return fig.Chart(panels, table.select(COLUMNS).to_dict(as_series=False), says, shared=True, size=(5.8, 4.4))


def _line(rows: pl.DataFrame, column: str, name: str, colour: str, **look: object) -> fig.Line:
    logs = rows[column].fill_null(math.nan).to_numpy()
    vacuous = look.get("hollow", np.zeros(len(logs), bool))
    hover: list[fig.Hover] = [
        (f"{name}\nlayer {layer}: ", power(k), "\nvacuous: it says nothing" if empty else "")
        for layer, k, empty in zip(rows["layer"], logs.tolist(), vacuous, strict=True)  # type: ignore[call-overload]
    ]
    logs = np.where(np.isfinite(logs), np.maximum(logs, LOWEST), np.nan)
    group = "" if "index" in look else name
    return fig.Line(rows["layer"].to_list(), logs, colour, name, group, hover=hover, **look)  # type: ignore[arg-type]


def _bound(rows: pl.DataFrame, theorem: str, index: int) -> fig.Line:
    upper = rows["kind"][0] == "upper"
    says = not rows.filter("met")["vacuous"].all()
    name = f"{theorem} {'≤' if upper else '≥'}" if says else f"{theorem} (vacuous)"
    return _line(
        rows, "log10_bound", name, fig.line_colour(index % 6), index=index, marker="index",
        dash="solid" if upper else "dash", width=1.5, hollow=rows["vacuous"].to_numpy(),
    )  # fmt: skip


def proved_shares(metric: str, guarantees: pl.DataFrame, samples: int) -> dict[str, np.ndarray]:
    """log10 of the tightest bound of a metric of `SHARES` that holds for all samples, `[layer]`, by "upper" and
    "lower". NaN is at layers where some sample has no bound; a kind without any bound is left out. `guarantees` is
    `Certificates.guarantees()`."""
    share = (pl.col("log10_bound") - pl.col("log10_size")).alias("share")
    proved = guarantees.filter(pl.col("theorem") != EXACT, quantity=SHARES.get(metric, ""))
    proved = proved.with_columns(share).filter(pl.col("share").is_finite())
    bounds = {}
    for kind, best, worst in (("upper", pl.min, pl.max), ("lower", pl.max, pl.min)):
        by_sample = proved.filter(kind=kind).group_by("layer", "sample").agg(best("share"))
        by_layer = by_sample.group_by("layer").agg(worst("share"), pl.len()).filter(len=samples)
        layers = by_layer["layer"].to_numpy()
        if len(layers):
            bounds[kind] = np.full(layers.max() + 1, np.nan)
            bounds[kind][layers] = by_layer["share"].to_numpy()
    return bounds


def depth_chart(proved: list[tuple[str, str, int]], by_sample: list[int | None]) -> fig.Chart:
    """A row for each theorem that proves something of every sample: blue from where tokens are proved
    uniform, red up to where that is excluded; dotted, where each sample is measured to be uniform."""
    measured = sorted({layer for layer in by_sample if layer is not None})
    end = max([layer for *_, layer in proved] + measured, default=1) + 1
    marks: list[fig.Line | fig.Spans] = []
    for kind, name, index in (("upper", "proved uniform", 0), ("lower", "proved apart", 1)):
        rows = [(row, layer) for row, (_, side, layer) in enumerate(proved) if side == kind]
        starts = [layer if kind == "upper" else 0 for _, layer in rows]
        ends = [end if kind == "upper" else layer for _, layer in rows]
        if rows:
            marks.append(fig.Spans([row for row, _ in rows], starts, ends, fig.line_colour(index), name))
    below = len(proved) - 0.5
    marks += [
        fig.Line([layer, layer], [-0.5, below], "ink", name, "measured", dash="dot", width=1.6)
        for layer, name in zip(measured, ["measured uniform", *[None] * len(measured)], strict=False)
    ]
    names = {float(row): name for row, (name, _, _) in enumerate(proved)}
    y = fig.Axis(labels=names, range=(max(below, 0.5), -0.5), grid=False)
    columns = {name: [row[k] for row in proved] for k, name in enumerate(("theorem", "kind", "layer"))}
    panel = fig.Panel(fig.Axis("layer", last=end, range=(0.0, float(end))), y, marks)
    says, size = "Where each theorem proves tokens uniform or apart.", (6.4, 1.3 + 0.32 * max(len(proved), 1))
    return fig.Chart([panel], columns, says, shared=True, size=size)


def overview(title: str, said: str, bounds: list[BoundView], table: pl.DataFrame, broken: int) -> Section:
    """The theorems whose hypotheses are met from layer 1 on, with the figure of the first sample."""
    met = [view for view in bounds if view.met_to]
    rows = [
        [view.theorem, view.layers, str(view.layer), quantity(view.quantity).short, view.measured, view.sign,
         view.proved, view.slack]
        for view in met
    ]  # fmt: skip
    drawable = table.filter(pl.col("met") & (pl.col("quantity") != RANK))
    plots = [] if drawable.is_empty() else [Plot("bounds", [("", bounds_chart(table, int(drawable["sample"][0])))])]
    notes = ["A measurement contradicts a theorem: please report this network."] if broken else []
    unmet = [view.theorem for view in bounds if not view.met_to]
    if unmet:
        notes.append(f"Hypotheses not met: {', '.join(unmet)}. summary() says which and why, print() all of it.")
    quantities = [quantity(name) for name in QUANTITIES if name in {view.quantity for view in met}]
    note = "   ".join(f"{shown.short}: {shown.symbol}" for shown in quantities)
    note += "\nSlack in decades. Figure: the first sample; table: the loosest." if rows else ""
    headings = ("theorem", "layers", "at", "of", "measured", "", "bound", "slack")
    lines = ["\n".join(sparklines(*zip(*view.by_layer, strict=True))) for view in met]
    shown = Table("", headings, rows, note=note, curves=("by layer", lines), spare=["layers", "by layer"])
    return Section(title, said, plots, [shown], notes)


def bounds_section(proved: Mapping[str, tuple[pl.DataFrame, list[BoundView], int]]) -> Section:
    """What is proved of each variant, from its table, its views, and how many guarantees are contradicted."""
    plots, tables, notes = [], [], []
    for k, (variant, (table, bounds, broken)) in enumerate(proved.items()):
        if (table["quantity"] != RANK).any():
            caption = sentence("bounds", "caption", variant=variant)
            plots.append(Plot(f"bounds-{k}", [("", bounds_chart(table))], caption))
        tables += [certificate_table(bounds, table, variant), failing_table(table, variant)]
        if broken:
            notes.append(sentence("bounds", "contradicted", variant=variant))
    shown = [table for table in tables if table.rows]
    return Section("What is proved", sentence("bounds", "lead"), plots, shown, notes, key="bounds")


def certificate_table(bounds: list[BoundView], table: pl.DataFrame, variant: str) -> Table:
    """A line per theorem that holds somewhere: at which layers, what it says at the last at which it says
    something, next to the measurement. Those that hold nowhere are named beneath."""
    rows = [
        [view.theorem, quantity(view.quantity).symbol, view.layers, str(view.layer), view.measured,
         f"{view.sign} {view.proved}" if view.state == "says" else view.proved, view.slack]
        for view in bounds
        if view.met_to
    ]  # fmt: skip
    none = [view.theorem for view in bounds if not view.met_to]
    headings = ["theorem", "of", "holds at layers", "at layer", "measured", "proved", "slack, decades"]
    notes = []
    if rows:
        notes.append("Vacuous: the theorem holds, but its bound says nothing new (as large as the tokens, or zero).")
    if rows and table["sample"].n_unique() > 1:
        notes.append("Numbers are those of the excerpt with the most slack.")
    if none:
        notes.append(f"A hypothesis fails from the first layer on, see below: {', '.join(none)}.")
    return Table(f"Certificates: {variant}", headings, rows, note=" ".join(notes))


def failing_table(table: pl.DataFrame, variant: str) -> Table:
    """A line per hypothesis that fails somewhere: its number, its limit, and the theorems it takes out."""
    failures: dict[tuple[str, str], dict[str, float]] = {}  # the first number found, by theorem
    for theorem, hypotheses in table.select("theorem", "hypotheses").iter_rows():
        for hypothesis in hypotheses:
            if not hypothesis["met"]:
                numbers = failures.setdefault((hypothesis["says"], hypothesis["limit"]), {})
                numbers.setdefault(theorem, hypothesis["number"])
    rows = [
        [says, f"{next(iter(numbers.values())):.4g}", limit, ", ".join(numbers)]
        for (says, limit), numbers in failures.items()
    ]
    headings = ["hypothesis", "found", "must be", "so not"]
    return Table(f"Hypotheses that fail: {variant}", headings, rows, wordy=True, folded=True)
