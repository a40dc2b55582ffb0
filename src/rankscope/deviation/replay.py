"""Passes that are made many times: asked once what numbers decide, and replayed from then on.

On a GPU a layer of deviation arithmetic is hundreds of small kernels, and the host that starts them one by
one is what one waits for. The first time a network sees tokens of some shape, it goes by its rules and the
answers that numbers gave are kept (`decisions.py`). The second time the rules are gone through with these
answers taken as given, which nothing has to wait for, and all that they start is captured as a CUDA graph.
After that the graph is replayed. Where numbers no longer allow a shortcut, the pass is made by the rules, and
that shortcut is not taken again.

A second pass may go beside the first (`SecondPassFunction`): it is asked, captured and replayed with it.

`compile=True` has torch's compiler fuse the kernels once answers have settled: a minute or two, for passes
that are made by the hundred. A second pass is captured as it is.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor

from rankscope.deviation.decisions import Answers, Question, at_layer, presumed, recorded
from rankscope.deviation.rules import Deviation
from rankscope.deviation.state import State
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.transformer import Transformer
from rankscope.nets.traversal import Block, BlockOutput, traverse
from rankscope.nets.weights import converted, outline

SHARE = 1 / 8
"""The part of a GPU's memory that captured passes may hold."""
MOST = 64
"""Passes that are remembered, the latest."""
PATIENCE = 8
"""How often answers may change before no shortcut is taken any more."""
SETTLED = 2
"""Passes without a change after which one may compile."""


class ReplayInputs(NamedTuple):
    """What layers are made of and given."""

    weights: Any
    settings: PassSettings
    state: State

    def anew(self) -> "ReplayInputs":
        """With nothing that was kept with its parts, answers among it."""
        return converted(self, lambda t: t)

    def through(self, block: Block) -> BlockOutput:
        """Through a block with these weights."""
        rules = Deviation(block.arch, self.settings)
        return traverse(block.with_weights(self.weights), rules, self.state)


Layer = Callable[[ReplayInputs], tuple[BlockOutput, Tensor]]
"""What a layer gives, and where it has left out more than can be."""
SecondPassFunction = Callable[[Transformer, PassSettings, State, Sequence[BlockOutput]], tuple[Any, Any]]
"""What is made of a network, what it was given and what its layers gave: a structure of tensors, and what
must not be dropped while they can be made again. Its questions have layers beyond the network's."""


class PassResult(NamedTuple):
    """A pass through all layers."""

    layers: tuple[BlockOutput, ...]
    second_pass: Any = None
    """What went beside it; None where nothing did."""


Whole = Callable[[ReplayInputs], tuple[PassResult, Tensor]]
"""What all layers give, and where more was left out than can be."""


class Ruled:
    """A layer by its rules, answers taken as given."""

    def __init__(self, block: Block, answers: Answers) -> None:
        self.block, self.answers = block, answers
        self.rests_on: list[Question] = []

    def __call__(self, given: ReplayInputs) -> tuple[BlockOutput, Tensor]:
        """What it gives, and where it has left out more than can be."""
        with presumed(self.answers) as asked:
            asked.layer = self.block.index
            passed = given.anew().through(self.block)
        self.rests_on = asked.rests_on
        return passed, asked.violations(given.state.x.log)


class RuledBeside:
    """What goes beside a pass, answers taken as given."""

    def __init__(self, second_pass: SecondPassFunction, net: Transformer, answers: Answers) -> None:
        self.second_pass, self.net, self.answers = second_pass, net, answers
        self.rests_on: list[Question] = []
        self.held: Any = None

    def __call__(self, given: ReplayInputs, passed: Sequence[BlockOutput]) -> tuple[Any, Tensor]:
        """What it gives, and where it has left out more than can be."""
        with presumed(self.answers) as asked:
            found, self.held = beside_of(self.second_pass, self.net, given, passed)
        self.rests_on = asked.rests_on
        return found, asked.violations(given.state.x.log)


def beside_of(
    second_pass: SecondPassFunction, net: Transformer, given: ReplayInputs, passed: Sequence[BlockOutput]
) -> tuple[Any, Any]:
    """With nothing that was kept with what it is made of, answers among it."""
    settings, state, found = converted((given.settings, given.state, tuple(passed)), lambda t: t)
    return second_pass(net, settings, state, found)


