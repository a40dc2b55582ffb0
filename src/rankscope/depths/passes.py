"""The passes that a depth card takes over its tokens: forward, back, and without each layer and head.

`depth` in `card.py` calls them in this order.

1. `read_forward` goes through the network block by block, by the plain rules, and takes of each layer what its tokens,
   branches, norms and attention show.
2. `TwoPasses` has the exact shares of what passes through each layer (`paths`) with one layer in memory, where the
   network can be frozen. Forward, the tokens that each layer reads are kept, apart by where they started (embedding,
   bias). Back, layer by layer, `A^T output` is pulled through the layer, which is frozen again on the tokens that were
   kept: A is the map of all later layers, and `<branch, A^T output>` is the inner product of the output with everything
   that passes through a branch. So no layer is needed but the one at hand, and layers may be read from files. It costs
   two readings of every layer and the time of about six forward passes.
3. `Removals` measures what the output loses when a layer or a head is taken out, by running the network without it.
   `without(net, ...)` would run as often as there are layers and heads. Here what comes before a layer is not run
   again: the tokens before it are known from the pass forward, and all networks that lack something run side by side as
   copies in one batch. Each layer is applied to all copies while it is in memory. As many copies run together as
   memory holds; where that is not all, the later layers are read again for the rest. Without a layer its input goes on
   as its output. Without a head the others, the output bias and all norms stay. The result is that of
   `net.without(layers=...)` and `net.without(heads=...)`. Cost, in layers applied to the text: `L (L - 1) / 2` for all
   layers, and `H L (L + 1) / 2` for all heads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.metrics import (
    ROUNDING,
    Values,
    affine_rank_with_doubt,
    entropy,
    first_token_mass,
    frobenius_norm,
    unit_of,
)
from rankscope.nets import (
    Block,
    Branch,
    Half,
    Memory,
    PassSettings,
    Plain,
    RowOutputs,
    Tokens,
    Transformer,
    contributions,
    free_memory,
    traverse,
)
from rankscope.paths import (
    FreezingRules,
    Frozen,
    FrozenLayer,
    FrozenNorm,
    FrozenRules,
    HeadTerms,
    Parts,
    Terms,
    centred_tokens,
    closure_of,
    size_of,
    uniform,
)
from rankscope.shapes import Bool, Float

Valid = Bool[Tensor, "batch token"]
SINK = 0.3  # The mass on the first token above which a head has a sink (Gu et al. 2025)
SHARE = 4  # The part of free memory that copies of the tokens may fill: one in so many
UNKNOWN = 2**30  # Bytes for copies where nobody says how many are free
NormRank = tuple[dict[str, Any], dict[str, Values]]
"""The layer and name of a norm, and by column the affine rank of the tokens before and after it, each of a sample, with
whether rounding may have decided one of them."""


class LayerShares(NamedTuple):
    """What of the output passed through a layer; in the first axis 0 is what started at the embedding, 1 at a bias.

    NaN of a residual that is only rounding.
    """

    layer: Float[Tensor, "start batch"]  # through any of its branches: what the layer adds, with their biases
    mlp: Float[Tensor, "start batch"]  # through its MLP; zero where there is none
    heads: Float[Tensor, "start batch head"]  # through each head


class _OneLayer(FrozenRules):
    """The rules of a frozen layer, which also record what `heads` mixed and what the `mlp` added."""

    def __init__(self, frozen: Frozen, layer: FrozenLayer, start: int | None) -> None:
        super().__init__(frozen)
        self.frozen_layer, self.start = layer, start
        self.recorded: dict[str, Tensor] = {}

    def layer(self, block: Block) -> FrozenLayer:
        """The frozen layer that these rules go through."""
        return self.frozen_layer

    def output(self, block: Block, head_terms: HeadTerms) -> Terms:
        """What heads add, after recording what each mixed."""
        self.recorded["heads"] = head_terms
        return super().output(block, head_terms)

    def add(self, block: Block, half: Half, terms: Terms, branches: dict[str, Terms]) -> Terms:
        """The sum, after recording what the MLP adds to it: a copy is summed, which may be changed in place."""
        if "mlp" in branches:
            self.recorded["mlp"] = branches["mlp"].parts
            branches = branches | {"mlp": branches["mlp"]._replace(parts=branches["mlp"].parts.clone())}
        return super().add(block, half, terms, branches)


class _PastLayer(_OneLayer):
    """The rules past all branches of a frozen layer: its skips, and norms on sums, whose biases pass by it too."""

    def takes(self, block: Block, half: Half, branch: Branch) -> bool:
        """False for every branch: paths go by the skips alone."""
        return False


class TwoPasses:
    """Shares by layer and head: `forward` is called with each layer in order, then `back` gives the shares."""

    def __init__(self, net: Transformer, X: Tokens, valid: Bool[Tensor, "batch token"]) -> None:
        self.net, self.valid, self.first = net, valid, X
        self.settings, self.no_padding = net.settings(X, valid), bool(valid.all())
        self.terms = torch.stack([X, torch.zeros_like(X)])
        self.inputs: list[tuple[Tokens, Parts]] = []
        self.closure = float("nan")  # How far the terms are from adding up to the output; known once `back` begins

    def _frozen(self, X: Tokens) -> Frozen:
        """A frozen network that has this last state; its layers are frozen one at a time."""
        net = self.net
        last = FrozenNorm.of(net.arch, net.weights.final_norm, X) if net.arch.final_norm else None
        output = net.finish(X) * self.valid[..., None]
        return Frozen(net, self.first, self.valid, (), last, output, None, self.no_padding)

    @torch.no_grad()
    def forward(self, layer: FrozenLayer, X: Tokens) -> None:
        """Carry what started at the embedding and at biases through a layer, which was frozen on the tokens X."""
        self.inputs.append((X, self.terms))
        rules = _OneLayer(self._frozen(X), layer, 1)
        self.terms = rules.through(layer.block, Terms(self.terms, 1)).parts

    def back(self, X: Tokens) -> Iterator[tuple[int, LayerShares, LayerShares]]:
        """Yield (layer from 1, shares of the output, shares of its residual), the last layer first.

        Args:
            X: The last state, before the final norm.

        Raises:
            ClosureError: The terms do not add up to the output.
        """
        frozen = self._frozen(X)
        ended = FrozenRules(frozen)
        self.closure = closure_of(ended.end(Terms(self.terms, 1)).sum(0), frozen)
        output, noise = frozen.output, uniform(frozen.output, self.valid)
        targets = [output, centred_tokens(output, self.valid)]
        sizes = [size_of(target) for target in targets]
        with torch.enable_grad():
            Z = torch.zeros_like(X)[None].requires_grad_(True)
            Y = ended.end(Terms(Z))[0]
            scaled = [target / size[:, None, None] for target, size in zip(targets, sizes, strict=True)]
            pulled = [torch.autograd.grad(Y, Z, target, retain_graph=True)[0][0] for target in scaled]
        for block in reversed(self.net.blocks):
            X, terms = self.inputs[block.index]
            freezing = FreezingRules(self.net.arch, self.settings)
            with torch.no_grad():
                traverse(block, freezing, X)
            products = list(self._products(freezing.layers[block.index], frozen, terms, pulled))
            pulled = [before for before, _ in products]
            of_output, of_residual = (
                LayerShares(*(values / (size[:, None] if values.ndim == 3 else size) for values in part))
                for (_, part), size in zip(products, sizes, strict=True)
            )
            masks = (noise[:, None] if values.ndim == 3 else noise for values in of_residual)
            masked = (values.masked_fill(mask, torch.nan) for values, mask in zip(of_residual, masks, strict=True))
            yield block.index + 1, of_output, LayerShares(*masked)
        self.net.weights.layers.release()

    def _products(
        self, layer: FrozenLayer, frozen: Frozen, terms: Parts, pulled: list[Tokens]
    ) -> Iterator[tuple[Tokens, LayerShares]]:
        """For each target: what it is before the layer, and its inner products with what passes through the layer."""
        block = layer.block
        rules = _OneLayer(frozen, layer, 1)
        with torch.no_grad():
            after = rules.through(block, Terms(terms, 1)).parts
            added = after - _PastLayer(frozen, layer, 1).through(block, Terms(terms, 1)).parts
        linear = _OneLayer(frozen, layer, None)
        with torch.enable_grad():
            Z = torch.zeros_like(terms[:1]).requires_grad_(True)  # the map is linear: its slope is the same anywhere
            Y = linear.through(block, Terms(Z)).parts[0]
        nodes, nothing = [Z, *linear.recorded.values()], terms.new_zeros((*terms.shape[:2], self.net.arch.heads))
        for target in pulled:
            before, *slopes = torch.autograd.grad(
                Y, nodes, target, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            through = zip(linear.recorded, slopes, strict=True)
            parts = {name: (rules.recorded[name] * slope).sum((-2, -1)) for name, slope in through}
            parts = {"mlp": nothing[..., 0], "heads": nothing, **parts}
            yield before[0], LayerShares((added * target).sum((-2, -1)), **parts)


@dataclass
class ForwardReadings:
    """What a pass forward gives: the tokens before each layer and after the last, and numbers by layer, head, norm."""

    states: list[Tokens] = field(default_factory=list)
    layers: list[dict[str, Values]] = field(default_factory=list)
    heads: list[dict[str, Float[Tensor, "batch head"]]] = field(default_factory=list)
    norms: list[NormRank] = field(default_factory=list)


class _Readings(Plain):
    """A mixin before rules on tensors: records ranks at norms, and cosines of branches with the stream."""

    def __init__(self, net: Transformer, X: Tokens, valid: Valid) -> None:
        super().__init__(net.arch, net.settings(X, valid))
        self.valid, self.unit = valid, unit_of(X.dtype)
        self.norms: list[NormRank] = []
        self.cosines: dict[str, Values] = {}  # By branch, of the layer at hand
        self.branches: list[Tokens] = []

    def norm(self, block: Block, name: str, X: Tokens) -> Tokens:
        """The norm, after which ranks are recorded."""
        Y = super().norm(block, name, X)
        self.norms.append(_norm_rank(block.index + 1, name, X, Y, self.valid, self.unit))
        return Y

    def add(self, block: Block, half: Half, X: Tokens, branches: dict[str, Tokens]) -> Tokens:
        """The sum, whose branches are compared with the stream first."""
        for name, branch in branches.items():
            self.cosines[name] = mean_cosine_of(branch, X, self.valid)
            self.branches.append(branch)
        return super().add(block, half, X, branches)


class _FreezingReadings(_Readings, FreezingRules):
    """The same, of a network that is frozen for its paths."""


def _norm_rank(layer: int, name: str, X: Tokens, Y: Tokens, valid: Valid, unit: float) -> NormRank:
    """The affine ranks of tokens X before and Y after a norm of a layer; `unit` is the eps of the arithmetic that the
    network runs in."""
    (before, first), (after, second) = (affine_rank_with_doubt(Z, ~valid, unit=unit) for Z in (X, Y))
    ranks = {"rank_before": before, "rank_after": after, "rank_doubtful": first | second}
    return {"layer": layer, "norm_name": name}, ranks


@torch.no_grad()
def read_forward(
    net: Transformer, X: Tokens, valid: Valid, paths: TwoPasses | None, progress: Callable[[int], None]
) -> ForwardReadings:
    """Run the network once over tokens X, valid ones first (`net.prepared`), and read every layer. `paths` is shown
    each, frozen (None where the network has no linear rules), and `progress` is called with 1 after each.

    Raises:
        ArchitectureError: A part leaves something to later layers, so that these cannot run without it.
    """
    rules = (_Readings if paths is None else _FreezingReadings)(net, X, valid)
    forward, unit = ForwardReadings(), unit_of(X.dtype)
    for block in net.blocks:
        forward.states.append(X)
        output = traverse(block, rules, X)
        if rules.carried:
            names = ", ".join(map(str, rules.carried))
            sentence = f"a depth card takes layers out one by one; a part leaves {names} to later layers"
            raise ArchitectureError(f"{sentence}, which cannot run without it: measure the network instead",
                                    subject="parts")  # fmt: skip
        after = output.state.masked_fill(~valid[..., None], 0.0)
        P, padding = output.pattern, ~valid
        of_heads = {
            "cosine": mean_cosine_of(contributions(block.weights, output.heads), X[:, None], valid[:, None]),
            "entropy": entropy(P, padding), "sink": first_token_mass(P, padding),
        }  # fmt: skip
        active = torch.zeros(net.arch.heads, dtype=torch.bool, device=X.device)
        active[list(block.active_heads)] = True
        of_heads = {name: values.masked_fill(~active, torch.nan) for name, values in of_heads.items()}
        rank, doubtful = affine_rank_with_doubt(after, padding, unit=unit)
        forward.layers.append({
            "influence": influence(X, after, valid),
            "cosine": mean_cosine_of(sum(rules.branches[1:], rules.branches[0]), X, valid),
            "cosine_attention": rules.cosines.pop("attention"),
            "cosine_mlp": rules.cosines.pop("mlp", torch.full_like(rank, torch.nan)),
            "entropy": of_heads["entropy"].nanmean(-1), "sink": of_heads["sink"].nanmean(-1),
            "sink_heads": (of_heads["sink"] > SINK).double().sum(-1) / max(1, len(block.active_heads)),
            "rank": rank, "rank_doubtful": doubtful,
        })  # fmt: skip
        rules.branches.clear()
        forward.heads.append(of_heads)
        if paths is not None:
            assert isinstance(rules, FreezingRules)
            paths.forward(rules.layers.pop(block.index), X)
        X = after
        progress(1)
    forward.states.append(X)
    forward.norms = rules.norms
    if net.arch.final_norm:
        forward.norms.append(_norm_rank(net.arch.layers, "final_norm", X, net.finish(X), valid, unit))
    net.weights.layers.release()
    return forward


def influence(X: Tokens, Y: Tokens, valid: Valid) -> Values:
    """The mean over tokens of `1 - cos(x, y)` (block influence of Men et al. 2024), as half the square of what unit
    vectors differ by."""
    u, v = _directions(X), _directions(Y)
    rest = 2 - u.square().sum(-1) - v.square().sum(-1)  # 0, but for a token of length zero, whose cosine is 0
    return _over_tokens(((u - v).square().sum(-1) + rest) / 2, valid)


def mean_cosine_of(Y: Tensor, X: Tensor, valid: Tensor) -> Values:
    """The mean over tokens of `cos(y, x)`; 0 of a token of length zero."""
    return _over_tokens((_directions(Y) * _directions(X)).sum(-1), valid)


def _directions(X: Tensor) -> Tensor:
    """Unit vectors in float64; a token of length zero stays zero."""
    largest = X.abs().amax(-1, keepdim=True).double()
    unit = X.double() / largest.masked_fill(largest == 0, 1.0)  # squares could leave the range
    length = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    return unit / length.masked_fill(length == 0, 1.0)


def _over_tokens(values: Tensor, counted: Tensor) -> Values:
    """The mean over the tokens that count; NaN where none does."""
    return values.masked_fill(~counted, 0.0).sum(-1) / counted.sum(-1)


class _WithoutHead(Plain):
    """Plain rules in which each sample of the batch lacks one head."""

    def __init__(self, settings: PassSettings, net: Transformer, removed: Tensor) -> None:
        super().__init__(net.arch, settings)
        self.removed = torch.nn.functional.one_hot(removed, net.arch.heads).bool()[..., None, None]
        self.in_cross = False

    def only_active(self, block: Block, heads: Float[Tensor, "batch head row head_width"]) -> RowOutputs:
        """The outputs of heads, zero of the one that a sample lacks."""
        return super().only_active(block, heads if self.in_cross else heads.masked_fill(self.removed, 0.0))

    def cross(self, block: Block, X: Tokens) -> Tokens:
        """Cross-attention keeps all its heads."""
        self.in_cross = True
        try:
            return super().cross(block, X)
        finally:
            self.in_cross = False


BACK = 4  # Layers applied to the text in the time that one takes on the way back, about


def layers_applied(layers: int, heads: int) -> int:
    """How many layers of a network are applied to the text for a card, in all; `heads` is 0 where none is taken out."""
    return layers * (1 + BACK) + layers + layers * (layers - 1) // 2 + heads * layers * (layers + 1) // 2


@dataclass(eq=False)
class Removals:
    """Runs a network without each of its layers and, if asked for, each of its heads."""

    net: Transformer
    states: Sequence[Tokens]  # The prepared tokens before each layer, and after the last
    valid: Bool[Tensor, "batch token"]  # Which of them are tokens
    heads: bool  # Whether heads are taken out as well
    batch_size: int  # Samples that run together at most
    progress: Callable[[int], None]  # Called with how many layers were applied to the text

    def __post_init__(self) -> None:
        self.starts: list[int | None] = [None, *(range(self.net.arch.heads) if self.heads else ())]
        self.together = max(1, self.batch_size // len(self.valid))
        output = self.net.finish(self.states[-1]) * self.valid[..., None]
        self.uniform, self.output = uniform(output, self.valid), output.double()
        self.residual = centred_tokens(self.output, self.valid)
        self.floor = torch.zeros_like(self.valid[:, 0], dtype=torch.float64)
        """By sample: a change of the output up to this one may be rounding; known once `run` has ended."""
        self._settings: dict[int, PassSettings] = {}

    @torch.no_grad()
    def run(self) -> Iterator[tuple[tuple[int, int | None], dict[str, Tensor]]]:
        """Yield ((layer, head), what is lost without it, by column); the head is None where the layer went."""
        layers = len(self.net.blocks)
        state_bytes = max(1, self.states[0].numel() * self.states[0].element_size())
        free = free_memory(self.states[0].device)
        most = max(1, int((UNKNOWN if free is None else free / SHARE) // state_bytes) // len(self.starts))
        for first in range(0, layers, most):
            yield from self._group(first, min(first + most, layers))

    def _group(self, first: int, stop: int) -> Iterator[tuple[tuple[int, int | None], dict[str, Tensor]]]:
        """Without something of layers `first` to `stop`: their copies go to the end side by side."""
        names: list[tuple[int, int | None]] = []
        X = self.states[0]
        copies = X.new_empty((0, *X.shape))
        if first == 0:  # nothing is taken out of this copy: its entries are changed by a unit of rounding, up or down
            signs = 2 * torch.randint(2, X.shape, generator=torch.Generator().manual_seed(0)).to(X) - 1
            names, copies = [(0, None)], (X * (1 + torch.finfo(X.dtype).eps * signs))[None]
        for block in self.net.blocks[first:]:
            copies = self._through(block, copies)
            if block.index < stop:
                X = self.states[block.index][None]
                heads = self._without_heads(block) if len(self.starts) > 1 else X[:0]
                copies = torch.cat([copies, X, heads])
                names += [(block.index + 1, head) for head in self.starts]
        self.net.weights.layers.release()
        for name, X in zip(names, copies, strict=True):
            lost = self._lost(X)
            if name[0] == 0:
                self.floor = ROUNDING * lost["lost"].clamp(min=unit_of(X.dtype))
            else:
                yield name, lost

    def _through(self, block: Block, copies: Float[Tensor, "copy batch token width"]) -> Tensor:
        """All copies after a block."""
        for start in range(0, len(copies), self.together):
            some = copies[start : start + self.together]
            rules = Plain(self.net.arch, self._settings_of(len(some)))
            copies[start : start + self.together] = self._applied(block, rules, some)
        return copies

    def _without_heads(self, block: Block) -> Float[Tensor, "head batch token width"]:
        """The tokens after a block without each of its heads."""
        outputs = []
        for start in range(0, self.net.arch.heads, self.together):
            removed = torch.arange(start, min(start + self.together, self.net.arch.heads), device=self.valid.device)
            rules = _WithoutHead(self._settings_of(len(removed)), self.net, removed.repeat_interleave(len(self.valid)))
            X = self.states[block.index]
            outputs.append(self._applied(block, rules, X.expand(len(removed), *X.shape)))
        return torch.cat(outputs)

    def _applied(self, block: Block, rules: Plain, copies: Tensor) -> Tensor:
        state: Any = traverse(block, rules, copies.flatten(0, 1)).state
        self.progress(len(copies))
        return state.view(copies.shape).masked_fill(~self.valid[..., None], 0.0)

    def _settings_of(self, copies: int) -> PassSettings:
        """The settings of a pass over so many copies of the samples."""
        if copies not in self._settings:
            net, X = self.net, self.states[0]
            if net.memory is not None and len(net.memory.valid) > 1:
                memory = Memory(net.memory.tokens.repeat(copies, 1, 1), net.memory.valid.repeat(copies, 1))
                net = replace(net, memory=memory)
            self._settings[copies] = net.settings(X.repeat(copies, 1, 1), self.valid.repeat(copies, 1))
        return self._settings[copies]

    def _lost(self, X: Tokens) -> dict[str, Tensor]:
        """What the output loses where tokens X come out of the last layer."""
        changed = (self.net.finish(X) * self.valid[..., None]).double()
        difference = changed - self.output
        lost = _ratio(difference, self.output)
        lost_residual = _ratio(centred_tokens(difference, self.valid), self.residual)
        lost_residual = lost_residual.masked_fill(self.uniform, torch.nan)
        return {
            "lost": lost,  # |output' - output| / |output|
            "lost_cosine": _cosine_gap(changed, self.output),  # 1 - the cosine of output' and output
            "lost_residual": lost_residual,  # of the residuals of both; NaN where the output is uniform
            "lost_below_floor": lost <= self.floor,  # rounding alone may change the output as much
            "lost_residual_below_floor": lost_residual <= self.floor / _ratio(self.residual, self.output),
        }


def _ratio(difference: Tokens, whole: Tokens) -> Values:
    """The norm of a difference over that of the whole; NaN where the whole is zero."""
    size = frobenius_norm(whole)
    return frobenius_norm(difference) / size.masked_fill(size == 0, torch.nan)


def _cosine_gap(changed: Tokens, output: Tokens) -> Values:
    """`1 - cos`, as half the square of what unit vectors differ by; 1 where one of them is zero."""
    sizes = [frobenius_norm(X)[:, None, None] for X in (changed, output)]
    u, v = (X / size.masked_fill(size == 0, 1.0) for X, size in zip((changed, output), sizes, strict=True))
    zero = (sizes[0] == 0) | (sizes[1] == 0)
    return ((u - v).square().sum((1, 2)) / 2).masked_fill(zero.flatten(), 1.0)
