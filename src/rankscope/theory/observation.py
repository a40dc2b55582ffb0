"""Runs a network on samples and collects the `Facts` that the theorems need, layer by layer.

Called by `certify`. All samples, and after them perturbed copies of all (`rounding.py` compares them), go through the
network as one batch: `deviation.dissect`, with a plain float64 pass of the samples beside it to check it
(`Float64Pass`), or in its place (`float64_records`) for a network without deviation rules. While a layer is there its
attention is read (`_layer_numbers`, `_agreement`); hidden states are kept, and those of several layers are read in one
go where that spares a GPU kernels (`_WaitingStates`). Numbers stay on the device until the end, and leave it together.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, partial
from itertools import chain, groupby
from typing import Any, Generic, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from rankscope.deviation import BlockRecord, HalfRecord, Scaled, State, applies
from rankscope.deviation.attention import DeviationPattern, common_heads, deviation_heads
from rankscope.deviation.comparison import attends_elsewhere, state_distance, steep_scores, tokens_lost, undecided
from rankscope.deviation.decisions import at_layer, can_skip, must_compute
from rankscope.deviation.dissect import recording_rules, records, starting_state, starting_tokens
from rankscope.deviation.norms import normalise
from rankscope.deviation.perturbation import PerturbedPlain, is_cached
from rankscope.deviation.propagate import DeviationStep
from rankscope.deviation.readings import read
from rankscope.deviation.replay import bytes_of_weights, form, replayed, tensors_of, weights_key
from rankscope.deviation.scaled import LOWEST
from rankscope.errors import TokensError
from rankscope.metrics import dobrushin, metric
from rankscope.metrics.attention import FEW
from rankscope.metrics.centre import centred
from rankscope.metrics.cosine import max_cosine_gap, min_cosine
from rankscope.metrics.distances import largest_square_distance, largest_sum_distance
from rankscope.metrics.log_readings import FARTHEST
from rankscope.metrics.residuals import NORMS
from rankscope.metrics.tokens import Tokens, tokens, tokens_of, unit_of
from rankscope.nets import Transformer
from rankscope.nets.norms import NormWeights
from rankscope.nets.order import active_heads, order
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.plain import Plain
from rankscope.nets.traversal import Block, changed, traverse
from rankscope.nets.weights import converted
from rankscope.shapes import Float
from rankscope.theory.facts import Centre, Facts, HalfFacts, LayerFacts, LayerNumbers, Number, TokenSizes
from rankscope.theory.halves import half_facts
from rankscope.theory.hypotheses import SOFTMAX, normed_sums, skips
from rankscope.theory.logs import TEN, clipped, log, logs_of, product_of, sized, sum_of
from rankscope.theory.weight_norms import LayerNorms, WeightNorms, of_heads

MANY = 2048  # From this many tokens on, Dobrushin's coefficient is bounded without comparing all pairs of rows
NOISE_SHARE = 1e-3  # The share of rounding in a float64 residual above which it is called noise
RESOLVED = 1e-4  # The share of the tokens' size by which they must differ for float64 to see it
WITHIN = 300.0  # The largest |log| of the size of tokens that float64 can hold: 1e+-130
AT_ONCE = {"cpu": 2**22}
"""Bytes of hidden states that are read in one go, by device: on the CPU what its cache holds, else 2^30."""
PerSample = Float[Tensor, " batch"]


@dataclass(frozen=True)
class Agreement(Generic[Number]):
    """How far perturbed copies and float64 agree with the pass itself on the tokens after a layer."""

    difference: Number  # Of the copies' tokens, the largest, as `state_distance` has it
    float64_difference: Number
    """How far float64's deviation is from this one, as a share of it, where float64 can see."""
    lost: Number  # Whether a token that was not zero before the layer is too short after it
    undecided: Number  # Whether a copy disagrees on the order of steep scores
    elsewhere: Number  # Whether a copy attends to other tokens by steep scores


@dataclass(frozen=True)
class Passes:
    """The facts of one sample: of the pass itself, then of its perturbed copies; and how far they agree."""

    facts: tuple[Facts, ...]
    agreement: tuple[Agreement[float], ...]  # By layer, 0 the input
    memo: dict[str, Any] = field(default_factory=dict)  # Results that depend on these passes alone, by name


