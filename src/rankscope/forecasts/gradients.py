"""Gradients of a network by layer and kind of weight, at any scale: where a loss reaches, and where it does not.

`gradients` runs forward in deviation arithmetic (`deviation/rules.py`: states `1 x^T + e^s R`), which keeps what
attention of each layer read, and then backward through one block at a time by plain autograd (`nets/plain.py`) from the
tokens of that state. The gradient at the tokens is made of size one after each block and its log carried apart, one of
each sample, so that no product over depth leaves float64; tokens that vanish themselves are lifted (`_lift`).

**Queries and keys.** Their gradient is e^{2s}, in autograd rounding below 1e-16. With G_i the gradient at a head's
output for token i, `v_j = v + e^s r_j` the values, P the pattern and c the divisor, the gradient at scores is

    dS_ij = P_ij (a_ij - sum_k P_ik a_ik),    a_ij = G_i . v_j.

What all values have in common drops out, and dS is e^s times that of r. Rows of dS sum to zero, so that of keys
`k + e^s k_j` the common part drops out of `dQ_i = sum_j dS_ij k_j / c`; `dK_j = sum_i dS_ij q_i / c` sums to zero over
j, and what tokens have in common drops out of `dW_K = X^T dK`. **Both gradients are e^{2s}**, and are formed of r, k_j
and the deviations R of tokens. Where positions rotate, keys of equal tokens differ: the common value alone drops out,
and both are e^s. The other end is attention to one token alone. There a_ij is taken about that of the largest entry of
a row, the others keep the log of P, and dS at the largest follows from the sum: P = 1 - 1e-400 is read as well.

**The rest.** Autograd is right for it. Gradients at tokens, values, outputs, MLPs and norms do not vanish as tokens
become the same: of what reaches tokens, the part through scores is a share e^s of that through values, and rounding of
it a share 1e-16 (more where biases of values are far above what they are added to). Where scores are not those of the
formula above (norms of queries, capped scores, other kernels, Transformer-XL's positions, parts that change P in their
own way), autograd is taken for queries and keys too, as far as it resolves them (`uncancelled`).

Whether rounding decided is not guessed: all is run once more with last digits moved (`deviation/perturbation.py`), and
readings on which the two do not agree are **marked**. Gradients of biases and of tensors of parts are not read.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from rankscope.deviation import (
    LOWEST,
    Deviation,
    DeviationPattern,
    PassInputs,
    PerturbedDeviation,
    PerturbedPlain,
    Scaled,
    State,
    StateHeads,
    Values,
    finish,
    spread,
    without_rule,
)
from rankscope.errors import ArchitectureError, TokensError, require
from rankscope.metrics import FARTHEST
from rankscope.nets import (
    Architecture,
    AttentionWeights,
    Block,
    Layer,
    Plain,
    Transformer,
    converted,
    named,
    pieces,
    rotate,
    shapes,
    traverse,
)
from rankscope.remedies import PatternShaping
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
TOKENS = ""  # the name of tokens among what one block leaves to the next; the others are names of `rules.carried`


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
    names = [name.split(".", 2)[2] for name in shapes(inputs.net.arch) if name.startswith("layers.")]
    kinds = {name: kind for name in names if (kind := kind_of(name)) is not None}
    weights = converted(inputs.net.weights.layers, lambda t: t.detach().requires_grad_(t.is_floating_point()))
    layers = tuple(weights)  # all in memory, since the network is held
    logs, perturbed = (_Pass(inputs, kinds, layers, moves).run(cotangent) for moves in (False, True))
    readings = {}
    for name, log in logs.items():  # marked where another pass differs; of logs beyond 1000, by over 1e-10 of them
        error = (log - perturbed[name]).abs() / (log.abs() / 1e3).clamp(min=1.0)
        agreed = (error <= AGREED) & (log.abs() < FARTHEST) | (log == perturbed[name]) & (log == -torch.inf)
        readings[name] = LogReadings(log / math.log(10), ~agreed)
    tokens, separation = readings.pop("tokens"), readings.pop("separation")
    return GradientProfile(tokens, readings, separation)


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
        return _total(self.log + log_norm(self.parts[TOKENS], 1))


class ReadRecorder:
    """Mixed into deviation arithmetic: keeps by layer what attention read, its pattern and the values it mixed."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.reads: dict[int, tuple[State, DeviationPattern]] = {}
        self.values_mixed: dict[int, Values] = {}

    def pattern(self, block: Block, state: State) -> DeviationPattern:
        """The pattern; of several that a layer may have, the first is kept: parts ask for a second one."""
        P = cast(DeviationPattern, super().pattern(block, state))
        self.reads.setdefault(block.index, (state, P))
        return P

    def mix(self, block: Block, P: DeviationPattern, values: Values) -> Any:
        """The outputs of heads; values of attention are kept, not those of cross-attention after it."""
        self.values_mixed.setdefault(block.index, values)
        return super().mix(block, P, values)


