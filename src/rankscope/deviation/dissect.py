"""A pass in deviation arithmetic that records what happened inside each block: what theorems ask about.

Called by `theory/observation.py`. `dissect` runs the rules of `rules.py` with a recorder mixed in, which notes what
every norm, branch and sum gave while a block is traversed; after each block the notes become one `HalfRecord` per half
of the block. Perturbed copies of the samples may go along in the same batch.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from rankscope.deviation.attention import DeviationPattern, HeadOutputs, Values
from rankscope.deviation.decisions import at_layer
from rankscope.deviation.perturbation import Perturbation, PerturbedDeviation, repeated
from rankscope.deviation.rules import Deviation, total
from rankscope.deviation.state import State
from rankscope.nets import Block, Branching, Half, PassSettings, Transformer, traverse


class BranchRecord(NamedTuple):
    """Attention or the MLP, from the hidden states that it reads to what it adds."""

    kind: Branching
    inside: State  # what the branch reads: the hidden states, through a norm if one comes before
    raw: State  # what attention or the MLP gives
    out: State  # what is added: `raw`, through the second norm of a sandwich if there is one


class HalfRecord(NamedTuple):
    """One half of a block: a skip and the branches added to it (attention, the MLP, in a parallel block both)."""

    before: State
    branches: tuple[BranchRecord, ...]
    weight: float  # the weight of the skip
    total: State  # the sum of all that is added to the skip
    summed: State  # the skip plus `total`
    after: State  # the sum, through the norm of a post-norm block
    torn: Tensor | bool = False
    """True for samples where a norm gave a sign to a token that is zero but for rounding, in this block or before; only
    a pass with perturbed copies looks for that."""


class BlockRecord(NamedTuple):
    """What a block did to a state, with its parts."""

    state: State
    attention: DeviationPattern
    heads: HeadOutputs | None
    halves: tuple[HalfRecord, ...]


class _Recorder:
    """Mixed into an arithmetic: notes what goes into every part and what comes out."""

    def forget(self) -> None:
        """Drop all notes, before each block."""
        self.inside: dict[str, State] = {}
        self.raw: dict[str, State] = {}
        self.normed: dict[str, State] = {}
        self.sums: list[tuple[Half, State, dict[str, State], State]] = []

    def norm(self, block: Block, name: str, state: State) -> State:
        state = self.normed[name] = super().norm(block, name, state)
        return state

    def values(self, block: Block, state: State) -> Values:
        self.inside["attention"] = state
        return cast(Values, super().values(block, state))

    def output(self, block: Block, heads: HeadOutputs) -> State:
        state = self.raw["attention"] = super().output(block, heads)
        return state

    def mlp(self, block: Block, state: State) -> State:
        self.inside["mlp"] = state
        state = self.raw["mlp"] = super().mlp(block, state)
        return state

    def add(self, block: Block, half: Half, state: State, branches: dict[str, State]) -> State:
        result: State = super().add(block, half, state, branches)
        self.sums.append((half, state, branches, result))
        return result

    def halves(self) -> tuple[HalfRecord, ...]:
        """The notes of one block, half by half."""
        torn = isinstance(self, PerturbedDeviation) and self.losses.torn
        records = []
        for half, before, out, summed in self.sums:
            kinds = (branch.part for branch in half.branches)
            branches = tuple(BranchRecord(kind, self.inside[kind], self.raw[kind], out[kind]) for kind in kinds)
            after = summed if half.after is None else self.normed[half.after]
            added = total(out.values())
            records.append(HalfRecord(before, branches, half.skip, added, summed, after, torn))
        return tuple(records)


class _RecordedDeviation(_Recorder, Deviation):
    """Deviation arithmetic that records."""


class _RecordedPerturbed(_Recorder, PerturbedDeviation):
    """Perturbed deviation arithmetic that records."""


def starting_tokens(net: Transformer, X: Tensor, padding: Tensor | None = None) -> tuple[Tensor, PassSettings]:
    """The tokens and settings that a pass starts from, padding cut off, of which samples that go together have the
    same."""
    X, valid, _ = net.prepared(X.to(dtype=torch.float64, device=net.device), padding)
    settings = net.settings(X, valid)
    if padding is not None and not bool(valid.all()):
        # Masks stay those of all positions: whom tokens see may depend on how many there are (`bigbird`, `strided`).
        n = int(valid[0].sum())
        X, settings = X[:, :n], settings.first(n)
    return X, settings


def starting_state(net: Transformer, X: Tensor, settings: PassSettings, copies: int = 0) -> tuple[State, PassSettings]:
    """The state and settings of `starting_tokens`, and after all samples of perturbed copies of them
    (`perturbation.py`), since the split into a common token and deviations rounds as any rule does."""
    if not copies:
        return State.of(X, settings.valid), settings
    settings = repeated(settings, 1 + copies)
    noise, X = Perturbation(copies=copies), X.repeat(1 + copies, 1, 1)
    X = X if net.weights.positions is None else noise.perturb(X)  # a sum, which was rounded
    return noise.of(State.of(X, settings.valid)), settings


def dissect(net: Transformer, X: Tensor, copies: int = 0, padding: Tensor | None = None) -> Iterator[BlockRecord]:
    """What each block did to tokens, part by part: one record at a time, as the pass goes on.

    Nothing is checked here: there must be a token and no cross-attention, of which there are no records, as
    `certify` makes sure.

    Args:
        net: The network, taken in float64.
        X: Its input tokens `[batch, token, width]`.
        copies: So many copies of all samples go along after them in the batch, perturbed in their last digits.
        padding: `[batch, token]`, True at padding, which is in no record: then all samples have as many tokens.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> first, _ = dissect(net, torch.ones(1, 3, 8))
    >>> [branch.kind for half in first.halves for branch in half.branches]
    ['attention', 'mlp']
    """
    net = net.to(torch.float64)
    state, settings = starting_state(net, *starting_tokens(net, X, padding), copies)
    yield from records(net, state, recording_rules(net, settings, copies))


RecordingRules = _RecordedDeviation | _RecordedPerturbed


def recording_rules(net: Transformer, settings: PassSettings, copies: int = 0) -> RecordingRules:
    """Rules for one pass of samples and copies, which note what every part of a block gave."""
    if copies:
        return _RecordedPerturbed(net.arch, settings, copies=copies)
    return _RecordedDeviation(net.arch, settings)


def records(net: Transformer, state: State, rules: RecordingRules) -> Iterator[BlockRecord]:
    """What each block does from a `starting_state` on, as `dissect` gives it."""
    for block in net.blocks:
        at_layer(block.index)
        rules.forget()
        state, P, heads, *_ = traverse(block, rules, state)
        yield BlockRecord(state, P, heads, rules.halves())
