"""`Profile`: what was measured, as one tidy table and the manifest of the run that made it.

Made by `measure` and `watch` (of the table of `readers.py`), by `Profile.join` and by reading a run.

One row per variant, arithmetic, sample, layer, metric (and head, for metrics of attention):

    variant · arithmetic · sample · layer · head · metric · value · log10 · floor · below_floor · digits

and a column for each factor that `Profile.join` was given, as a seed or a size.

A value at or below its floor is rounding noise: it stays in the table, marked. `digits` is how many of its
decimal digits rounding left, by a second pass with different rounding (`agreement.py`); null where there was none.

`Curves` is what a `Profile` and a `Summary` (`summary.py`) share, which say how a curve is made of their rows
(`_view`): which metrics, variants, arithmetics and **factors** (in what joined profiles differ: seeds, sizes, steps, a
column for each) there are, how one is chosen, how it is drawn (`figures.py`), and what is shown of it: its sections,
and their tables. The report and the overview of several runs take some of the parts.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import MetricError, require, require_one_of
from rankscope.extras import counted
from rankscope.figures import Chart, evenly, power, sparklines
from rankscope.metrics import direction_of, is_share, symbol_of
from rankscope.profiles.figures import arithmetics_chart, curves_chart
from rankscope.profiles.views import CurveView, LineName, of_samples, zeros_note
from rankscope.results import Plot, Section, Table, TableResult, Views, sentence
from rankscope.runs import joined
from rankscope.shapes import Bool, Float

DRAWN = 8  # lines of a figure at most: there are as many colours
FLOORS = sentence("curves", "floors")
LAYERS = 33  # Columns at most: of more layers, so many evenly
Bounds = Mapping[str, Mapping[str, Any]]  # By metric, then by variant: what `curves_chart` takes as bounds
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
        if not len(self.table):
            return []
        lead, *further = self.metrics
        count, noun = self.measured
        statistic = sentence("curves", "of_excerpts" if noun == "excerpt" else "of_samples", excerpts=count)
        proved = sentence("curves", "proved") if bounds else ""
        filled = {"symbol": symbol_of(lead), "statistic": statistic, "floors": FLOORS, "proved": proved}
        both = self._both(lead, (bounds or {}).get(lead, {}))
        plots = [Plot("curves", both, sentence("curves", "caption", **filled))]
        for name in further:  # without what the large figure says already
            views = self._both(name, {})
            small = [(scale, replace(chart, legend=False, height=270, colour_bar=None)) for scale, chart in views]
            plots.append(Plot(f"curves-{name}", small, name.replace("_", " "), small=True))
        tables = [curve_table(self.views(lead)), *self.spread(lead)]
        heading, lead_in = "How uniform the tokens become", sentence("curves", "lead")
        sections = [Section(heading, lead_in, plots, tables, key="residual")]
        plots = []
        for k, (variant, curves) in enumerate(compared_arithmetics(self).items()):
            caption = sentence("arithmetics", "caption", variant=variant, symbol=symbol_of(curves[0].metric))
            plots.append(Plot(f"arithmetics-{k}", [("", arithmetics_chart(curves))], caption))
        return sections + [Section("What each arithmetic can see", FLOORS, plots, key="arithmetics")] * bool(plots)

    def _both(self, metric: str, bounds: Mapping[str, Any]) -> Views:
        """Logarithmic and linear, the one first that shows more."""
        curves = self.views(metric)
        log, linear = curves_chart(curves, True, bounds), curves_chart(curves, False)
        views = [("log", log), ("linear", linear)]
        powers = log.panels[0].y.powers
        return views[::-1] if powers is not None and powers.narrow else views

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


def by_variant(curves: Sequence[CurveView]) -> dict[str, list[CurveView]]:
    """The curves of each variant."""
    groups: dict[str, list[CurveView]] = {}
    for curve in curves:
        groups.setdefault(curve.variant, []).append(curve)
    return groups


def compared_arithmetics(measured: Curves) -> dict[str, list[CurveView]]:
    """By variant the curves of a residual, where there are several arithmetics to compare."""
    metric = next((name for name in measured.metrics if direction_of(name) == 1), None)
    if measured.measured[1] == "excerpt" or len(measured.arithmetics) < 2 or metric is None:
        return {}
    return by_variant(measured.views(metric))


def ends_table(curves: Sequence[CurveView], threshold: float | None = None) -> Table:
    """The first, the middle and the last number of each curve; floors where a line ends at one, and depths where they
    differ. With a threshold, of a share also the layer from which on it is at most that."""
    metric, rows = curves[0].metric, [[curve.label, *map(power, curve.ends)] for curve in curves]
    shapes = [sparklines(curve.log10[curve.first :].tolist())[0] for curve in curves]
    more, notes = {}, [zeros_note(curves)]
    if threshold is not None and len({curve.depth for curve in curves}) > 1:
        more["layers"] = [str(curve.depth) for curve in curves]
    if threshold is not None and is_share(metric):
        more["uniform"] = [_since(curve.uniform_from(threshold)).replace("layer ", "") or "no" for curve in curves]
        notes.append(f"uniform: below {threshold:g} from that layer on")
    if any(curve.floor_from is not None for curve in curves):
        more["at floor"] = [_since(curve.floor_from) for curve in curves]
    for cells in more.values():
        rows = [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
    return Table(
        f"{metric}: {symbol_of(metric)}, {curves[0].statistic}", ["", "first", "middle", "last", *more], rows,
        note="\n".join(filter(None, notes)), curves=(f"layers {curves[0].first} →", shapes), spare=["middle"],
    )  # fmt: skip


def _since(layer: int | None) -> str:
    return "" if layer is None else f"from layer {layer}"


def curve_table(curves: Sequence[CurveView]) -> Table:
    """The centre of each curve by layer; noise is marked."""
    some = evenly(range(max((view.depth + 1 for view in curves), default=0)), LAYERS)
    rows, marked = [], set()
    for row, view in enumerate(curves):
        layers = [layer for layer in some if layer <= view.depth]
        marked |= {(row, column + 1) for column, layer in enumerate(layers) if view.noise[layer]}
        cells = [power(float(view.log10[layer])) for layer in layers]
        rows.append([view.label, *cells, *[""] * (len(some) - len(layers))])
    notes = [f"{curves[0].statistic.capitalize()}.", "○ at or below the floor." if marked else ""]
    note = " ".join(filter(None, [*notes, zeros_note(curves)]))
    return Table(f"{curves[0].metric} by layer", ["variant", *map(str, some)], rows, marked, note)


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


SCHEMA: dict[str, type[pl.DataType]] = {
    "variant": pl.String, "arithmetic": pl.String, "sample": pl.Int64, "layer": pl.Int64, "head": pl.Int64,
    "metric": pl.String, "value": pl.Float64, "log10": pl.Float64, "floor": pl.Float64,
    "below_floor": pl.Boolean, "digits": pl.Float64,
}  # fmt: skip
KEYS, NUMBERS = list(SCHEMA)[:6], list(SCHEMA)[6:10]  # what a row is identified by, and what it says of that


class Profile(Curves):
    """Measurements of one or more networks, layer by layer."""

    kind = "profile"
    schemas: ClassVar = {"profile": SCHEMA}
    later = ("digits",)
    grows = True

    @property
    def measured(self) -> tuple[int, str]:
        """How many things were measured, and what they are."""
        return self.table["sample"].n_unique(), "sample"

    @classmethod
    def join(cls, profiles: list["Profile"], **factors: Sequence[Any]) -> "Profile":
        """Several profiles as one: variants or arithmetics side by side, or runs that differ in factors, with
        a value of each factor for each profile: `Profile.join(runs, seed=[0, 1, 2])`. Factors are columns of
        the table, stand in the names of lines, and choose one: `curve("mu", seed=1)`.

        >>> from rankscope.nets import Architecture, Transformer
        >>> from rankscope.profiles.measuring import measure
        >>> arch, X = Architecture(layers=2, width=8, heads=2), torch.randn(1, 5, 8)
        >>> runs = [measure(Transformer.random(arch, seed=seed), X) for seed in (0, 1)]
        >>> both = Profile.join(runs, seed=[0, 1])
        >>> [view.label for view in both.views()], both.curve("mu", seed=1).shape
        (['seed 0', 'seed 1'], torch.Size([1, 3]))
        """
        listed = profiles if isinstance(profiles, list | tuple) else [profiles]
        strange = [type(profile).__name__ for profile in listed if not isinstance(profile, Profile)]
        if strange or listed is not profiles:
            what = "one profile alone" if not strange else f"{strange[0]} in the place of a profile"
            sentence = f"join takes a list of profiles, as in Profile.join([one, two]); received {what}"
            raise MetricError(sentence, subject="profiles")
        require(profiles, "join must be given at least one profile; received none", MetricError, "profiles")
        tables = with_factors([profile.table for profile in profiles], factors, SCHEMA)
        table = pl.concat(tables, how="vertical_relaxed")
        names = [name for name in table.columns if name not in SCHEMA]
        twice = table.filter(table.select(*KEYS, *names).is_duplicated())
        if len(twice):
            row = twice.row(0, named=True)
            sentence = f"profiles to join must differ; {row['variant']!r} in {row['arithmetic']} comes twice"
            remedy = "name them with measure(..., variant=), or say in what they differ, as in join(..., seed=[0, 1])"
            raise MetricError(f"{sentence}: {remedy}", subject="profiles")
        manifest = joined([profile.manifest for profile in profiles])
        return cls(table, manifest.adding(factors=names) if names else manifest)

    def curve(
        self,
        metric: str,
        column: str = "value",
        *,
        variant: str | None = None,
        arithmetic: str | None = None,
        **factors: Any,
    ) -> Float[Tensor, "sample layer"] | Float[Tensor, "sample layer head"]:
        """`[sample, layer]`, layer 0 the input; of attention `[sample, layer, head]`, NaN at layer 0. `column` may be
        value, log10, floor, below_floor or digits; `factors` choose among those of `join`."""
        require_one_of("column", column, [*NUMBERS, "digits"], MetricError)
        rows = self.rows(metric, variant=variant, arithmetic=arithmetic, **factors)
        heads = rows["head"].drop_nulls()
        shape = [_size(rows["sample"]), _size(rows["layer"])] + ([_size(heads)] if len(heads) else [])
        curve = torch.full(shape, torch.nan, dtype=torch.float64)
        axes = ["sample", "layer"] + (["head"] if len(heads) else [])
        index = tuple(torch.from_numpy(rows[axis].to_numpy().copy()) for axis in axes)
        curve[index] = torch.from_numpy(rows[column].cast(pl.Float64).fill_null(math.nan).to_numpy().copy())
        return curve

    def _view(self, line: LineName, chosen: Mapping[str, Any]) -> CurveView:
        columns = {name: self.curve(line.metric, name, **chosen).numpy() for name in ("log10", "value", "floor")}
        return of_samples(line, columns, self.at_floor(line.metric, **chosen).numpy())

    def at_floor(self, metric: str, **chosen: Any) -> Bool[Tensor, " layer"]:
        """True at layers where every sample (and head) that has a value lies at its floor: rounding noise. A layer
        where none has a value is False. The variant, arithmetic and factors are `chosen` as in `curve`."""
        value = self.curve(metric, **chosen)
        noise = self.curve(metric, "below_floor", **chosen) == 1
        known = ~value.isnan()
        over = [axis for axis in range(value.ndim) if axis != 1]
        return (noise | ~known).all(dim=over) & known.any(dim=over)


def _size(column: pl.Series) -> int:
    largest = column.max()
    return int(largest) + 1 if isinstance(largest, int) else 0
