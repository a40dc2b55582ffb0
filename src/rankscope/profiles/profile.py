"""`Profile`: what was measured, as one tidy table and the manifest of the run that made it.

Made by `measure` and `watch` (of the table of `readings.py`), by `Profile.join` and by reading a run.

One row per variant, arithmetic, sample, layer, metric (and head, for metrics of attention):

    variant · arithmetic · sample · layer · head · metric · value · log10 · floor · below_floor · digits

and a column for each factor that `Profile.join` was given, as a seed or a size.

A value at or below its floor is rounding noise: it stays in the table, marked. `digits` is how many of its
decimal digits rounding left, by a second pass with different rounding (`agreement.py`); null where there was none.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import MetricError, require, require_one_of
from rankscope.profiles.curves import Curves, with_factors
from rankscope.profiles.views import CurveView, LineName, of_samples
from rankscope.runs import joined
from rankscope.shapes import Bool, Float

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