def observe(
    net: Transformer,
    X: Float[Tensor, "token width"],
    centre: Centre = "mean",
    norms: WeightNorms | None = None,
    padding: Tensor | None = None,
) -> Facts:
    """Run the network on one sample and collect what the theorems need to know.

    Args:
        net: The network, taken in float64.
        X: The tokens of the sample.
        centre: What residuals are about, the "mean" or the "argmin".
        norms: Cached norms of weights, for a network and its variants.
        padding: `[token]`, True at padding: part of the pass, by its masks, and of no fact.
    """
    return observe_batch(net, X[None], centre, norms, 0, None if padding is None else padding[None])[0].facts[0]


def observe_batch(
    net: Transformer,
    X: Float[Tensor, "batch token width"],
    centre: Centre = "mean",
    norms: WeightNorms | None = None,
    copies: int = 0,
    padding: Tensor | None = None,
    memo: dict[Any, Any] | None = None,
    first_sample: int = 0,
) -> list[Passes]:
    """Run the network on samples of equally many tokens, and on perturbed copies of them.

    Args:
        net: The network, taken in float64.
        X: The tokens of the samples.
        centre: What residuals are about, the "mean" or the "argmin".
        norms: Cached norms of weights, for a network and its variants.
        copies: How many copies of each sample are perturbed in the result of every rule (`deviation/perturbation.py`).
        padding: `[batch, token]`, True at padding: part of the pass, by its masks, and of no fact.
        memo: Shared by all facts of this network, as `Facts.memo` is.
        first_sample: The number of the first of these samples among all.
    """
    net, norms = net.to(torch.float64), WeightNorms() if norms is None else norms
    X, memo = X.to(dtype=torch.float64, device=net.device), {} if memo is None else memo
    deviates = applies(net)
    on_device = None if net.streamed else _NormsOnDevice.together(norms.of_layers(net), X)
    inputs = ObservationInputs(*starting_tokens(net, X, padding), on_device)
    observed, first, branches = _observation(net, inputs, centre, copies, norms)
    start = inputs.X.cpu()
    masks = dict.fromkeys(map(net.arch.mask_of, range(net.arch.layers)))
    visible = {mask: inputs.settings.visible[mask][:, 0].cpu() for mask in masks}
    layer_norms = norms.of_layers(net)  # after the pass, by which streamed layers are read once

    def facts(sample: int, copy: int) -> Facts:
        at = copy * len(X) + sample
        sizes, layers, _ = observed[at]
        own = slice(at, at + 1)
        return Facts(
            net, centre, "deviation" if deviates else "float64", first_sample + sample, start[sample],
            _samples(first, own),
            {mask: matrices[sample if len(matrices) > 1 else 0] for mask, matrices in visible.items()}, sizes,
            tuple(
                LayerFacts(**vars(numbers), heads=heads, mlp=mlp, halves=halves)
                for (numbers, halves), (heads, mlp) in zip(layers, layer_norms, strict=True)
            ),
            norms, tuple(_samples(of_layer, own) for of_layer in branches), memo,
        )  # fmt: skip

    return [
        Passes(tuple(facts(sample, copy) for copy in range(1 + copies)), observed[sample][2])
        for sample in range(len(X))
    ]


@dataclass(frozen=True)
class ObservationInputs:
    """All tensors that an observation starts from, but for the weights."""

    X: Float[Tensor, "batch token width"]
    settings: PassSettings
    norms: Float[Tensor, " number"] | None  # `_NormsOnDevice.together`; None of streamed layers, taken as they are read


class Observation(NamedTuple):
    """What a pass gives: numbers with an entry for each sample and copy, how they are arranged, the states that it
    starts from, and what branches add."""

    numbers: Float[Tensor, "number batch"]
    arrangement: "Arrangement"
    first: State
    branches: Any


class Arrangement:
    """Where the rows of a table stand in the structure of tensors that it was made of."""

    def __init__(self, structure: Any, rows: dict[int, int]) -> None:
        """`rows` gives the row of each tensor by its id."""
        self._structure = converted(structure, lambda t: cast(Tensor, Row(rows[id(t)])))

    @classmethod
    def of(cls, structure: Any, count: int) -> "tuple[Arrangement, Float[Tensor, 'number batch']]":
        """(the arrangement, the table) of tensors of at most `count` entries, those of one form stacked together."""
        forms: dict[Any, list[Tensor]] = {}
        for t in tensors_of(structure):
            forms.setdefault((len(t), t.dtype), []).append(t)
        rows = {id(t): row for row, t in enumerate(chain.from_iterable(forms.values()))}
        parts = [pad(torch.stack(alike).double(), (0, count - length)) for (length, _), alike in forms.items()]
        return cls(structure, rows), torch.cat(parts)

    def by_sample(self, table: Float[Tensor, "number batch"]) -> list[Any]:
        """The structure of each sample and copy, with a float in the place of each tensor."""
        return _by_sample(self._structure, table.tolist(), table.shape[1])


