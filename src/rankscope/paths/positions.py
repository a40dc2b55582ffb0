"""Which tokens the output comes from: paths by the token at which they start.

With attention, norms and gates frozen, the output y of a query token is a sum of one term per source token j, `J_j x_j`
with `x_j` its embedding, and of what starts at biases. The share of a source is

    <J_j x_j, y> / <y, y>  =  <x_j, J_j^T y> / <y, y>,

so one backward pass through the frozen layers gives it for all of them. By length, the pulled back output is a
polynomial: coefficient k has what came back along paths of length k, and a layer makes it one longer,

    G_{l-1}[k] = past^T G_l[k] + through^T G_l[k-1].

The size of a term has no such shortcut: it takes a forward pass for each source.

Called by `Decomposition.by_position`; uses the rules of `terms.py`, one layer at a time, so that layers may stay in
their files.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import PathError
from rankscope.metrics import frobenius_norm
from rankscope.nets import Block, Half, Tokens
from rankscope.paths.frozen import Frozen, Parts
from rankscope.paths.lengths import require_closure, size_of
from rankscope.paths.polynomials import length_terms
from rankscope.paths.terms import FrozenRules, Terms, WholeNetwork
from rankscope.shapes import Float


@dataclass(frozen=True, eq=False, repr=False)
class ByPosition:
    """Shares of the output by source token: see `Decomposition.by_position`."""

    table: pl.DataFrame
    closure: float  # How far the shares of a sample are from adding up to one, at most

    def __repr__(self) -> str:
        samples, sources = (self.table[name].drop_nulls().n_unique() for name in ("sample", "source"))
        return f"ByPosition: {samples} samples of up to {sources} source tokens, closure {self.closure:.0e}"


class _PastAndThrough(FrozenRules):
    """Rules that keep apart what goes past the heads of a layer and what goes through them: two terms of one."""

    def add(self, block: Block, half: Half, terms: Terms, branches: dict[str, Terms]) -> Terms:
        """Everything but attention, and attention."""
        if not half.attends:
            return super().add(block, half, terms, branches)
        past = super().add(block, half, terms, {name: branches[name] for name in branches if name != "attention"})
        return Terms(torch.cat([past.parts, branches["attention"].parts]))


def by_position(frozen: Frozen, query: int | None = -1, lengths: bool = False, sizes: bool = False) -> ByPosition:
    """Return the shares of the output by source token; the arguments are those of `Decomposition.by_position`."""
    chosen = _chosen(frozen, query)
    target = frozen.output * chosen
    size = size_of(target)
    unit, per_size, nothing = target / size[:, None, None], 1 / size, frobenius_norm(target.double()).to(target) == 0
    with torch.no_grad():
        if lengths:
            bias_terms = length_terms(replace(frozen, X=torch.zeros_like(frozen.X)))[1]
        else:
            bias_terms = WholeNetwork(replace(frozen, X=torch.zeros_like(frozen.X))).run()[None]
    bias = (bias_terms * unit).sum((2, 3)) * per_size  # [length, batch]
    share = (_pulled_back(frozen, unit, lengths) * frozen.X).sum(3) * per_size[:, None]  # [length, batch, token]
    missed = (share.sum((0, 2)) + bias.sum(0) - 1).masked_fill(nothing, 0.0)
    closure = require_closure(float(missed.abs().max()), share.dtype)
    columns = {"share": torch.cat([share, bias[..., None]], 2)}
    if sizes:
        norms = [torch.linalg.vector_norm(term * chosen, dim=(2, 3)) for term in _source_terms(frozen, lengths)]
        columns["norm"] = torch.stack([*norms, torch.linalg.vector_norm(bias_terms * chosen, dim=(2, 3))], 2)
    frozen.net.weights.layers.release()
    return ByPosition(_table(columns, frozen, lengths), closure)


def _chosen(frozen: Frozen, query: int | None) -> Float[Tensor, "batch token 1"]:
    """One at the query token of each sample, zero elsewhere; one everywhere where there is no query."""
    count = frozen.valid.sum(1)
    if query is None:
        return torch.ones_like(frozen.output[..., :1])
    fewest = int(count.min())
    if isinstance(query, bool) or not isinstance(query, int) or not -fewest <= query < fewest:
        limits = f"a whole number from {-fewest} to {fewest - 1}, or None for all tokens"
        raise PathError(f"query must be {limits}; got {query!r}", subject="query")
    index = torch.where(torch.tensor(query < 0, device=count.device), count + query, query)
    places = torch.arange(frozen.valid.shape[1], device=count.device)
    return (places == index[:, None]).to(frozen.output)[..., None]


def _pulled_back(frozen: Frozen, target: Tokens, lengths: bool) -> Parts:
    """The target at the input of the network, a part for each length, or one for all of them."""
    rules = _PastAndThrough(frozen) if lengths else FrozenRules(frozen)
    nothing = torch.zeros_like(target)[None]
    with torch.enable_grad():
        Z = nothing.clone().requires_grad_(True)  # The maps are linear: their slopes are the same anywhere
        (pulled,) = torch.autograd.grad(rules.end(Terms(Z)), Z, target[None])
        for layer in reversed(frozen.layers):
            Y = rules.through(layer.block, Terms(Z)).parts
            longer = torch.cat([nothing, pulled, nothing]) if lengths else pulled
            # Coefficient k goes past the heads, and k - 1 through them.
            targets = longer.unfold(0, 2, 1).movedim(-1, 1).flip(1) if lengths else longer[None]
            gradients = [torch.autograd.grad(Y, Z, both, retain_graph=True)[0] for both in targets]
            pulled = torch.cat(gradients)
    return pulled.detach()


def _source_terms(frozen: Frozen, lengths: bool) -> Iterator[Parts]:
    """What starts at each source token, a forward pass for each: a part for each length, or one for all."""
    for source in range(frozen.X.shape[1]):
        X = torch.zeros_like(frozen.X)
        X[:, source] = frozen.X[:, source]
        alone = replace(frozen, X=X)
        yield length_terms(alone, biases=False)[0] if lengths else WholeNetwork(alone, biases=False).run()[None]


def _table(columns: dict[str, Tensor], frozen: Frozen, lengths: bool) -> pl.DataFrame:
    """Rows of the valid tokens of each sample, and of its biases."""
    frames = []
    for sample, valid in enumerate(frozen.valid.tolist()):
        sources = [index for index, is_token in enumerate(valid) if is_token]
        for length in range(len(columns["share"])):
            by_length = {"length": [length] * (len(sources) + 1)} if lengths else {}
            frames.append(pl.DataFrame({
                "sample": [sample] * (len(sources) + 1), **by_length, "start": ["embedding"] * len(sources) + ["bias"],
                "source": [*sources, None],
                **{name: values[length, sample, [*sources, -1]].double().tolist() for name, values in columns.items()},
            }))  # fmt: skip
    return pl.concat(frames)
