"""A network on disk, in a format of its own, and the fingerprint by which it is known.

    rankscope.json        the architecture, which tensors are one and the same, the fingerprint, the origin
    network.safetensors   every tensor once

Each file is written atomically, the first one last; the fingerprint tells whether they belong together. It is
the SHA-256 of the architecture and of a hash of each tensor, so that layers can be hashed in any order.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import ArchitectureError, FileError, require
from rankscope.files import atomic, writable_folder, write_text
from rankscope.nets.architecture import Architecture
from rankscope.nets.structures import named
from rankscope.nets.tensors import shapes
from rankscope.nets.weights import Weights

ABOUT, TENSORS = "rankscope.json", "network.safetensors"
FORMAT = 1


def is_saved(folder: str | Path) -> bool:
    """Whether a folder holds a network in this format."""
    return (Path(folder) / ABOUT).is_file()


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Every tensor once, atomically; which names are of a tensor that another name has."""
    from safetensors.torch import save_file

    first: dict[Any, str] = {}
    same: dict[str, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else name
        if first.setdefault(key, name) != name:
            same[name] = first[key]
    kept = {name: tensor for name, tensor in tensors.items() if name not in same}
    with atomic(path) as temporary:
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in kept.items()}, temporary)
    return same


def read_tensors(path: Path, same: dict[str, str]) -> dict[str, Tensor]:
    """What `write_tensors` wrote; a tensor of several names comes once."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
        return {**tensors, **{name: tensors[kept_name] for name, kept_name in same.items()}}
    except (OSError, SafetensorError, KeyError) as error:
        sentence = f"{path} must hold the tensors of a saved network; it cannot be read ({error}): save it again"
        raise FileError(sentence, subject=str(path)) from error


def write(folder: str | Path, arch: Architecture, state: dict[str, Tensor], about: dict[str, Any]) -> Path:
    """A network; `about` is what else `rankscope.json` holds."""
    path = Path(folder)
    writable_folder(path)
    same = write_tensors(path / TENSORS, state)
    fields = {"format": FORMAT, "architecture": arch.to_dict(), "same": same, **about}
    write_text(path / ABOUT, json.dumps(fields, indent=1))
    return path


def read(folder: str | Path) -> tuple[Architecture, dict[str, Tensor], dict[str, Any]]:
    """(architecture, tensors, all fields of `rankscope.json`)."""
    path = Path(folder)
    try:
        fields = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        known = fields["format"]
        sentence = f"{path} must be a network saved in format {FORMAT}; it is of format {known!r}"
        require(known == FORMAT, f"{sentence}: load it with the version that wrote it", FileError, str(path))
        arch = Architecture.from_dict(fields["architecture"])
        same = dict(fields["same"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, FileError | ArchitectureError):
            raise
        sentence = f"{path / ABOUT} must describe a network that was saved; it cannot be read ({error})"
        raise FileError(sentence, subject=str(path)) from error
    return arch, read_tensors(path / TENSORS, same), fields


def fingerprint(arch: Architecture, weights: Weights, beside: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the tensors that the architecture reads, and of those `beside`."""
    layers, mine = weights.layers, shapes(arch)
    digest_of = digests(weights, layers=False)
    for index in range(1 if arch.shared else len(layers)):
        layer = layers.noted(index, digests)
        digest_of |= {f"layers.{index}.{name}": sha for name, sha in layer.items()}
    known = {name: sha for name, sha in digest_of.items() if name in mine}
    known |= {name: digest(tensor) for name, tensor in beside.items()}
    lines = [json.dumps(arch.to_dict(), sort_keys=True), *(f"{name} {known[name]}" for name in sorted(known))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digests(structure: object, layers: bool = True) -> dict[str, str]:
    """Return the digest of every tensor of a structure by its dotted name; without `layers` if False."""
    tensors = named(structure, layers=layers)
    with ThreadPoolExecutor() as pool:  # hashing of billions of numbers takes longer than a pass over them
        return dict(zip(tensors, pool.map(digest, tensors.values()), strict=True))


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of the dtype, shape and numbers of a tensor."""
    sha = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    flat = flat.clone() if flat.numel() < 2 else flat  # the stride of one element may be anything
    sha.update(flat.view(torch.uint8).numpy().data)
    return sha.hexdigest()