class Row(int):
    """The number of a row of a table."""


def _by_sample(structure: Any, table: list[list[float]], samples: int) -> list[Any]:
    """The structure of each sample: parts are made for all samples at once, which spares most calls."""
    if isinstance(structure, Row):
        return table[structure]
    parts: list[Any] = []
    make: Callable[[tuple[Any, ...]], Any] = tuple
    if isinstance(structure, dict):
        parts, make = list(structure.values()), lambda items: dict(zip(structure, items, strict=True))
    elif isinstance(structure, tuple):
        parts, make = list(structure), getattr(type(structure), "_make", tuple)
    elif is_dataclass(structure):
        parts = [getattr(structure, part.name) for part in fields(structure)]
        make = partial(_made, type(structure))
    if not parts:
        return [structure] * samples
    return [make(items) for items in zip(*(_by_sample(part, table, samples) for part in parts), strict=True)]


def _made(kind: type, items: tuple[Any, ...]) -> Any:
    """A dataclass of these fields."""
    return kind(*items)


def _observation(
    net: Transformer, inputs: ObservationInputs, centre: Centre, copies: int, norms: WeightNorms
) -> tuple[list[Any], State, Any]:
    """(a list of what `_Observer.run` gives of each sample and copy, as floats; the states that the pass starts from;
    what branches add, by layer)."""

    def run(inputs: ObservationInputs) -> Observation:
        observer = _Observer(net, inputs, centre, copies, norms)
        arrangement, numbers = Arrangement.of(observer.run(), len(observer.first.log))
        return Observation(numbers, arrangement, observer.first, tuple(observer.branches))

    key = ("certify", net.arch if net.streamed else weights_key(net), centre, copies)
    samples, tokens, width = inputs.X.shape
    largest = max(width, net.arch.mlp_width, net.arch.heads * max(tokens, net.arch.head_width, net.arch.value_width))
    # Random rows must stay where a graph reads them; linear programmes run on the CPU, and parts of one's own and
    # experts do not take the same way each time.
    own = net.streamed or net.arch.parts or any(map(net.arch.mixes, range(net.arch.layers)))
    on_graph = is_cached((1 + copies) * samples * tokens * largest, inputs.X.device)
    held = 0 if net.streamed else bytes_of_weights(net)
    observed = replayed(key, run, inputs, centre == "mean" and not own and on_graph, held)
    return observed.arrangement.by_sample(observed.numbers), observed.first, observed.branches


def _samples(structure: Any, at: slice) -> Any:
    """Some samples of a state or a pattern, whose tensors all begin with the axis of samples."""
    return converted(structure, lambda t: t[at])


def stacked(structures: Sequence[Any]) -> Any:
    """Structures of one form as one, their tensors one after the other along the samples; None of several forms."""
    if len(structures) == 1:
        return structures[0]
    if len(set(map(form, structures))) > 1:
        return None
    columns = iter([torch.cat(column) for column in zip(*map(tensors_of, structures), strict=True)])
    return converted(structures[0], lambda _: next(columns))


