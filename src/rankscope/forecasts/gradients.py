"""Gradients of a network by layer and kind of weight, at any scale: where a loss reaches, and where it does not.

`gradients` runs forward in deviation arithmetic (`deviation/rules.py`: states `1 x^T + e^s R`), which keeps what
attention of each layer read, and then backward through one block at a time by plain autograd (`nets/plain.py`) from the
tokens of that state. The gradient at the tokens is made of size one after each block and its log carried apart, one of
each sample, so that no product over depth leaves float64; tokens that vanish themselves are lifted (`_lift`).

Of queries and keys the gradient is e^{2s}, in autograd rounding below 1e-16: `score_gradients.py` has it at any scale.
Autograd is right for the rest. Gradients at tokens, values, outputs, MLPs and norms do not vanish as tokens become the
same: of what reaches tokens, the part through scores is a share e^s of that through values, and rounding of it a share
1e-16 (more where biases of values are far above what they are added to). Where scores are not those of
`score_gradients.py` (norms of queries, capped scores, other kernels, Transformer-XL's positions, parts that change P in
their own way), autograd is taken for queries and keys too, as far as it resolves them (`uncancelled`).

Whether rounding decided is not guessed: all is run once more with last digits moved (`deviation/perturbation.py`), and
readings on which the two do not agree are **marked**. Gradients of biases and of tensors of parts are not read.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.deviation import (
    LOWEST,
    Deviation,
    PassInputs,
    PerturbedDeviation,
    PerturbedPlain,
    Scaled,
    State,
    finish,
    spread,
    without_rule,
)
from rankscope.errors import ArchitectureError, TokensError, require
from rankscope.forecasts.score_gradients import (
    HeadRecorder,
    ReadRecorder,
    has_formula,
    log_norm,
    query_and_key,
    uncancelled,
)
from rankscope.metrics import FARTHEST
from rankscope.nets import Block, Layer, Plain, Transformer, converted, named, shapes, traverse
from rankscope.shapes import Bool, Float


class LogReadings(NamedTuple):
    """Numbers by layer, as log10 of their size: -inf of a zero."""

    log10: Float[Tensor, " layer"]
    below_floor: Bool[Tensor, " layer"]  # True where rounding decided: the number is **marked**

    @property
    def known(self) -> Float[Tensor, " layer"]:
        """Natural logs, NaN where they are marked."""
        return self.log10.masked_fill(self.below_floor, torch.nan) * math.log(10)


class Exponents(NamedTuple):
    """By how much a layer multiplies gradients and angles, as natural logs; NaN where readings are marked."""

    gradient: float  # lambda_g, the mean of `gradients`: (1/L) log(|dX_0|^2 / |dX_L|^2)
    angle: float  # the mean of `angles`
    gradients: Float[Tensor, " layer"]  # of layers 1 to L: log(|dX_{l-1}|^2 / |dX_l|^2)
    angles: Float[Tensor, " layer"]  # lambda_a of layers 1 to L: log[(1 - p'/q') / (1 - p/q)]


@dataclass(frozen=True)
class GradientProfile:
    """Norms of gradients of one loss, the sum over samples, and how far apart tokens are."""

    tokens: LogReadings  # Of the tokens at layer 0 (the input) to L, over all samples
    weights: dict[str, LogReadings]
    """By kind (`KINDS` of `gradients.py`), of weights of layers 1 to L; kinds that no layer has are left out."""
    separation: LogReadings
    """`1 - p/q` at layer 0 to L: q the mean square of tokens, p the mean product of two of a sample."""

    def exponents(self) -> Exponents:
        """The exponents of Cowsik et al. 2024: of gradients at tokens and of the angle between them.

        Theirs of gradients, `(1/L) log |d<X_L, R>/dX_0|^2`, contains `(1/L) log |R|^2`, which is taken off here; so
        is what the final norm does, which is no layer."""
        gradients, angles = -2 * self.tokens.known.diff(), self.separation.known.diff()
        return Exponents(float(gradients.mean()), float(angles.mean()), gradients, angles)


KINDS = {
    "query": r"attention\.query\.weight",
    "key": r"attention\.key\.weight",
    "value": r"attention\.value\.weight",
    "output": r"attention\.output\.weight",
    "mlp": r"(mlp|experts)\..*weight",
    "norm": r"\w+_(norm|after)\.gain",
}
"""The kinds of weights, by the names of their tensors in a layer."""
AGREED = 1e-7  # the difference of logs up to which two passes agree: 4e-8 in log10
RESOLVED = math.log(1e-10)  # of what would be if nothing cancelled: autograd's least share of queries and keys
WITHIN = 340.0  # tokens beyond e^340 (1e148) are not taken through a block: their squares leave float64
TINY, LIFTED = math.log(1e-130), math.log(1e-40)  # tokens below the first are lifted to the second (`_lift`)
SAME = math.log(1e-9)  # the share up to which a block of lifted tokens gives what it gives of these, lifted
FAINT = -300.0  # the log below which the gradient of a sample beside the largest one is nothing to weights
HIDDEN = ""  # the name of tokens among what one block leaves to the next; the others are names of `rules.carried`


def gradients(
    net: Transformer,
    X: Float[Tensor, "batch token width"],
    cotangent: Float[Tensor, "batch token width"] | None = None,
    seed: int = 0,
) -> GradientProfile:
    """The sizes of gradients of a loss at tokens and weights of every layer, however small they are.

    Args:
        net: The network, taken in float64; every part has a rule in deviation arithmetic.
        X: The tokens that it reads, without padding.
        cotangent: The gradient of the loss at the network's output, after the final norm. Left out, a Gaussian R: the
            loss is then `<X_L, R>`.
        seed: What R is drawn from.

    Raises:
        ArchitectureError: A part has no rule in deviation arithmetic.
        TokensError: The cotangent has not the shape of X.

    >>> from rankscope.nets import Architecture
    >>> san = Transformer.random(Architecture(layers=7, width=16, heads=2), init="xavier").variant("san")
    >>> profile = gradients(san, torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)))
    >>> bool(profile.weights["query"].log10[-1] < -100), bool(profile.weights["value"].log10[-1] > -3)
    (True, True)
    """
    missing = without_rule(net)
    sentence = f"gradients start from deviation arithmetic, which has no rule for {', '.join(missing)}"
    require(not missing, f"{sentence}: take a network without", ArchitectureError, "arithmetic")
    inputs = PassInputs.of(net.held(), X)
    if cotangent is None:
        cotangent = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sentence = f"a cotangent must have the shape of the tokens, {tuple(X.shape)}; received {tuple(cotangent.shape)}"
    require(cotangent.shape == X.shape, sentence, TokensError, "cotangent")
    cotangent = cotangent.to(inputs.state.R.value)
    logs, perturbed = (_Pass(inputs, moves).run(cotangent) for moves in (False, True))
    readings = {name: _marked(log, perturbed[name]) for name, log in logs.items()}
    tokens, separation = readings.pop("tokens"), readings.pop("separation")
    return GradientProfile(tokens, readings, separation)


def _marked(log: Tensor, other: Tensor) -> LogReadings:
    """Natural logs as readings, marked where another pass differs; of logs beyond 1000, by over 1e-10 of them."""
    error = (log - other).abs() / (log.abs() / 1e3).clamp(min=1.0)
    agreed = (error <= AGREED) & (log.abs() < FARTHEST) | (log == other) & (log == -torch.inf)
    return LogReadings(log / math.log(10), ~agreed)


class _Graph(NamedTuple):
    """One block as autograd has it: what goes in and what comes out, tokens and `rules.carried` by name."""

    block: Block
    leaves: dict[str, Tensor]
    weights: Layer
    outputs: dict[str, Tensor]
    lift: Float[Tensor, " batch"]  # the log that tokens were divided by, mostly 0; NaN where gradients are not known
    degree: int  # the block of tokens c X is c^degree times that of X, where they are so small as to be lifted


class _Cotangents(NamedTuple):
    """The gradient at what a block leaves to the next: of each sample of size one, and the log of its size."""

    parts: dict[str, Tensor]
    log: Float[Tensor, " batch"]

    @classmethod
    def of(cls, parts: dict[str, Tensor], log: Tensor) -> "_Cotangents":
        """Gradients in units of e^log, brought to size one; zeros have the log -inf."""
        size = torch.stack([part.abs().flatten(1).amax(-1) for part in parts.values()]).amax(0)
        safe = size.masked_fill(size == 0, 1.0)
        units = {name: part / spread(safe, part) for name, part in parts.items()}
        return cls(units, (log + safe.log()).masked_fill(size == 0, -torch.inf))

    @property
    def log_norm(self) -> Tensor:
        """The log of the norm at tokens, of all samples together."""
        return _total(self.log + log_norm(self.parts[HIDDEN], 1))


def _recording(recorder: type, rules: type) -> Any:
    """The class of these rules with a recorder mixed in."""
    return type(f"{recorder.__name__}{rules.__name__}", (recorder, rules), {})


class _Pass:
    """Forward through all layers, and backward through one at a time."""

    def __init__(self, inputs: PassInputs, perturbed: bool) -> None:
        given = inputs.net.arch, inputs.settings
        self.net, self.start = inputs.net, inputs.state
        names = [name.split(".", 2)[2] for name in shapes(inputs.net.arch) if name.startswith("layers.")]
        self.kinds = {name: kind for name in names if (kind := kind_of(name)) is not None}
        self.rules = _recording(ReadRecorder, PerturbedDeviation if perturbed else Deviation)(*given)
        self.plain = _recording(HeadRecorder, PerturbedPlain if perturbed else Plain)(*given)
        self.rules.reads, self.rules.values_mixed = {}, {}
        self.plain.head_outputs, self.plain.queries_and_keys = {}, {}

    def run(self, cotangent: Tensor) -> dict[str, Tensor]:
        """Natural logs of all readings, by what they are of."""
        state, graphs = self.rules.tidy(self.start), []
        separations = [_separation(state)]
        for block in self.net.blocks:
            with torch.no_grad():
                after = traverse(block, self.rules, state).state
            graphs.append(self._graph(block, state, after))
            state = after
            separations.append(_separation(state))
        lift = _lift(state)
        with torch.enable_grad():
            X = state.tokens(lift).requires_grad_()
            output = self.net.finish(X)
        lift = _checked(lift, output, finish(self.net, state).tokens(lift))
        at = _Cotangents.of({HIDDEN: torch.autograd.grad(output, X, cotangent)[0]}, 0 * lift)
        tokens, by_layer, zero = [at.log_norm], [], torch.full_like(at.log[0], -torch.inf)
        while graphs:
            sizes, at = self._backward(graphs.pop(), at)
            tokens.append(at.log_norm)
            by_layer.append(sizes)
        logs = {kind: [sizes.get(kind, zero) for sizes in reversed(by_layer)] for kind in self.kinds.values()}
        logs |= {"tokens": tokens[::-1], "separation": separations}
        return {name: torch.stack(of_layers) for name, of_layers in logs.items()}

    def _graph(self, block: Block, state: State, after: State) -> _Graph:
        """A block run with autograd, from the tokens of a state and what earlier blocks left."""
        memory, arch, lift = self.plain.carried, block.arch, _lift(state)
        kept = {name: part.detach().requires_grad_() for name, part in memory.items() if isinstance(part, Tensor)}
        memory |= kept
        X = state.tokens(lift).requires_grad_()
        weights = converted(block.weights, lambda t: t.detach().requires_grad_(t.is_floating_point()))
        with torch.enable_grad():
            output = traverse(block.with_weights(weights), self.plain, X).state
        left = {HIDDEN: output} | {name: part for name, part in memory.items() if isinstance(part, Tensor)}
        gated = arch.mlp in ("gated", "experts")
        known = not gated or (arch.mlp_skip == 0 and not arch.parallel)  # a skip is of another degree
        lift = _checked(lift, output, after.tokens(lift * (1 + gated)), known)
        return _Graph(block, {HIDDEN: X, **kept}, weights, left, lift, 1 + gated)

    def _backward(self, graph: _Graph, at: _Cotangents) -> tuple[dict[str, Tensor], _Cotangents]:
        """(logs of the norms of gradients by kind of weight, the gradient at what the block read)."""
        log, below = at.log + graph.degree * graph.lift, at.log + (graph.degree - 1) * graph.lift  # of weights, tokens
        largest = log.amax().clamp(min=LOWEST)
        share = (log - largest).clamp(min=FAINT).exp()
        heads = self.plain.head_outputs.pop(graph.block.index)
        weights = [(self.kinds[name], tensor) for name, tensor in named(graph.weights).items() if name in self.kinds]
        outputs = {name: part for name, part in graph.outputs.items() if name in at.parts}
        grads = torch.autograd.grad(
            list(outputs.values()),
            [heads, *graph.leaves.values(), *(tensor for _, tensor in weights)],
            [at.parts[name] * spread(share, part) for name, part in outputs.items()],
            materialize_grads=True,
            retain_graph=True,
        )
        count = 1 + len(graph.leaves)
        G, *of_leaves = (part / spread(share, part) for part in grads[:count])
        sizes: dict[str, list[Tensor]] = {}
        for (kind, _), gradient in zip(weights, grads[count:], strict=True):
            sizes.setdefault(kind, []).append(log_norm(gradient) + largest)
        logs = {kind: _total(torch.stack(several)) for kind, several in sizes.items()}
        logs |= self._of_scores(graph, Scaled(G, below), logs)
        return logs, _Cotangents.of(dict(zip(graph.leaves, of_leaves, strict=True)), below)

    def _of_scores(self, graph: _Graph, G: Scaled, logs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The logs of queries and keys, from the gradient G at outputs of heads; elsewhere as autograd has them, NaN
        below what it resolves."""
        block, arch, index = graph.block, graph.block.arch, graph.block.index
        (state, P), values = self.rules.reads.pop(index), self.rules.values_mixed.pop(index)
        (q, k), kinds = self.plain.queries_and_keys.pop(index), ("query", "key")
        if has_formula(arch):
            with torch.no_grad():
                return dict(zip(kinds, query_and_key(self.rules, block, state, P, values, G), strict=True))
        if arch.kernel == "uniform":
            return {}
        largest = G.log.amax().clamp(min=LOWEST)
        sizes = uncancelled(arch, graph.weights.attention, q, k, values, G.at(largest.expand_as(G.log)))
        least = {kind: size + largest + RESOLVED for kind, size in zip(kinds, sizes, strict=True)}
        return {kind: logs[kind].masked_fill(logs[kind] < least[kind], torch.nan) for kind in kinds}


