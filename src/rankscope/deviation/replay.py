"""Computations that are made many times on a GPU: recorded, captured as a CUDA graph, and replayed.

A layer of deviation arithmetic, and what is read of it, is hundreds of small kernels; on a GPU the host takes longer
to start them one by one than they run. A whole pass is therefore handed to `ReplayCache.run`, as a function of tensors:

1. The first time, the function is called. Its rules ask questions about numbers (may this shortcut be taken?), and the
   answers are recorded (`decisions.py`).
2. The second time it is called with these answers presumed, so that nothing waits for a number, and every kernel is
   captured in a CUDA graph. The graph also computes `violations`: which presumed answers the numbers do not allow.
3. After that the graph is replayed. If there are violations, its result is dropped, the function is called and recorded
   again, and from then on a new graph takes only the shortcuts that both recordings allow.

Called by `propagate.py` (all layers), `profiles/captured.py` (what `measure` reads) and `theory/observation.py` (what
theorems need) where the host would wait for answers (`waits`), as on a GPU; on a CPU they call the function themselves.

What goes into a function and comes out of it are nested tuples, dicts and dataclasses of tensors whose first axis is
that of samples (`Structure`). The latter two read several layers as one batch, their samples one after the other
(`joined`), which spares a GPU kernels; the numbers of all layers then leave the GPU in one copy (`NumberTable`).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from threading import RLock
from typing import Any, TypeVar
from warnings import warn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from rankscope.deviation.decisions import Answers, Presuming, Recording, answering
from rankscope.nets import Structure, Transformer, converted, form, tensors_of
from rankscope.shapes import Float

MEMORY_SHARE = 1 / 8  # the part of a GPU's memory that captured computations may hold
MOST_COMPUTATIONS = 64  # computations that are remembered, the latest
PATIENCE = 8  # how often answers may change before no shortcut is presumed any more

Result = TypeVar("Result")


@dataclass
class CachedComputation:
    """What the cache remembers of one function for inputs of one form (`form`)."""

    answers: Answers
    run: Callable[[Any], tuple[Any, Tensor]] | None = None
    """The function with answers presumed, which returns its result and its violations. On a GPU a captured graph; None
    until it is made. It holds the network, so that no other network comes to lie where the weights of this one are."""
    size: int = 0  # bytes of the result of its graph, and of what the function keeps alive
    changes: int = 0  # how often a violation changed the answers


@dataclass
class ReplayCache:
    """Runs functions of tensors, and remembers them by a key and by the form of their inputs."""

    computations: OrderedDict[Hashable, CachedComputation] = field(default_factory=OrderedDict)
    pool: Any = None  # memory that all graphs share for their intermediate tensors
    lock: Any = field(default_factory=RLock)

    def run(
        self,
        key: Hashable,
        function: Callable[[Any], Result],
        inputs: Any,
        net: Transformer | None = None,
        capture: bool = True,
    ) -> Result:
        """`function(inputs)`, recorded, presumed or replayed as the module's docstring says.

        Args:
            key: Equal for functions that compute the same, with the same weights.
            function: Computes nested tuples, dicts and dataclasses of tensors; anything else among them must be the
                same each time.
            inputs: Nested tuples, dicts and dataclasses of tensors.
            net: The network whose weights the function reads, which are told apart by their addresses.
            capture: Whether a graph may be made of the function.
        """
        like = tensors_of(inputs)[0]
        device = torch.cuda.device(like.device) if like.is_cuda else nullcontext()  # on whose streams graphs run
        with self.lock, device:  # by one thread at a time: a graph has one place for inputs and result
            inputs = converted(inputs, lambda t: t)  # fresh objects: what they cache would not be asked a second time
            full_key = (key if net is None else (key, weights_key(net)), form(inputs))
            cached = self.computations.get(full_key)
            if cached is None:
                with answering(Recording()) as asking:
                    result = function(inputs)
                self.computations[full_key] = CachedComputation(asking.answers)
                if len(self.computations) > MOST_COMPUTATIONS:
                    self.computations.popitem(last=False)
                return result
            self.computations.move_to_end(full_key)
            try:
                if cached.run is None:
                    held = 0 if net is None else sum(t.nbytes for t in _weights(net))
                    self._prepare(cached, function, inputs, capture, held)
                assert cached.run is not None
                result, violations = cached.run(inputs)
                violated = bool(violations.any())
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError):
                # What was presumed falsely may give NaN, which metrics and decompositions refuse. Any other error comes
                # again when the numbers are asked.
                violated = True
            if violated:
                with answering(Recording(at_most=cached.answers)) as asking:
                    result = function(inputs)
                cached.changes, cached.run, cached.size = cached.changes + 1, None, 0
                # None are presumed any more once they have changed too often.
                cached.answers = {} if cached.changes > PATIENCE else asking.answers
            return result

    def clear(self) -> None:
        """Forget all computations, and free the memory that their graphs hold."""
        self.computations.clear()
        self.pool = None

    def _prepare(
        self, cached: CachedComputation, function: Callable[[Any], Any], inputs: Any, capture: bool, held: int
    ) -> None:
        """Make `cached.run`: the function, which keeps `held` bytes alive, with answers presumed; captured on a GPU."""
        answers, like = cached.answers, tensors_of(inputs)[0]
        kept: list[Tensor] = []  # lives as long as `run`, which the graph's replay holds

        def run(inputs: Any) -> tuple[Any, Tensor]:
            with answering(Presuming(answers)) as asking:
                result = function(inputs)
            kept[:] = asking.kept
            return result, asking.violations(like)

        if not (capture and self.captures(inputs)):
            cached.run = run
            return
        try:
            captured, size = self._captured(run, inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as refused:
            # The same numbers, but kernels are started one by one.
            warn(f"a pass could not be captured as a CUDA graph, and is slower: {refused}", stacklevel=2)
            cached.run = run
            return
        cached.run, cached.size = captured, size + held
        most = torch.cuda.mem_get_info(like.device)[1] * MEMORY_SHARE
        for key, earlier in list(self.computations.items()):
            total = sum(computation.size for computation in self.computations.values())
            if earlier is not cached and earlier.size and total > most:
                del self.computations[key]

    def captures(self, inputs: Any) -> bool:
        """True if functions of these inputs are captured as CUDA graphs."""
        return tensors_of(inputs)[0].is_cuda

    def _captured(
        self, run: Callable[[Any], tuple[Any, Tensor]], inputs: Any
    ) -> tuple[Callable[[Any], tuple[Any, Tensor]], int]:
        """(a run as a CUDA graph, the bytes of its result); weights are read where they are."""
        graph_inputs = converted(inputs, torch.clone)
        targets = tensors_of(graph_inputs)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(graph_inputs)  # what is set up at first use is not captured
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if self.pool is None or not any(computation.size for computation in self.computations.values()):
            self.pool = torch.cuda.graph_pool_handle()  # torch frees a pool with the last graph that shares it
        with torch.cuda.graph(graph, pool=self.pool):
            result, violations = run(graph_inputs)

        def replay(inputs: Any) -> tuple[Any, Tensor]:
            for target, source in zip(targets, tensors_of(inputs), strict=True):
                target.copy_(source)
            graph.replay()
            _ = run  # held here, since it keeps alive what the graph reads where it lies
            # The next replay writes where these are.
            return converted(result, torch.clone), violations

        return replay, sum(t.nbytes for t in tensors_of(result))


replay_cache = ReplayCache()
"""The process's cache."""