class _Observer:
    """Takes a batch of samples and their perturbed copies through the network and notes the numbers."""

    def __init__(
        self, net: Transformer, inputs: ObservationInputs, centre: Centre, copies: int, norms: WeightNorms
    ) -> None:
        self.net, self.centre, self.copies, self.norms, self.inputs = net, centre, copies, norms, inputs
        self.samples = len(inputs.X)
        self.first, self.settings = starting_state(net, inputs.X, inputs.settings, copies)
        self.deviates = applies(net)
        self.rules = recording_rules(net, self.settings, copies) if self.deviates else None
        self.float64_pass: Float64Pass | None = None
        if self.deviates and copies and not net.arch.parts:
            self.float64_pass = Float64Pass(net, inputs.settings)
        self.layer_norms = [] if inputs.norms is None else _NormsOnDevice.of_layers(net, inputs.norms)
        self.branches: list[tuple[Scaled, ...]] = []

    def run(self) -> tuple[Any, Any, Any]:
        """(sizes by layer, (numbers, halves) by layer, agreement by layer), of every sample."""
        net = self.net
        if self.rules is not None:
            passed = records(net, self.first, self.rules)
        else:
            passed = float64_records(net, self.first, self.settings, self.copies)
        kept, before, layers, agreements = _WaitingStates(self), self.first, [], []
        zero = self.first.log.new_zeros(self.samples)
        kept.add(self.first)
        for index, record in enumerate(passed):
            if net.streamed:
                self.layer_norms.append(_NormsOnDevice.of_layer(self.norms.of(net, index), zero))
            followed = None
            if self.float64_pass is not None:
                own = slice(0, self.samples)
                states = _samples(before, own), _samples(record.state, own)
                followed = self.float64_pass.follow(net.blocks[index], *states)
            numbers = self._layer_numbers(index, record)
            layers.append(numbers)
            agreements.append(self._patterns(record.attention))
            kept.add(record.state, WaitingLayer(index, record.halves, numbers.log_averaging, followed))
            before = record.state
        at_layer(net.arch.layers)
        kept.flush()
        agreement = [Agreement(kept.differences[0], zero, zero, zero, zero)]
        for layer, attention in enumerate(agreements, 1):
            float64_difference = kept.float64_differences[layer - 1]
            agreement.append(Agreement(kept.differences[layer], float64_difference, kept.lost[layer], *attention))
        return tuple(kept.sizes), tuple(zip(layers, kept.halves, strict=True)), tuple(agreement)

    def _patterns(self, pattern: DeviationPattern) -> tuple[Tensor, Tensor]:
        """(`undecided`, `elsewhere`) of an `Agreement`."""
        none = torch.zeros(self.samples, dtype=torch.bool, device=pattern.p.device)
        if not self.copies:
            return none, none
        n = self.samples
        first = _samples(pattern, slice(0, n))
        if not must_compute("observation.steep", steep_scores(first).any()):
            return none, none
        left, elsewhere = none, none
        for copy in range(1, 1 + self.copies):
            second = _samples(pattern, slice(copy * n, (copy + 1) * n))
            left, elsewhere = left | undecided(first, second), elsewhere | attends_elsewhere(first, second.matrix())
        return left, elsewhere

    def _layer_numbers(self, index: int, record: BlockRecord) -> LayerNumbers[PerSample]:
        net, arch = self.net, self.net.arch
        active, before = active_heads(arch, index), record.halves[0].before
        visible = self.settings.visible[arch.mask_of(index)]
        norms = self.layer_norms[index]
        Delta = Scaled(of_heads(record.attention.Delta.value, active), record.attention.Delta.log)
        P = of_heads(self._matrix(net.blocks[index], record), active)
        tau = logs_of(_dobrushin(Delta.value), Delta.log[:, None])
        averaging = clipped(sum_of(product_of(tau, norms.spectral)))
        unknown = torch.full_like(before.log, math.nan)
        oscillation, factor, attention, exact = unknown, unknown, unknown, unknown
        bilinear = arch.kernel in SOFTMAX and not arch.query_norm and not arch.score_cap
        if arch.norm == "none" and bilinear and arch.positions in ("none", "absolute"):
            oscillation, factor = self._oscillation(index, before, visible, norms)
        if arch.norm == "none" and arch.mlp == "none":
            exact = self._exact_factor(index, before, Delta)
            attention = _attention_factor(Delta, norms) if active else torch.full_like(unknown, -torch.inf)
        # A weight below zero off the mask, as a kernel of one's own may have, is no weight of an average either.
        smallest, defect = torch.zeros_like(unknown), torch.zeros_like(unknown)
        if active:
            smallest = P.masked_fill(~visible & (P >= 0), torch.inf).amin((1, 2, 3)).clamp(min=0.0)
            defect = (P.sum(-1) - 1).abs().amax((1, 2))
        return LayerNumbers(oscillation, factor, attention, exact, averaging, smallest.log(), defect)

    def _matrix(self, block: Block, record: BlockRecord) -> Float[Tensor, "batch head token token"]:
        """P from the tokens themselves, in which small weights are not differences of large ones; from its two
        parts where tokens have left floating point's range."""
        if not record.halves[0].branches:
            return record.attention.matrix()
        inside, rules = record.halves[0].branches[0].inside.tokens(), Plain(block.arch, self.settings)
        P = changed("pattern", block, rules, rules.pattern(block, inside), inside)
        finite = P.isfinite().all(-1).all(-1).all(-1)
        if can_skip("observation.finite_pattern", finite.all()):
            return cast(Tensor, P)
        return torch.where(finite[:, None, None, None], P, record.attention.matrix())

    def _about(self, state: State) -> tuple[Scaled, Scaled]:
        """(the centre, the deviation about it with its largest entry one)."""
        mean, R = state.centred()
        x, R = state.x + mean, sized(R)
        if self.centre == "mean":
            return x, R
        moved = centred(tokens(R.value), "argmin", "composite")
        return x + Scaled((R.value - moved)[:, 0], R.log), sized(Scaled(moved, R.log))

    def _oscillation(
        self, index: int, state: State, visible: Tensor, norms: "_NormsOnDevice"
    ) -> tuple[PerSample, PerSample]:
        """(log of the largest oscillation of a row of E, log of the factor of `factors.py` made of them)."""
        arch, active = self.net.arch, active_heads(self.net.arch, index)
        if arch.kernel == "uniform" or not active:
            nothing = torch.full_like(state.log, -torch.inf)
            return nothing, nothing
        (x, R), w = self._about(state), self.net.weights.layers[index].attention
        dq, dk = deviation_heads(R, w.query, arch), deviation_heads(R, w.key, arch)
        E = of_heads(dq.value, active) / arch.divisor @ of_heads(dk.value, active).mT
        hidden = ~visible
        osc = E.masked_fill(hidden, -torch.inf).amax(-1) - E.masked_fill(hidden, torch.inf).amin(-1)
        size = torch.where(osc > 0, osc, 1.0).log() + 2 * R.log[:, None, None]
        size = size.masked_fill(osc <= 0, -torch.inf)  # [batch, head, token]
        grown = _log_expm1(size)
        most = of_heads(self._log_most(index, x, dk, visible), active)
        return size.amax((1, 2)), _combined(grown.logsumexp(-1) + most, grown.amax(-1), norms)

    def _log_most(self, index: int, x: Scaled, dk: Scaled, visible: Tensor) -> Float[Tensor, "batch head"]:
        """log of the largest entry of `p = softmax(ref)`, ref the scores that the centre's query gives."""
        arch, w = self.net.arch, self.net.weights.layers[index].attention
        q = common_heads(x, w.query, arch)
        ref = Scaled((dk.value @ q.value[..., None])[..., 0], dk.log + q.log)
        if arch.kernel == "gaussian":
            k = common_heads(x, w.key, arch)
            ref = ref + Scaled(-(dk.value @ k.value[..., None])[..., 0], dk.log + k.log)
            ref = ref + Scaled(-dk.value.square().sum(-1) / 2, 2 * dk.log)
        scores = ref.explicit() / arch.divisor
        seen = visible[:, :, 0]  # every row sees the same where this is used
        return scores.masked_fill(~seen, -torch.inf).log_softmax(-1).amax(-1)

    def _exact_factor(self, index: int, state: State, Delta: Scaled) -> PerSample:
        """`||(P - 1p^T) R W||_{1,inf} / ||R||_{1,inf}`, summed over heads, about the centre."""
        arch, active, w = self.net.arch, active_heads(self.net.arch, index), self.net.weights.layers[index].attention
        R = sized(state.centred()[1])
        values = of_heads(deviation_heads(R, w.value, arch).value, active)
        head_outputs = (Delta.value @ values).transpose(1, 2).flatten(-2)
        out = head_outputs @ of_heads(w.output.weight, active, axis=0).flatten(0, 1)
        together = torch.cat([out, R.value])
        if self.centre == "mean":
            apart = together - together[:, :1]  # equal ones are zero exactly
            deviation = sized(Scaled.plain(apart - apart.mean(1, keepdim=True)))
            logs = logs_of(NORMS["composite"](deviation.value), deviation.log)
        else:
            mask = torch.ones(together.shape[:2], dtype=torch.bool, device=out.device)
            logs = _log_about_argmin(State.of(together, mask))
        added, before = torch.split(logs, len(out))
        return torch.where(before == -torch.inf, -torch.inf, added - before + Delta.log)

    def sizes(self, state: State) -> TokenSizes[PerSample]:
        """The sizes of the tokens of a state."""
        if not can_skip("observation.finite_tokens", state.scaled_tokens.isfinite().all()):
            sentence = "tokens and weights must be finite to be certified; NaN or infinity came out of a layer"
            raise TokensError(f"{sentence}: certify net.variant(layers=...), the layers before it", subject="X")
        R, all_tokens = sized(state.centred()[1]), sized(Scaled.plain(state.scaled_tokens))
        lengths = torch.linalg.vector_norm(all_tokens.value, dim=-1)
        unit, equal = all_tokens.log + state.log, state.R.largest() == 0

        def of_residual(size: Tensor) -> PerSample:
            return logs_of(size, R.log).clamp(min=LOWEST).masked_fill(equal, -torch.inf)

        mu = of_residual(torch.linalg.vector_norm(R.value, dim=(1, 2)))
        residual = of_residual(NORMS["composite"](R.value)) if self.centre == "mean" else _log_about_argmin(state)
        composite = logs_of(NORMS["composite"](all_tokens.value), unit)
        frobenius = logs_of(torch.linalg.vector_norm(all_tokens.value, dim=(1, 2)), unit)
        noise = (mu.abs() > FARTHEST) & ~equal | mu.isnan()
        if not self.deviates:
            noise = mu - frobenius < log(unit_of(torch.float64) / NOISE_SHARE)
        shortest, longest = logs_of(lengths.amin(-1), unit), logs_of(lengths.amax(-1), unit)
        ready, _ = tokens_of(state.scaled_tokens, state.valid.mask, unpadded=True)
        return TokenSizes(
            residual, mu, diameter=logs_of(largest_square_distance(R.value).sqrt(), R.log),
            of_tokens={"residual": composite, "mu": frobenius, "diameter": longest}, shortest=shortest,
            longest=longest, cosine=min_cosine(ready), log_cosine_gap=_log_cosine_gap(state, ready), noise=noise,
        )  # fmt: skip


