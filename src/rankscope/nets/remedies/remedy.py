"""What a remedy is: a change of an architecture, and of the tensors where it needs some."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from rankscope.nets.fields import Fields

Arch = TypeVar("Arch", bound=Fields)


@runtime_checkable
class Remedy(Protocol):
    """Goes onto a network. One of your own is any object with these two."""

    @property
    def name(self) -> str:
        """What it is called."""

    def applied(self, arch: Any) -> Any:
        """The architecture with it: other fields, parts more (`parts.py`)."""


class Built:
    """What the built-in remedies have in common. Each is a frozen dataclass of its numbers; those that are
    parts of a block are parts themselves, and tensors that are trained lie with the weights of each layer
    under `parts.NAME`."""

    name: ClassVar[str]
    says: ClassVar[str]
    """In one line, what it does."""
    source: ClassVar[str]
    zero: ClassVar[Mapping[str, float]] = {}
    """The numbers at which it changes nothing; empty where there are none."""

    def applied(self, arch: Arch) -> Arch:
        """The architecture with this part as its last."""
        replaced: Arch = arch.replace(parts=(*arch.parts, self))  # type: ignore[attr-defined]
        return replaced

    def tensors(self, arch: Fields, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a network that gets the remedy, where it changes some."""
        return state

    def spec(self) -> str:
        """As the command line and files write it: `contranorm:s=0.1`."""
        numbers: Any = fields(self) if is_dataclass(self) else ()
        said = ",".join(f"{each.name}={getattr(self, each.name)!r}" for each in numbers)
        return f"{self.name}:{said}" if said else self.name
