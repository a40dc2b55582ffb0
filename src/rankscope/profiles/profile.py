"""`Profile`: what was measured, as one tidy table and the manifest of the run that made it.

One row per variant, arithmetic, sample, layer, metric (and head, for metrics of attention):

    variant · arithmetic · sample · layer · head · metric · value · log10 · floor · below_floor

A value at or below its floor is rounding noise: it stays in the table, marked.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.errors import MetricError, one_of
from rankscope.profiles.views import CurveView, of_samples
from rankscope.runs import Manifest, joined, tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA: dict[str, type[pl.DataType]] = {
    "variant": pl.String,
    "arithmetic": pl.String,
    "sample": pl.Int64,
    "layer": pl.Int64,
    "head": pl.Int64,
    "metric": pl.String,
    "value": pl.Float64,
    "log10": pl.Float64,
    "floor": pl.Float64,
    "below_floor": pl.Boolean,
}
KEYS = ["variant", "arithmetic", "sample", "layer", "head", "metric"]
"""What a row is identified by."""


@dataclass(frozen=True, eq=False, repr=False)
class Profile:
    """Measurements of one or more networks, layer by layer."""

    table: pl.DataFrame
    manifest: Manifest

    def __repr__(self) -> str:
        from rankscope.profiles.card import curves_repr

        return curves_repr("Profile", self._many, self.views())

    def _repr_html_(self) -> str:
        """For notebooks: the first metric as a figure and a table."""
        from rankscope.profiles.card import curves_card

        return curves_card("Profile", self._many, self.views(), len(self.metrics))

    @property
    def _many(self) -> tuple[int, str]:
        return self.table["sample"].n_unique(), "sample"

    @classmethod
    def join(cls, profiles: list["Profile"]) -> "Profile":
        """Several profiles as one: variants or arithmetics side by side."""
        given = profiles if isinstance(profiles, list | tuple) else [profiles]
        strange = [type(each).__name__ for each in given if not isinstance(each, Profile)]
        if strange or given is not profiles:
            what = "one profile alone" if not strange else f"{strange[0]} in the place of a profile"
            raise MetricError(
                f"join takes a list of profiles, as in Profile.join([one, two]); received {what}"
            )
        if not profiles:
            raise MetricError("join must be given at least one profile; received none")
        table = pl.concat([profile.table for profile in profiles])
        twice = table.filter(table.select(KEYS).is_duplicated())
        if len(twice):
            row = twice.row(0, named=True)
            raise MetricError(
                f"profiles to join must differ in variant or arithmetic; {row['variant']!r} in "
                f"{row['arithmetic']} comes twice: name them with measure(..., variant=)"
            )
        return cls(table, joined([profile.manifest for profile in profiles]))

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

    def rows(self, metric: str, *, variant: str | None = None, arithmetic: str | None = None) -> pl.DataFrame:
        """One metric of one variant in one arithmetic; each must be named where there are several."""
        chosen = {
            "metric": only("metric", metric, self.metrics),
            "variant": only("variant", variant, self.variants),
            "arithmetic": only("arithmetic", arithmetic, self.arithmetics),
        }
        return self.table.filter(*(pl.col(column) == value for column, value in chosen.items()))

    def curve(
        self, metric: str, column: str = "value", *, variant: str | None = None, arithmetic: str | None = None
    ) -> Float[Tensor, "sample layer"] | Float[Tensor, "sample layer head"]:
        """`[sample, layer]`, layer 0 the input; of attention `[sample, layer, head]`, NaN at layer 0.

        `column` may be value, log10, floor or below_floor.
        """
        if column not in ("value", "log10", "floor", "below_floor"):
            raise MetricError(one_of("column", column, ("value", "log10", "floor", "below_floor")))
        rows = self.rows(metric, variant=variant, arithmetic=arithmetic)
        heads = rows["head"].drop_nulls()
        shape = [_size(rows["sample"]), _size(rows["layer"])] + ([_size(heads)] if len(heads) else [])
        curve = torch.full(shape, torch.nan, dtype=torch.float64)
        places = ["sample", "layer"] + (["head"] if len(heads) else [])
        index = tuple(torch.from_numpy(rows[place].to_numpy().copy()) for place in places)
        curve[index] = torch.from_numpy(rows[column].cast(pl.Float64).to_numpy().copy())
        return curve

    def lines(self, metric: str) -> list[tuple[str, str]]:
        """The (variant, arithmetic) pairs that have this metric, in order."""
        rows = self.table.filter(metric=only("metric", metric, self.metrics))
        return rows.select("variant", "arithmetic").unique(maintain_order=True).rows()

    def views(self, metric: str | None = None) -> list[CurveView]:
        """What each line of a metric (the first, if left out) says: all that is drawn, printed and told."""
        if not len(self.table):
            return []
        found, name = [], metric or self.metrics[0]
        for variant, arithmetic in self.lines(name):
            chosen = {"variant": variant, "arithmetic": arithmetic}
            columns = {each: self.curve(name, each, **chosen).numpy() for each in ("log10", "value", "floor")}
            label = variant if len(self.arithmetics) == 1 else f"{variant}, {arithmetic}"
            noise = self.at_floor(name, **chosen).numpy()
            found.append(of_samples(name, variant, arithmetic, label, columns, noise))
        return found

    def at_floor(
        self, metric: str, *, variant: str | None = None, arithmetic: str | None = None
    ) -> Bool[Tensor, " layer"]:
        """By layer: whether every sample (and head) that has a value lies at its floor."""
        value = self.curve(metric, variant=variant, arithmetic=arithmetic)
        noise = self.curve(metric, "below_floor", variant=variant, arithmetic=arithmetic) == 1
        there = ~value.isnan()
        over = [axis for axis in range(value.ndim) if axis != 1]
        return (noise | ~there).all(dim=over) & there.any(dim=over)

    def plot(self, metric: str | None = None, *, log: bool | None = None) -> "Figure":
        """The metric (the first, if left out) by layer, floors drawn; `log=None` decides by range."""
        from rankscope.profiles.plot import plot_curves

        return plot_curves(self.views(only("metric", metric or self.metrics[0], self.metrics)), log)

    def save(self, path: str | Path) -> Path:
        """Write one Parquet file, manifest inside, atomically."""
        return tables.write(path, self.table, self.manifest)

    @classmethod
    def read(cls, path: str | Path) -> "Profile":
        """The profile that `save` wrote."""
        return cls(*tables.read(path, SCHEMA, "Profile"))


def _size(column: pl.Series) -> int:
    largest = column.max()
    return int(largest) + 1 if isinstance(largest, int) else 0


def only(what: str, asked: str | None, known: list[str]) -> str:
    """The one asked for, which may go unnamed where there is no other."""
    if not known:
        raise MetricError("this profile has no rows: it was measured on no sample")
    if asked is None and len(known) == 1:
        return known[0]
    if asked is None:
        raise MetricError(f"this profile holds several {what}s: name one of {', '.join(known)}")
    if asked not in known:
        raise MetricError(one_of(what, asked, known))
    return asked