class FollowedStates(NamedTuple):
    """A state of the samples, what float64 has in its place, and for which of them that says something."""

    state: State
    float64: State
    followed: Tensor


class WaitingLayer(NamedTuple):
    """What a layer did, until it is read with others."""

    layer: int
    halves: tuple[HalfRecord, ...]
    log_averaging: PerSample
    followed: FollowedStates | None


@dataclass
class _WaitingStates:
    """Hidden states that wait to be read: of layers of one form, one after the other along the samples."""

    observer: _Observer
    states: list[State] = field(default_factory=list)
    waiting: list[WaitingLayer] = field(default_factory=list)
    sizes: list[TokenSizes[PerSample]] = field(default_factory=list)  # What was read so far, by layer
    halves: list[tuple[HalfFacts[PerSample], ...]] = field(default_factory=list)
    differences: list[PerSample] = field(default_factory=list)
    float64_differences: list[PerSample] = field(default_factory=list)
    lost: list[Tensor] = field(default_factory=list)
    last: State | None = None  # The last state that was read

    def add(self, state: State, layer: WaitingLayer | None = None) -> None:
        """Keep a state, and the layer that led to it; read all that is kept once it is enough."""
        self.states.append(state)
        if layer is not None:
            self.waiting.append(layer)
        bytes_of_layer = sum(t.nbytes for t in tensors_of((state, layer)))
        if (len(self.states) + 1) * bytes_of_layer > AT_ONCE.get(state.log.device.type, 2**30):
            self.flush()

    def flush(self) -> None:
        """Read the states that wait, and forget them."""
        states, observer = self.states, self.observer
        if not states:
            return
        stack = stacked(states)
        if stack is None:  # of different forms
            self._read_states([states[0]], states[0])
            for state in states[1:]:
                self._read_states([state], state)
        else:
            self._read_states(states, stack)
        mixes = observer.net.arch.mixes
        for _, group in groupby(self.waiting, lambda kept: (mixes(kept.layer), form((kept.halves, kept.followed)))):
            indices, halves, averaging, followed = zip(*group, strict=True)
            self._read_float64(followed)
            stack = stacked(halves)
            layers = [observer.net.weights.layers[index] for index in indices]
            mlp = torch.stack([observer.layer_norms[index].mlp for index in indices])
            read = [half_facts(observer.net.arch, layers, half, torch.cat(averaging), mlp) for half in stack]
            for number in range(len(indices)):
                own = slice(number * len(averaging[0]), (number + 1) * len(averaging[0]))
                self.halves.append(tuple(_samples(facts, own) for facts, _ in read))
                if _writes_beside_skips(observer.net):
                    observer.branches.append(tuple(_samples(branch, own) for _, branch in read))
        self.states, self.waiting = [], []

    def _read_float64(self, layers: Sequence[FollowedStates | None]) -> None:
        """Note how far float64 is from states of layers of one form."""
        pairs, n = [pair for pair in layers if pair is not None], self.observer.samples
        if not pairs:
            self.float64_differences += [self.observer.first.log.new_zeros(n)] * len(layers)
            return
        state, float64, followed = cast(FollowedStates, stacked(pairs))
        differences = state_distance(state, float64).masked_fill(~followed, 0.0)
        self.float64_differences += torch.split(differences, n)

    def _read_states(self, states: Sequence[State], stack: State) -> None:
        """Note the sizes of states, one after the other in `stack`, and how far copies agree on them."""
        observer, total, n = self.observer, len(states[0].log), self.observer.samples
        sizes = observer.sizes(stack)

        def copy_of(number: int) -> State:
            chosen = [_samples(state, slice(number * n, (number + 1) * n)) for state in states]
            return chosen[0] if len(chosen) == 1 else cast(State, stacked(chosen))

        first, difference = copy_of(0), None
        for copy in range(1, 1 + observer.copies):
            other = state_distance(first, copy_of(copy))
            difference = other if difference is None else torch.maximum(difference, other)
        if difference is None:
            difference = torch.zeros_like(first.log)
        own = slice(0, n)
        before = [states[0] if self.last is None else self.last, *states[:-1]]
        previous = [_samples(state, own) for state in before]
        lost = tokens_lost(previous[0] if len(previous) == 1 else cast(State, stacked(previous)), first)
        for number in range(len(states)):
            self.sizes.append(_samples(sizes, slice(number * total, (number + 1) * total)))
            self.differences.append(difference[number * n : (number + 1) * n])
            self.lost.append(lost[number * n : (number + 1) * n])
        self.last = states[-1]


