"""`PathModel`: a network whose head reads only the sum of its paths of chosen lengths, to be trained on them.

The head's input sums only paths of the chosen lengths. Attention patterns and LayerNorm scales come from the full
forward pass. A LayerNorm follows, so a term's overall scale does not matter (Dong et al. 2021, theorem 2.1 and figure
4). With P_h and W_h the pattern and the value-output weights of head h, the sum Y_l[k] of all paths of length k through
l layers is `Y_l[k] = skip Y_{l-1}[k] + sum_h P_h Y_{l-1}[k-1] W_h`, up to the scales of norms.

Gradients are exact: they go through the terms, and through attention patterns and norm scales unless `detached`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.errors import LabError
from rankscope.lab import Interface, Model
from rankscope.nets import Dropout, Transformer
from rankscope.paths import Frozen, FrozenLayer, FrozenNorm, frozen_pass, length_terms, require_linear
from rankscope.shapes import Bool, Float

EPS = 1e-12  # Of the norm before the head: terms of one length may be small
Stack = Float[Tensor, "length batch token width"]


class PathModel(Model):
    """A model whose head reads `norm(sum_k lengths[k] Y_k)`, Y_k the sum of the terms of all paths of length k.

    Args:
        net: The network between embedding and head; the module has a copy of its weights.
        task: What a token is, and how many classes there are.
        std: Standard deviation of the entries of embedding and positions; `1 / sqrt(width)` if left out.
        seed: Decides embedding, positions and head.
        lengths: The weight of each length from 0 to the number of layers. They are a buffer, which may be changed
            between steps.
        detached: Attention patterns and norm scales are detached; queries and keys get no gradient.

    Raises:
        LabError: There are not as many weights as lengths, or all are zero.
        PathError: The network has a part that paths do not go through.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> model = PathModel(net, Interface(classes=5, symbols=5), lengths=(0, 0, 1))
    >>> model.terms(torch.tensor([[0, 3, 1]])).shape, model(torch.tensor([[0, 3, 1]])).shape
    (torch.Size([3, 1, 3, 8]), torch.Size([1, 3, 5]))
    """

    lengths: Tensor

    def __init__(
        self, net: Transformer, task: Interface, std: float | None = None, seed: int = 0, *,
        lengths: Sequence[float], detached: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(net, task, std, seed)
        require_linear(net)
        if len(lengths) != net.arch.layers + 1 or not any(lengths):
            wanted = f"lengths must have {net.arch.layers + 1} weights, one for each from 0, and not all zero"
            raise LabError(f"{wanted}; got {tuple(lengths)}", subject="lengths")
        self.detached = detached
        self.register_buffer("lengths", torch.tensor(lengths, dtype=net.dtype, device=net.device))

    def terms(self, inputs: Tensor, padding: Bool[Tensor, "batch token"] | None = None) -> Stack:
        """The sum of the terms of all paths of each length, from the embedding and from biases."""
        X, net = self.tokens(inputs), self.net.current()
        frozen = frozen_pass(net, X, padding, None if padding is not None else self.net.masks_for(X))
        embedding, bias = length_terms(_detached(frozen) if self.detached else frozen)
        terms = embedding + bias if frozen.has_constants else embedding
        return terms if frozen.order is None else torch.stack([frozen.restored(Y) for Y in terms])

    def forward(
        self, inputs: Tensor, padding: Bool[Tensor, "batch token"] | None = None, drop: Dropout | None = None
    ) -> Tensor:
        """Logits of the weighted sum of terms, normalised."""
        if drop is not None:
            raise LabError("paths are of a network without dropout; got some: train with dropout=0", subject="dropout")
        return self.read(self.terms(inputs, padding), self.lengths, padding)

    def read(self, terms: Stack, lengths: Float[Tensor, " length"], padding: Tensor | None = None) -> Tensor:
        """Logits of terms weighted by length, normalised."""
        return self.logits(self.readout(terms, lengths), padding)

    def readout(self, terms: Stack, lengths: Float[Tensor, " length"]) -> Float[Tensor, "batch token width"]:
        """What the head reads: the weighted sum of terms, each token normalised without gain and bias."""
        Y = torch.einsum("k,kbtd->btd", lengths, terms)
        return F.layer_norm(Y, Y.shape[-1:], eps=EPS)


def _detached(frozen: Frozen) -> Frozen:
    """The frozen network with all that was measured taken out of the graph of gradients; weights stay in it."""
    layers = []
    for layer in frozen.layers:
        copy = FrozenLayer(layer.block)
        copy.P = layer.P.detach()
        copy.norms = {name: _held(norm) for name, norm in layer.norms.items()}
        copy.gate, copy.head_gate = (None if gate is None else gate.detach() for gate in (layer.gate, layer.head_gate))
        copy.kept = {name: tensor.detach() for name, tensor in layer.kept.items()}
        layers.append(copy)
    last: Any = None if frozen.last is None else _held(frozen.last)
    return replace(frozen, layers=tuple(layers), last=last)


def _held(norm: FrozenNorm) -> FrozenNorm:
    return replace(norm, scale=norm.scale.detach())
