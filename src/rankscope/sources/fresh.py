"""`fresh`: a network of a usual size with random weights, nothing downloaded."""

import torch

from rankscope.nets import Transformer
from rankscope.sources.presets import preset


def fresh(
    name: str,
    seed: int = 0,
    init: str = "bert",
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Transformer:
    """The architecture of that name with untrained weights, N(0, 0.02) unless `init` says otherwise.

    >>> fresh("bert-tiny").arch.layers
    2
    """
    return Transformer.random(preset(name), seed=seed, init=init, dtype=dtype, device=device)
