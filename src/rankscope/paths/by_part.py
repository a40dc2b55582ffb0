"""What passes through a layer's heads, its MLP, or one head, on its way to the output.

Called by `Decomposition.by_layer` and `by_head`; traverses a `Frozen` network with the rules of `terms.py`.

Everything that passes through a part is one term: the part's branch of the full stream (biases and all),
carried to the end by the frozen layers after it. Its inner product with the output is also `<branch, A^T
output>`, A the map of all later layers: one backward pass gives it for every head of every layer.

`TwoPasses`, which `depths/card.py` calls block after block, has the same shares with one layer in memory: the network
goes forward once, and back once. Forward, the tokens that each layer reads are kept, apart by where they started
(embedding, bias). Back, layer by layer, `A^T output` is pulled through the layer, which is frozen again on the tokens
that were kept. So no layer is needed but the one at hand, and layers may be read from files. It costs two readings of
every layer and the time of about six forward passes.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import PathError, require
from rankscope.metrics import dobrushin, frobenius_norm, metric, mu, residual, tokens
from rankscope.nets import Block, Branch, Half, Tokens, Transformer, traverse
from rankscope.paths.frozen import FreezingRules, Frozen, FrozenLayer, FrozenNorm, Parts
from rankscope.paths.lengths import closure_of, cosine, size_of
from rankscope.paths.lengths import share as share_of
from rankscope.paths.terms import FrozenRules, HeadTerms, Terms, WholeNetwork
from rankscope.shapes import Bool, Float


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
    for layer, U, Z, share, residual_share in zip(frozen.layers, head_terms, rules.inputs_read, *shares, strict=True):
        frames.append(_head_rows(layer, U.detach()[0], Z, share.detach(), residual_share.detach(), frozen))
    return pl.concat(frames)


def _head_rows(
    layer: FrozenLayer, U: Tensor, Z: Tensor, share: Tensor, residual_share: Tensor, frozen: Frozen
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
        "share": share,
        "residual_share": residual_share.masked_fill(uniform(frozen.output, frozen.valid)[:, None], torch.nan),
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
        "share": share_of(term, frozen.output).tolist(),
        "residual_share": share_of(term, centred).masked_fill(alike, torch.nan).tolist(),
        "cosine": cosine(term, frozen.output).tolist(),
    })  # fmt: skip


def uniform(X: Tensor, valid: Tensor) -> Tensor:
    """True for samples whose tokens are equal as far as the arithmetic resolves: their residual is noise."""
    return metric("relative_residual").read(tokens(X, ~valid)).below_floor.to(X.device)


def centred_tokens(X: Tensor, valid: Tensor) -> Tensor:
    """X minus the mean of its valid tokens."""
    count = valid.sum(-1).clamp(min=1)[:, None, None]
    mean = (X * valid[..., None]).sum(1, keepdim=True) / count
    return (X - mean) * valid[..., None]


class LayerShares(NamedTuple):
    """What of the output passed through a layer; in the first axis 0 is what started at the embedding, 1 at a bias.

    NaN of a residual that is only rounding.
    """

    layer: Float[Tensor, "start batch"]  # through any of its branches: what the layer adds, with their biases
    mlp: Float[Tensor, "start batch"]  # through its MLP; zero where there is none
    heads: Float[Tensor, "start batch head"]  # through each head


class _OneLayer(FrozenRules):
    """The rules of a frozen layer, which also record what heads mixed and what the MLP added."""

    def __init__(self, frozen: Frozen, layer: FrozenLayer, start: int | None) -> None:
        super().__init__(frozen)
        self.frozen_layer, self.start = layer, start
        self.head_terms: HeadTerms | None = None
        self.mlp_terms: Parts | None = None

    def layer(self, block: Block) -> FrozenLayer:
        """The frozen layer that these rules go through."""
        return self.frozen_layer

    def output(self, block: Block, head_terms: HeadTerms) -> Terms:
        """What heads add, after recording what each mixed."""
        self.head_terms = head_terms
        return super().output(block, head_terms)

    def add(self, block: Block, half: Half, terms: Terms, branches: dict[str, Terms]) -> Terms:
        """The sum, after recording what the MLP adds to it: a copy is summed, which may be changed in place."""
        if "mlp" in branches:
            self.mlp_terms = branches["mlp"].parts
            branches = branches | {"mlp": branches["mlp"]._replace(parts=self.mlp_terms.clone())}
        return super().add(block, half, terms, branches)


class _PastLayer(_OneLayer):
    """The rules past all branches of a frozen layer: its skips, and norms on sums, whose biases pass by it too."""

    def takes(self, block: Block, half: Half, branch: Branch) -> bool:
        """False for every branch: paths go by the skips alone."""
        return False


class TwoPasses:
    """Shares by layer and head: `forward` is called with each layer in order, then `back` gives the shares."""

    def __init__(self, net: Transformer, X: Tokens, valid: Bool[Tensor, "batch token"]) -> None:
        self.net, self.valid, self.first = net, valid, X
        self.settings, self.whole = net.settings(X, valid), bool(valid.all())
        self.terms = torch.stack([X, torch.zeros_like(X)])
        self.inputs: list[tuple[Tokens, Parts]] = []
        self.closure = float("nan")  # How far the terms are from adding up to the output; known once `back` begins

    def _frozen(self, X: Tokens) -> Frozen:
        """A frozen network that has this last state; its layers are frozen one at a time."""
        net = self.net
        last = FrozenNorm.of(net.arch, net.weights.final_norm, X) if net.arch.final_norm else None
        output = net.finish(X) * self.valid[..., None]
        return Frozen(net, self.first, self.valid, (), last, output, None, self.whole)

    @torch.no_grad()
    def forward(self, layer: FrozenLayer, X: Tokens) -> None:
        """Carry what started at the embedding and at biases through a layer, which was frozen on the tokens X."""
        self.inputs.append((X, self.terms))
        rules = _OneLayer(self._frozen(X), layer, 1)
        self.terms = rules.through(layer.block, Terms(self.terms, 1)).parts

    def back(self, X: Tokens) -> Iterator[tuple[int, LayerShares, LayerShares]]:
        """Yield (layer from 1, shares of the output, shares of its residual), the last layer first.

        Args:
            X: The last state, before the final norm.

        Raises:
            ClosureError: The terms do not add up to the output.
        """
        frozen = self._frozen(X)
        ended = FrozenRules(frozen)
        self.closure = closure_of(ended.end(Terms(self.terms, 1)).sum(0), frozen)
        output, noise = frozen.output, uniform(frozen.output, self.valid)
        targets = [output, centred_tokens(output, self.valid)]
        sizes = [size_of(target) for target in targets]
        with torch.enable_grad():
            Z = torch.zeros_like(X)[None].requires_grad_(True)
            Y = ended.end(Terms(Z))[0]
            scaled = [target / size[:, None, None] for target, size in zip(targets, sizes, strict=True)]
            pulled = [torch.autograd.grad(Y, Z, target, retain_graph=True)[0][0] for target in scaled]
        for block in reversed(self.net.blocks):
            X, terms = self.inputs[block.index]
            freezing = FreezingRules(self.net.arch, self.settings)
            with torch.no_grad():
                traverse(block, freezing, X)
            shares = list(self._shares(freezing.layers[block.index], frozen, terms, pulled))
            pulled = [before for before, _ in shares]
            of_output, of_residual = (
                LayerShares(*(values / size[..., None] if values.ndim == 3 else values / size for values in part))
                for (_, part), size in zip(shares, sizes, strict=True)
            )
            noisy = (noise[:, None] if values.ndim == 3 else noise for values in of_residual)
            masked = (values.masked_fill(mask, torch.nan) for values, mask in zip(of_residual, noisy, strict=True))
            yield block.index + 1, of_output, LayerShares(*masked)
        self.net.weights.layers.release()

    def _shares(
        self, layer: FrozenLayer, frozen: Frozen, terms: Parts, pulled: list[Tokens]
    ) -> Iterator[tuple[Tokens, LayerShares]]:
        """For each target: what it is before the layer, and its inner products with what passes through the layer."""
        block = layer.block
        rules = _OneLayer(frozen, layer, 1)
        with torch.no_grad():
            after = rules.through(block, Terms(terms, 1)).parts
            added = after - _PastLayer(frozen, layer, 1).through(block, Terms(terms, 1)).parts
        linear = _OneLayer(frozen, layer, None)
        with torch.enable_grad():
            Z = torch.zeros_like(terms[:1]).requires_grad_(True)  # the map is linear: its slope is the same anywhere
            Y = linear.through(block, Terms(Z)).parts[0]
        nodes = [Z, *(node for node in (linear.head_terms, linear.mlp_terms) if node is not None)]
        values = [node for node in (rules.head_terms, rules.mlp_terms) if node is not None]
        heads = terms.new_zeros((*terms.shape[:2], self.net.arch.heads))
        mlp = terms.new_zeros(terms.shape[:2])
        for target in pulled:
            before, *slopes = torch.autograd.grad(
                Y, nodes, target, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            shares = LayerShares((added * target).sum((2, 3)), mlp, heads)
            for value, slope in zip(values, slopes, strict=True):
                if value.ndim == 5:  # [start, batch, head, token, head_width]
                    shares = shares._replace(heads=(value * slope).sum((3, 4)))
                else:
                    shares = shares._replace(mlp=(value * slope).sum((2, 3)))
            yield before[0], shares
