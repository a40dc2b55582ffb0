"""Nested tuples, dicts and dataclasses of tensors whose first axis is that of samples: cut, joined, made plain numbers.

`replay.py` asks for the tensors and the form of what goes into a graph and comes out of it. `profiles/captured.py` and
`theory/observation.py` read several layers as one batch, their samples one after the other (`joined`), which spares a
GPU kernels; the numbers of all layers then leave the GPU in one copy (`NumberTable`).
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rankscope.nets import Structure, converted, outline
from rankscope.shapes import Float


def tensors_of(structure: Any) -> list[Tensor]:
    """The tensors of a structure, each once."""
    tensors: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    converted(structure, note)
    return tensors


def form(structure: Any) -> Hashable:
    """Equal for structures that differ in nothing but the values of their tensors."""
    tensors = tensors_of(structure)
    positions = {id(t): position for position, t in enumerate(tensors)}
    places = repr(outline(structure, lambda t: positions[id(t)]))
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors), places


def samples(structure: Structure, start: int, count: int) -> Structure:
    """The samples of a structure from number `start` on, `count` of them."""
    return converted(structure, lambda t: t[start : start + count])


def parts(structure: Structure, count: int) -> list[Structure]:
    """A structure cut into `count` of equally many samples each: the inverse of `joined`."""
    cut: dict[int, tuple[Tensor, ...]] = {id(t): t.chunk(count) for t in tensors_of(structure)}
    return [converted(structure, lambda t, index=index: cut[id(t)][index]) for index in range(count)]


def joined(structures: Sequence[Structure]) -> Structure:
    """The samples of several structures as those of one; what is no tensor is that of the first."""
    if len(structures) == 1:
        return structures[0]
    return converted(structures[0], lambda *tensors: torch.cat(tensors), *structures[1:])


def joined_by_form(structures: Sequence[Structure]) -> Iterator[tuple[list[int], Structure]]:
    """(the indices of structures of one form that follow each other, these as one), one such group after the other."""
    for _, group in groupby(range(len(structures)), lambda index: form(structures[index])):
        indices = list(group)
        yield indices, joined([structures[index] for index in indices])


class NumberTable:
    """Which row of a table has the numbers of each tensor of a structure; a column is a sample."""

    def __init__(self, structure: Any, rows: dict[int, int]) -> None:
        """`rows` gives the row of each tensor by its id."""
        self._rows: dict[int, int] = {}  # by the id of the empty tensor that stands in the place of a tensor

        def place(t: Tensor) -> Tensor:
            empty = torch.empty(0)
            self._rows[id(empty)] = rows[id(t)]
            return empty

        self._structure = converted(structure, place)

    @classmethod
    def of(cls, structure: Any, count: int) -> "tuple[NumberTable, Float[Tensor, 'number sample']]":
        """(which row is which, the table) of tensors of at most `count` entries; shorter ones end in zeros."""
        alike: dict[Any, list[Tensor]] = {}
        for t in tensors_of(structure):
            alike.setdefault((len(t), t.dtype), []).append(t)
        rows = {id(t): row for row, t in enumerate(chain.from_iterable(alike.values()))}
        blocks = [pad(torch.stack(block).double(), (0, count - length)) for (length, _), block in alike.items()]
        return cls(structure, rows), torch.cat(blocks)

    def by_sample(self, table: Float[Tensor, "number sample"]) -> list[Any]:
        """The structure of each sample, with a float in the place of each tensor."""
        columns = table.cpu().T.tolist()
        return [
            converted(self._structure, lambda t, numbers=numbers: numbers[self._rows[id(t)]]) for numbers in columns
        ]
