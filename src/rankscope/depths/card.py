"""`depth`: which layers, heads and paths of a model does its output need?

What is asked of which file, and in which order, is told in the room's `__init__.py`. `sample_tables` makes tables of
what was read, what paths carry and what was lost, with a row for each sample, by layer, by head and by norm; what is
not known is null.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import polars as pl
import torch
from torch import Tensor

from rankscope.depths.passes import (
    BACK,
    ForwardReadings,
    LayerShares,
    Removals,
    TwoPasses,
    layers_applied,
    read_forward,
)
from rankscope.depths.tables import (
    ALL_LAYER_CELLS,
    HEAD_CELLS,
    LAYER_CELLS,
    LEAVES,
    MARKED_COLUMNS,
    MARKS,
    NOISE,
    SHOWN_HEADS,
    EffectiveDepth,
    Row,
    caption,
    depth_chart,
    effective_depths,
    means,
    norms_sentence,
    printed,
    sentence_of,
)
from rankscope.errors import PathError
from rankscope.extras import counted
from rankscope.figures import Chart
from rankscope.nets import usual_modes
from rankscope.paths import require_linear
from rankscope.profiles import check_memory
from rankscope.results import Plot, Result, Section, Table, sentence
from rankscope.runs import Manifest, network_manifest
from rankscope.sources import InputsLike, NetworkLike, inputs_of

if TYPE_CHECKING:
    from rankscope.figures import Figure

Progress = Callable[[int, int], None]
TABLES = ("layers", "heads", "norms")
Shares = tuple[LayerShares, LayerShares]  # Of the output, and of its residual
Columns = Mapping[str, Tensor | None]  # Numbers of all samples by column; None where they are not known
SHARES = ("share", "share_embedding", "share_bias", "residual_share")
LOST = ("lost", "lost_cosine", "lost_residual", "lost_below_floor", "lost_residual_below_floor")
READ = ("cosine", "entropy", "sink")
HEAD_COLUMNS = ("sample", "layer", "head", *SHARES, *READ, *LOST)
LAYER_COLUMNS = (
    "sample", "layer", *SHARES, "share_attention", "share_mlp", "influence", "cosine_attention", "cosine_mlp", *READ,
    "sink_heads", "rank", "rank_doubtful", *LOST,
)  # fmt: skip
NORM_COLUMNS = ("sample", "layer", "norm_name", "rank_before", "rank_after", "rank_doubtful")
"""The columns of each table."""
PLACES = {"sample": pl.Int64, "layer": pl.Int64, "head": pl.Int64, "norm_name": pl.String}


def _kind(name: str) -> Any:
    """The type of a column."""
    return PLACES.get(name, pl.Boolean if name in MARKS else pl.Float64)


SCHEMAS = [{name: _kind(name) for name in columns} for columns in (LAYER_COLUMNS, HEAD_COLUMNS, NORM_COLUMNS)]
"""The columns of the tables of layers, heads and norms, and their types."""


@dataclass(frozen=True, eq=False, repr=False)
class DepthCard(Result):
    """What each layer and head of a model does for its output."""

    kind = "depth"
    schemas: ClassVar = {f"depth_{name}": schema for name, schema in zip(TABLES, SCHEMAS, strict=True)}
    by_sample: Mapping[str, pl.DataFrame]
    """The tables `layers`, `heads` and `norms` with a row for each sample; `layers`, `heads` and `norms` of the card
    are their means."""
    manifest: Manifest  # What was run on what
    notes: tuple[str, ...] = ()  # What is not known, and why: a sentence each

    @cached_property
    def layers(self) -> pl.DataFrame:
        """One row per layer (from 1), means over samples; null where no sample has a number:

        layer · share · share_embedding · share_bias · share_attention · share_mlp · residual_share · influence ·
        cosine · cosine_attention · cosine_mlp · entropy · sink · sink_heads · rank · rank_doubtful · lost ·
        lost_cosine · lost_residual · lost_below_floor · lost_residual_below_floor

        `docs/depth.md` defines each.
        """
        return means(self.by_sample["layers"], "layer")

    @cached_property
    def heads(self) -> pl.DataFrame:
        """One row per layer (from 1) and head (from 0), means over samples; the columns are those of `layers` that
        a head has."""
        return means(self.by_sample["heads"], "layer", "head")

    @cached_property
    def norms(self) -> pl.DataFrame:
        """One row per norm, in the order of the network, means over samples:

        layer · norm_name · rank_before · rank_after · rank_doubtful
        """
        return means(self.by_sample["norms"], "layer", "norm_name")

    @cached_property
    def effective_depths(self) -> list[EffectiveDepth]:
        """How deep the network works, by several definitions, each with its formula (`tables.py`)."""
        return effective_depths(self.layers)

    @property
    def sentence(self) -> str:
        """What the card says, in a sentence."""
        return sentence_of(self.name, self.layers, self.heads)

    @property
    def name(self) -> str:
        """The name of the model."""
        origin = self.manifest.origin or {}
        return Path(str(origin.get("name") or self.manifest.model or "network")).name

    @property
    def closure(self) -> float | None:
        """How far all paths are from adding up to the output, relative to it; None where there are no shares."""
        return self.manifest.closure

    @property
    def title(self) -> str:
        """The model and its size."""
        return f"DepthCard: {self.name}, {counted(self.layers.height, 'layer')}"

    @cached_property
    def chart(self) -> Chart:
        """The figure, as both renderers draw it."""
        return depth_chart(self.layers, self.heads, self.sentence)

    def overview(self) -> Section:
        """The figure, the sentence, and the layers in a few columns."""
        known = [effective.sentence for effective in self.effective_depths]
        table = Table("", list(LAYER_CELLS), self._rows(LAYER_CELLS))
        return Section(self.title, self.sentence, [Plot("depth", [("", self.chart)])], [table], known)

    def sections(self) -> list[Section]:
        """Which layers and heads the output needs: the figure, the layers, and effective depths."""
        plot = Plot("depth", [("", self.chart)], caption(self.chart))
        lead = f"{sentence('depth', 'lead')} {self.sentence} {norms_sentence(self.norms)}"
        headings = list(ALL_LAYER_CELLS)
        marked = {
            (row, headings.index(heading))
            for row, values in enumerate(self.layers.to_dicts())
            for heading, mark in MARKED_COLUMNS.items() if values[mark]
        }  # fmt: skip
        cells = [[cell.removesuffix(NOISE) for cell in row] for row in self._rows(ALL_LAYER_CELLS)]
        rows = [
            [effective.name.replace("_", " "),
             "–" if effective.value is None else f"{effective.value:.3g} of {effective.layers}", effective.definition]
            for effective in self.effective_depths
        ]  # fmt: skip
        tables = [
            Table("Layers", headings, cells, marked, sentence("depth", "layers"), spare=LEAVES),
            Table("Effective depth", ["", "layers", "what it is"], rows, wordy=True),
            *self._heads(),
        ]
        return [Section("Which layers and heads the output needs", lead, [plot], tables, key="depth")]

    def _heads(self) -> list[Table]:
        """The heads without which the output changes most, and least; none where no run lacked one."""
        known = self.heads.filter(self.heads["lost"].is_not_null()).sort("lost", descending=True).to_dicts()
        some = len(known) > 2 * SHOWN_HEADS
        shown = known[:SHOWN_HEADS] + known[-SHOWN_HEADS:] if some else known
        note = sentence("depth", "most", count=SHOWN_HEADS) * some + sentence("depth", "counted")
        rows = [[cell(row) for cell in HEAD_CELLS.values()] for row in shown]
        return [Table("Heads, mean over samples", list(HEAD_CELLS), rows, note=note, spare=LEAVES)] if known else []

    def _rows(self, columns: Mapping[str, Callable[[Row], str]]) -> list[list[str]]:
        return [[cell(row) for cell in columns.values()] for row in self.layers.iter_rows(named=True)]

    def plot(self, *_: Any, **options: Any) -> "Figure":
        """Losses, shares, cosines by layer and a map of heads; `options` are those of `rankscope.figures.plot`."""
        return printed(self.chart, **options)

    def svg(self) -> str:
        """The figure under the sentence as SVG, for a README."""
        buffer = io.StringIO()
        printed(self.chart, self.sentence).savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """The tables by sample, under the names that they have in a run folder."""
        return {f"depth_{name}": self.by_sample[name] for name in TABLES}

    @classmethod
    def made_of(cls, tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]) -> "DepthCard":
        """The card of these tables; of earlier versions the manifest has the notes."""
        known = manifest.networks[0].checks.get("notes", ()) if manifest.networks else ()
        by_sample = {name: tables[f"depth_{name}"] for name in TABLES}
        return cls(by_sample, manifest, tuple(details.get("notes", known)))


@usual_modes()
def depth(
    net: NetworkLike,
    X: InputsLike,
    padding: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    heads: bool = True,
    batch_size: int = 16,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> DepthCard:
    """Say of each layer and head what the output owes to it, and what it loses without it.

    Shares of paths are exact, as of `decompose`; losses are measured, by running the network without the part. Layers
    may be in files (`load(..., stream=True)`): each is read three times or, where copies of the tokens do not fit into
    memory, more often. With L layers of H heads the time is that of about `L / 2 + 8` forward passes, and `H L / 2`
    more with `heads`.

    Args:
        net: The network, or a Hugging Face model in memory; it runs in its own dtype.
        X: Texts, what `net.encode` gave, token ids `[batch, token]`, or tokens `[batch, token, width]`.
        padding: `[batch, token]`, True at padding.
        attention_mask: Instead of `padding`, 1 at tokens and 0 at padding (Hugging Face's convention).
        heads: Whether the network also runs without each head.
        batch_size: Samples that run together at most, where parts are taken out.
        device: Where to run; where the network is, if left out.
        progress: Called as `progress(done, total)`, in layers applied to the text.

    Returns:
        A `DepthCard`.

    Raises:
        ArchitectureError: A part of the network leaves something to later layers, which cannot run without it.
        ClosureError: The paths do not add up to the output.
        TooLargeError: The attention of the text does not fit into memory.

    >>> from rankscope import fresh
    >>> card = depth(fresh("bert-tiny"), ["Call me Ishmael."])
    >>> card.layers.height, card.heads.height, bool((card.layers["lost"] > 0).all())
    (2, 4, True)
    """
    net, X, padding = inputs_of("depth", net, X, padding, attention_mask)
    net = net.to(device=device)
    X = X.to(dtype=net.dtype, device=net.device)
    check_memory(net.arch, len(X), X.shape[1], len(X), "float", net.device, False)
    X, valid, _ = net.prepared(X, None if padding is None else padding.to(net.device))
    notes, paths = [], None
    try:
        require_linear(net)
        paths = TwoPasses(net, X, valid)
    except PathError as error:
        notes.append(f"There are no shares of paths: {error}.")
    done, total = 0, layers_applied(net.arch.layers, net.arch.heads if heads else 0)

    def counter(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(min(done, total), total)

    forward = read_forward(net, X, valid, paths, counter)
    shares: dict[int, tuple[LayerShares, LayerShares]] = {}
    if paths is not None:
        for layer, of_output, of_residual in paths.back(forward.states[-1]):
            shares[layer] = of_output, of_residual
            counter(BACK)
    removals = Removals(net, forward.states, valid, heads, batch_size, counter)
    losses = dict(removals.run())
    if not heads:
        notes.append("Heads were not taken out one by one.")
    tables = sample_tables(forward, shares, losses)
    manifest = network_manifest(net, {"notes": notes, "floor": removals.floor.tolist()})
    closure = None if paths is None else paths.closure
    return DepthCard(tables, manifest.adding(samples=len(X), tokens=X.shape[1], closure=closure), tuple(notes))


def sample_tables(
    forward: ForwardReadings, shares: Mapping[int, Shares], losses: Mapping[tuple[int, int | None], Columns]
) -> dict[str, pl.DataFrame]:
    """The tables `layers`, `heads` and `norms`, of what was read of each layer; of what passes through it, by its
    number from 1 (empty where paths are not known); and of what is lost without a layer (its head is None) or head."""
    layers, heads = [], []
    for layer, (of_layer, of_heads) in enumerate(zip(forward.layers, forward.heads, strict=True), 1):
        through = shares.get(layer)
        layers.append(_rows({"layer": layer}, {**_shares(through), **of_layer, **losses[layer, None]}))
        for head in range(of_heads["entropy"].shape[1]):
            read = {name: values[:, head] for name, values in of_heads.items()}
            lost = losses.get((layer, head), dict.fromkeys(LOST))
            heads.append(_rows({"layer": layer, "head": head}, {**_shares(through, head), **lost, **read}))
    norms = [pl.DataFrame(schema=SCHEMAS[2]), *(_rows(norm_place, ranks) for norm_place, ranks in forward.norms)]
    return {
        "layers": pl.concat(layers).select(LAYER_COLUMNS), "heads": pl.concat(heads).select(HEAD_COLUMNS),
        "norms": pl.concat(norms),
    }  # fmt: skip


def _rows(place: Mapping[str, Any], columns: Mapping[str, Tensor | None]) -> pl.DataFrame:
    """The rows of all samples at one place."""
    samples = next(len(values) for values in columns.values() if values is not None)
    data = {"sample": list(range(samples)), **{name: [value] * samples for name, value in place.items()}}
    data |= {name: [None] * samples if values is None else values.tolist() for name, values in columns.items()}
    return pl.DataFrame(data, schema={name: _kind(name) for name in data}).fill_nan(None)


def _shares(shares: Shares | None, head: int | None = None) -> Columns:
    """What passes through one head of a layer or, without one, through the layer and its halves."""
    names = (*SHARES, *(() if head is not None else ("share_attention", "share_mlp")))
    if shares is None:
        return dict.fromkeys(names)
    of_output, of_residual = (part.layer if head is None else part.heads[..., head] for part in shares)
    values = [of_output.sum(0), of_output[0], of_output[1], of_residual.sum(0)]
    halves = [shares[0].heads.sum((0, 2)), shares[0].mlp.sum(0)]
    return dict(zip(names, [*values, *(halves if head is None else [])], strict=True))
