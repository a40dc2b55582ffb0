"""Skips that never let tokens collapse, at arbitrarily small beta (Dong et al. 2021, section 3).

Heads read the first half of a token's entries and write to the second. With a skip of weight one the
first half then stays as it was, whatever the heads attend to and however small or large their weights
are, so

    ||res(X_L)|| >= ||res(X_0)||    for every depth L,

with equality at layer 0 when the second half starts at zero. W_V = 0 is the least of infinitely many such
networks.
"""

import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, Transformer
from rankscope.shapes import Float


def non_collapsing_network(width: int, heads: int, layers: int, scale: float, seed: int = 0) -> Transformer:
    """A network of attention and skips that keeps the residual of every input of `lasting_tokens`.

    >>> net = lasting(width=8, heads=2, layers=3, scale=1e-3)
    >>> X = lasting_tokens(tokens=5, width=8)
    >>> bool((net.run(X).output[..., :4] == X[..., :4]).all())
    True
    """
    if width % 2:
        raise ArchitectureError(
            f"width must be even, half to read and half to write; got {width}", subject="width"
        )
    arch = Architecture(
        layers=layers, width=width, heads=heads, mlp="none", norm="none", biases=False,
    )  # fmt: skip
    tensors = Transformer.random(arch, seed, init="xavier").state()
    for name, tensor in tensors.items():
        if name.endswith("value.weight"):
            tensor = tensor * scale
            tensor[width // 2 :] = 0.0  # reads the first half
        elif name.endswith("output.weight"):
            tensor = tensor.clone()
            tensor[..., : width // 2] = 0.0  # writes to the second
        tensors[name] = tensor
    return Transformer.from_weights(arch, tensors)


def non_collapsing_tokens(tokens: int, width: int, seed: int = 0) -> Float[Tensor, "1 token width"]:
    """Random tokens whose second half is zero."""
    X = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    X[..., width // 2 :] = 0.0
    return X