def _writes_beside_skips(net: Transformer) -> bool:
    """True if theorems ask for what branches add: beside skips, with no norm after a sum or a branch."""
    arch = net.arch
    after = any(branch.after is not None for half in order(arch) for branch in half.branches)
    return math.prod(skips(arch)) > 0 and not normed_sums(arch) and not after


@dataclass(frozen=True)
class _NormsOnDevice:
    """Norms of one layer's weights where the network is: logs of those of heads, and of its MLP as they are."""

    columns: Float[Tensor, " head"]
    rows: Float[Tensor, " head"]
    spectral: Float[Tensor, " head"]
    mlp: Float[Tensor, " 4"]  # `MLPNorms`: spectral, up, gate and down

    @staticmethod
    def together(layers: Sequence[LayerNorms], like: Tensor) -> Float[Tensor, " number"]:
        """The norms of these layers one after the other on the device of `like`, where they cross over to in one go."""
        of_mlps = torch.tensor([[mlp.spectral, mlp.up, mlp.gate, mlp.down] for _, mlp in layers], dtype=torch.float64)
        names = ("columns", "rows", "spectral")
        parts = [[*(heads.logs[name] for name in names), mlp] for (heads, _), mlp in zip(layers, of_mlps, strict=True)]
        return torch.cat(list(chain.from_iterable(parts))).to(like.device)

    @classmethod
    def of_layers(cls, net: Transformer, numbers: Float[Tensor, " number"]) -> "list[_NormsOnDevice]":
        """The norms of each layer of a network, from those `together`."""
        counts = [len(active_heads(net.arch, index)) for index in range(net.arch.layers)]
        parts = torch.split(numbers, [size for count in counts for size in (count, count, count, 4)])
        return [cls(*parts[start : start + 4]) for start in range(0, len(parts), 4)]

    @classmethod
    def of_layer(cls, norms: LayerNorms, like: Tensor) -> "_NormsOnDevice":
        """The norms of one layer on the device of `like`."""
        numbers, count = cls.together([norms], like), len(norms[0].columns)
        return cls(*torch.split(numbers, [count, count, count, 4]))


