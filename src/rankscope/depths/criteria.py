"""Criteria by which layers and heads are kept: a score for each on given tokens, the larger the more it is needed.

Called by `cut.py`. X_l are the tokens after layer l, Y the output, w the weights of a layer.

| criterion        | the score of a layer                                                                           |
|------------------|------------------------------------------------------------------------------------------------|
| `path_share`     | `|<Y - Y_0, Y>| / <Y, Y>`, Y_0 the sum over all paths that pass by the layer: exact (`paths`)  |
| `residual_share` | the same with the residual of Y in the place of the second Y and of the last two               |
| `influence`      | `1 - cosine(X_{l-1}, X_l)`, mean over tokens: block influence (Men et al. 2024, ShortGPT)      |
| `magnitude`      | the Frobenius norm of all matrices of the layer                                                |
| `gradient`       | the sum of `|w dL/dw|` over all weights of the layer: first-order Taylor (Molchanov et al.     |
|                  | 2017; Ma et al. 2023, LLM-Pruner), L a loss of the output                                      |
| `error`          | `||Y' - Y|| / ||Y||`, Y' the output of the network without the layer: measured                 |
| `random`         | a number drawn from the seed: the baseline                                                     |

Scores of samples are averaged. Shares are taken with attention, norms and gates frozen as measured, and are those of
branches: norms of a layer stay on the paths that pass by it. Of heads, `path_share` and `residual_share` are the sizes
of those in `Decomposition.by_head`, `magnitude` is that of the head's queries, keys, values and outputs, and `gradient`
the derivative of L by a factor on the head's output, its size averaged over samples (Michel et al. 2019).

The share of a *set* of layers, of all paths that meet at least one of them, is no sum of shares, and neither is the
measured error: `path_share`, `residual_share` and `error` have a score of sets.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.depths.passes import influence
from rankscope.errors import PathError, require
from rankscope.metrics import valid_tokens
from rankscope.nets import Block, Branch, Half, HeldLayers, Transformer, converted, named
from rankscope.paths import Frozen, WholeNetwork, centred_tokens, decompose, freeze, share, uniform
from rankscope.shapes import Bool, Float, Int

Loss = Callable[[Float[Tensor, "batch token width"]], Tensor]  # A number, from the output of the network
LayerSet = Collection[int]  # Layers, numbered from 1


@dataclass(frozen=True, eq=False)
class Sample:
    """What a network is scored on."""

    X: Float[Tensor, "batch token width"]
    padding: Bool[Tensor, "batch token"] | None = None
    loss: Loss | None = None  # Of `gradient`; None: the output in a random direction, `sum of +-Y`
    seed: int = 0  # Of `random`, and of that direction

    def valid(self) -> Bool[Tensor, "batch token"]:
        """True at tokens, False at padding."""
        return valid_tokens(self.X.shape[:-1], self.padding, self.X.device)

    def output(self, net: Transformer) -> Float[Tensor, "batch token width"]:
        """The output of a network, zero at padding."""
        return net.run(self.X, self.padding).output * self.valid()[..., None]

    def loss_of(self, Y: Float[Tensor, "batch token width"]) -> Tensor:
        """The loss of an output."""
        if self.loss is not None:
            return self.loss(Y)
        signs = torch.randint(2, Y.shape, generator=torch.Generator().manual_seed(self.seed)).to(Y) * 2 - 1
        return (signs * Y * self.valid()[..., None]).sum()

    def alone(self, index: int) -> "Sample":
        """One of the samples, by itself."""
        padding = None if self.padding is None else self.padding[index : index + 1]
        return replace(self, X=self.X[index : index + 1], padding=padding)


class Criterion(NamedTuple):
    """One way to say what is needed."""

    name: str
    layers: Callable[[Transformer, Sample], list[float]]  # The score of each layer, the first first
    heads: Callable[[Transformer, Sample], list[list[float]]] | None = None  # By layer, of each head
    sets: Callable[[Transformer, Sample, Sequence[LayerSet]], list[float]] | None = None  # Of each set of layers
    against_whole: bool = False  # Greedy rounds score sets of the whole network, not layers of what is left


class _PassingBy(WholeNetwork):
    """Rules of the frozen network in which no path meets some layers: their branches are left out."""

    def __init__(self, frozen: Frozen, layers: LayerSet) -> None:
        super().__init__(frozen)
        self.layers = frozenset(layers)

    def takes(self, block: Block, half: Half, branch: Branch) -> bool:
        """Every branch but those of the layers that are passed by."""
        return block.index + 1 not in self.layers


@torch.no_grad()
def set_shares(net: Transformer, sample: Sample, sets: Sequence[LayerSet], residual: bool = False) -> list[float]:
    """The size of the share of all paths that meet each set of layers, in the output or in its residual.

    Raises:
        PathError: Paths do not cover the network, or with `residual` tokens of all outputs are equal.
    """
    frozen = freeze(net, sample.X, sample.padding)
    output, target, counted = frozen.output, frozen.output, torch.ones(len(sample.X), dtype=torch.bool)
    if residual:
        counted, target = ~uniform(output, frozen.valid).cpu(), centred_tokens(output, frozen.valid)
    sentence = "a share of the residual needs an output whose tokens differ; in all samples they are equal"
    require(counted.any(), f"{sentence}: take path_share", PathError, "residual_share")
    shares = [share(output - _PassingBy(frozen, layers).run(), target) for layers in sets]
    return [float(values.abs().cpu()[counted].mean()) for values in shares]


def _each(net: Transformer) -> list[LayerSet]:
    """Every layer as a set of its own."""
    return [(layer,) for layer in range(1, net.arch.layers + 1)]


def _path_shares(residual: bool) -> Criterion:
    column = "residual_share" if residual else "share"

    def heads(net: Transformer, sample: Sample) -> list[list[float]]:
        table = decompose(net, sample.X, sample.padding).by_head()
        scores = table.with_columns(table[column].abs().fill_nan(None)).group_by("layer", "head").mean()
        rows = scores.sort("layer", "head")[column].fill_null(0.0).to_list()
        return [rows[k : k + net.arch.heads] for k in range(0, len(rows), net.arch.heads)]

    sets = partial(set_shares, residual=residual)
    name = "residual_share" if residual else "path_share"
    return Criterion(name, lambda net, sample: sets(net, sample, _each(net)), heads, sets)


@torch.no_grad()
def influences(net: Transformer, sample: Sample) -> list[float]:
    """One minus the cosine of each token before and after a layer, mean over tokens and then over samples."""
    valid, before, scores = sample.valid(), None, []
    for step in net.steps(sample.X, sample.padding):
        if before is not None:
            scores.append(float(influence(before, step.state, valid).mean()))
        before = step.state
    return scores


@torch.no_grad()
def magnitudes(net: Transformer, sample: Sample) -> list[float]:
    """The Frobenius norm of all matrices of each layer."""
    squares = []
    for layer in net.weights.layers:
        matrices = [tensor for name, tensor in named(layer).items() if name.endswith("weight")]
        squares.append(sum(float(tensor.double().square().sum()) for tensor in matrices))
    return [square**0.5 for square in squares]


@torch.no_grad()
def head_magnitudes(net: Transformer, sample: Sample) -> list[list[float]]:
    """The Frobenius norm of the queries, keys, values and outputs of each head."""
    group, rows = net.arch.heads // net.arch.key_heads, []
    for layer in net.weights.layers:
        w = layer.attention
        of_queries = w.query.weight.double().square().sum((0, 2)) + w.output.weight.double().square().sum((1, 2))
        of_keys = w.key.weight.double().square().sum((0, 2)) + w.value.weight.double().square().sum((0, 2))
        rows.append((of_queries + of_keys.repeat_interleave(group)).sqrt().tolist())
    return rows


def _with_gradients(net: Transformer, sample: Sample) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """By layer and name, each weight w and dL/dw. Layers that share their weights get a gradient each."""
    net = net.held()
    layers = HeldLayers([converted(layer, lambda t: t.detach().requires_grad_()) for layer in net.weights.layers])
    with torch.enable_grad():
        tracked = replace(net, weights=replace(net.weights, layers=layers))
        loss = sample.loss_of(tracked.run(sample.X, sample.padding).output)
        flat = [tensor for layer in layers for tensor in named(layer).values()]
        gradients = iter(torch.autograd.grad(loss, flat, allow_unused=True))
    pairs = [zip(named(layer).items(), gradients, strict=False) for layer in layers]  # each takes as many as it has
    return [{name: (w.detach(), grad) for (name, w), grad in pair if grad is not None} for pair in pairs]


def taylor_scores(net: Transformer, sample: Sample) -> list[float]:
    """The sum of `|w dL/dw|` over all weights of each layer."""
    layers = _with_gradients(net, sample)
    return [sum(float((w * gradient).double().abs().sum()) for w, gradient in layer.values()) for layer in layers]


def head_taylor_scores(net: Transformer, sample: Sample) -> list[list[float]]:
    """`|dL/dm|` of each head at m = 1, m a factor on its output, mean over samples. The factor is one on the head's
    rows of the output projection as well, so that `dL/dm = <w, dL/dw>` over these."""
    total = torch.zeros(net.arch.layers, net.arch.heads, dtype=torch.float64, device=sample.X.device)
    for index in range(len(sample.X)):
        rows = [layer["attention.output.weight"] for layer in _with_gradients(net, sample.alone(index))]
        total += torch.stack([(w * gradient).double().sum((1, 2)).abs() for w, gradient in rows])
    listed: list[list[float]] = (total / len(sample.X)).tolist()
    return listed


@torch.no_grad()
def errors(net: Transformer, sample: Sample, sets: Sequence[LayerSet]) -> list[float]:
    """`||Y' - Y|| / ||Y||` of each sample, mean over samples, Y' the output without each set of layers."""
    Y = sample.output(net).double()
    changed = (sample.output(net.without(layers=layers)).double() for layers in sets)
    return [float((torch.linalg.norm(Z - Y, dim=(1, 2)) / torch.linalg.norm(Y, dim=(1, 2))).mean()) for Z in changed]


