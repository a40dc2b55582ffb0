"""What a few paths of one length are good for: sum them, normalise, classify with the trained head.

| attention | paths | |
|---|---|---|
| own | 5, 20 | the published figure: attention recomputed along each path |
| shared | 5, 20 | the theorem's terms: attention of the full network |
| shared | all | the exact sum of the theorem's terms, `decompose(...).by_length()` |

Paths are drawn as the published code draws them, with repetition: 20 of the 12 paths of length 1 may hold one
thrice and another not at all. The sum of all lengths of `shared` is the network's own output;
its terms may cancel, so it is taken in float64. Single paths are walked in float32, as they were trained.
"""

import copy
import random
from collections import Counter
from collections.abc import Iterator

import polars as pl
import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.lab import UNLABELLED, Batch, Model
from rankscope.nets import Transformer
from rankscope.paths import AfterLayer, Frozen, OwnAttention, Path, PathRules, by_length, freeze, path_terms

PIECE = 2**19  # Numbers in the tokens that are evaluated together
Key = tuple[str, str, int | None, int]  # (attention, paths, length, repeat)
Draw = tuple[str, int, int]  # (paths, length, repeat)


def drawn_path(layers: int, heads: int, length: int, draw: random.Random) -> Path:
    """A path of a length: which layers take a head, then which head each takes."""
    through = set(draw.sample(range(layers), length))
    return tuple(draw.randrange(heads) if layer in through else None for layer in range(layers))


def draws(layers: int, heads: int, counts: tuple[int, ...], repeats: int, seed: int) -> dict[Draw, Counter[Path]]:
    """How often each path was drawn. The same for both kinds of attention."""
    draw = random.Random(seed)
    return {
        (str(count), length, repeat): Counter(drawn_path(layers, heads, length, draw) for _ in range(count))
        for count in counts
        for length in range(layers + 1)
        for repeat in range(repeats)
    }


@torch.no_grad()
def path_effects(model: Model, data: Batch, counts: tuple[int, ...], repeats: int, seed: int = 0) -> pl.DataFrame:
    """The accuracy of a few paths at a time: one row per attention, paths (5, 20, all), length and repeat,
    and one for the network as it is (attention 'full', length null)."""
    precise = copy.deepcopy(model).double().eval()
    net = precise.network()
    drawn = draws(net.arch.layers, net.arch.heads, counts, repeats, seed)
    right: Counter[Key] = Counter()
    tokens = 0
    for piece in _pieces(data, net.arch.width):
        valid = piece.labels != UNLABELLED
        tokens += int(valid.sum())
        for key, Y in _sums(net, precise.tokens(piece.inputs), ~valid, drawn):
            logits = precise.head(F.layer_norm(Y, Y.shape[-1:], eps=net.arch.norm_eps))
            right[key] += int(((logits.argmax(-1) == piece.labels) & valid).sum())
    rows = [(*key, hits / tokens) for key, hits in right.items()]
    schema = {"attention": pl.String, "paths": pl.String, "length": pl.Int64, "repeat": pl.Int64,
              "accuracy": pl.Float64}  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row")


def _sums(
    net: Transformer, X: Tensor, padding: Tensor, drawn: dict[Draw, Counter[Path]]
) -> Iterator[tuple[Key, Tensor]]:
    """What the paths of each draw add up to, tokens where the data have them."""
    frozen = freeze(net, X, padding)
    yield ("full", "all", None, 0), frozen.restored(frozen.output)
    exact = by_length(frozen)
    for length, Y in enumerate(exact.embedding + exact.bias):
        yield ("shared", "all", length, 0), Y
    light = freeze(net.to(torch.float32), X.float(), padding)
    for attention, rules in (("own", OwnAttention(light)), ("shared", PathRules(light))):
        for key, Y in weighted(light, drawn, rules.after_layer).items():
            yield (attention, *key), frozen.restored(Y.double())


def weighted(frozen: Frozen, wanted: dict[Draw, Counter[Path]], after_layer: AfterLayer) -> dict[Draw, Tensor]:
    """The sum of each draw's terms, every path walked once for all draws."""
    users: dict[Path, list[tuple[Draw, int]]] = {}
    for key, paths in wanted.items():
        for path, times in paths.items():
            users.setdefault(path, []).append((key, times))
    sums = {key: torch.zeros_like(frozen.X) for key in wanted}
    for path, term in path_terms(frozen, users, after_layer):
        for key, times in users[path]:
            sums[key].add_(term, alpha=times)
    return sums


def _pieces(data: Batch, width: int) -> Iterator[Batch]:
    most = max(1, PIECE // (data.labels.shape[1] * width))
    for start in range(0, len(data), most):
        yield data.part(slice(start, start + most))