def _log_about_argmin(state: State) -> PerSample:
    """log of `||res X||_{1,inf}` about the minimising centre."""
    reading = read(metric("residual@argmin"), DeviationStep(0, state, None))
    assert reading is not None
    return reading.log10 * TEN


def _log_cosine_gap(state: State, ready: Tokens) -> PerSample:
    """log of the largest `1 - cos(x_i, x_j)`: close tokens' from what their directions differ by."""
    u = normalise(state, "scale", NormWeights(), 0.0).residual
    close = logs_of(largest_square_distance(u.value) / 2, 2 * u.log)
    apart = max_cosine_gap(ready).log()
    equal = state.R.largest() == 0
    return torch.where(state.x.log > LOWEST, close.masked_fill(equal, -torch.inf), apart)


def _dobrushin(Delta: Float[Tensor, "batch head token token"]) -> Float[Tensor, "batch head"]:
    """Dobrushin's coefficient of every head, or among many tokens an upper bound that does not compare all
    pairs of rows: `|a - b| / 2 <= max |a - mean|`."""
    if Delta.shape[-1] > MANY:
        return (Delta - Delta.mean(-2, keepdim=True)).abs().sum(-1).amax(-1)
    if Delta.device.type == "cpu":
        few = 1 < Delta.shape[-1] <= FEW  # of two rows each pair once, not twice as metrics do for whole batches
        pairs = [torch.pdist(rows, 1.0).amax() / 2 for rows in Delta.flatten(0, 1)] if few else []
        return torch.stack(pairs).view(Delta.shape[:2]) if pairs else dobrushin(Delta)
    return largest_sum_distance(Delta) / 2  # NaN of a head that holds NaN


