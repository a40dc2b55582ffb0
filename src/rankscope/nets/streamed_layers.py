"""Layers that are not in memory: read when they are asked for, one at a time, and let go.

Whatever walks through a network's layers in order reads each once; whatever asks for the same layer again
finds the last one still there. Variants of a network share its source: a layer that one of them holds is
handed to the others, so that those which go side by side read each layer once for all.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from torch import Tensor

Item = TypeVar("Item")


class LayerSource(Generic[Item]):
    """Where layers are read from, by number."""

    def __init__(self, read: Callable[[int], Item], like: Tensor) -> None:
        self._read = read
        self.like = like
        """A tensor without entries, of the dtype and on the device of all."""
        self.note: Callable[[Item], Any] | None = None
        """What is to be noted of every layer that comes by."""
        self.noted: dict[int, Any] = {}
        self._held: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """Layers that somebody still holds."""
        self._moved: WeakValueDictionary[Hashable, LayerSource[Item]] = WeakValueDictionary()

    def __call__(self, place: int) -> Item:
        """A layer, read anew where nobody holds it."""
        held: Item | None = self._held.get(place)
        if held is not None:
            return held
        item = self._held[place] = self._read(place)
        if self.note is not None and place not in self.noted:
            self.noted[place] = self.note(item)
        return item

    def moved(self, move: Callable[[Item], Item], like: Tensor, how: Hashable) -> "LayerSource[Item]":
        """Where the same layers come from, each changed after it is read; `how` names the change, and the
        same name gives the same source."""
        found = self._moved.get(how)
        if found is None:
            found = self._moved[how] = LayerSource(lambda place: move(self(place)), like)
        return found


class StreamedLayers(Generic[Item]):
    """The layers of a network, in any order, one of them in memory. A sequence, though not by name: whoever
    checks types at run time would read some."""

    def __init__(self, source: LayerSource[Item], places: Sequence[int]) -> None:
        self.source, self.places = source, tuple(places)
        self._last: tuple[int, Item] | None = None

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Item:
        place = self.places[index]
        if self._last is None or self._last[0] != place:
            self._last = None  # before the next is read
            self._last = place, self.source(place)
        return self._last[1]

    def moved(self, move: Callable[[Item], Item], like: Tensor, how: Hashable) -> "StreamedLayers[Item]":
        """Return the layers with each changed after it is read."""
        return StreamedLayers(self.source.moved(move, like, how), self.places)

    def kept(self) -> tuple[Item, ...]:
        """All of them in memory; one that comes several times, once."""
        found = {place: self.source(place) for place in dict.fromkeys(self.places)}
        return tuple(found[place] for place in self.places)


def picked(
    layers: tuple[Item, ...] | StreamedLayers[Item], indices: Sequence[int]
) -> tuple[Item, ...] | StreamedLayers[Item]:
    """Some of the layers, in that order; none is read for it."""
    if isinstance(layers, StreamedLayers):
        return StreamedLayers(layers.source, [layers.places[index] for index in indices])
    return tuple(layers[index] for index in indices)


def let_go(layers: tuple[Any, ...] | StreamedLayers[Any]) -> None:
    """At the end of a pass: of layers that are read, none stays in memory."""
    if isinstance(layers, StreamedLayers):
        layers._last = None
