"""`cut`: a smaller network, of the layers or heads that a criterion says are needed most.

The order: `sources.inputs` makes a network and tokens of what was given; `criteria.py` scores layers or heads; a search
chooses which go; `Transformer.without` takes them out; and what the output loses is measured (`fidelity`).

| search     | how layers are chosen                                                                              |
|------------|----------------------------------------------------------------------------------------------------|
| `one_shot` | all are scored once, and those with the lowest scores go                                           |
| `greedy`   | the layer with the lowest score goes, the rest is scored anew as a network of its own, and so on;  |
|            | by `error`, each time against the whole network                                                    |
| `exact`    | every set of as many layers is scored as a whole, and the one with the lowest score goes           |

`exact` goes with criteria that score sets (`path_share`, `residual_share`, `error`); scores of the others add up, so
that `one_shot` finds their best set.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypedDict, Unpack

import polars as pl
import torch
from torch import Tensor, nn

from rankscope.depths.criteria import CRITERIA, Criterion, Loss, Sample
from rankscope.errors import ArchitectureError, SourceError, require, require_one_of
from rankscope.nets import Transformer, usual_modes
from rankscope.results import Result, Section, Table
from rankscope.runs import Manifest, network_manifest
from rankscope.shapes import Bool, Float
from rankscope.sources import InputsLike, NetworkLike, inputs_of

SEARCHES = ("one_shot", "greedy", "exact")
MOST_SETS, BEST = 5000, 5  # Sets of layers that an exact search scores at most, and those that are shown
Progress = Callable[[int, int], None]
Tokens = Float[Tensor, "batch token width"]


class Fidelity(NamedTuple):
    """How close the output of a smaller network is to that of the whole, on the same tokens; means over samples."""

    relative_error: float  # `||Y' - Y|| / ||Y||`, Y and Y' the outputs
    cosine: float  # Of each token in both outputs, mean over tokens


@torch.no_grad()
def fidelity(whole: Transformer, small: Transformer, X: Tensor, padding: Tensor | None = None) -> Fidelity:
    """What the output of the smaller network still has of the whole one's.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> fidelity(net, net, torch.randn(1, 5, 8, dtype=torch.float64)).relative_error
    0.0
    """
    sample = Sample(X, padding)
    return fidelity_of(sample.output(whole), sample.output(small), sample.valid())


@torch.no_grad()
def fidelity_of(Y: Tokens, Z: Tokens, valid: Bool[Tensor, "batch token"]) -> Fidelity:
    """How close the outputs Z are to the outputs Y, both zero at padding; `valid` is True at tokens."""
    Y, Z = Y.double(), Z.double()
    cosines = torch.nn.functional.cosine_similarity(Y, Z, dim=-1)
    errors = torch.linalg.norm(Z - Y, dim=(1, 2)) / torch.linalg.norm(Y, dim=(1, 2))
    return Fidelity(float(errors.mean()), float(((cosines * valid).sum(1) / valid.sum(1)).mean()))


SCORES = {"round": pl.Int64, "layer": pl.Int64, "head": pl.Int64, "layers": pl.String, "score": pl.Float64}
"""The columns of the table of scores as it is saved; those that a search does not have are null."""


@dataclass(frozen=True, eq=False, repr=False)
class Cut(Result):
    """A smaller network, and how it was chosen: see `cut`. One that was read from a folder has no networks."""

    kind = "cut"
    schemas: ClassVar = {"cut_scores": SCORES}
    networks: tuple[Transformer, Transformer] | None  # The whole one and the smaller one
    by: str
    search: str
    layers: tuple[int, ...]  # Taken out, numbered from 1, in the order in which they went
    heads: tuple[tuple[int, int], ...]  # Taken out: (layer from 1, head from 0)
    scores: pl.DataFrame
    """One row for each layer (or head) and round: round · layer · (head) · score; of an exact search for each set:
    layers · score."""
    fidelity: Fidelity  # On the tokens that it was chosen on
    manifest: Manifest
    sentence: str  # What was taken out, and what the output lost by it
    notes: tuple[str, ...] = ()

    @property
    def original(self) -> Transformer:
        """The whole network; raises ArchitectureError where the cut was read from a folder."""
        return self._networks()[0]

    @property
    def net(self) -> Transformer:
        """The smaller network; raises ArchitectureError where the cut was read from a folder."""
        return self._networks()[1]

    def _networks(self) -> tuple[Transformer, Transformer]:
        if self.networks is None:
            what = "this one was read from a folder, which has its scores alone: cut again"
            raise ArchitectureError(f"a cut has its networks where it was made; {what}", subject="networks")
        return self.networks

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """The scores of all layers, heads or sets, with every column of `SCORES`."""
        missing = [pl.lit(None, kind).alias(name) for name, kind in SCORES.items() if name not in self.scores.columns]
        return {"cut_scores": self.scores.with_columns(missing).select(list(SCORES))}

    def details(self) -> dict[str, Any]:
        """What was taken out, how it was chosen, and what is left of the output."""
        chosen = {"by": self.by, "search": self.search, "layers": list(self.layers), "heads": list(self.heads)}
        return {**chosen, "columns": self.scores.columns, "sentence": self.sentence, **self.fidelity._asdict()}

    @classmethod
    def made_of(cls, tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]) -> "Cut":
        """The cut of these scores, without its networks."""
        scores = tables["cut_scores"].select(details["columns"])
        heads = tuple((int(layer), int(head)) for layer, head in details["heads"])
        fidelity = Fidelity(float(details["relative_error"]), float(details["cosine"]))
        chosen, layers = (details["by"], details["search"]), tuple(details["layers"])
        return cls(None, *chosen, layers, heads, scores, fidelity, manifest, details["sentence"])

    @property
    def title(self) -> str:
        """How what goes was chosen."""
        return f"Cut by {self.by}, {self.search.replace('_', ' ')}"

    def sections(self) -> list[Section]:
        """What was taken out, and the scores of what could go."""
        shown, note = self.scores, ""
        if self.search == "exact":
            shown, note = (
                shown.sort("score").head(BEST),
                f"The lowest {BEST} of {shown.height} sets of layers that could go.",
            )
        elif not self.heads:
            turns = {layer: str(turn) for turn, layer in enumerate(self.layers, 1)}
            goes = pl.col("layer").replace_strict(turns, default="", return_dtype=pl.String).alias("goes")
            shown = shown.filter(pl.col("round") == 1).drop("round").with_columns(goes)
            note = "Scores before the first went; then the rest was scored anew." if self.search == "greedy" else ""
        rows = [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row] for row in shown.rows()]
        table = Table(f"How much is needed, by {self.by}", shown.columns, rows, note=note)
        sentence = f"{self.sentence[0].upper()}{self.sentence[1:]}."
        return [Section("What was taken out", sentence, tables=[table])]

    def save_model(self, folder: str | Path, model: nn.Module | None = None) -> Any:
        """Write the smaller model into a new or empty folder that transformers loads, and return it.

        Beside config, weights and tokenizer the folder gets what the folder of the whole model says of its use:
        pooling, normalisation and prompts of sentence-transformers, and how images become input.

        Args:
            folder: Where to write.
            model: The whole model of transformers, with its head for a task; read again from where the network
                came from, if left out.

        Raises:
            SourceError: The network did not come from a model of transformers, or heads were taken out, for which
                configs have no words: `cut.net.save(folder)` writes the network itself.
        """
        from rankscope.sources import locate, original, write_shortened

        origin: Any = self.original.origin
        if self.heads or not hasattr(origin, "to_hf"):
            reason = "has fewer heads in its layers" if self.heads else "was not loaded"
            advice = "cut.net.save(folder) writes the network itself"
            raise SourceError(f"no model of transformers holds a network that {reason}: {advice}", subject="model")
        given, revision = origin.weights == "given", {}
        if "revision" in origin.details:
            revision = {"revision": origin.details["revision"]}
        message = "the network was loaded from a model in memory; save_model(folder, model) takes that model"
        require(model is not None or not given, message, SourceError, "model")
        full_model = original(origin.name, **revision) if model is None else model
        location = None if given else locate(origin.name, revision)
        return write_shortened(full_model, self.original, self.layers, folder, location=location)


def _sentence(
    whole: Transformer, small: Transformer, layers: Sequence[int], heads: Sequence[Any], kept: Fidelity
) -> str:
    """What was taken out, and what the output lost by it."""
    error, cosine = kept
    if heads:
        how = "removed" if small.arch.heads < whole.arch.heads else "silenced, not removed"
        what = f"{len(heads)} of {whole.arch.layers * whole.arch.heads} heads {how}"
    elif layers:
        *most, last = map(str, sorted(layers))
        listed = f"s {', '.join(most)} and {last}" if most else f" {last}"
        what = f"without layer{listed} ({small.arch.layers} of {whole.arch.layers} left)"
    else:
        what = "nothing taken out"
    return f"{what}: output off by {100 * error:.3g} %, cosine {cosine:.4f}"


class ScoringOptions(TypedDict, total=False):
    """Further options of `cut`, each a keyword."""

    of: str
    """"layers" (the default), or "heads": equally many of each layer, those that share keys and values together, scored
    once."""
    loss: Loss | None
    """For `gradient`, a number that is computed from the output `[batch, token, width]`, as a task's loss through the
    model's head; if left out, the sum of the output's entries times random signs."""
    seed: int
    """Of `random`, and of these signs; 0 if left out."""
    progress: Progress | None
    """Called with the rounds or sets that are done, and how many there are."""


@usual_modes()
def cut(
    net: NetworkLike,
    X: InputsLike,
    keep: float = 0.75,
    by: str = "influence",
    search: str = "one_shot",
    *,
    padding: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **options: Unpack[ScoringOptions],
) -> Cut:
    """Take the layers or heads out of a network that a criterion says are needed least.

    Args:
        net: The network, or a Hugging Face model in memory.
        X: Texts, what `net.encode` gave, token ids, or tokens `[batch, token, width]`: what needs are measured on.
        keep: The share of layers (or of heads in each layer) that stays, above 0 and at most 1; at least one stays.
        by: The criterion (`criteria.py`): path_share, residual_share, influence, magnitude, gradient, error, random.
        search: one_shot, greedy or exact.
        padding: `[batch, token]`, True at padding.
        attention_mask: Instead of `padding`, 1 at tokens and 0 at padding (Hugging Face's convention).
        options: `of`, `loss`, `seed` and `progress`: those of `ScoringOptions`.

    Returns:
        A `Cut`: `net`, what was taken out, all scores, and how close the output still is.

    Raises:
        ArchitectureError: `keep`, `by`, `search` or an option is none of those, or there are too many sets for `exact`.
        PathError: Shares of paths were asked for, and paths do not cover the network.

    >>> from rankscope.nets import Architecture
    >>> whole = Transformer.random(Architecture(layers=4, width=8, heads=2))
    >>> found = cut(whole, torch.randn(2, 5, 8, dtype=torch.float64), keep=0.5, by="influence")
    >>> found.net.arch.layers, len(found.layers)
    (2, 2)
    """
    for name in options:
        require_one_of("an option of cut", name, ScoringOptions.__annotations__, ArchitectureError, name)
    of, seed, progress = options.get("of", "layers"), options.get("seed", 0), options.get("progress")
    net, X, padding = inputs_of("cut", net, X, padding, attention_mask)
    for name, value, known in (("by", by, CRITERIA), ("search", search, SEARCHES), ("of", of, ("layers", "heads"))):
        require_one_of(name, value, known, ArchitectureError)
    is_share = isinstance(keep, int | float) and not isinstance(keep, bool) and 0 < keep <= 1
    require(is_share, f"keep must be a share above 0 and at most 1; got {keep!r}", ArchitectureError, "keep")
    sample = Sample(X.to(dtype=net.dtype, device=net.device), padding, options.get("loss"), seed)
    criterion, layers, heads = CRITERIA[by], list[int](), list[tuple[int, int]]()
    if of == "heads":
        heads, scores = _lowest_heads(net, sample, criterion, keep)
    else:
        count = net.arch.layers - _left(net.arch.layers, keep)
        progress = progress or (lambda done, total: None)
        if search == "exact":
            layers, scores = _exact(net, sample, criterion, count, progress)
        else:
            counts = [count] if search == "one_shot" else [1] * count
            layers, scores = _in_rounds(net, sample, criterion, counts, progress)
    sentence = f"{by} must be finite numbers; the network gives others on these tokens"
    require(scores["score"].is_finite().all(), sentence, ArchitectureError, "by")
    small = net.without(layers=layers, heads=heads)
    kept = fidelity(net, small, sample.X, padding)
    told, manifest = _sentence(net, small, layers, heads, kept), network_manifest(net, {}).adding(seed=seed)
    return Cut((net, small), by, search, tuple(layers), tuple(heads), scores, kept, manifest, told)


def _left(count: int, keep: float) -> int:
    """How many of `count` stay: the nearest whole number, halves up, and one at least."""
    return max(1, math.floor(keep * count + 0.5))


Found = tuple[list[int], pl.DataFrame]  # The layers that go, in order, and the scores they were chosen by


def _in_rounds(net: Transformer, sample: Sample, by: Criterion, counts: Sequence[int], progress: Progress) -> Found:
    """In each round as many layers go as `counts` has for it: those with the lowest scores, the rest scored anew."""
    out: list[int] = []
    tables = [_rows(0, (), ())]
    for done, count in enumerate(counts, 1):
        left = [layer for layer in range(1, net.arch.layers + 1) if layer not in out]
        if by.sets is not None and by.against_whole:
            scores = by.sets(net, sample, [(*out, layer) for layer in left])
        else:
            scores = by.layers(net.without(layers=out) if out else net, sample)
        tables.append(_rows(done, left, scores))
        out += [left[index] for index in sorted(range(len(left)), key=scores.__getitem__)[:count]]
        progress(done, len(counts))
    return out, pl.concat(tables)


def _exact(net: Transformer, sample: Sample, by: Criterion, count: int, progress: Progress) -> Found:
    if by.sets is None:
        known = ", ".join(name for name, criterion in CRITERIA.items() if criterion.sets is not None)
        sentence = f"an exact search needs a criterion that scores sets of layers ({known}); got {by.name}"
        raise ArchitectureError(f"{sentence}, whose scores add up: one_shot finds its best set", subject="search")
    if (set_count := math.comb(net.arch.layers, count)) > MOST_SETS:
        sentence = f"an exact search scores at most {MOST_SETS} sets of layers; {count} of {net.arch.layers} are"
        raise ArchitectureError(f"{sentence} {set_count}: use greedy", subject="search")
    sets = list(combinations(range(1, net.arch.layers + 1), count))
    scores = by.sets(net, sample, sets)
    progress(1, 1)
    listed = [", ".join(map(str, layers)) for layers in sets]
    return list(sets[scores.index(min(scores))]), pl.DataFrame({"layers": listed, "score": scores})


def _rows(number: int, layers: Any, scores: Any) -> pl.DataFrame:
    schema = {"round": pl.Int64, "layer": pl.Int64, "score": pl.Float64}
    return pl.DataFrame({"round": [number] * len(layers), "layer": list(layers), "score": list(scores)}, schema)


def _lowest_heads(
    net: Transformer, sample: Sample, by: Criterion, keep: float
) -> tuple[list[tuple[int, int]], pl.DataFrame]:
    """The heads of each layer that go, as pairs, and the scores of all. Heads that share keys and values go together;
    where all share one, each goes by itself."""
    if by.heads is None:
        known = ", ".join(name for name, criterion in CRITERIA.items() if criterion.heads is not None)
        raise ArchitectureError(f"heads are scored by {known}; got {by.name}", subject="by")
    heads, scores = net.arch.heads, torch.tensor(by.heads(net, sample), dtype=torch.float64)
    size = heads // net.arch.key_heads if net.arch.key_heads > 1 else 1
    grouped: Float[Tensor, "layer group"] = scores.view(net.arch.layers, -1, size).sum(-1)
    count = grouped.shape[1] - _left(grouped.shape[1], keep)
    lowest = grouped.argsort(dim=1, stable=True)[:, :count].tolist()
    pairs = [(layer, size * group) for layer, groups in enumerate(lowest, 1) for group in sorted(groups)]
    out = [(layer, first + k) for layer, first in pairs for k in range(size)]
    layers = [layer for layer in range(1, net.arch.layers + 1) for _ in range(heads)]
    columns = {"layer": layers, "head": list(range(heads)) * net.arch.layers, "score": scores.flatten().tolist()}
    return out, pl.DataFrame(columns)
