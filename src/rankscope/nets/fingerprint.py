"""SHA-256 over an architecture and every tensor: the same network gives the same string.

It is made of a hash of each tensor, so that layers can be hashed in any order, as they come by.
"""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from rankscope.nets.architecture import Architecture
from rankscope.nets.streamed_layers import StreamedLayers
from rankscope.nets.tensors import shapes
from rankscope.nets.weights import Weights, named


def fingerprint(arch: Architecture, weights: Weights, beside: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the tensors that the architecture reads, and of those `beside`."""
    layers, mine = weights.layers, shapes(arch)
    digest_of = digests(weights, layers=False)
    for index in range(1 if arch.shared else len(layers)):
        if isinstance(layers, StreamedLayers):
            noted, index_in_source = layers.source.noted, layers.places[index]
            if index_in_source not in noted:
                noted[index_in_source] = digests(layers[index])
            layer = noted[index_in_source]
        else:
            layer = digests(layers[index])
        digest_of |= {f"layers.{index}.{name}": sha for name, sha in layer.items()}
    known = {name: sha for name, sha in digest_of.items() if name in mine}
    known |= {name: digest(tensor) for name, tensor in beside.items()}
    lines = [json.dumps(arch.to_dict(), sort_keys=True), *(f"{name} {known[name]}" for name in sorted(known))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digests(structure: object, layers: bool = True) -> dict[str, str]:
    """Return the digest of every tensor of a structure by its dotted name; without `layers` if False."""
    return {name: digest(tensor) for name, tensor in named(structure, layers=layers).items()}


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of the dtype, shape and numbers of a tensor."""
    sha = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    flat = flat.clone() if flat.numel() < 2 else flat  # the stride of one element may be anything
    sha.update(flat.view(torch.uint8).numpy().data)
    return sha.hexdigest()
