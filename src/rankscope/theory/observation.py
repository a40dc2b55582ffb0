"""Runs a network on samples and collects the `Facts` that the theorems need, layer by layer.

Called by `certificates.py`. All samples, and after them perturbed copies of all (`rounding.py` compares them), go
through the network as one batch:

1. `deviation/dissect.py` gives a record of each block; for a network without deviation rules `rounding.py` does.
2. While a block's record is there, its attention is read (`readings.py`, `rounding.py`).
3. Its hidden states wait until they are read (`readings.py`, `rounding.py`): those of several layers as one batch,
   which spares a GPU kernels.
4. All numbers leave the device together, and become the `Facts` of each sample and copy.

On a GPU steps 1 to 3 are a captured graph (`deviation/replay.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.deviation import (
    HalfRecord,
    NumberTable,
    Scaled,
    State,
    applies,
    at_layer,
    is_cached,
    joined_by_form,
    parts,
    recording_rules,
    records,
    replay,
    samples,
    starting_state,
    starting_tokens,
)
from rankscope.nets import PassSettings, Structure, Transformer, active_heads, tensors_of
from rankscope.shapes import Float
from rankscope.theory.readings import AttentionOfLayer, half_facts, token_sizes
from rankscope.theory.rounding import Float64Pass, FollowedStates, agreement, float64_records, pattern_agreement
from rankscope.theory.theorem import (
    Agreement,
    Centre,
    Facts,
    HalfFacts,
    LayerFacts,
    LayerNumbers,
    Passes,
    PerSample,
    TokenSizes,
    premises_of,
)
from rankscope.theory.weight_norms import DeviceNorms, PackedNorms, WeightNorms, packed, unpacked

AT_ONCE = {"cpu": 2**22}
"""Bytes of hidden states that are read in one go, by device: on the CPU what its cache holds, else 2^30."""


def observe(
    net: Transformer,
    X: Float[Tensor, "token width"],
    centre: Centre = "mean",
    norms: WeightNorms | None = None,
    padding: Tensor | None = None,
) -> Facts:
    """Run the network on one sample and collect what the theorems need to know: `observe_batch` without copies."""
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
    on_device = None if net.streamed else packed(norms.of_layers(net), net.device)
    inputs = ObservationInputs(*starting_tokens(net, X, padding), on_device)
    observation = _observation(net, inputs, centre, copies, norms)
    by_sample = observation.arrangement.by_sample(observation.numbers)
    start = inputs.X.cpu()
    masks = dict.fromkeys(map(net.arch.mask_of, range(net.arch.layers)))
    visible = {mask: inputs.settings.visible[mask][:, 0].cpu() for mask in masks}
    layer_norms = norms.of_layers(net)  # after the pass, by which streamed layers are read once

    def facts(sample: int, copy: int) -> Facts:
        at = copy * len(X) + sample
        sizes, layers, _ = by_sample[at]
        return Facts(
            net, centre, "deviation" if applies(net) else "float64", first_sample + sample, start[sample],
            samples(observation.first, at, 1),
            {mask: matrices[sample if len(matrices) > 1 else 0] for mask, matrices in visible.items()}, sizes,
            tuple(
                LayerFacts(**vars(numbers), heads=heads, mlp=mlp, halves=halves)
                for (numbers, halves), (heads, mlp) in zip(layers, layer_norms, strict=True)
            ),
            norms, samples(observation.branches, at, 1), memo,
        )  # fmt: skip

    return [
        Passes(tuple(facts(sample, copy) for copy in range(1 + copies)), by_sample[sample][2])
        for sample in range(len(X))
    ]


@dataclass(frozen=True)
class ObservationInputs:
    """All tensors that an observation starts from, but for the weights."""

    X: Float[Tensor, "batch token width"]
    settings: PassSettings
    norms: PackedNorms | None  # None of streamed layers, whose norms are taken as they are read


class Observation(NamedTuple):
    """What a pass gives: numbers with an entry for each sample and copy, and some tensors that stay where they are."""

    numbers: Float[Tensor, "number batch"]
    arrangement: NumberTable  # of (sizes by layer, (numbers, halves) by layer, agreement by layer)
    first: State  # what the pass starts from
    branches: tuple[tuple[Scaled, ...], ...]  # what branches add, by layer and half; empty if no theorem asks


def _observation(
    net: Transformer, inputs: ObservationInputs, centre: Centre, copies: int, norms: WeightNorms
) -> Observation:
    """The pass, on a GPU by a captured graph where it can be one."""

    def run(inputs: ObservationInputs) -> Observation:
        return _Observer(net, inputs, centre, copies, norms).run()

    if not replay.waits(inputs.X):
        return run(inputs)
    count, tokens, width = inputs.X.shape
    largest = max(width, net.arch.mlp_width, net.arch.heads * max(tokens, net.arch.head_width, net.arch.value_width))
    # Random rows must stay where a graph reads them; linear programmes run on the CPU, and parts of one's own and
    # experts do not take the same way each time.
    changes = net.streamed or net.arch.parts or any(map(net.arch.mixes, range(net.arch.layers)))
    rows_stay = is_cached((1 + copies) * count * tokens * largest, inputs.X.device)
    key, read = ("certify", net.arch, centre, copies), None if net.streamed else net
    return replay.replay_cache.run(key, run, inputs, read, capture=centre == "mean" and not changes and rows_stay)


class _WaitingBlock(NamedTuple):
    """What a block did to its tokens, until it is read together with other blocks."""

    mixes: bool  # True of a mixture of experts, which is not read with other MLPs
    halves: tuple[HalfRecord, ...]
    log_averaging: PerSample
    before: State  # of the samples alone
    passes: tuple[State, ...]  # after the block, of the samples and of each copy
    of_patterns: tuple[Tensor, Tensor]  # `pattern_agreement`
    by_float64: FollowedStates | None


class _Observer:
    """Takes a batch of samples and their perturbed copies through the network and notes the numbers."""

    def __init__(
        self, net: Transformer, inputs: ObservationInputs, centre: Centre, copies: int, norms: WeightNorms
    ) -> None:
        self.net, self.inputs, self.centre, self.copies, self.norms = net, inputs, centre, copies, norms
        self.samples, self.deviates = len(inputs.X), applies(net)
        self.first, self.settings = starting_state(net, inputs.X, inputs.settings, copies)
        self.layer_norms: list[DeviceNorms] = []
        if inputs.norms is not None:
            heads = [len(active_heads(net.arch, index)) for index in range(net.arch.layers)]
            self.layer_norms = unpacked(inputs.norms, heads)
        self.states: list[State] = []  # that wait to be read, with the blocks that led to them
        self.blocks: list[_WaitingBlock] = []
        # What was read, by layer; the first of `sizes` and `agreement` are of the input.
        self.sizes: list[TokenSizes[PerSample]] = []
        self.agreement: list[Agreement[PerSample]] = []
        self.numbers: list[LayerNumbers[PerSample]] = []
        self.halves: list[tuple[HalfFacts[PerSample], ...]] = []
        self.branches: list[tuple[Scaled, ...]] = []

    def run(self) -> Observation:
        """Run all layers, and read what they did."""
        net, passes = self.net, self._passes(self.first)
        self.agreement.append(agreement(passes[0], passes, (torch.zeros_like(passes[0].equal),) * 2))
        self._keep(self.first)
        float64_pass = None
        if self.deviates and self.copies and not net.arch.parts:
            float64_pass = Float64Pass(net, self.inputs.settings)
        if self.deviates:
            recorded = records(net, self.first, recording_rules(net, self.settings, self.copies))
        else:
            recorded = float64_records(net, self.first, self.settings, self.copies)
        for index, record in enumerate(recorded):
            if net.streamed:
                norms = self.norms.of(net, index)
                self.layer_norms += unpacked(packed([norms], net.device), [len(norms[0].columns)])
            block, before, passes = net.blocks[index], passes[0], self._passes(record.state)
            by_float64 = None
            if float64_pass is not None:
                by_float64 = float64_pass.follow(block, before, passes[0])
            attention = AttentionOfLayer(block, self.settings, record, self.layer_norms[index], self.centre)
            self.numbers.append(attention.numbers())
            of_patterns, averaging = pattern_agreement(self._passes(record.attention)), self.numbers[-1].log_averaging
            waiting = record.halves, averaging, before, passes, of_patterns, by_float64
            self._keep(record.state, _WaitingBlock(net.arch.mixes(index), *waiting))
        at_layer(net.arch.layers)
        self._read()
        by_layer = tuple(self.sizes), tuple(zip(self.numbers, self.halves, strict=True)), tuple(self.agreement)
        table, numbers = NumberTable.of(by_layer, len(self.first.log))
        return Observation(numbers, table, self.first, tuple(self.branches))

    def _passes(self, structure: Structure) -> tuple[Structure, ...]:
        """The samples alone, then each copy of them."""
        return tuple(samples(structure, copy * self.samples, self.samples) for copy in range(1 + self.copies))

    def _keep(self, state: State, block: _WaitingBlock | None = None) -> None:
        """Let a state wait, and the block that led to it; read all that wait once they are enough."""
        self.states.append(state)
        self.blocks += [] if block is None else [block]
        held = state, block and (block.halves, block.log_averaging, block.by_float64)
        bytes_of_layer = sum([t.nbytes for t in tensors_of(held)])
        if (len(self.states) + 1) * bytes_of_layer > AT_ONCE.get(self.net.device.type, 2**30):
            self._read()

    def _read(self) -> None:
        """Read what waits, and forget it."""
        for indices, state in joined_by_form(self.states):
            self.sizes += parts(token_sizes(state, self.centre, by_floats=not self.deviates), len(indices))
        done = len(self.halves)
        for indices, blocks in joined_by_form(self.blocks):
            self._read_blocks([done + index for index in indices], blocks)
        self.states, self.blocks = [], []

    def _read_blocks(self, layers: Sequence[int], blocks: _WaitingBlock) -> None:
        """Read the blocks of these layers, whose samples follow each other."""
        arch = self.net.arch
        agree = agreement(blocks.before, blocks.passes, blocks.of_patterns, blocks.by_float64)
        self.agreement += parts(agree, len(layers))
        weights = [self.net.weights.layers[layer] for layer in layers]
        mlp = torch.stack([self.layer_norms[layer].mlp for layer in layers])
        read = [half_facts(arch, weights, half, blocks.log_averaging, mlp) for half in blocks.halves]
        facts, branches = zip(*read, strict=True)
        self.halves += parts(facts, len(layers))
        # Theorems ask for what branches add beside skips, with no norm after a sum or a branch.
        known = premises_of(arch)
        if math.prod(known.skips) > 0 and not known.normed_sums and not known.normed_branches:
            self.branches += parts(branches, len(layers))
