"""sigmaReparam (Zhai et al. 2023): every matrix W is trained as `g W / sigma`, sigma its largest singular value and g a
number of its own that is trained too.

sigma is followed by one step of the power method in each forward pass of a training, from the vector that the
last one left (the singular vector, at first):

    v <- W^T u / |W^T u|,   u <- W v / |W v|   (without gradient),   sigma = u^T W v   (with gradient to W)

for `x W` with W of shape `[in, out]`. In evaluation the step is made and forgotten. While W moves, sigma is
below its norm, as it is in the published code.

As published, matrices of the blocks, of patches and points and of the head have it, tables of symbols and
positions, norms and biases do not. Queries, keys and values have a g each, and all heads of a layer share it;
the published vision models have one for the three, which are one matrix there. g starts at sigma, where the
network starts as it was drawn (published for images), or at one (published for speech, and the paper's).
Experts of a mixture are left as they are. `Trainable.network()` gives the product, as plain weights.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rankscope.errors import LabError, require_one_of

STARTS = ("sigma", "one")  # What g starts from
MATRICES = ("query", "key", "value", "gate", "output", "up", "down", "query_latent", "key_latent")
"""Of a block, by the last part of their names."""


class SigmaReparam(nn.Module):
    """The parametrisation `g W / sigma(W)` of one weight; a weight with three axes is the matrix of its first
    `rows` axes by the others."""

    u: Tensor

    def __init__(self, weight: Tensor, rows: int, start: str) -> None:
        super().__init__()
        self.rows = rows
        left, size, _ = torch.linalg.svd(self.matrix(weight.detach()), full_matrices=False)
        self.register_buffer("u", left[:, 0].clone())
        self.g = nn.Parameter(size[0].clone() if start == "sigma" else torch.ones_like(size[0]))

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as a matrix `[in, out]`."""
        return weight.flatten(0, self.rows - 1).flatten(1)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that the network uses."""
        W = self.matrix(weight)
        with torch.no_grad():
            v = nn.functional.normalize(self.u @ W, dim=0)
            u = nn.functional.normalize(W @ v, dim=0)
            if self.training:
                self.u.copy_(u)
        return weight * (self.g / (u @ W @ v))


def reparametrise(module: nn.Module, start: str = "sigma") -> None:
    """Put it on every matrix of a `Trainable` or a `Model`, in place.

    >>> from rankscope.lab import Trainable
    >>> from rankscope.nets import Architecture, Transformer
    >>> module = Trainable(Transformer.random(Architecture(layers=1, width=8, heads=2)))
    >>> reparametrise(module, start="one")
    >>> W = module.network().state_dict()["layers.0.mlp.up.weight"]
    >>> round(float(torch.linalg.matrix_norm(W, 2)), 12)
    1.0
    """
    require_one_of("start of g", start, STARTS, LabError, "sigma_reparam")
    for name, part in list(module.named_modules()):
        weight, last = getattr(part, "weight", None), name.rpartition(".")[2]
        if not isinstance(weight, Tensor) or weight.ndim < 2:
            continue
        if ".layers." in f".{name}" and (last not in MATRICES or ".experts." in name):
            continue
        rows = 2 if last == "output" else 1
        parametrize.register_parametrization(part, "weight", SigmaReparam(weight, rows, start))