def _log_expm1(size: Tensor) -> Tensor:
    x = size.clamp(max=6.0).exp()
    small, middle = size < -30, torch.expm1(x.clamp(min=1e-13, max=40.0)).log()
    large = size.exp()
    return torch.where(small, size, torch.where(large > 40, large, middle))


def _combined(columns: Tensor, rows: Tensor, norms: _NormsOnDevice) -> PerSample:
    """log of `sqrt((sum_h ||M_h||_1 ||W_h||_1) (sum_h ||M_h||_inf ||W_h||_inf))` from the logs of M's."""
    sides = zip((columns, rows), (norms.columns, norms.rows), strict=True)
    first, second = (clipped(sum_of(product_of(of_M, of_W))) for of_M, of_W in sides)
    return product_of(0.5 * first, 0.5 * second)


def _attention_factor(Delta: Scaled, norms: _NormsOnDevice) -> PerSample:
    """The factor of `factors.py` with `M_h = (I - 11^T/n) P_h` as measured."""
    M = (Delta.value - Delta.value.mean(-2, keepdim=True)).abs()
    columns, rows = (M.sum(axis).amax(-1).log() + Delta.log[:, None] for axis in (-2, -1))
    return _combined(columns, rows, norms)


class Float64Pass:
    """A float64 pass beside deviation arithmetic, with which it shares no formula. The pass restarts from the
    deviation state wherever float64 could not resolve the residual."""

    def __init__(self, net: Transformer, settings: PassSettings) -> None:
        self.rules = Plain(net.arch, settings)
        self.X: Tensor | None = None
        self.followed: Tensor | None = None  # True for samples whose tokens X still stands for
        self.seen: Tensor | None = None  # True for samples whose tokens after the last block float64 resolves

    def follow(self, block: Block, before: State, after: State) -> FollowedStates | None:
        """The states after a block and float64's, which are to be compared where float64 can resolve them; None where
        it can nowhere. The float64 tokens are asked as well: those of deviation arithmetic may be wrong."""
        X, followed = self.X, self.followed
        seen = visible_to_float64(before) if self.seen is None else self.seen
        self.X = self.followed = self.seen = None
        if not must_compute("observation.float64", seen.any()):
            return None
        if X is None or followed is None:
            X = before.tokens()
        elif not can_skip("observation.followed", followed):
            X = torch.where(followed[:, None, None], X, before.tokens())
        X = traverse(block, self.rules, X).state
        finite = X.isfinite().flatten(1).all(1)
        X = X.masked_fill(~finite[:, None, None], 0.0)
        own_state = State.of(X, after.valid.mask)
        self.seen = visible_to_float64(after)
        self.X, self.followed = X, seen & finite & (visible_to_float64(own_state) | self.seen)
        return FollowedStates(after, own_state, self.followed)


def visible_to_float64(state: State) -> Tensor:
    """True for samples whose tokens float64 can hold, and resolve what they differ by."""
    size = state.log
    return (state.R.log_size() - size > math.log(RESOLVED)) & (size.abs() < WITHIN)


def float64_records(net: Transformer, first: State, settings: PassSettings, copies: int) -> Iterator[BlockRecord]:
    """Run the network in float64 and give a record of each block: its attention pattern, and for a layer
    without norms and MLP the branch that was added to the skip."""
    rules = PerturbedPlain(net.arch, settings, copies=copies) if copies else Plain(net.arch, settings)
    before, real, weight = first.tokens(), first.valid.mask, net.arch.attention_skip
    for block in net.blocks:
        at_layer(block.index)
        after, P, *_ = traverse(block, rules, before)
        p = P.mean(-2)
        deviations = Scaled.plain(P - p[:, :, None])
        top = p.argmax(-1, keepdim=True)
        visible = torch.ones(len(P), 1, *P.shape[-2:], dtype=torch.bool, device=P.device)
        state, added = State.of(after, real), State.of(after - weight * before, real)
        half = HalfRecord(State.of(before, real), (), weight, added, state, state)
        yield BlockRecord(state, _PatternMatrix(p, deviations, top, visible), None, (half,))
        before = after


class _PatternMatrix(DeviationPattern):
    """An attention pattern kept as a matrix, whose rows need not sum to one."""

    @cached_property
    def Delta(self) -> Scaled:
        return self.off_top

    def matrix(self) -> Tensor:
        return self.p[:, :, None] + self.off_top.value
