"""What a `Profile` and a `Summary` share: metrics by layer, a curve for each variant in each arithmetic."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rankscope.errors import MetricError, one_of
from rankscope.profiles.factors import line_names
from rankscope.profiles.views import CurveView
from rankscope.runs.tables import SavedTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Curves(SavedTable):
    """A table with a variant, an arithmetic, a layer and a metric in every row."""

    def __repr__(self) -> str:
        from rankscope.profiles.card import curves_repr

        return curves_repr(type(self).__name__, self._many, self.views())

    def _repr_html_(self) -> str:
        """For notebooks: the first metric as a figure and a table."""
        from rankscope.profiles.card import curves_card

        return curves_card(type(self).__name__, self._many, self.views(), len(self.metrics))

    @property
    @abstractmethod
    def _many(self) -> tuple[int, str]:
        """Of how many, and of what."""

    @abstractmethod
    def _view(self, metric: str, name: str, label: str, chosen: Mapping[str, Any]) -> CurveView:
        """What one line says, under its name and label; `chosen` is its variant, arithmetic and factors."""

    @property
    def variants(self) -> list[str]:
        """The networks in the table, in order."""
        return self.table["variant"].unique(maintain_order=True).to_list()

    @property
    def metrics(self) -> list[str]:
        """The metrics in the table, in the order they were asked for."""
        found = self.table["metric"].unique(maintain_order=True).to_list()
        asked = [name for network in self.manifest.networks for name in network.metrics]
        return sorted(found, key=lambda name: asked.index(name) if name in asked else len(asked))

    @property
    def arithmetics(self) -> list[str]:
        """The arithmetics in the table, in order."""
        return self.table["arithmetic"].unique(maintain_order=True).to_list()

    @property
    def factors(self) -> dict[str, list[Any]]:
        """In what joined profiles differ, as seeds or sizes: the values of each, in order."""
        names = [name for name in self.table.columns if name not in self.schema]
        return {name: self.table[name].unique(maintain_order=True).to_list() for name in names}

    def rows(
        self, metric: str, *, variant: str | None = None, arithmetic: str | None = None, **factors: Any
    ) -> pl.DataFrame:
        """One metric of one variant in one arithmetic, and of one value of each factor; each must be named
        where there are several."""
        known = self.factors
        for name in factors:
            if name not in known:
                raise MetricError(
                    one_of("a factor", name, known) if known else f"this profile has no factors; got {name}="
                )
        return self.table.filter(
            metric=_only("metric", metric, self.metrics),
            variant=_only("variant", variant, self.variants),
            arithmetic=_only("arithmetic", arithmetic, self.arithmetics),
            **{name: _only(name, factors.get(name), values) for name, values in known.items()},
        )

    def lines(self, metric: str) -> list[tuple[str, str]]:
        """The (variant, arithmetic) pairs that have this metric, in order."""
        rows = self.table.filter(metric=_only("metric", metric, self.metrics))
        return rows.select("variant", "arithmetic").unique(maintain_order=True).rows()

    def views(self, metric: str | None = None) -> list[CurveView]:
        """What each line of a metric (the first, if left out) says: all that is drawn, printed and told. Of a
        corpus it is the median, with bands of nine tenths and of a half of the excerpts."""
        if not len(self.table):
            return []
        shown = _only("metric", metric or self.metrics[0], self.metrics)
        columns = ["variant", "arithmetic", *self.factors]
        chosen = self.table.filter(metric=shown).select(columns).unique(maintain_order=True).to_dicts()
        named = line_names(chosen, list(self.factors))
        one = len(self.arithmetics) == 1
        return [
            self._view(shown, name, name if one else f"{name}, {each['arithmetic']}", each)
            for name, each in zip(named, chosen, strict=True)
        ]

    def plot(
        self,
        metric: str | None = None,
        *,
        log: bool | None = None,
        ax: "Axes | Iterable[Axes] | None" = None,
        figsize: tuple[float, float] | None = None,
    ) -> "Figure":
        """The metric (the first, if left out) by layer, floors drawn; `log=None` decides by range. Of a
        corpus the median, with bands of a half and of nine tenths of the excerpts. Into `ax`, if given, or a
        new figure of `figsize` inches."""
        from rankscope.figures.plot import plot
        from rankscope.profiles.figures import curves_chart

        curves = self.views(_only("metric", metric or self.metrics[0], self.metrics))
        return plot(curves_chart(curves, log), ax=ax, figsize=figsize)


def _only(what: str, asked: Any, known: list[Any]) -> Any:
    """The one asked for, which may go unnamed where there is no other."""
    if not known:
        raise MetricError("this profile has no rows: it was measured on no sample")
    if asked is None and len(known) == 1:
        return known[0]
    if asked is None:
        raise MetricError(f"this profile holds several {what}s: name one of {', '.join(map(str, known))}")
    if asked not in known:
        raise MetricError(one_of(what, asked, map(str, known)))
    return asked
