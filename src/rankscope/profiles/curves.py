"""What a `Profile` and a `Summary` share: metrics by layer, a curve for each variant in each arithmetic.

`profile.py` and `summary.py` say how a curve is made of their rows (`_view`); here is what is the same for both: which
metrics, variants, arithmetics and **factors** (in what joined profiles differ: seeds, sizes, steps, a column for each)
there are, how one is chosen, how it is drawn (`figures.py`), and what is shown of it (`sections.py`).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from rankscope.errors import MetricError, require, require_one_of
from rankscope.extras import counted
from rankscope.figures import Chart
from rankscope.profiles.figures import curves_chart
from rankscope.profiles.sections import Bounds, curve_sections, ends_table
from rankscope.profiles.views import CurveView, LineName
from rankscope.results import Plot, Section, Table, TableResult

DRAWN = 8  # lines of a figure at most: there are as many colours
FACTOR_TYPES = (str, int, float, bool)


class Curves(TableResult):
    """A table with a variant, an arithmetic, a layer and a metric in every row."""

    @property
    def title(self) -> str:
        """How many networks and samples there are, of how many layers, in which arithmetics."""
        curves = self.views()
        if not curves:
            return f"{type(self).__name__}: no rows"
        networks = counted(len({curve.variant for curve in curves}), "network")
        layers = counted(max(curve.depth for curve in curves), "layer")
        arithmetics = ", ".join(dict.fromkeys(curve.arithmetic for curve in curves))
        return f"{type(self).__name__}: {networks}, {counted(*self.measured)}, {layers}, {arithmetics}"

    def overview(self) -> Section:
        """The first metric: the figure, and the ends of each line."""
        curves = self.views()
        if not curves:
            return Section(self.title)
        also = f" And {counted(len(self.metrics) - 1, 'other metric')}: plot(metric), table."
        about_metric = f"{curves[0].metric}. {curves[0].statistic.capitalize()}.{also if len(self.metrics) > 1 else ''}"
        notes = [f"Drawn: the first {DRAWN} of {len(curves)} lines."] if len(curves) > DRAWN else []
        plot = Plot("curves", [("", curves_chart(curves[:DRAWN]))])
        return Section(self.title, about_metric, [plot], [ends_table(curves)], notes)

    def sections(self, bounds: Bounds | None = None) -> list[Section]:
        """Each metric by layer, and where there are several arithmetics, what each can see.

        Args:
            bounds: By metric and variant what is proved of it, which figures show too.
        """
        return curve_sections(self, bounds or {}) if len(self.table) else []

    def spread(self, metric: str) -> list[Table]:
        """How what was measured differs at the last layer, where that is more than a range: of a corpus."""
        return []

    def charts(self, metric: str | None = None, *, log: bool | None = None) -> list[Chart]:
        """The metric (the first, if left out) by layer: of samples the mean and their range, of a corpus the median,
        with bands of a half and of nine tenths of the excerpts. A log axis also shows floors; `log=None` takes one if
        values span over two decades."""
        return [curves_chart(self.views(only("metric", metric or next(iter(self.metrics), None), self.metrics)), log)]

    @property
    @abstractmethod
    def measured(self) -> tuple[int, str]:
        """How many things were measured, and what they are: samples, or excerpts."""

    @abstractmethod
    def _view(self, line: LineName, chosen: Mapping[str, Any]) -> CurveView:
        """One line under its name; `chosen` is its variant, arithmetic and factors."""

    @property
    def variants(self) -> list[str]:
        """The networks in the table, in order."""
        return self.table["variant"].unique(maintain_order=True).to_list()

    @property
    def metrics(self) -> list[str]:
        """The metrics in the table, in the order they were asked for."""
        names = self.table["metric"].unique(maintain_order=True).to_list()
        order = [name for network in self.manifest.networks for name in network.metrics]
        return sorted(names, key=lambda name: order.index(name) if name in order else len(order))

    @property
    def arithmetics(self) -> list[str]:
        """The arithmetics in the table, in order."""
        return self.table["arithmetic"].unique(maintain_order=True).to_list()

    @property
    def factors(self) -> dict[str, list[Any]]:
        """In what joined profiles differ, as seeds or sizes: the values of each, in order."""
        names = [name for name in self.table.columns if name not in self.schemas[self.kind]]
        return {name: self.table[name].unique(maintain_order=True).to_list() for name in names}

    def rows(
        self, metric: str, *, variant: str | None = None, arithmetic: str | None = None, **factors: Any
    ) -> pl.DataFrame:
        """One metric of one variant, arithmetic and value of each factor; each is named where there are several."""
        known = self.factors
        for name in factors:
            require(known, f"this profile has no factors; got {name}=", MetricError, name)
            require_one_of("a factor", name, known, MetricError, name)
        return self.table.filter(
            metric=only("metric", metric, self.metrics),
            variant=only("variant", variant, self.variants),
            arithmetic=only("arithmetic", arithmetic, self.arithmetics),
            **{name: only(name, factors.get(name), values) for name, values in known.items()},
        )

    def lines(self, metric: str) -> list[tuple[str, str]]:
        """The (variant, arithmetic) pairs that have this metric, in order."""
        rows = self.table.filter(metric=only("metric", metric, self.metrics))
        return rows.select("variant", "arithmetic").unique(maintain_order=True).rows()

    def views(self, metric: str | None = None) -> list[CurveView]:
        """What each line of a metric (the first, if left out) says: all that is drawn, printed and told. Of a
        corpus it is the median, with bands of nine tenths and of a half of the excerpts."""
        if not len(self.table):
            return []
        shown = only("metric", metric or next(iter(self.metrics), None), self.metrics)
        columns = ["variant", "arithmetic", *self.factors]
        chosen = self.table.filter(metric=shown).select(columns).unique(maintain_order=True).to_dicts()
        names = line_names(chosen, list(self.factors))
        alone = len(self.arithmetics) == 1
        labels = [name if alone else f"{name}, {line['arithmetic']}" for name, line in zip(names, chosen, strict=True)]
        lines = zip(names, chosen, labels, strict=True)
        return [self._view(LineName(shown, name, line["arithmetic"], label), line) for name, line, label in lines]


def only(what: str, wanted: Any, known: list[Any]) -> Any:
    """The value asked for, which may go unnamed where there is no other."""
    require(known, "this profile has no rows: it was measured on no sample", MetricError, "table")
    if wanted is None and len(known) == 1:
        return known[0]
    sentence = f"this profile holds several {what}s: name one of {', '.join(map(str, known))}"
    require(wanted is not None, sentence, MetricError, what)
    require_one_of(what, wanted, known, MetricError)
    return wanted


def with_factors(
    tables: Sequence[pl.DataFrame], factors: Mapping[str, Sequence[Any]], schema: Mapping[str, Any]
) -> list[pl.DataFrame]:
    """The tables, each with its value of every factor."""
    for name, values in factors.items():
        sentence = f"a factor must have a name of its own; every profile has {name!r}"
        require(name not in schema, sentence, MetricError, name)
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != len(tables):
            got = f"{len(values)} values" if isinstance(values, list | tuple) else repr(values)
            example = f"{name}={list(range(len(tables)))[:3]}"
            sentence = f"a factor must have a value for each of the {len(tables)} profiles, as in {example}; got {got}"
            raise MetricError(sentence, subject=name)
        alike = len({type(value) for value in values}) <= 1
        sentence = f"values of a factor must be of one kind, numbers or words; got {name}={values!r}"
        require(alike and all(isinstance(value, FACTOR_TYPES) for value in values), sentence, MetricError, name)
    extended = [
        table.with_columns(pl.lit(values[index]).alias(name) for name, values in factors.items())
        for index, table in enumerate(tables)
    ]
    columns = {tuple(sorted(set(table.columns) - set(schema))) for table in extended}
    listed = " and ".join(", ".join(names) or "none" for names in sorted(columns))
    sentence = f"profiles to join must have the same factors; received {listed}"
    require(len(columns) <= 1, sentence, MetricError, "factors")
    return [table.select(*schema, *sorted(set(table.columns) - set(schema))) for table in extended]


def line_names(lines: Sequence[Mapping[str, Any]], factors: Sequence[str]) -> list[str]:
    """What each line is called: its variant, and the factors in which lines differ.

    >>> both = [{"variant": "san", "seed": 0, "width": 8}, {"variant": "san", "seed": 1, "width": 8}]
    >>> line_names(both, ["seed", "width"])
    ['seed 0', 'seed 1']
    """
    differ = [name for name in factors if len({line[name] for line in lines}) > 1]
    alone = bool(differ) and len({line["variant"] for line in lines}) == 1
    return [", ".join([line["variant"]] * (not alone) + [f"{name} {line[name]}" for name in differ]) for line in lines]
