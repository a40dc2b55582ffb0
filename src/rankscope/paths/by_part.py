"""What of the output passes through a layer's heads, its MLP, or one head, and from which tokens it comes.

Called by `Decomposition.by_layer`, `by_head` and `by_position`; traverses a `Frozen` network with the rules of
`frozen.py`. The last goes one layer at a time, so that layers may stay in their files.

**Parts.** Everything that passes through a part is one term: the part's branch of the full stream (biases and all),
carried to the end by the frozen layers after it. Its inner product with the output is also `<branch, A^T
output>`, A the map of all later layers: one backward pass gives it for every head of every layer.
`TwoPasses` (`depths/passes.py`) has the same shares with one layer in memory.

**Source tokens.** With attention, norms and gates frozen, the output y of a query token is a sum of one term per source
token j, `J_j x_j` with `x_j` its embedding, and of what starts at biases. The share of a source is

    <J_j x_j, y> / <y, y>  =  <x_j, J_j^T y> / <y, y>,

so one backward pass through the frozen layers gives it for all of them. By length, the pulled back output is a
polynomial: coefficient k has what came back along paths of length k, and a layer makes it one longer,

    G_{l-1}[k] = past^T G_l[k] + through^T G_l[k-1].

The size of a term has no such shortcut: it takes a forward pass for each source.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import PathError, require
from rankscope.metrics import dobrushin, frobenius_norm, mu, residual
from rankscope.nets import Block, Half, Tokens
from rankscope.paths.frozen import (
    Frozen,
    FrozenLayer,
    FrozenRules,
    HeadTerms,
    Parts,
    Terms,
    WholeNetwork,
    centred_tokens,
    cosine,
    require_closure,
    share,
    size_of,
    uniform,
)
from rankscope.paths.lengths import length_terms
from rankscope.shapes import Float


class _PartTracker(WholeNetwork):
    """Rules whose term 0 is the whole network, and the others what passed through each part so far."""

    def __init__(self, frozen: Frozen) -> None:
        super().__init__(frozen)
        self.names: list[tuple[int, str]] = []

    def output(self, block: Block, head_terms: HeadTerms) -> Terms:
        """The stream's heads once more, without the output bias, which passes through none."""
        parts = self.added(block, head_terms)
        return self._started(block, torch.cat([parts, parts[:1]]))

    def add(self, block: Block, half: Half, terms: Terms, branches: dict[str, Terms]) -> Terms:
        """What the branches add to the stream goes on as parts of their own."""
        count, new = len(terms.parts), []
        for name, branch in branches.items():
            new.append(branch.parts[count:] if name == "attention" else branch.parts[:1].clone())
            self.names.append((block.index + 1, "heads" if name == "attention" else name))
            branches = branches | {name: branch._replace(parts=branch.parts[:count])}
        return Terms(torch.cat([super().add(block, half, terms, branches).parts, *new]), self.start)


LAYER: dict[str, Any] = {"sample": pl.Int64, "layer": pl.Int64, "part": pl.String, **dict.fromkeys(
    ("norm", "residual", "share", "residual_share", "cosine"), pl.Float64)}  # fmt: skip
HEAD: dict[str, Any] = {**dict.fromkeys(("sample", "layer", "head"), pl.Int64), **dict.fromkeys(
    ("norm", "share", "residual_share", "contraction", "averaging", "dobrushin"), pl.Float64)}  # fmt: skip
"""The columns of the tables of `by_layer` and `by_head`."""


class _HeadRecorder(WholeNetwork):
    """Rules of the whole network that record what every head mixed and what the heads of each layer read."""

    def __init__(self, frozen: Frozen) -> None:
        super().__init__(frozen)
        self.head_terms: list[Tensor] = []
        self.inputs_read: list[Tensor] = []

    def values(self, block: Block, terms: Terms) -> Tensor:
        """The values of heads, after recording the tokens that heads read."""
        self.inputs_read.append(terms.parts.detach()[0])
        return super().values(block, terms)

    def output(self, block: Block, head_terms: HeadTerms) -> Terms:
        """The output of attention, after recording what each head mixed."""
        self.head_terms.append(head_terms)
        return super().output(block, head_terms)


@torch.no_grad()
def by_layer(frozen: Frozen) -> pl.DataFrame:
    """One row per sample, layer (from 1) and part (heads, mlp):

    sample · layer · part · norm · residual · share · residual_share · cosine

    of everything that passes through it: its size and residual at the output, its share of the output (`<term, output>
    / <output, output>`) and of the output's residual (NaN where that is noise), its cosine with the output.
    """
    rules = _PartTracker(frozen)
    terms = Terms(frozen.X[None], rules.start)
    for layer in frozen.layers:
        terms = rules.through(layer.block, terms)
    ended = rules.end(terms._replace(start=None))[1:]
    return pl.concat([_rows(term, frozen, *name) for term, name in zip(ended, rules.names, strict=True)])


