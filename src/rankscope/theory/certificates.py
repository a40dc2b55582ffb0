"""`Certificates`: bounds next to measurements, one row per theorem, sample and layer.

| column           | meaning                                                                            |
|------------------|------------------------------------------------------------------------------------|
| `met`            | every hypothesis of the theorem holds, on this network and input, up to this layer |
| `log10_bound`    | the guarantee; null where a hypothesis is not met                                  |
| `log10_measured` | the same quantity as measured, in deviation arithmetic                             |
| `log10_size`     | the same measure of the tokens themselves                                          |
| `slack`          | decades between bound and measurement; not negative, or the theorem is wrong       |
| `below_floor`    | the measured side is rounding: passes that round otherwise differ on it            |
| `vacuous`        | met, but it says no more than is known anyway                                      |
| `why`            | the hypotheses that are not met, with their numbers                                |
| `hypotheses`     | all of them: in words, the number found, the limit, and whether it is met          |

An upper bound is vacuous when it is as large as the tokens themselves, a lower bound when it is zero.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import polars as pl

from rankscope.errors import TheoremError, one_of
from rankscope.runs.tables import SavedTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.theory.views import BoundView

HYPOTHESIS = pl.Struct({"says": pl.String, "number": pl.Float64, "limit": pl.String, "met": pl.Boolean})
SCHEMA: dict[str, Any] = {
    "theorem": pl.String,
    "sample": pl.Int64,
    "layer": pl.Int64,
    "quantity": pl.String,
    "kind": pl.String,
    "met": pl.Boolean,
    "vacuous": pl.Boolean,
    "log10_bound": pl.Float64,
    "log10_measured": pl.Float64,
    "log10_size": pl.Float64,
    "slack": pl.Float64,
    "below_floor": pl.Boolean,
    "why": pl.String,
    "hypotheses": pl.List(HYPOTHESIS),
}


class Certificates(SavedTable):
    """What theorems guarantee of a network on an input, and where they do not apply: see `certify`."""

    schema = SCHEMA

    def __repr__(self) -> str:
        from rankscope.theory.card import certificates_repr

        return certificates_repr(self.views(), self.table["sample"].n_unique())

    def _repr_html_(self) -> str:
        """For notebooks: bounds and measurement as a figure and a table."""
        from rankscope.theory.card import certificates_card

        return certificates_card(self.views(), self.table, len(self.broken()))

    @property
    def theorems(self) -> list[str]:
        """The names of the theorems that were evaluated, in order."""
        return self.table["theorem"].unique(maintain_order=True).to_list()

    def of(self, theorem: str, sample: int | None = None) -> pl.DataFrame:
        """The rows of one theorem, of one sample or all."""
        if theorem not in self.theorems:
            raise TheoremError(one_of("theorem", theorem, self.theorems), subject="theorem")
        samples = self.table["sample"].n_unique()
        if sample is not None and sample not in range(samples):
            raise TheoremError(f"sample must lie in 0..{samples - 1}; got {sample!r}", subject="sample")
        rows = self.table.filter(theorem=theorem)
        return rows if sample is None else rows.filter(sample=sample)

    def guarantees(self) -> pl.DataFrame:
        """Rows that say something: hypotheses met, not vacuous, and the measured side above its floor."""
        return self.table.filter(pl.col("met") & ~pl.col("vacuous") & ~pl.col("below_floor"))

    def broken(self) -> pl.DataFrame:
        """Guarantees that the measurement contradicts. There should be none: bounds have been moved outward
        by more than rounding could make of either side."""
        return self.table.filter(pl.col("met") & ~pl.col("below_floor") & (pl.col("slack") < 0))

    def summary(self) -> pl.DataFrame:
        """A row per theorem: up to which layer its hypotheses hold for every sample, up to which it says
        something, the last such layer's numbers (the loosest sample's), and the first reason why not."""
        rows = []
        for name in self.theorems:
            part = self.of(name)
            layers = part.group_by("layer", maintain_order=True).agg(
                pl.col("met").all(),
                (pl.col("met") & ~pl.col("vacuous") & ~pl.col("below_floor")).all().alias("says"),
            )
            held = _first_layers(layers["met"].to_list())
            says = [layer for layer, yes in layers.select("layer", "says").iter_rows() if yes]
            last = part.filter(layer=says[-1] if says else max(held, 1))
            bad = part.filter(pl.col("why").is_not_null())
            numbers = last.select("log10_bound", "log10_measured", "log10_size", "slack")
            worst = numbers.row(_largest(numbers["slack"].to_list()), named=True)
            rows.append(
                {
                    "theorem": name,
                    "kind": part["kind"][0],
                    "quantity": part["quantity"][0],
                    "met_to": held,
                    "says_at": says[-1] if says else None,
                    **(worst if held else dict.fromkeys(worst)),
                    "why": None if bad.is_empty() else bad["why"][0],
                }
            )
        return pl.DataFrame(rows, schema_overrides={"says_at": pl.Int64, "why": pl.String})

    def views(self) -> "list[BoundView]":
        """What each theorem says: all that is printed and told of it."""
        from rankscope.theory.views import bound_views

        return bound_views(self.summary(), self.table)

    def plot(
        self,
        sample: int = 0,
        *,
        ax: "Axes | Iterable[Axes] | None" = None,
        figsize: tuple[float, float] | None = None,
    ) -> "Figure":
        """Bounds and measurement on one axis of powers of ten, a panel per quantity: into as many axes `ax`,
        if given, or a new figure of `figsize` inches."""
        from rankscope.figures.plot import plot
        from rankscope.theory.figures import bounds_chart

        return plot(bounds_chart(self.table, sample), ax=ax, figsize=figsize)


def _first_layers(met: list[bool]) -> int:
    """How many layers from the first on."""
    return next((layer for layer, yes in enumerate(met) if not yes), len(met))


def _largest(slacks: list[float | None]) -> int:
    finite = [-1.0 if slack is None else slack for slack in slacks]
    return finite.index(max(finite))