class Compiled:
    """Fuses layers. Those that come to the same graph share one compilation."""

    def __init__(self, compiler: Callable[[Any], Callable[..., Any]] | None = None) -> None:
        """`compiler` makes a graph of tensors faster: torch's, if left out."""
        self.compiler = compiler or (lambda graph: torch.compile(graph, fullgraph=True, dynamic=False))
        self.functions: dict[str, Callable[..., Any]] = {}

    def __call__(self, layer: Layer) -> Layer:
        """The same layer, traced and compiled when it is first gone through."""
        made: list[tuple[Callable[..., Any], Any]] = []

        def fused(given: ReplayInputs) -> tuple[BlockOutput, Tensor]:
            tensors = tensors_of(given)
            if not made:
                made.append(self._made(layer, given, tensors))
            function, like = made[0]
            found: tuple[BlockOutput, Tensor] = with_tensors(like, function(tensors))
            return found

        return fused

    def _made(
        self, layer: Layer, given: ReplayInputs, tensors: list[Tensor]
    ) -> tuple[Callable[..., Any], Any]:
        from torch.fx.experimental.proxy_tensor import make_fx

        like: list[tuple[BlockOutput, Tensor]] = []

        def flat(tensors: list[Tensor]) -> list[Tensor]:
            like.append(layer(with_tensors(given, tensors)))
            return tensors_of(like[-1])

        graph = make_fx(flat)(tensors)
        constants = {name: value.tolist() for name, value in graph.named_buffers()}
        text = f"{graph.code}{constants}{[(t.shape, t.stride(), t.dtype) for t in tensors]}"
        if text not in self.functions:
            self.functions[text] = self.compiler(graph)
        return self.functions[text], like[-1]


@dataclass
class CachedPass:
    """A pass that was made."""

    answers: Answers
    run: Whole | None = None
    layers: list[Ruled | RuledBeside] = field(default_factory=list)
    size: int = 0
    """Bytes that it holds."""
    changes: int = 0
    since: int = 0
    """Passes since the last of them."""

    def learn(self, violations: Tensor) -> None:
        """Give up the shortcuts that were not allowed."""
        rests_on = [question for layer in self.layers for question in layer.rests_on]
        wrong = {q for q, doubted in zip(rests_on, violations.tolist(), strict=True) if doubted}
        self.changes += 1
        kept = {} if self.changes > PATIENCE else self.answers
        self.answers = {q: answer for q, answer in kept.items() if q not in wrong}
        self.run, self.size, self.since = None, 0, 0