class HeadRecorder:
    """Mixed into plain arithmetic: keeps by layer queries, keys and the outputs of heads, for autograd."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.head_outputs: dict[int, Tensor] = {}
        self.queries_and_keys: dict[int, tuple[Tensor, Tensor]] = {}

    def scored(self, block: Block, X: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries, keys and what positions add to their scores; the first that a layer asks for are kept."""
        q, k, added = super().scored(block, X)
        self.queries_and_keys.setdefault(block.index, (q, k))
        return q, k, added

    def only_active(self, block: Block, heads: Tensor) -> Tensor:
        """The outputs of heads, zero at those that are not active; kept as they were."""
        self.head_outputs.setdefault(block.index, heads)
        return cast(Tensor, super().only_active(block, heads))


class _Pass:
    """Forward through all layers, and backward through one at a time; the kinds of weights are by their names."""

    def __init__(self, inputs: PassInputs, kinds: dict[str, str], leaves: Sequence[Layer], perturbed: bool) -> None:
        given = inputs.net.arch, inputs.settings
        self.net, self.start, self.kinds, self.leaves = inputs.net, inputs.state, kinds, leaves
        rules, plain = (PerturbedDeviation, PerturbedPlain) if perturbed else (Deviation, Plain)
        self.rules: Any = type("RecordingDeviation", (ReadRecorder, rules), {})(*given)
        self.plain: Any = type("RecordingPlain", (HeadRecorder, plain), {})(*given)

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
        at = _Cotangents.of({TOKENS: torch.autograd.grad(output, X, cotangent)[0]}, 0 * lift)
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
        weights = self.leaves[block.index]
        with torch.enable_grad():
            output = traverse(block.with_weights(weights), self.plain, X).state
        left = {TOKENS: output} | {name: part for name, part in memory.items() if isinstance(part, Tensor)}
        gated = arch.mlp in ("gated", "experts")
        known = not gated or (arch.mlp_skip == 0 and not arch.parallel)  # a skip is of another degree
        lift = _checked(lift, output, after.tokens(lift * (1 + gated)), known)
        return _Graph(block, {TOKENS: X, **kept}, weights, left, lift, 1 + gated)

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
    for kind, pattern in KINDS.items():
        if re.fullmatch(pattern, name):
            return kind
    return None


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


def has_formula(arch: Architecture) -> bool:
    """True if scores are those of the formula: products of queries and keys, and what positions add or rotate, under a
    softmax, of which parts make at most `alpha I + beta P - gamma C`.

    >>> [has_formula(Architecture(layers=1, width=8, heads=2, query_norm=normed)) for normed in (False, True)]
    [True, False]
    """
    shaped = all(isinstance(part, PatternShaping) for part in pieces(arch.parts) if part.place == "pattern")
    products = not (arch.score_cap or arch.query_norm or arch.positions == "relative")
    return arch.kernel == "softmax" and products and shaped


def query_and_key(
    rules: Any, block: Block, state: State, P: DeviationPattern, values: Values, G: Scaled
) -> tuple[Tensor, Tensor]:
    """The logs of the norms of the gradients at the weights of queries and of keys of a layer, over all samples.

    Args:
        rules: Deviation arithmetic, as it went through the layer.
        block: The layer.
        state: What its attention read.
        P: The pattern that its scores gave, before parts changed it.
        values: The values that it mixed.
        G: The gradient at the outputs of heads `[batch, head, token, width]`, one log per sample.
    """
    arch, w, dS = block.arch, block.weights.attention, _at_scores(block, P, values, G)
    asking, answering = rules.latent(state, w.query_latent), rules.latent(state, w.key_latent)
    perturbations = (rules.perturb, rules.perturb_tensor)
    heads = StateHeads(arch, block.index, w, asking, rules.settings, *perturbations, answering)
    (q, dq, k, dk), turned = heads.split_heads, dS.mapped(lambda t: t.mT)
    if rules.settings.rotary:
        cos, sin = rules.settings.rotary_of(block.index)
        queries, keys = (_rotated(_of_tokens(*parts), cos, sin, arch) for parts in ((q, dq), (k, dk)))
        dQ, dK = (_rotated(part, cos, -sin, arch) for part in (_times(dS, keys), _times(turned, queries)))
        read = Scaled(answering.scaled_tokens, answering.log)
    else:
        dQ, dK = _times(dS, dk), _times(turned, _of_tokens(q, dq))
        read = answering.R
    gain = arch.log_gain * math.log(P.p.shape[-1]) if arch.log_gain else 1.0
    factor = math.log(abs(gain) / arch.divisor) if gain else -math.inf
    of_queries = _weight_log(Scaled(asking.scaled_tokens, asking.log), dQ, arch.heads)
    return of_queries + factor, _weight_log(read, dK, arch.key_heads) + factor


