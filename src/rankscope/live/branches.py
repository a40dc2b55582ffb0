"""Follows what branches of blocks give, from function to function of torch, to where it is added.

A block computes `x + f(x)`: f is the branch, x comes by the skip. Nothing in a module says where that sum is. So while
a model runs, `SkipTracer` notes of every tensor which others it was computed from. Where something that comes from a
branch is added to a tensor that the branch itself was computed from, the sum is `x + f(x)`:

- To leave out the branch, its module's hook makes what it gives 0, and the tracer only checks that this 0 is what
  arrives at the sum. It may meet other branches on its way, as in `attention + mlp + x`.
- To leave out the skip, the tracer gives `f(x)` for the sum. Nothing is subtracted, so no digit is lost.

What cannot be followed (a kernel that is no function of torch, a sum that is made otherwise) is refused when the call
of the model ends. `left_out.py` begins and ends calls, and calls `follow` when the module of a branch has returned.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rankscope.errors import WatchError
from rankscope.live.attention.softmax import COPIES, tensors_in

SUMS, SUMS_IN_PLACE = {"add", "__add__", "__radd__"}, {"add_", "__iadd__"}


class BranchOutput(NamedTuple):
    """The output of a branch in one of the branch's calls, until the sum is found to which it is added."""

    name: str
    kind: str  # "branches": it was made 0; "skips": the tensor that it is added to is to be left out
    ancestors: set[int]  # the numbers of all tensors that it was computed from


class SkipTracer(TorchFunctionMode):
    """Finds the sum x + f(x) of a block while the model runs, and makes it f(x) where the skip x is left out. For that
    it records, at every function of torch, which tensors the result was computed from. Tensors are numbered in the
    order in which they were made; a copy has the number of its original. No tensor is kept alive."""

    def __init__(self) -> None:
        super().__init__()
        self.active = False  # the model runs
        self.clear()

    def clear(self) -> None:
        """Forget everything that a call of the model has left."""
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by the id of a tensor
        self._parents: list[tuple[int, ...]] = []  # of each number, those that it was computed from
        self._sources: list[frozenset[int]] = []  # of each number, the branches that it comes from
        self._partial: set[int] = set()  # sums of a branch that was made 0 and of other branches
        self._followed: list[BranchOutput] = []
        self._open: set[int] = set()  # branches that were not added to anything yet

    def follow(self, name: str, kind: str, x: Tensor) -> None:
        """Follow x, which the branch `name` gave, until it is added to something that it was computed from."""
        number = self._number(x)
        ancestors, ahead = set[int](), [number]
        while ahead:
            new = [parent for parent in self._parents[ahead.pop()] if parent not in ancestors]
            ancestors.update(new)
            ahead += new
        self._open.add(len(self._followed))
        self._sources[number] = self._sources[number] | {len(self._followed)}
        self._followed.append(BranchOutput(name, kind, ancestors))

    def check(self) -> None:
        """Raise unless everything that was followed was added to what it was computed from."""
        for source in sorted(self._open):
            name, kind, _ = self._followed[source]
            if kind == "branches":
                expected = "a branch must be what a block adds, as it is or scaled, to what it was computed from"
                way = "name the module whose output is added, or its last Linear"
                fault = f"what {name} gives is not, or not as 0: {way}"
            else:
                expected = "a skip can be left out where a block computes x + branch, with + in torch"
                fault = f"what {name} gives was not seen to be added to what it was computed from: name another module"
            raise WatchError(f"{expected}; {fault}", subject=kind)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if not self.active or torch.compiler.is_compiling():
            return func(*args, **named)
        name = getattr(func, "__name__", "")
        result, partial = None, False
        is_sum = name in SUMS | SUMS_IN_PLACE and len(args) == 2 and not named
        if self._open and is_sum and all(isinstance(x, Tensor) for x in args):
            result, partial = self._added(args[0], args[1], name in SUMS_IN_PLACE)
        if result is None:
            result = func(*args, **named)
        if name in COPIES and args and isinstance(args[0], Tensor) and isinstance(result, Tensor):
            self._set(result, self._number(args[0]))
        else:
            self._note((*args, *named.values()), (result, args[0] if func is Tensor.__setitem__ else None))
        if partial:
            self._partial.add(self._number(result))
        return result

    def _note(self, given: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        """Note what results were computed from."""
        made = [x for x in tensors_in(results) if not isinstance(x, nn.Parameter)]
        if made:
            values = (value for x in given for value in (x.values() if isinstance(x, dict) else [x]))
            parents = {self._number(x) for x in tensors_in(values) if not isinstance(x, nn.Parameter)}
            for x in made:
                self._new(x, tuple(parents))

    def _number(self, x: Tensor) -> int:
        entry = self._numbers.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else self._new(x, ())

    def _new(self, x: Tensor, parents: tuple[int, ...]) -> int:
        number = len(self._parents)
        self._parents.append(parents)
        sources = frozenset[int]().union(*(self._sources[parent] for parent in parents))
        self._sources.append(sources & self._open)
        return self._set(x, number)

    def _set(self, x: Tensor, number: int) -> int:
        key, numbers = id(x), self._numbers
        numbers[key] = (weakref.ref(x, lambda _: numbers.pop(key, None)), number)
        return number

    def _added(self, a: Tensor, b: Tensor, in_place: bool) -> tuple[Tensor | None, bool]:
        """What a + b is without a skip, None where it is as it was; and whether it is a sum of branches, one of which
        was made 0."""
        result, partial = None, False
        for branch, other in ((a, b), (b, a)):
            number, skip = self._number(branch), self._number(other)
            for source in sorted((self._sources[number] & self._open) - self._sources[skip]):
                followed = self._followed[source]
                is_skip = skip in followed.ancestors
                if followed.kind == "branches":
                    if number not in self._partial and bool(branch.any()):
                        continue
                    partial |= not is_skip
                elif is_skip and branch.shape == other.shape:
                    if not in_place:
                        result = branch.to(torch.result_type(branch, other), copy=True)
                    else:  # in the tensor that the sum would be written to
                        result = a if a is branch else a.copy_(branch)
                else:
                    continue
                if is_skip:
                    self._open.discard(source)
        return result, partial
