"""A second pass beside the first, rounded otherwise: what both agree on, rounding did not decide.

The witness goes through each block after the first pass has, from its own state. Where float64 can see what
tokens differ by, it takes the plain rules, which share no formula with deviation arithmetic; below that, the
rules of deviation arithmetic, shaken (`noise.py`). It costs a plain pass where tokens stay apart, and as much
as the first pass where they do not. On a GPU it is recorded and replayed with the first (`replayed.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.deviation.attention import Attention
from rankscope.deviation.blocks import AttentionByRows
from rankscope.deviation.decisions import at_layer, needed, spared
from rankscope.deviation.noise import ShakenDeviation, ShakenPlain, ShakenRows, ShakenStreamed, keeps
from rankscope.deviation.propagate import DeviationStep, Given, at_once, layers, restored, stepped
from rankscope.deviation.replayed import replays
from rankscope.deviation.scaled import LOWEST, Logs, Scaled, chosen
from rankscope.deviation.state import State
from rankscope.nets import Step, Transformer
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.streaming import Asked, Numbers
from rankscope.nets.traversal import Block, BlockOutput, traverse
from rankscope.shapes import Bool, Float

RESOLVED = 1e-4
"""The share of the tokens' size by which they must differ for float64 to be asked."""
SHORTEST = 1e-140
"""The size of a token, beside the largest, from which on a product of two like it may leave float64."""
STEEP = math.log(1e4)
"""The log of scores from which on their rounding may decide a softmax."""
UNDECIDED = 1e-6
"""The difference of attention weights from which on two passes look at other tokens."""
WAVERS = 1e-3
"""The relative difference of logs of attention weights from which on two passes are undecided."""
ALIKE = 1e-9
"""The distance of two states up to which they are the same."""
WITHIN = 300.0
"""The log of the sizes within which float64 is asked: 1e+-130."""

Weights = Float[Tensor, "batch head row token"] | Callable[[slice], Tensor]
"""P, or what makes rows of it."""


def witnessed(
    given: Given, by_rows: Asked | None = None, compile: bool = False
) -> Iterator[tuple[DeviationStep, "Seen"]]:
    """The steps of a pass, each with what a witness saw of it; `by_rows` is what is asked of attention that
    is too large to be held."""
    witness = Witness(given, by_rows=by_rows)
    if not (at_once(given, compile, passes=2) and _shakes(given)):
        for step in layers(given, compile):
            yield step, witness.follow(step)
        return
    went = replays(compile).went(given.net, given.settings, given.state, beside)
    for number, followed in enumerate(went.beside):
        step = DeviationStep(0, given.state, None)
        if number:
            step = DeviationStep(number, *went.passed[number - 1])
        yield restored(step, given.order), followed.seen(witness, number)


def _shakes(given: Given) -> bool:
    """Whether its noise is kept, where a recorded pass can find it."""
    arch, (samples, tokens) = given.net.arch, given.state.real.rows.shape
    memory = given.settings.memory
    others = max(tokens, 0 if memory is None else memory.valid.shape[1])
    heads = arch.heads * max(others, arch.head_width, arch.value_width)
    return keeps(2 * samples * others * max(arch.width, arch.mlp_width, heads), given.net.device)


