"""A network on disk, in a format of its own: a folder of two files and what its origin adds.

    rankscope.json        the architecture, which tensors are one and the same, the fingerprint, the origin
    network.safetensors   every tensor once

Each file is written atomically, the first one last; the fingerprint tells whether they belong together.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from rankscope.errors import ArchitectureError, FileError
from rankscope.files import atomic, writable_folder, write_text
from rankscope.nets.architecture import Architecture

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
        save_file(
            {name: tensor.detach().cpu().contiguous().clone() for name, tensor in kept.items()}, temporary
        )
    return same


def read_tensors(path: Path, same: dict[str, str]) -> dict[str, Tensor]:
    """What `write_tensors` wrote; a tensor of several names comes once."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
        return {**tensors, **{name: tensors[kept_name] for name, kept_name in same.items()}}
    except (OSError, SafetensorError, KeyError) as error:
        raise FileError(
            f"{path} must hold the tensors of a saved network; it cannot be read ({error}): save it again",
            subject=str(path),
        ) from error


def write(folder: str | Path, arch: Architecture, state: dict[str, Tensor], about: dict[str, Any]) -> Path:
    """A network; `about` is what else `rankscope.json` holds."""
    path = Path(folder)
    writable_folder(path)
    same = write_tensors(path / TENSORS, state)
    fields = {"format": FORMAT, "architecture": arch.to_dict(), "same": same, **about}
    write_text(path / ABOUT, json.dumps(fields, indent=1))
    return path


def read(folder: str | Path) -> tuple[Architecture, dict[str, Tensor], dict[str, Any]]:
    """(architecture, tensors, all that `rankscope.json` says)."""
    path = Path(folder)
    try:
        fields = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        known = fields["format"]
        if known != FORMAT:
            raise FileError(
                f"{path} must be a network saved in format {FORMAT}; it is of format {known!r}: load it "
                "with the version that wrote it",
                subject=str(path),
            )
        arch = Architecture.from_dict(fields["architecture"])
        same = dict(fields["same"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, FileError | ArchitectureError):
            raise
        raise FileError(
            f"{path / ABOUT} must describe a network that was saved; it cannot be read ({error}): save it "
            "again",
            subject=str(path),
        ) from error
    return arch, read_tensors(path / TENSORS, same), fields