@dataclass
class Replays:
    """Passes that were made, by the network and what it was given."""

    fuse: Callable[[Layer], Layer] | None = None
    """`Compiled()`; None leaves layers as they are."""
    known: OrderedDict[tuple[Any, ...], CachedPass] = field(default_factory=OrderedDict)
    pool: Any = None
    """What graphs need in between, which they share."""

    def run(
        self,
        net: Transformer,
        settings: PassSettings,
        state: State,
        second_pass: SecondPassFunction | None = None,
    ) -> PassResult:
        """The same, with what goes beside."""
        given = ReplayInputs(tuple(block.weights for block in net.blocks), settings, state)
        key = (net.arch, _key(given), second_pass)
        known = self.known.get(key)
        if known is None:
            with recorded() as asked:
                run = _by_rules(net, given, second_pass)
            self.known[key] = CachedPass(asked.answers)
            if len(self.known) > MOST:
                self.known.popitem(last=False)
            return run
        self.known.move_to_end(key)
        if known.run is None or (self.fuse is not None and known.since == SETTLED):
            self._prepare(known, net, given, second_pass)
        assert known.run is not None
        run, violations = known.run(given)
        known.since += 1
        if bool(violations.any()):
            known.learn(violations)
            run = _by_rules(net, given, second_pass)
        return run

    def _prepare(
        self, known: CachedPass, net: Transformer, given: ReplayInputs, second_pass: SecondPassFunction | None
    ) -> None:
        """Make ready what is run: the rules, from a settled pass on compiled, on a GPU captured."""
        ruled = [Ruled(block, known.answers) for block in net.blocks]
        second = None if second_pass is None else RuledBeside(second_pass, net, known.answers)
        known.layers = [*ruled, *([] if second is None else [second])]
        layers: Sequence[Layer] = ruled
        if self.fuse is not None and known.since >= SETTLED:
            layers = [self.fuse(layer) for layer in layers]

        def whole(given: ReplayInputs) -> tuple[PassResult, Tensor]:
            state, found, violations = given.state, [], []
            for layer, weights in zip(layers, given.weights, strict=True):
                passed, doubted = layer(ReplayInputs(weights, given.settings, state))
                state = passed.state
                found.append(passed)
                violations.append(doubted)
            run = PassResult(tuple(found))
            if second is not None:
                other, doubted = second(given, found)
                run = run._replace(second_pass=other)
                violations.append(doubted)
            return run, torch.cat(violations)

        known.run = whole
        if self.captures(given):
            try:
                known.run, known.size = self._captured(whole, given)
            except RuntimeError as refused:
                if second is None:
                    raise
                # The same numbers, which nothing waits for either: what is started one by one takes longer.
                warn(
                    f"a pass with its second one could not be captured, and is slower: {refused}",
                    stacklevel=2,
                )
                return
            most = torch.cuda.mem_get_info(state_of(given).device)[1] * SHARE
            while sum(each.size for each in self.known.values()) > most and len(self.known) > 1:
                self.known.popitem(last=False)

    def captures(self, given: ReplayInputs) -> bool:
        """Whether passes are captured where this one is."""
        return state_of(given).is_cuda

    def _captured(self, whole: Whole, given: ReplayInputs) -> tuple[Whole, int]:
        """A pass as a CUDA graph; weights are read where they are."""
        kept = ReplayInputs(given.weights, *converted((given.settings, given.state), torch.clone))
        inputs = tensors_of(kept[1:])
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            whole(kept)  # what is set up at first use is not captured
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool):
            run, violations = whole(kept)

        def replay(given: ReplayInputs) -> tuple[PassResult, Tensor]:
            for here, there in zip(inputs, tensors_of(given[1:]), strict=True):
                here.copy_(there)
            graph.replay()
            # The next replay writes where these are.
            return converted(run, torch.clone), violations

        return replay, sum(t.nbytes for t in tensors_of(run))


def _by_rules(net: Transformer, given: ReplayInputs, second_pass: SecondPassFunction | None) -> PassResult:
    """Asked at every question, or as who listens wants it."""
    state, found = given.state, []
    for block, weights in zip(net.blocks, given.weights, strict=True):
        at_layer(block.index)
        found.append(ReplayInputs(weights, given.settings, state).anew().through(block))
        state = found[-1].state
    return PassResult(
        tuple(found), None if second_pass is None else beside_of(second_pass, net, given, found)[0]
    )


@cache
def replays(compile: bool) -> Replays:
    """Those of this process."""
    return Replays(Compiled() if compile else None)


def repeats(net: Transformer, settings: PassSettings, state: State, passes: int = 1) -> bool:
    """Whether a pass, or so many side by side, can be made again without asking: parts of one's own may
    remember another, a mixture goes through the experts that were chosen, layers that are read are elsewhere
    each time, and what layers give must fit into what may be held."""
    if (
        net.streamed
        or net.arch.parts
        or any(map(net.arch.mixes, range(net.arch.layers)))
        or not state.R.value.shape[1]
    ):
        return False
    if not state.x.log.is_cuda:
        return True
    samples, tokens = state.valid.mask.shape
    layer = samples * tokens * (3 * net.arch.heads * tokens + 4 * net.arch.width) * 8
    return passes * net.arch.layers * layer <= torch.cuda.mem_get_info(state.x.log.device)[1] * SHARE


def state_of(given: ReplayInputs) -> Tensor:
    """A tensor that is where the pass is."""
    return given.state.x.log


def _key(given: ReplayInputs) -> tuple[Any, ...]:
    """The same for what has the same weights and differs by the values of its other tensors alone."""
    tensors = tensors_of(given[1:])
    numbers = {id(t): number for number, t in enumerate(tensors)}
    shape = outline(given[1:], lambda t: numbers[id(t)])
    weights = tuple((t.data_ptr(), t.shape, t.stride()) for t in tensors_of(given.weights))
    return weights, tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors), repr(shape)


def tensors_of(structure: Any) -> list[Tensor]:
    """The tensors of a structure, each once."""
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    converted(structure, note)
    return found


def with_tensors(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """A structure with other tensors, in the order of `tensors_of`."""
    each = iter(tensors)
    return converted(structure, lambda _: next(each))