class Witness:
    """The second pass, one block at a time."""

    plain: ShakenPlain | ShakenStreamed

    def __init__(self, given: Given, seed: int = 0, by_rows: Asked | None = None) -> None:
        """Of what the first pass is given. `by_rows`: attention by blocks of rows, as it has it, and what is
        asked of it."""
        self.given = given
        arch, settings, seeds = given.net.arch, given.settings, (seed, seed + 1)
        if by_rows is None:
            self.plain = ShakenPlain(arch, settings, seed)
            self.fine, self.other = (ShakenDeviation(arch, settings, each) for each in seeds)
        else:
            self.plain = ShakenStreamed(given.net, settings, by_rows, seed)
            self.fine, self.other = (ShakenRows(given.net, settings, each) for each in seeds)
        self.state = self.fine.noise.of(given.state)  # as a first product of it with a matrix is rounded
        self.before: State | None = None
        self.lost = torch.zeros(len(given.state.real.rows), dtype=torch.bool, device=given.net.device)

    def follow(self, step: DeviationStep) -> "Seen":
        """What the witness saw of a layer that the first pass has gone through."""
        if self.before is not None:
            self.lost = self.lost | lost(self.before, step.state)
        self.before = step.state
        if step.layer == 0:
            return Seen(self, None, self.state, torch.zeros_like(self.lost), None, self.lost)
        block, before = self.given.net.blocks[step.layer - 1], self.state
        sees, plain, numbers = _sees(before), None, None
        if self.given.net.arch.parts:  # what they remember of earlier layers is of one arithmetic
            sees = torch.zeros_like(sees)
        if needed(sees.any()):
            X, P, *rest = traverse(block, self.plain, before.tokens())
            X = before.real.cleared(X)
            numbers, P = (P, None) if isinstance(P, Numbers) else (None, P)
            # What the first pass has lost, float64 may still see.
            after = State.of(X.nan_to_num(0.0, 0.0, 0.0), before.real.rows)
            sees = sees & X.isfinite().flatten(1).all(1) & (_sees(step.state) | _sees(after))
            plain = Step(step.layer, X.nan_to_num(0.0, 0.0, 0.0), P, *rest) if needed(sees.any()) else None
        seen = Seen(self, block, before, sees, plain, self.lost, numbers)
        if plain is None:
            self.state = seen.passed.state
        else:
            self.state = after if spared(sees.all()) else _chosen(sees, after, seen.passed.state)
        self.lost = self.lost | _hidden(step, seen) | self.plain.signs.torn | self.fine.signs.torn
        return replace(seen, lost=self.lost, made=seen.made_so_far)


def beside(
    net: Transformer, settings: PassSettings, state: State, passed: Sequence[BlockOutput]
) -> tuple[tuple["Followed", ...], Witness]:
    """What a witness sees of all layers that a pass has gone through."""
    witness, found = Witness(Given(net, state, settings, None)), []
    steps = [DeviationStep(0, state, None), *(DeviationStep(n, *each) for n, each in enumerate(passed, 1))]
    for step in steps:
        at_layer(net.arch.layers + step.layer)
        seen = witness.follow(step)
        found.append(Followed(seen.before, seen.sees, seen.inside, seen.lost, seen.made_so_far))
    return tuple(found), witness


class Followed(NamedTuple):
    """The tensors of one layer of a witness, as `Seen` has them."""

    before: State
    sees: Bool[Tensor, " batch"]
    inside: Step | None
    lost: Bool[Tensor, " batch"]
    made: DeviationStep | None

    def seen(self, witness: Witness, layer: int) -> "Seen":
        """For a witness that has not gone through the layer itself."""
        block = witness.given.net.blocks[layer - 1] if layer else None
        return Seen(witness, block, self.before, self.sees, self.inside, self.lost, made=self.made)


@dataclass(frozen=True)
class Seen:
    """One layer of the witness."""

    witness: Witness
    block: Block | None
    before: State
    """Its tokens before the block."""
    sees: Bool[Tensor, " batch"]
    """Whether float64 can see what the tokens differ by, before the block and after it."""
    inside: Step | None
    """By plain rules, real tokens first; None where float64 sees no sample."""
    lost: Bool[Tensor, " batch"]
    """Whether a token became so short beside the others that one scale does not hold them, or what equal
    tokens differ by may have been all that is left, or a norm gave a sign to what is zero but for rounding,
    here or before: nothing is known of the sample since."""
    numbers: Numbers | None = None
    """Of attention by plain rules, where it is by rows; real tokens first."""
    made: DeviationStep | None = None
    """By shaken rules of deviation arithmetic, where they were gone through before."""

    @property
    def made_so_far(self) -> DeviationStep | None:
        """The same, by now."""
        found: DeviationStep | None = self.__dict__.get("passed", self.made)
        return found

    @cached_property
    def passed(self) -> DeviationStep:
        """By shaken rules of deviation arithmetic, real tokens first."""
        if self.made is not None:
            return self.made
        if self.block is None:
            return DeviationStep(0, self.before, None)
        return self._shaken(self.block, self.witness.fine)

    @cached_property
    def other(self) -> DeviationStep:
        """The same block, shaken otherwise, tokens where they stood."""
        if self.block is None:
            return self.fine
        return restored(self._shaken(self.block, self.witness.other), self.witness.given.order)

    def _shaken(self, block: Block, rules: ShakenDeviation) -> DeviationStep:
        rules.begin(block)
        return stepped(block, rules, self.before)

    def again(self, where: Tensor) -> DeviationStep:
        """`fine`, for the samples for which it is asked."""
        return self.fine

    def once_more(self, where: Tensor) -> DeviationStep:
        """`other`, for those."""
        return self.other

    @cached_property
    def plain(self) -> Step | None:
        """By plain rules, tokens where they stood."""
        order = self.witness.given.order
        if self.inside is None or order is None:
            return self.inside
        return self.inside.restored(order)

    @property
    def restored_numbers(self) -> Numbers | None:
        """The same, tokens where they stood."""
        order = self.witness.given.order
        return self.numbers if order is None or self.numbers is None else self.numbers.restored(order)

    def plain_rows(self, rows: slice) -> Float[Tensor, "batch head row token"]:
        """Some rows of P by plain rules, where they are made as they are asked for; real tokens first."""
        assert self.numbers is not None and self.numbers.rows is not None
        there, every = self.numbers.rows, slice(None)
        found = there.pattern(every, every, rows.start, rows.stop)
        return F.pad(found, (0, there.k.shape[2] - found.shape[-1]))

    @cached_property
    def fine(self) -> DeviationStep:
        """By shaken rules of deviation arithmetic, tokens where they stood."""
        return restored(self.passed, self.witness.given.order)


