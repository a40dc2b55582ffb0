"""Shares of the output by layer and head with one layer in memory: the network goes forward once, and back once.

`by_part.py` carries what passes through each layer to the end, beside all others: as many terms as there are layers,
and for heads a graph of the whole network. Here a share is `<term, A^T output>`, A the frozen map of all later layers.
Forward, the tokens that each layer reads are kept, apart by where they started (embedding, bias). Back, layer by layer,
`A^T output` is pulled through the layer, which is frozen again on the tokens that were kept. So no layer is needed but
the one at hand, and layers may be read from files. It costs two readings of every layer and the time of about six
forward passes.

Called by `depths/card.py`, block after block; uses the rules of `terms.py`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.nets import Block, Branch, Half, Tokens, Transformer, release, traverse
from rankscope.paths.by_part import centred_tokens, uniform
from rankscope.paths.frozen import FreezingRules, Frozen, FrozenLayer, FrozenNorm, Parts
from rankscope.paths.lengths import closure_of, size_of
from rankscope.paths.terms import FrozenRules, HeadTerms, Terms
from rankscope.shapes import Bool, Float

STARTS = 2  # Where paths start: 0 at the embedding, 1 at a bias


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
        release(self.net.weights.layers)

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