def by_head(frozen: Frozen) -> pl.DataFrame:
    """One row per sample, layer (from 1) and head:

    sample · layer · head · norm · share · residual_share · contraction · averaging · dobrushin

    `norm`: of what the head says, `P_h Z W_h` with its value bias, before a sandwich's second norm; 0 of a head that is
    not active. `share` and `residual_share`: what everything that passes through it is of the output, and of the
    output's residual. `contraction`: the residual of what it says over that of what it reads, `mu(P_h Z W_h) / mu(Z)`;
    `averaging`: the same without its weights, `mu(P_h Z) / mu(Z)`, where rows sum to one at most `sqrt(n / 2)` times
    Dobrushin's coefficient of P_h, n the number of tokens. Where Z is uniform as far as the arithmetic can see, both
    would be noise: NaN, as is `residual_share` where the output is uniform.
    """
    sentence = "by_head needs all layers in memory; they are streamed: use by_layer"
    require(not frozen.net.streamed, sentence, PathError, "stream")
    # What every head mixed `[1, batch, head, token, head_width]`, and the output, are nodes of one graph.
    rules = _HeadRecorder(replace(frozen, X=frozen.X.clone().requires_grad_(True)))
    with torch.enable_grad():
        output, head_terms = rules.run(), rules.head_terms
    centred = centred_tokens(frozen.output, frozen.valid)
    shares = []
    for target in (frozen.output, centred):
        size = size_of(target)[:, None]
        pulled = torch.autograd.grad(output, head_terms, target / size[..., None], retain_graph=True)
        shares.append([(U * v)[0].sum((2, 3)) / size for U, v in zip(head_terms, pulled, strict=True)])
    frames = []
    for layer, U, Z, *of_heads in zip(frozen.layers, head_terms, rules.inputs_read, *shares, strict=True):
        of_output, of_residual = (values.detach() for values in of_heads)
        frames.append(_head_rows(layer, U.detach()[0], Z, of_output, of_residual, frozen))
    return pl.concat(frames)


def _head_rows(
    layer: FrozenLayer, U: Tensor, Z: Tensor, of_output: Tensor, of_residual: Tensor, frozen: Frozen
) -> pl.DataFrame:
    padding = ~frozen.valid
    batch, heads = U.shape[:2]
    wide = padding[:, None].expand(batch, heads, -1)
    is_active = torch.tensor([head in layer.ways for head in range(heads)], device=U.device)
    contributions = U @ layer.block.weights.attention.output.weight  # [batch, head, token, width]
    contributions = contributions * is_active[:, None, None]
    inputs_read = mu(Z, padding).masked_fill(uniform(Z, frozen.valid), torch.nan)[:, None]
    mixed = layer.P @ Z[:, None]
    columns: dict[str, Tensor] = {
        "norm": frobenius_norm(contributions * frozen.valid[:, None, :, None]),
        "share": of_output,
        "residual_share": of_residual.masked_fill(uniform(frozen.output, frozen.valid)[:, None], torch.nan),
        "contraction": mu(contributions, wide) / inputs_read,
        "averaging": mu(mixed, wide) / inputs_read,
        "dobrushin": dobrushin(layer.P, padding),
    }
    return pl.DataFrame({
        "sample": [sample for sample in range(batch) for _ in range(heads)],
        "layer": [layer.block.index + 1] * (batch * heads), "head": list(range(heads)) * batch,
        **{name: value.double().flatten().tolist() for name, value in columns.items()},
    })  # fmt: skip


def _rows(term: Tensor, frozen: Frozen, layer: int, part: str) -> pl.DataFrame:
    padding = ~frozen.valid
    centred = centred_tokens(frozen.output, frozen.valid)
    alike = uniform(frozen.output, frozen.valid)
    return pl.DataFrame({
        "sample": list(range(len(term))), "layer": [layer] * len(term), "part": [part] * len(term),
        "norm": frobenius_norm(term.double()).tolist(), "residual": residual(term, padding).tolist(),
        "share": share(term, frozen.output).tolist(),
        "residual_share": share(term, centred).masked_fill(alike, torch.nan).tolist(),
        "cosine": cosine(term, frozen.output).tolist(),
    })  # fmt: skip


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
