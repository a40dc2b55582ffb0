"""Sets of paths of one length: drawn without repetition, summed, and classified by two readers.

`number_or_length.py` asks for `evaluated_sets`, and for `evaluated_lengths` of networks before training. Every path of
a length is walked once for all sets (`path_terms`), and the sums of all sets are products of a matrix of memberships
with the terms. Everything is in float64: the terms of long paths are small and may cancel.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.lab import Batch, Model
from rankscope.metrics import relative_mu
from rankscope.paths import (
    Frozen,
    OwnAttention,
    Path,
    PathRules,
    Ways,
    by_length,
    counts_along,
    freeze,
    path_terms,
    paths_along,
    sampled_paths,
)
from rankscope.shapes import Float
from rankscope_studies.questions.readout import fitted_readout

OWN, SHARED, LEVEL = "own", "shared", "shared attention, terms scaled to equal RMS"
SHARES = (1 / 6, 1 / 2)  # Of all paths of a length: 2 of 12 is the least that leaves a choice at length 1
AT_ONCE = 2**24  # Numbers in the sums that are classified together, and in terms that are held at once
FLOOR = 1e-12  # Relative residuals are read down to here; below, rounding adds to them
Sums = Float[Tensor, "set batch token width"]


class PathSet(NamedTuple):
    """A set of paths of one length."""

    repeat: int  # Which draw of this number of paths it is
    paths: list[Path]


def share_number(share: float, total: int) -> int:
    """The number of paths that is nearest to a share of all paths of a length; at least one.

    >>> [share_number(1 / 6, total) for total in (1, 12, 60, 64)]
    [1, 2, 10, 11]
    """
    return max(1, round(share * total))


def drawn_sets(ways: Ways, length: int, numbers: Sequence[int], repeats: int, seed: int) -> list[PathSet]:
    """Sets of every number of paths that a length has, of every share, and of all its paths.

    Args:
        ways: The choices of a path in each layer.
        length: The heads in every path.
        numbers: Of paths in a set; those that are not fewer than all paths of the length are left out.
        repeats: Sets of each number; of all paths there is one set.
        seed: Decides which paths are drawn.
    """
    total = counts_along(ways)[length]
    wanted = {*numbers} | {share_number(share, total) for share in SHARES}
    sets = [
        PathSet(repeat, sampled_paths(ways, length, count, (seed * 10**6 + count) * 1000 + repeat))
        for count in sorted(wanted)
        if count < total
        for repeat in range(repeats)
    ]
    return [*sets, PathSet(0, [*paths_along(ways, length)])] if total else []


def set_sums(frozen: Frozen, sets: Sequence[PathSet], fit: slice) -> Iterator[tuple[str, Sums]]:
    """The sum of the terms of each set's paths, for each kind of path.

    Scaled to equal RMS, a path's term is divided by its root mean square over the tokens of the samples `fit`, one
    number for the path. Along a path of its own attention, a norm ends every layer: these terms have equal norms as
    they are.
    """
    paths = sorted({path for members in sets for path in members.paths}, key=str)
    at = {path: index for index, path in enumerate(paths)}
    belongs = frozen.X.new_zeros(len(sets), len(paths))
    for row, members in zip(belongs, sets, strict=True):
        row[[at[path] for path in members.paths]] = 1.0
    chunk = max(1, AT_ONCE // frozen.X.numel())
    own_sums, shared_sums, level_sums = (frozen.X.new_zeros(len(sets), frozen.X.numel()) for _ in range(3))
    for terms, columns in _chunks(frozen, paths, at, OWN, chunk):
        own_sums.addmm_(belongs[:, columns], terms.flatten(1))
    yield OWN, own_sums.view(-1, *frozen.X.shape)
    del own_sums
    for terms, columns in _chunks(frozen, paths, at, SHARED, chunk):
        sizes = terms[:, fit].square().mean((1, 2, 3)).sqrt().clamp_min(torch.finfo(terms.dtype).tiny)
        shared_sums.addmm_(belongs[:, columns], terms.flatten(1))
        level_sums.addmm_(belongs[:, columns] / sizes, terms.flatten(1))
    yield SHARED, shared_sums.view(-1, *frozen.X.shape)
    yield LEVEL, level_sums.view(-1, *frozen.X.shape)


def _chunks(
    frozen: Frozen, paths: list[Path], at: dict[Path, int], kind: str, chunk: int
) -> Iterator[tuple[Tensor, list[int]]]:
    """Terms of some paths at a time `[path, batch, token, width]`, and where those paths stand in the list."""
    after_layer = (OwnAttention if kind == OWN else PathRules)(frozen).after_layer
    terms: list[Tensor] = []
    columns: list[int] = []
    for path, term in path_terms(frozen, paths, after_layer):
        terms.append(term)
        columns.append(at[path])
        if len(terms) == chunk:
            yield torch.stack(terms), columns
            terms, columns = [], []
    if terms:
        yield torch.stack(terms), columns


class SetReader:
    """Classifies sums of paths as figure 4 does, and with readouts fitted to them.

    Args:
        model: The trained model, in float64.
        output: The output of its network on the samples to fit to and, after them, those to evaluate on.
        fit: Samples that readouts are fitted to.
        test: Samples that accuracies are of.
    """

    def __init__(self, model: Model, output: Tensor, fit: Batch, test: Batch) -> None:
        self.model, self.output, self.labels = model, output, (fit.labels.flatten(), test.labels.flatten())
        self.fit, self.test = slice(len(fit)), slice(len(fit), None)

    def read(self, sums: Sums) -> list[dict[str, Any]]:
        """A row for each sum: the accuracies of both readers, norm, alignment and relative residual."""
        most = max(1, AT_ONCE // (sums[0].numel() // sums.shape[-1] * max(sums.shape[-1], self.classes)))
        return [row for start in range(0, len(sums), most) for row in self._rows(sums[start : start + most])]

    @property
    def classes(self) -> int:
        """The number of classes that the head tells apart."""
        return len(self.model.head.bias)

    def _rows(self, sums: Sums) -> list[dict[str, Any]]:
        Y = F.layer_norm(sums, sums.shape[-1:], eps=self.model.net.arch.norm_eps)
        learnt, asked = Y[:, self.fit].flatten(1, 2), Y[:, self.test].flatten(1, 2)
        refitted = fitted_readout(learnt, self.labels[0], self.classes).logits(asked)
        output = self.output[self.test].flatten(0, 1)
        residual = relative_mu(Y[:, self.test].flatten(0, 1)).view(len(Y), -1).mean(1)
        size = sums[:, self.test].square().mean((1, 2, 3)).sqrt()
        columns = {
            "head": self._accuracy(self.model.head(asked)), "refit": self._accuracy(refitted),
            "norm": size.log10(), "alignment": F.cosine_similarity(asked, output, dim=-1).mean(1),
            "residual": residual.clamp_min(FLOOR).log10(),
        }  # fmt: skip
        lists = {name: values.tolist() for name, values in columns.items()}
        return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]

    def refitted(self, *sides: Tensor, share: float = 1.0) -> float:
        """The accuracy of a readout that is fitted to sums or tokens beside each other, each of them normalised.

        Args:
            sides: Sums of paths, or tokens alone, `[sample, token, width]`.
            share: Of the samples to fit to, that are fitted to.
        """
        normed = [F.layer_norm(X, X.shape[-1:], eps=self.model.net.arch.norm_eps) for X in sides]
        features = torch.cat(normed, -1)[None]
        fit = features[:, : math.ceil(share * self.fit.stop)].flatten(1, 2)
        readout = fitted_readout(fit, self.labels[0][: fit.shape[1]], self.classes)
        return float(self._accuracy(readout.logits(features[:, self.test].flatten(1, 2))))

    def _accuracy(self, logits: Tensor) -> Tensor:
        return (logits.argmax(-1) == self.labels[1]).double().mean(-1)


@torch.no_grad()
def evaluated_sets(
    model: Model, fit: Batch, test: Batch, numbers: Sequence[int], repeats: int, seed: int = 0
) -> list[dict[str, Any]]:
    """How well sets of paths of one length are classified: a row for each kind, length, number and draw, and a row of
    kind 'whole' for the network itself.

    `head` and `refit` are the accuracies of the trained head and of a readout fitted to the set's sum; of all paths of
    a length, `half` is that of a readout fitted to half of the samples, and `beside` that of one fitted to the sum and
    the token alone. `norm` is log10 of the root mean square of the sum; `alignment` the mean over tokens of the
    cosine between the sum, normalised as the head reads it, and the network's output; `residual` log10 of the relative
    residual after LayerNorm, and of `FLOOR` where that is larger.

    Args:
        model: The trained model; its blocks have their norms last.
        fit: Samples that readouts are fitted to; without padding, as are `test`.
        test: Samples that all numbers are of.
        numbers: Of paths in a set.
        repeats: Sets of each length and number.
        seed: Decides which paths are drawn.
    """
    frozen, reader = _reading(model, fit, test)
    rows = [{"kind": "whole"} | reader.read(frozen.output[None])[0]]
    for length, total in enumerate(counts_along(frozen.ways)):
        sets = drawn_sets(frozen.ways, length, numbers, repeats, seed)
        for kind, sums in set_sums(frozen, sets, reader.fit):
            for drawn, row in zip(sets, reader.read(sums), strict=True):
                count = len(drawn.paths)
                rows.append({"kind": kind, "length": length, "number": count, "share": count / total,
                             "repeat": drawn.repeat} | row)  # fmt: skip
            all_paths = sums[-1]  # the last set is that of all paths
            rows[-1]["half"] = reader.refitted(all_paths, share=0.5)
            rows[-1]["beside"] = reader.refitted(all_paths, frozen.X)
    return rows


@torch.no_grad()
def evaluated_lengths(model: Model, fit: Batch, test: Batch) -> list[dict[str, Any]]:
    """How well readouts fitted to all paths of a length, with shared attention, classify: a row for each length.

    `refit` and `beside` are the accuracies that `evaluated_sets` has under these names. Sums of all paths of a length
    need no walk along single paths (`by_length`), so that this is fast.

    Args:
        model: The model; its blocks have their norms last.
        fit: Samples that readouts are fitted to; without padding, as are `test`.
        test: Samples that accuracies are of.
    """
    frozen, reader = _reading(model, fit, test)
    terms = by_length(frozen)
    return [
        {"length": length, "refit": reader.refitted(sums), "beside": reader.refitted(sums, frozen.X)}
        for length, sums in enumerate(terms.embedding + terms.bias)
    ]


def _reading(model: Model, fit: Batch, test: Batch) -> tuple[Frozen, SetReader]:
    """The network in float64, frozen on the samples of `fit` and `test`, and what reads its sums of paths."""
    precise = copy.deepcopy(model).double().eval()
    frozen = freeze(precise.network(), precise.tokens(torch.cat([fit.inputs, test.inputs])))
    return frozen, SetReader(precise, frozen.output, fit, test)
