"""`collapse_depth`: the layer where tokens become the same, as measured and as guaranteed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, Unpack

import polars as pl
from torch import Tensor

from rankscope.errors import TheoremError, require
from rankscope.extras import counted
from rankscope.figures import Chart
from rankscope.results import Plot, Result, Section, Table
from rankscope.runs import Manifest
from rankscope.sources import InputsLike, NetworkLike
from rankscope.theory.certificates import Certificates, CertifyOptions, Chosen, certify, leading
from rankscope.theory.figures import EXACT, depth_chart

SAMPLE = {"sample": pl.Int64, "layer": pl.Int64}
THEOREM = {"theorem": pl.String, "sample": pl.Int64, "kind": pl.String, "layer": pl.Int64, "says": pl.String}


@dataclass(frozen=True, eq=False, repr=False)
class CollapseDepth(Result):
    """Where the residual, as a share of the tokens' own size, falls below the threshold."""

    kind = "collapse"
    schemas: ClassVar = {"collapse_measured": SAMPLE, "collapse_guaranteed": THEOREM}
    threshold: float
    measured: pl.DataFrame  # sample, layer: the first layer below it (0 is the input); null where no layer is
    guaranteed: pl.DataFrame
    """theorem, sample, kind, layer, says: for an upper bound the first layer at which it proves so; for a
    lower bound the last layer up to which it proves the contrary; null where it proves neither."""
    manifest: Manifest = field(default_factory=Manifest)
    notes: tuple[str, ...] = ()

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        """What is measured, and what is guaranteed."""
        return {"collapse_measured": self.measured, "collapse_guaranteed": self.guaranteed}

    @classmethod
    def made_of(cls, tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]) -> Self:
        """The result of these tables."""
        return cls(details["threshold"], tables["collapse_measured"], tables["collapse_guaranteed"], manifest)

    def details(self) -> dict[str, Any]:
        """The threshold, as a share of the tokens' size."""
        return {"threshold": self.threshold}

    @property
    def title(self) -> str:
        """Where tokens were measured to be uniform."""
        return f"CollapseDepth to {self.threshold:g}: {self.uniform}"

    def sections(self) -> list[Section]:
        """By layer: where tokens are measured to be uniform, and what each theorem proves or excludes."""
        says = {"upper": ("uniform", "by layer"), "lower": ("apart", "not up to layer")}
        rows = [[name, says[kind][0], f"{says[kind][1]} {layer}"] for name, kind, layer in self.proved]
        plots = [Plot("collapse", [("", self.charts()[0])])] if rows else []
        table = Table("", ("theorem", "proves tokens", "for every sample"), rows)
        sentence = "" if rows else "No theorem proves or excludes it for every sample."
        return [Section("Where tokens become the same", sentence, plots, [table])]

    def charts(self) -> list[Chart]:
        """What is measured and what is proved, a line for each theorem."""
        return [depth_chart(self.proved, self.measured["layer"].to_list())]

    @property
    def proved(self) -> list[tuple[str, str, int]]:
        """(theorem, kind, layer), of theorems that prove something of every sample, the weakest: upper, uniform by that
        layer; lower, not uniform up to it."""
        return [
            (str(name), str(kind), max(layers) if kind == "upper" else min(layers))
            for (name, kind), part in self.guaranteed.group_by("theorem", "kind", maintain_order=True)
            if None not in (layers := part["layer"].to_list())
        ]

    @property
    def uniform(self) -> str:
        """Where tokens were measured to be uniform, in words."""
        layers, count = self.measured["layer"].drop_nulls().to_list(), len(self.measured)
        if not count:
            return "ranks alone were measured, which say nothing of how far apart tokens are"
        if not layers:
            return f"no sample of {count} is uniform at any layer"
        last = f"uniform by layer {max(layers)}"
        return (
            f"{last}, in {counted(count, 'sample')}"
            if len(layers) == count
            else f"{len(layers)} of {count} samples {last}"
        )

    @property
    def said(self) -> str:
        """What was measured of uniformity, and what is proved, in a sentence or two."""
        share = f"{self.threshold:g} of the tokens' size"
        sentence = f"Measured to {share}: {self.uniform}."
        upper, lower = (
            sorted((layer, name) for name, kind, layer in self.proved if kind == side and name != EXACT)
            for side in ("upper", "lower")
        )
        if upper:
            sentence += f" Proved by layer {upper[0][0]} ({upper[0][1]})."
        if lower:
            sentence += f" Collapse to {share} is excluded up to layer {lower[-1][0]} ({lower[-1][1]})."
        return sentence if upper or lower else f"{sentence} No theorem proves or excludes it."