def waits(like: Tensor) -> bool:
    """True if the host waits for answers about tensors that are where this one is."""
    return like.device.type != "cpu"


def can_replay(net: Transformer, shape: torch.Size, held: int) -> bool:
    """True if a pass on the device of a network can be replayed.

    It cannot with parts of the user's own, which may keep something between passes; with a mixture of experts, which
    runs the experts that numbers choose; with streamed layers, whose weights have another address each time; or if the
    layers that are held do not fit into `MEMORY_SHARE` of a GPU.

    Args:
        net: The network.
        shape: How many samples go through it together, of how many tokens.
        held: How many layers are held at a time.
    """
    arch, (samples, tokens) = net.arch, shape
    if net.streamed or arch.parts or any(map(arch.mixes, range(arch.layers))) or not tokens:
        return False
    if net.device.type != "cuda":
        return True
    layer = samples * tokens * (3 * arch.heads * tokens + 4 * arch.width) * 8
    return held * layer <= torch.cuda.mem_get_info(net.device)[1] * MEMORY_SHARE


def weights_key(net: Transformer) -> Hashable:
    """Equal for networks of one architecture whose weights lie at the same addresses."""
    return net.arch, tuple((t.data_ptr(), t.shape, t.stride()) for t in _weights(net))


def _weights(net: Transformer) -> list[Tensor]:
    """The tensors of the layers of a network, found once."""
    if net not in _of_networks:
        _of_networks[net] = tensors_of(tuple(block.weights for block in net.blocks))
    return _of_networks[net]


_of_networks: WeakKeyDictionary[Transformer, list[Tensor]] = WeakKeyDictionary()


def samples(structure: Structure, start: int, count: int) -> Structure:
    """The samples of a structure from number `start` on, `count` of them."""
    return converted(structure, itemgetter(slice(start, start + count)))


def parts(structure: Structure, count: int) -> list[Structure]:
    """A structure cut into `count` of equally many samples each: the inverse of `joined`."""
    cut = {t: t.chunk(count) for t in tensors_of(structure)}
    return [converted(structure, {t: parts[index] for t, parts in cut.items()}.__getitem__) for index in range(count)]


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

    def __init__(self, structure: Any, rows: dict[Tensor, int]) -> None:
        """`rows` gives the row of each tensor."""
        places = {t: torch.empty(0) for t in rows}  # an empty tensor stands in the place of each
        self._structure = converted(structure, places.__getitem__)
        self._rows = {places[t]: row for t, row in rows.items()}

    @classmethod
    def of(cls, structure: Any, count: int) -> "tuple[NumberTable, Float[Tensor, 'number sample']]":
        """(which row is which, the table) of tensors of at most `count` entries; shorter ones end in zeros."""
        alike: dict[Any, list[Tensor]] = {}
        for t in tensors_of(structure):
            alike.setdefault((len(t), t.dtype), []).append(t)
        rows = {t: row for row, t in enumerate(chain.from_iterable(alike.values()))}
        blocks = [pad(torch.stack(block).double(), (0, count - length)) for (length, _), block in alike.items()]
        return cls(structure, rows), torch.cat(blocks)

    def by_sample(self, table: Float[Tensor, "number sample"]) -> list[Any]:
        """The structure of each sample, with a float in the place of each tensor."""
        columns = table.cpu().T.tolist()
        return [
            converted(self._structure, {t: numbers[row] for t, row in self._rows.items()}.__getitem__)
            for numbers in columns
        ]
