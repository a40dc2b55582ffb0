"""Passes that are made many times on a GPU: recorded, captured as a CUDA graph, and replayed.

On a GPU a layer of deviation arithmetic is hundreds of small kernels, and starting them one by one takes the
host longer than they run. `propagate.py` and `second_pass.py` therefore hand a whole pass to `PassCache.run`:

1. The first time a network gets tokens of some shape, its layers run by the rules and the answers to their
   questions are recorded (`decisions.py`).
2. The second time, the rules run with these answers presumed, and every kernel is captured in a CUDA graph.
3. After that the graph is replayed. If it reports violations, the pass runs by the rules again, and the
   shortcuts that were not allowed are not taken any more.

A second pass may follow the first (`second_pass_of_layers`): it is recorded, captured and replayed with it.
With `compile=True` torch's compiler fuses the kernels of each layer once answers have settled: a minute or
two, for passes that are made by the hundred; the second pass is captured as it is.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, cast
from warnings import warn

import torch
from torch import Tensor

from rankscope.deviation.decisions import Answers, Presuming, Recording, answering, at_layer
from rankscope.deviation.rules import Deviation
from rankscope.deviation.state import State
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.transformer import Transformer
from rankscope.nets.traversal import Block, BlockOutput, traverse
from rankscope.nets.weights import converted, outline

MEMORY_SHARE = 1 / 8  # the part of a GPU's memory that captured passes may hold
MOST_PASSES = 64  # passes that are remembered, the latest
PATIENCE = 8  # how often answers may change before no shortcut is presumed any more
SETTLED = 2  # passes without a change after which layers are compiled


class ReplayInputs(NamedTuple):
    """The tensors that a pass starts from, or one layer of it: `weights` are of all layers, or of one."""

    weights: Any
    settings: PassSettings
    state: State

    def run_block(self, block: Block) -> BlockOutput:
        """The block by its rules, with these weights."""
        fresh = converted(self, lambda t: t)  # nothing cached with its parts: answers would be among it
        rules = Deviation(block.arch, fresh.settings)
        return traverse(block.with_weights(fresh.weights), rules, fresh.state)


class PassResult(NamedTuple):
    """A pass through all layers."""

    layers: tuple[BlockOutput, ...]
    second_pass: Any = None  # the tensors of the second pass; None if there was none
    keep_alive: Any = None  # the object whose random numbers the second pass reads: a graph does so where they lie


SecondPassFunction = Callable[[Transformer, PassSettings, State, Sequence[BlockOutput]], tuple[Any, Any]]
"""From a network, its inputs and what its layers gave: (`second_pass`, `keep_alive`) of a `PassResult`. Its
questions must belong to layers beyond the network's."""
LayerFunction = Callable[[ReplayInputs], tuple[BlockOutput, Tensor]]
"""One layer with answers presumed: what it gives, and its violations."""
PassFunction = Callable[[ReplayInputs], tuple[PassResult, Tensor]]
"""A whole pass with answers presumed: what it gives, and its violations."""


def run_layers(
    net: Transformer,
    inputs: ReplayInputs,
    second_pass: SecondPassFunction | None = None,
    layers: Sequence[Callable[[ReplayInputs], BlockOutput]] = (),
) -> PassResult:
    """One pass through all layers, by their rules or by `layers`, and the second pass after it."""
    state = inputs.state
    outputs: list[BlockOutput] = []
    for block, weights in zip(net.blocks, inputs.weights, strict=True):
        at_layer(block.index)
        layer_inputs = ReplayInputs(weights, inputs.settings, state)
        outputs.append(layers[len(outputs)](layer_inputs) if layers else layer_inputs.run_block(block))
        state = outputs[-1].state
    if second_pass is None:
        return PassResult(tuple(outputs))
    fresh = converted((inputs.settings, inputs.state, tuple(outputs)), lambda t: t)
    return PassResult(tuple(outputs), *second_pass(net, *fresh))