def _hidden(step: DeviationStep, seen: Seen) -> Bool[Tensor, " batch"]:
    """Where rounding decided which tokens are looked at, and nothing shows, since they are equal as far as R
    can tell: what they differ by may be all that is left."""
    found = torch.zeros_like(seen.sees)
    for whole, rows in (("attention", "rows"), ("cross", "cross_rows")):
        P: Attention | AttentionByRows | None = getattr(step, whole) or getattr(step, rows)
        if P is None or not needed(steep(P).any()):
            continue
        plain: Weights | None = getattr(seen.plain, whole, None)
        if isinstance(P, AttentionByRows) and whole == "attention":
            plain = seen.plain_rows
        if plain is not None and seen.plain is not None and spared(seen.sees.all()):
            state = State.of(seen.plain.state, step.state.real.rows)
            found = found | elsewhere(P, plain) & (distance(step.state, state) <= ALIKE)
        else:
            other: Attention | AttentionByRows = getattr(seen.fine, whole) or getattr(seen.fine, rows)
            weights = other.matrix() if isinstance(other, Attention) else other.matrix
            alike = distance(step.state, seen.fine.state) <= ALIKE
            found = found | elsewhere(P, weights) & alike | undecided(P, other)
    return found


def _none(P: Attention | AttentionByRows) -> Bool[Tensor, " batch"]:
    return torch.zeros(len(P.p), dtype=torch.bool, device=P.p.device)


def score_sizes(P: Attention | AttentionByRows) -> tuple[Logs, Logs] | None:
    """By head the largest of ref, and the log of the largest of D; None where P was not made of scores."""
    if isinstance(P, AttentionByRows):
        ref, D = P.shared.ref, P.largest
    elif P.logits is None:
        return None
    else:
        ref, D = P.logits.ref, P.logits.D.log_size()
    return ref.masked_fill(ref.isinf(), 0.0).abs().amax(-1), D


def steep(P: Attention | AttentionByRows) -> Bool[Tensor, " batch"]:
    """Where scores are so large that their rounding may decide a softmax."""
    if not P.p.numel() or (sizes := score_sizes(P)) is None:
        return _none(P)
    ref, D = sizes
    return torch.maximum(D, ref.clamp(min=1e-300).log()).amax(-1) > STEEP


def elsewhere(P: Attention | AttentionByRows, other: Weights) -> Bool[Tensor, " batch"]:
    """Where two passes, their scores steep, look at other tokens."""
    return steep(P) & (apart(P, other).amax(1) > UNDECIDED)


def apart(P: Attention | AttentionByRows, other: Weights) -> Float[Tensor, "batch head"]:
    """The largest difference of an attention weight from another pass's."""
    if isinstance(other, Tensor):
        assert isinstance(P, Attention)
        return (P.matrix() - other).abs().amax((-2, -1))
    assert isinstance(P, AttentionByRows)
    return P.farthest(lambda rows: (P.matrix(rows) - other(rows)).abs())


