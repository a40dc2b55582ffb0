"""Observations that are made many times on a GPU: recorded, captured as a CUDA graph, and replayed.

The numbers that theorems need take thousands of small kernels, and starting them one by one takes the host longer than
they run. `observation.py` therefore hands a whole observation to `replayed`, a function of its tensors:

1. The first time, the questions about numbers that the rules ask are answered by the numbers, and the answers recorded
   (`deviation/decisions.py`).
2. The second time they are presumed, so that nothing waits, and every kernel is captured in a CUDA graph.
3. After that the graph is replayed. Where an answer was wrong the observation is made anew, and answers recorded.

On the CPU the function is called, and nothing is kept.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor

from rankscope.deviation.decisions import Answers, Presuming, Recording, answering
from rankscope.nets.weights import converted, outline
from rankscope.shapes import Float

MOST_GRAPHS = 4  # Graphs that are held, the latest: each holds the memory of a whole pass
MOST_CHANGES = 8  # How often answers may change before no shortcut is presumed any more


class Observation(NamedTuple):
    """What a function that is replayed gives: tensors, and what is the same each time."""

    numbers: Float[Tensor, "batch number"]
    branches: Any
    form: Any  # Not of tensors that change
    keep_alive: Any = None  # The objects whose tensors a graph reads where they lie


Observing = Callable[[Any], Observation]


@dataclass
class CachedObservation:
    """What is remembered of observations of one network over tokens of one shape."""

    answers: Answers
    run: "Callable[[Any], tuple[Observation, Tensor]] | None" = None
    """With answers presumed; None until it is made. It holds the network: no other comes to lie in its place."""
    changes: int = 0


_cached: OrderedDict[Hashable, CachedObservation] = OrderedDict()


def replayed(key: Hashable, run: Observing, inputs: Any, capture: bool) -> Observation:
    """`run(inputs)`, on a GPU recorded, captured and replayed.

    Args:
        key: Equal for calls whose inputs differ by the values of their tensors alone, and whose weights lie in the
            same place.
        run: Makes the observation from its inputs, nested tuples, dicts and dataclasses of tensors.
        inputs: The inputs.
        capture: Whether a CUDA graph may be made of it.
    """
    like = tensors_of(inputs)[0]
    if not waits(like):
        return run(inputs)
    cached = _cached.get(key)
    if cached is not None:
        _cached.move_to_end(key)
        if cached.run is None:
            cached.run = _prepared(run, cached.answers, inputs, capture and like.is_cuda)
        result, violations = cached.run(inputs)
        if not bool(violations.any()):
            return result
    changes = 0 if cached is None else cached.changes + 1
    with answering(Recording(at_most=None if cached is None else cached.answers)) as recording:
        result = run(inputs)
    _cached[key] = CachedObservation({} if changes > MOST_CHANGES else recording.answers, changes=changes)
    while len(_cached) > MOST_GRAPHS:
        _cached.popitem(last=False)
    return result


def waits(like: Tensor) -> bool:
    """True if the host waits for answers about tensors that are where this one is."""
    return like.device.type != "cpu"


def _prepared(
    run: Observing, answers: Answers, inputs: Any, capture: bool
) -> Callable[[Any], tuple[Observation, Tensor]]:
    """A function that makes the observation with answers presumed, and says which of them were wrong."""

    def presumed(inputs: Any) -> tuple[Observation, Tensor]:
        with answering(Presuming(answers)) as asking:
            result = run(inputs)
        return result, asking.violations(result.numbers)

    if not capture:
        return presumed
    try:
        return _captured(presumed, inputs)
    except RuntimeError as refused:
        # The same numbers, and nothing waits for them either; but kernels are started one by one.
        warn(f"what theorems need could not be captured as a CUDA graph, and takes longer: {refused}", stacklevel=2)
        return presumed


def _captured(
    presumed: Callable[[Any], tuple[Observation, Tensor]], inputs: Any
) -> Callable[[Any], tuple[Observation, Tensor]]:
    """The same as a CUDA graph; weights are read where they are."""
    inputs_of_graph = converted(inputs, torch.clone)
    targets = tensors_of(inputs_of_graph)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        presumed(inputs_of_graph)  # what is set up at first use is not captured
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, violations = presumed(inputs_of_graph)

    def replay(inputs: Any) -> tuple[Observation, Tensor]:
        for target, source in zip(targets, tensors_of(inputs), strict=True):
            target.copy_(source)
        graph.replay()
        # The next replay writes where these are.
        copied = result._replace(numbers=result.numbers.clone(), branches=converted(result.branches, torch.clone))
        return copied, violations

    return replay


def tensors_of(structure: Any) -> list[Tensor]:
    """The tensors of nested tuples, dicts and dataclasses, each once."""
    tensors: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    converted(structure, note)
    return tensors


def form_of(structure: Any) -> str:
    """Equal for structures whose tensors have the same places, shapes and dtypes."""
    places = {id(t): place for place, t in enumerate(tensors_of(structure))}
    return repr(outline(structure, lambda t: (places[id(t)], tuple(t.shape), t.stride(), t.dtype)))


def stacked(structures: Sequence[Any]) -> Any:
    """Structures of one form as one, their tensors one after the other along the samples; None of several forms."""
    if len(structures) == 1:
        return structures[0]
    if len(set(map(form_of, structures))) > 1:
        return None
    columns = iter([torch.cat(column) for column in zip(*map(tensors_of, structures), strict=True)])
    return converted(structures[0], lambda _: next(columns))