class LayerCompiler:
    """Compiles layers. Those that come to the same graph of tensors share one compilation."""

    def __init__(self, compiler: Callable[[Any], Callable[..., Any]] | None = None) -> None:
        """`compiler` makes a traced graph faster; torch's, if left out."""
        self.compiler = compiler or (lambda graph: torch.compile(graph, fullgraph=True, dynamic=False))
        self.functions: dict[str, Callable[..., Any]] = {}

    def __call__(self, layer: LayerFunction) -> LayerFunction:
        """A function that gives what `layer` gives, traced and compiled at its first call."""
        made: list[tuple[Callable[..., Any], Any]] = []

        def compiled(inputs: ReplayInputs) -> tuple[BlockOutput, Tensor]:
            tensors = tensors_of(inputs)
            if not made:
                made.append(self._traced(layer, inputs, tensors))
            function, like = made[0]
            return cast(tuple[BlockOutput, Tensor], with_tensors(like, function(tensors)))

        return compiled

    def _traced(
        self, layer: LayerFunction, inputs: ReplayInputs, tensors: list[Tensor]
    ) -> tuple[Callable[..., Any], Any]:
        """(the layer as a compiled function of a list of tensors, one of its results for the structure)."""
        from torch.fx.experimental.proxy_tensor import make_fx

        results: list[tuple[BlockOutput, Tensor]] = []

        def flat(tensors: list[Tensor]) -> list[Tensor]:
            results.append(layer(with_tensors(inputs, tensors)))
            return tensors_of(results[-1])

        graph = make_fx(flat)(tensors)
        constants = {name: value.tolist() for name, value in graph.named_buffers()}
        text = f"{graph.code}{constants}{[(t.shape, t.stride(), t.dtype) for t in tensors]}"
        if text not in self.functions:
            self.functions[text] = self.compiler(graph)
        return self.functions[text], results[-1]


@dataclass
class CachedPass:
    """What is remembered of passes of one network over tokens of one shape."""

    answers: Answers
    run: PassFunction | None = None  # the pass with answers presumed, on a GPU a captured graph; None until it is made
    size: int = 0  # bytes that its graph holds
    changes: int = 0  # how often a violation changed the answers
    runs_since_change: int = 0

    def answered_anew(self, answers: Answers) -> None:
        """Presume other answers from now on; none, once they have changed too often."""
        self.changes += 1
        self.answers = {} if self.changes > PATIENCE else answers
        self.run, self.size, self.runs_since_change = None, 0, 0


@dataclass
class PassCache:
    """Runs passes, and remembers them by the network and by the shape of what it is given."""

    compiler: Callable[[LayerFunction], LayerFunction] | None = None  # a `LayerCompiler`; None: layers stay as they are
    passes: OrderedDict[tuple[Any, ...], CachedPass] = field(default_factory=OrderedDict)
    pool: Any = None  # memory that all graphs share for their intermediate tensors

    def run(
        self, net: Transformer, settings: PassSettings, state: State, second_pass: SecondPassFunction | None = None
    ) -> PassResult:
        """A pass through all layers, recorded, presumed or replayed as the module's docstring says."""
        inputs = ReplayInputs(tuple(block.weights for block in net.blocks), settings, state)
        key = (net.arch, _key(inputs), second_pass)
        cached = self.passes.get(key)
        if cached is None:
            with answering(Recording()) as asking:
                result = run_layers(net, inputs, second_pass)
            self.passes[key] = CachedPass(asking.answers)
            if len(self.passes) > MOST_PASSES:
                self.passes.popitem(last=False)
            return result
        self.passes.move_to_end(key)
        if cached.run is None or (self.compiler is not None and cached.runs_since_change == SETTLED):
            self._prepare(cached, net, inputs, second_pass)
        assert cached.run is not None
        result, violations = cached.run(inputs)
        cached.runs_since_change += 1
        if bool(violations.any()):
            with answering(Recording(at_most=cached.answers)) as asking:
                result = run_layers(net, inputs, second_pass)
            cached.answered_anew(asking.answers)
        return result

    def _prepare(
        self, cached: CachedPass, net: Transformer, inputs: ReplayInputs, second_pass: SecondPassFunction | None
    ) -> None:
        """Make `cached.run`: the rules with answers presumed, compiled once settled, captured on a GPU."""
        answers, compiled = cached.answers, []
        if self.compiler is not None and cached.runs_since_change >= SETTLED:
            compiled = [self.compiler(partial(_presumed_layer, block, answers)) for block in net.blocks]

        def run(inputs: ReplayInputs) -> tuple[PassResult, Tensor]:
            with answering(Presuming(answers)) as asking:

                def run_compiled(layer: LayerFunction, layer_inputs: ReplayInputs) -> BlockOutput:
                    output, violations = layer(layer_inputs)
                    asking.violated.append(violations)
                    return output

                layers = [partial(run_compiled, layer) for layer in compiled]
                result = run_layers(net, inputs, second_pass, layers)
            return result, asking.violations(inputs.state.x.log)

        cached.run = run
        if not self.captures(inputs):
            return
        try:
            cached.run, cached.size = self._captured(run, inputs)
        except RuntimeError as refused:
            if second_pass is None:
                raise
            # The same numbers, and nothing waits for them either; but kernels are started one by one.
            warn(f"a pass with its second one could not be captured, and is slower: {refused}", stacklevel=2)
            return
        most = torch.cuda.mem_get_info(inputs.state.x.log.device)[1] * MEMORY_SHARE
        while sum(cached.size for cached in self.passes.values()) > most and len(self.passes) > 1:
            self.passes.popitem(last=False)

    def captures(self, inputs: ReplayInputs) -> bool:
        """True if passes over these inputs are captured as CUDA graphs."""
        return inputs.state.x.log.is_cuda

    def _captured(self, run: PassFunction, inputs: ReplayInputs) -> tuple[PassFunction, int]:
        """(a pass as a CUDA graph, the bytes of its result); weights are read where they are."""
        graph_state = ReplayInputs(inputs.weights, *converted((inputs.settings, inputs.state), torch.clone))
        graph_inputs = tensors_of(graph_state[1:])
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(graph_state)  # what is set up at first use is not captured
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool):
            result, violations = run(graph_state)

        def replay(inputs: ReplayInputs) -> tuple[PassResult, Tensor]:
            for target, source in zip(graph_inputs, tensors_of(inputs[1:]), strict=True):
                target.copy_(source)
            graph.replay()
            # The next replay writes where these are.
            return converted(result, torch.clone), violations

        return replay, sum(t.nbytes for t in tensors_of(result))


