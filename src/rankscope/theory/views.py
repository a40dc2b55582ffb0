"""What a theorem says of a network, as every output shows it: a row for each, and the sentences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from rankscope.figures import label, power

EXACT = "exact-factors"  # The theorem whose bound is the measurement itself: no proof of anything else
RANK = "affine_rank"  # The one quantity that is a count: it has no place on an axis of powers


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


def bound_views(summary: pl.DataFrame, table: pl.DataFrame) -> list[BoundView]:
    """One view per theorem, from `Certificates.summary()` and its table."""
    means = table.group_by("theorem", "layer").agg(pl.col("log10_measured", "log10_bound").mean()).sort("layer")
    views = []
    for row in summary.iter_rows(named=True):
        slack = row.pop("slack")
        row.pop("log10_size")
        curve = means.filter(theorem=row["theorem"]).head(row["met_to"])
        pairs = curve.select("log10_measured", "log10_bound").rows()
        views.append(BoundView(**row, decades=slack, by_layer=pairs))
    return views


def summary_views(summary: pl.DataFrame) -> list[BoundView]:
    """One view per theorem, without curves, from a summary alone, as a training run has it."""
    named = ("theorem", "quantity", "kind", "met_to", "says_at", "log10_measured", "log10_bound", "why")
    rows = summary.select(named).iter_rows(named=True)
    return [BoundView(**row, decades=None, by_layer=[]) for row in rows]


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


@dataclass(frozen=True)
class FailedHypothesis:
    """A hypothesis that fails at some layer, and the theorems that it rules out."""

    says: str
    number: str
    limit: str
    theorems: list[str]


def failed_hypotheses(table: pl.DataFrame) -> list[FailedHypothesis]:
    """Every hypothesis that fails, with the first number found."""
    failures: dict[tuple[str, str], dict[str, float]] = {}
    for theorem, hypotheses in table.select("theorem", "hypotheses").iter_rows():
        for hypothesis in hypotheses:
            if not hypothesis["met"]:
                numbers = failures.setdefault((hypothesis["says"], hypothesis["limit"]), {})
                numbers.setdefault(theorem, hypothesis["number"])
    return [
        FailedHypothesis(says, f"{next(iter(numbers.values())):.4g}", limit, list(numbers))
        for (says, limit), numbers in failures.items()
    ]