def uncancelled(
    arch: Architecture, w: AttentionWeights, q: Tensor, k: Tensor, values: Values, G: Tensor
) -> tuple[Tensor, Tensor]:
    """The logs of the norms that gradients of queries and keys would have if nothing cancelled and attention were to
    many tokens: 1e-16 of them is what autograd rounds, or takes as zero.

    Args:
        arch: The architecture of the network.
        w: The tensors of the layer's attention, in a graph of autograd.
        q: Its queries `[batch, head, token, width]` as they meet keys, in that graph.
        k: Its keys.
        values: The values that it mixed.
        G: The gradient at the outputs of heads.
    """
    length = torch.maximum(values.x.log_size(), values.R.log_size()).exp()[..., None, None] * G.shape[-1] ** 0.5
    longest = sum(part.detach().norm(dim=-1).amax(-1)[..., None, None] for part in (q, k))
    size = G.norm(dim=-1, keepdim=True) * length * (longest / arch.divisor + 1)
    sizes = []
    for part, linear in ((q, w.query), (k, w.key)):
        signs = torch.randn(part.shape, generator=torch.Generator().manual_seed(0), dtype=G.dtype).to(G.device).sign()
        sizes.append(log_norm(torch.autograd.grad(part, linear.weight, signs * size, retain_graph=True)[0]))
    return sizes[0], sizes[1]


def _at_scores(block: Block, P: DeviationPattern, values: Values, G: Scaled) -> Scaled:
    """dS `[batch, head, row, token]`, the gradient at scores."""
    assert P.logits is not None
    a = G.value @ values.R.value.mT
    for part in pieces(block.arch.parts):
        if isinstance(part, PatternShaping):
            a = a * part.of_heads(block, a)[1][:, None, None]  # beta of alpha I + beta P - gamma C
    log_P = P.logits.log_softmax(P.visible)
    top = log_P.argmax(-1, keepdim=True)
    log_rest = log_P.scatter(-1, top, -torch.inf)
    a = a - a.gather(-1, top)
    a = a - (log_rest.exp() * a).sum(-1, keepdim=True)
    logs = log_rest + a.abs().log()  # by entry: a row of large P may have no gradient at all
    reach = logs.amax((2, 3)).clamp(min=LOWEST)
    dS = (logs - spread(reach, logs)).exp() * a.sign()
    dS = dS.scatter(-1, top, -dS.sum(-1, keepdim=True))
    return Scaled(dS, G.log[:, None] + values.R.log + reach).unit()


def _of_tokens(common: Scaled, deviation: Scaled) -> Scaled:
    """Queries or keys of tokens `[batch, head, token, head_width]`: those of the common token and what tokens add."""
    return common.mapped(lambda t: t[:, :, None].expand_as(deviation.value)) + deviation


def _rotated(heads: Scaled, cos: Tensor, sin: Tensor, arch: Architecture) -> Scaled:
    """Queries or keys turned by their positions; with -sin gradients at them, turned back."""
    return heads.mapped(lambda t: rotate(t, (cos, sin), arch.rotary_pairs))


def _times(dS: Scaled, heads: Scaled) -> Scaled:
    return Scaled(dS.value @ heads.value, dS.log + heads.log).unit()


def _weight_log(read: Scaled, gradient: Scaled, heads: int) -> Tensor:
    """The log of the norm of `sum_t x_t g_t^T` over samples and tokens: x is what a linear map of so many heads read, g
    the gradient at what it gave, one for each head of queries."""
    value = torch.einsum("btw,bhtc->bhwc", read.value, gradient.value)
    products = Scaled(value, gradient.log + read.log[:, None]).unit()
    largest = products.log.amax()
    total = products.at(largest.expand_as(products.log)).sum(0)
    return log_norm(total.reshape(heads, -1, *total.shape[1:]).sum(1)) + largest


def log_norm(t: Tensor, axes: int = 0) -> Tensor:
    """The log of the norm of what stands after the first axes, -inf of zeros; no square leaves float64.

    >>> round(float(log_norm(torch.full((4,), 1e-300, dtype=torch.float64)) / math.log(10)), 4)
    -299.699
    """
    flat = t.reshape(*t.shape[:axes], -1)
    size = flat.abs().amax(-1, keepdim=True)
    size = size.masked_fill(size == 0, 1.0)
    return torch.linalg.vector_norm(flat / size, dim=-1).log() + size[..., 0].log()