def undecided(P: Attention | AttentionByRows, other: Attention | AttentionByRows) -> Bool[Tensor, " batch"]:
    """Where scores are steep, and two passes do not agree on by how much one token is looked at before
    another: the same token by chance, perhaps."""
    if not needed(steep(P).any()):
        return _none(P)
    if isinstance(P, AttentionByRows):
        assert isinstance(other, AttentionByRows)
        found = P.farthest(lambda rows: _wavering(P.log_matrix(rows), other.log_matrix(rows)))
        return steep(P) & (found.amax(1) > WAVERS)
    if not isinstance(other, Attention) or P.logits is None or other.logits is None:
        return _none(P)
    one, two = (each.log_softmax(P.visible) for each in (P.logits, other.logits))
    return steep(P) & (_wavering(one, two).flatten(1).amax(1) > WAVERS)


def _wavering(one: Tensor, two: Tensor) -> Tensor:
    """The relative difference of logs of weights."""
    return ((one - two).abs() / torch.maximum(one.abs(), two.abs()).clamp(min=1.0)).nan_to_num(nan=0.0)


def _sees(state: State) -> Bool[Tensor, " batch"]:
    """Its numbers are within float64's range, and what they differ by is not lost beside their size."""
    return (state.R.log_size() - state.log > math.log(RESOLVED)) & (state.log.abs() < WITHIN)


def lost(before: State, after: State) -> Bool[Tensor, " batch"]:
    """Where a token that was not zero has left float64's range beside the largest."""

    def size(state: State) -> Tensor:
        return state.R.value.abs().amax(-1) if state.R.value.shape[-1] else state.R.value.sum(-1)

    was = (size(before) > 0) | (before.x.log > LOWEST)[:, None]
    short = (size(after) < SHORTEST * after.R.largest()[:, None]) | (size(after) == 0)
    return (was & short & after.real.rows).any(-1) & (after.x.log <= LOWEST)


def _chosen(pick: Bool[Tensor, " batch"], a: State, b: State) -> State:
    return State(chosen(pick, a.x, b.x), chosen(pick, a.R, b.R), a.real)


def distance(a: State, b: State, deep: bool = True) -> Logs:
    """How far the deviations of two passes are apart: `||r - s||` of their directions, and the difference of
    their logs. Where logs are beyond 1000, both as a share of a thousandth of them: each layer of pure
    attention triples an error, and the log with it. Without `deep`, as they are. Infinite where one is
    zero. Or how far their mean tokens are apart, beside the size of tokens, where that is more."""
    (r, of_r), (s, of_s) = (_direction(each) for each in (a, b))
    found = torch.maximum(torch.linalg.vector_norm(r - s, dim=(1, 2)), (of_r - of_s).abs())
    found = found / (of_r.abs() / 1e3).clamp(min=1.0) if deep else found
    unit = torch.maximum(a.x.log_size(), a.R.log_size())
    shift = torch.linalg.vector_norm(_mean(a).at(unit) - _mean(b).at(unit), dim=1)
    shift = shift / (unit.abs() / 1e3).clamp(min=1.0) if deep else shift
    return torch.maximum(found, shift).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _mean(state: State) -> Scaled:
    return state.x + state.centred()[0]


def _direction(state: State) -> tuple[Tensor, Logs]:
    """The residual divided by its norm, and the log of that."""
    R = state.residual
    norm = torch.linalg.vector_norm(R.value, dim=(1, 2))
    safe = norm.masked_fill(norm == 0, 1.0)
    return R.value / safe[:, None, None], torch.where(norm == 0, R.log, R.log + safe.log())


def turned(a: State, b: State) -> Logs:
    """The largest `|u_i - v_i|` of the tokens' unit vectors."""

    def units(state: State) -> Tensor:
        X = state.whole
        size = X.abs().amax(-1, keepdim=True)
        X = X / size.masked_fill(size == 0, 1.0)
        return X / torch.linalg.vector_norm(X, dim=-1, keepdim=True).masked_fill(size == 0, 1.0)

    return torch.linalg.vector_norm(units(a) - units(b), dim=-1).amax(-1).nan_to_num(nan=torch.inf)
