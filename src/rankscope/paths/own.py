"""A path with attention of its own: the network along one path, everything computed from the path's own
tokens.

The theorem's path takes attention from the full network (`shared`). The code of Dong et al. 2021 runs the
path as a network of its own: one head, or the skip, in every layer, with attention, norms, MLPs and biases
computed from what the path itself has come to (`own`). The terms do not add up to the output.
"""

from dataclasses import replace

from torch import Tensor

from rankscope.nets.block import Setting, attention, mlp
from rankscope.nets.norms import normalise
from rankscope.nets.transformer import Transformer
from rankscope.nets.weights import NormWeights
from rankscope.paths.counts import Path


class OwnPaths:
    """Steps of paths through a network, one layer at a time."""

    def __init__(self, net: Transformer, X: Tensor, real: Tensor) -> None:
        arch = net.arch
        self.net, self.X, self.real = net, X, real
        self.setting = Setting.of(arch, net.weights, X, real)
        self.alone = [replace(arch, kept_heads=((head,),) * arch.layers) for head in range(arch.heads)]

    def matrices(self, path: Path) -> dict[int, Tensor]:
        """By layer in which the path takes a head: that head's attention `[batch, token, token]`."""
        found, X = {}, self.X
        for index, head in enumerate(path):
            if head is not None:
                found[index] = self._attended(index, X, head)[1][:, head]
            X = self.step(index, X, head)
        return found

    def _attended(self, index: int, X: Tensor, head: int) -> tuple[Tensor, Tensor, Tensor]:
        arch, w = self.net.arch, self.net.weights.layers[index]
        bare = arch.norm_place == "post" or index in arch.bare_layers
        inside = X if bare else normalise(X, arch.norm, w.attention_norm, arch.norm_eps)
        return attention(self.alone[head], index, w, inside, self.setting)

    def step(self, index: int, X: Tensor, head: int | None) -> Tensor:
        """Tokens `[batch, token, width]` after layer `index`, through that head or past all."""
        arch, w = self.net.arch, self.net.weights.layers[index]
        post, sandwich = arch.norm_place == "post", arch.norm_place == "sandwich"

        def norm(weights: NormWeights, Y: Tensor) -> Tensor:
            return normalise(Y, arch.norm, weights, arch.norm_eps)

        def branch_of_mlp(Y: Tensor) -> Tensor:
            out = mlp(arch, w, Y if post else norm(w.mlp_norm, Y))
            return norm(w.mlp_after, out) if sandwich else out

        serial = arch.mlp != "none" and not arch.parallel
        if head is None:
            Y = arch.attention_skip * X
            if arch.parallel and arch.mlp != "none":
                Y = Y + branch_of_mlp(X)
        else:
            Y, *_ = self._attended(index, X, head)
            Y = norm(w.attention_after, Y) if sandwich else Y
        Y = norm(w.attention_norm, Y) if post else Y
        if serial:
            Y = arch.mlp_skip * Y + branch_of_mlp(Y)
            Y = norm(w.mlp_norm, Y) if post else Y
        return Y * self.real[..., None]