def _random(net: Transformer, sample: Sample, shape: tuple[int, ...]) -> Tensor:
    # The number of layers is part of the seed: greedy choices draw anew in each round.
    return torch.rand(shape, generator=torch.Generator().manual_seed(sample.seed * 10007 + net.arch.layers))


CRITERIA = {
    criterion.name: criterion
    for criterion in (
        _path_shares(residual=False),
        _path_shares(residual=True),
        Criterion("influence", influences),
        Criterion("magnitude", magnitudes, head_magnitudes),
        Criterion("gradient", taylor_scores, head_taylor_scores),
        Criterion("error", lambda net, sample: errors(net, sample, _each(net)), None, errors, True),
        Criterion(
            "random",
            lambda net, sample: _random(net, sample, (net.arch.layers,)).tolist(),
            lambda net, sample: _random(net, sample, (net.arch.layers, net.arch.heads)).tolist(),
        ),
    )
}
"""All criteria, by name."""


@torch.no_grad()
def next_token_loss(
    model: Any, ids: Int[Tensor, "batch token"], padding: Bool[Tensor, "batch token"] | None = None
) -> Loss | None:
    """The mean cross-entropy of the next token, as a function of the output of the network; None where the model's
    logits are not its output embedding applied to that output (encoders, capped logits, models without a head).

    Args:
        model: A model of transformers with a head, such as `GPT2LMHeadModel`.
        ids: Token ids, padded at the end.
        padding: True at padding.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    valid = torch.ones_like(ids, dtype=torch.bool) if padding is None else ~padding
    if head is None or getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
        return None
    told = model(input_ids=ids, attention_mask=valid.long(), output_hidden_states=True, return_dict=True)
    if not torch.allclose(head(told.hidden_states[-1])[valid], told.logits[valid], rtol=1e-3, atol=1e-3):
        return None
    weight, bias = head.weight.double(), None if head.bias is None else head.bias.double()
    asked = ids[:, 1:].masked_fill(~valid[:, 1:], -100)

    def loss(Y: Tensor) -> Tensor:
        of_output = F.linear(Y[:, :-1], weight.to(Y), None if bias is None else bias.to(Y))
        return F.cross_entropy(of_output.flatten(0, 1), asked.flatten().to(Y.device), ignore_index=-100)

    return loss
