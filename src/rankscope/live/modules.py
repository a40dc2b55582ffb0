"""The modules and weights in a module, without their names: torch's own walk makes one for each, and that is
most of what finding a small model's blocks costs."""

from collections.abc import Iterable, Iterator

from torch import Tensor, nn


def parts(*modules: nn.Module) -> list[nn.Module]:
    """Everything in these modules, they themselves first, each once, in the order of `modules()`.

    >>> layer = nn.TransformerEncoderLayer(8, 2)
    >>> parts(layer) == list(layer.modules())
    True
    """
    found: dict[nn.Module, None] = {}

    def walk(some: Iterable[nn.Module | None]) -> None:
        for part in some:
            if part is not None and part not in found:
                found[part] = None
                walk(part._modules.values())

    walk(modules)
    return list(found)


def weights(some: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The weights of these modules themselves, not of what is in them."""
    return (weight for part in some for weight in part._parameters.values() if weight is not None)
