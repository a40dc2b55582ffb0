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
    ahead: list[nn.Module | None] = [*reversed(modules)]
    while ahead:
        part = ahead.pop()
        if part is not None and part not in found:
            found[part] = None
            if part._modules:
                ahead.extend(reversed(part._modules.values()))
    return list(found)


def holds(some: Iterable[nn.Module], kinds: tuple[type, ...]) -> bool:
    """Whether one of these modules is of such a class; few classes make up a model, and are asked once.

    >>> holds(parts(nn.TransformerEncoderLayer(8, 2)), (nn.Linear,))
    True
    """
    return any(issubclass(kind, kinds) for kind in set(map(type, some)))


def weights(some: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The weights of these modules themselves, not of what is in them."""
    return (weight for part in some for weight in part._parameters.values() if weight is not None)