def kind_of(name: str) -> str | None:
    """The kind of weight that a tensor of a layer is, by its name; None of those that are not read.

    >>> kind_of("mlp.down.weight"), kind_of("attention.query.bias")
    ('mlp', None)
    """
    return next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)), None)


def _lift(state: State) -> Float[Tensor, " batch"]:
    """The log that tokens of each sample are divided by before a block is differentiated: 0 but of tiny ones, NaN of
    huge ones. Blocks are homogeneous in tokens so small that scores are nothing and activations straight: what they
    give of lifted tokens is what they give of these, lifted, and so are gradients at weights."""
    tiny = (state.log < TINY) & (state.log > LOWEST)  # not where tokens are zero
    return torch.where(tiny, state.log - LIFTED, 0.0).masked_fill(state.log > WITHIN, torch.nan)


def _checked(lift: Tensor, output: Tensor, expected: Tensor, known: bool = True) -> Float[Tensor, " batch"]:
    """The lift of each sample, NaN where the output of lifted tokens is not as expected, or is not known to be."""
    share = SAME + (lift.abs() / 1e3).clamp(min=1.0).log()  # logs beyond 1000 are rounded by as much
    differs = log_norm(output.detach() - expected, 1) > log_norm(expected, 1) + share
    return lift.masked_fill((lift != 0) & (differs if known else True), torch.nan)


def _separation(state: State) -> Tensor:
    """The log of `1 - p/q`: with n tokens of a sample, `q - p = |res X|^2 / (n - 1)` and `q = |X|^2 / n`, the mean over
    samples of each."""
    n, residual = state.valid.mask.shape[1], state.residual
    apart = _total(residual.log + log_norm(residual.value, 1)) * 2
    size = _total(state.log + log_norm(state.scaled_tokens, 1)) * 2
    return apart - size + math.log(n / (n - 1)) if n > 1 else apart * torch.nan


def _total(logs: Tensor) -> Tensor:
    """The log of the norm of numbers that are given by their logs."""
    return (2 * logs).logsumexp(0) / 2