def collapse_depth(
    net: NetworkLike,
    X: InputsLike,
    threshold: float = 1e-6,
    padding: Tensor | None = None,
    *,
    theorems: Chosen = None,
    attention_mask: Tensor | None = None,
    **options: Unpack[CertifyOptions],
) -> CollapseDepth:
    """The layer where tokens are measured to be uniform to `threshold`, and what each certificate guarantees.

    Each quantity (residual, mu, diameter) is taken as a share of the same measure of the tokens.

    Args:
        net: The network, or a Hugging Face model in memory.
        X: Texts, what `net.encode` gave, or tokens `[batch, token, width]`.
        threshold: The share below which tokens count as uniform.
        padding: `[batch, token]`, True at padding.
        theorems: Names or `Theorem` objects; all if left out.
        attention_mask: Instead of `padding`, 1 at tokens and 0 at padding (Hugging Face's convention).
        options: Those of `certify`: `CertifyOptions` describes them.

    >>> from rankscope.nets import Architecture, Transformer
    >>> import torch
    >>> san = Transformer.random(Architecture(layers=4, width=16, heads=2)).variant("san")
    >>> found = collapse_depth(san, 0.1 * torch.randn(1, 5, 16), 1e-6, theorems="dong2021-2.3")
    >>> found.measured["layer"][0] <= found.guaranteed["layer"][0]
    True
    """
    return depth_of(certify(net, X, padding, theorems, attention_mask=attention_mask, **options), threshold)


def depth_of(certificates: Certificates, threshold: float) -> CollapseDepth:
    """The collapse depth from certificates that were computed before."""
    known = isinstance(threshold, int | float) and math.isfinite(threshold) and threshold > 0
    require(known, f"threshold must be > 0, as in 1e-6; got {threshold!r}", TheoremError, "threshold")
    limit = math.log10(threshold)
    # Zero of zero is uniform: no share.
    sized = certificates.table.filter(pl.col("quantity") != "affine_rank").with_columns(
        below=(pl.col("log10_measured") - pl.col("log10_size")).fill_nan(-math.inf) < limit,
        bound=(pl.col("log10_bound") - pl.col("log10_size")).fill_nan(-math.inf),
    )
    # Of the quantities that were certified, the residual is the one meant, if it is there.
    names = sized["quantity"].unique().to_list()
    first = next((name for name in ("residual", "mu", "diameter") if name in names), None)
    measured = [
        (sample, _first(part, pl.col("below")))
        for (sample,), part in sized.filter(quantity=first or "").group_by("sample", maintain_order=True)
    ]
    rows = []
    for (name, sample, kind), part in sized.group_by("theorem", "sample", "kind", maintain_order=True):
        if kind == "upper":
            layer = _first(part, pl.col("met") & (pl.col("bound") < limit))
            says = "does not prove it" if layer is None else f"uniform to {threshold:g} by layer {layer}"
        else:
            held = part.sort("layer").select(pl.col("met") & (pl.col("bound") >= limit)).to_series().to_list()
            layer = leading(held) or None
            says = f"not uniform to {threshold:g} up to layer {layer}" if layer else "excludes nothing"
        rows.append((name, sample, kind, layer, says))
    return CollapseDepth(
        float(threshold),
        pl.DataFrame(measured, schema=SAMPLE, orient="row"),
        pl.DataFrame(rows, schema=THEOREM, orient="row"),
        certificates.manifest,
    )


def _first(part: pl.DataFrame, condition: pl.Expr) -> int | None:
    layers = part.filter(condition)["layer"]
    return None if layers.is_empty() else int(layers.min())  # type: ignore[arg-type]