def _presumed_layer(block: Block, answers: Answers, inputs: ReplayInputs) -> tuple[BlockOutput, Tensor]:
    """One layer by its rules with answers presumed, and its violations."""
    with answering(Presuming(answers)) as asking:
        at_layer(block.index)
        output = inputs.run_block(block)
    return output, asking.violations(inputs.state.x.log)


@cache
def pass_cache(compile: bool) -> PassCache:
    """The process's cache of passes, with compiled layers or without."""
    return PassCache(LayerCompiler() if compile else None)


def can_replay(net: Transformer, state: State, passes: int = 1) -> bool:
    """True if `passes` passes side by side can be replayed and held.

    Parts of the user's own may remember something, a mixture runs the experts that were chosen, streamed
    layers are elsewhere each time, and on a GPU what all layers give must fit into `MEMORY_SHARE`."""
    arch = net.arch
    if net.streamed or arch.parts or any(map(arch.mixes, range(arch.layers))) or not state.R.value.shape[1]:
        return False
    if not state.x.log.is_cuda:
        return True
    samples, tokens = state.valid.mask.shape
    layer = samples * tokens * (3 * arch.heads * tokens + 4 * arch.width) * 8
    return passes * arch.layers * layer <= torch.cuda.mem_get_info(state.x.log.device)[1] * MEMORY_SHARE


def _key(inputs: ReplayInputs) -> tuple[Any, ...]:
    """Equal for inputs with the same weights whose other tensors differ by their values alone."""
    tensors = tensors_of(inputs[1:])
    positions = {id(t): position for position, t in enumerate(tensors)}
    structure = outline(inputs[1:], lambda t: positions[id(t)])
    weights = tuple((t.data_ptr(), t.shape, t.stride()) for t in tensors_of(inputs.weights))
    return weights, tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors), repr(structure)


def tensors_of(structure: Any) -> list[Tensor]:
    """The tensors of nested tuples, dicts and dataclasses, each once."""
    tensors: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    converted(structure, note)
    return tensors


def with_tensors(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """A structure with other tensors in place of its own, in the order of `tensors_of`."""
    replacements = iter(tensors)
    return converted(structure, lambda _: next(replacements))
