"""What is read off a network before it is trained, to predict what a training will make of it.

In order: two batches of the task go forward and their gradients come back; the tokens of a few samples go through
`measure`; the curvature along the gradient takes one pass more, and its backward pass another; and all but the
curvature is read once more after the weights have **drifted** as far as the optimiser alone would move them.

The loss of a network that ignores its inputs falls too, to that of the labels' frequencies. What has to be seen is the
rest: with logits z of a token, label y and `r = softmax(z) - onehot(y)`, the gradient is `sum_t dz_t^T r_t`; the
**input gradient** has `r_t` minus its mean over tokens in place of r_t, what a change of the output's bias cannot do.

Adam moves every weight by about the learning rate at a step, whatever the size of its gradient. So

- what the input-dependent loss falls by in a training is at most about `lr * steps * |input gradient|_1`, while the
  gradient stays as it is and batches agree on it;
- where batches do not agree, weights drift by about `lr * sqrt(steps)`: a network whose weights are smaller than that
  is another network soon.

| reading                | what it is                                                                                 |
|------------------------|--------------------------------------------------------------------------------------------|
| `residual_*`           | log10 of the relative residual of tokens after the last, middle and worst layer            |
| `entropy_*`            | of attention in nats: the mean over heads, and of the head that has least                  |
| `share_batch`          | log10 of the share of the output that tokens of the batch do not have in common            |
| `share_current`        | of that part, the share that the token's own symbol explains                               |
| `share_position`       | of that part, the share that the token's position explains                                 |
| `logits_*`             | log10 of the root mean square of what differs between tokens, and of what does not         |
| `reach_*`              | log10 of `lr * steps * |input gradient|_1`: of all weights, blocks, each kind of weight     |
| `lowest_*`, `tilt_*`   | log10 of the input gradient's norm in the layer that has least; last layer to first         |
| `agreement_*`          | the cosine of the input gradients of two batches                                           |
| `curvature`, `edge`    | log10 of `s H s`, s the signs of the gradient, and of `lr s H s / (2 |gradient|_1)`        |
| `start_loss`           | the loss of the first batch                                                                |
| `weights_*`            | log10 of the root mean square of weights in units of `lr * sqrt(steps)`, by kind           |
| `drift_*`              | the same readings after the drift                                                          |

`readings` reads a model of the lab. What it is made of (`output_readings`, `gradient_readings`, `profile_readings`,
`curvature_readings`, `weight_readings`) also reads a module of a person's own, as far as it can be read
(`live_module.py`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankscope.lab import UNLABELLED, Batch, Model, Recipe, Task, eval_mode
from rankscope.metrics import METRICS, Reading
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import MetricReader, one_pass

KINDS: dict[str, tuple[str, ...]] = {
    "query": ("attention.query.",),
    "key": ("attention.key.",),
    "value": ("attention.value.",),
    "output": ("attention.output.",),
    "mlp": (".mlp.",),
    "embedding": ("embed.", "net.positions"),
    "head": ("head.",),
}
"""Kinds of weights, by what their names have in them."""
IN_BLOCKS = ("query", "key", "value", "output", "mlp")  # Kinds that every layer has its own of
SAMPLES = 4  # Samples of the batch that `measure` reads
LOWEST, HIGHEST = -30.0, 30.0
"""Logs are cut here: what is smaller or larger than that trains as little."""
ABSENT = -40.0  # The reading of a part that a network has not


@dataclass(frozen=True)
class WeightPart:
    """Entries of one trained weight that belong together."""

    name: str  # The weight
    layer: int | None = None  # The layer that it is in; None outside the blocks
    choose: Callable[[Tensor], Tensor] = torch.flatten
    """Takes the entries, flat, out of a tensor of its shape: those of queries out of a fused matrix."""


WeightKinds = Mapping[str, Sequence[WeightPart] | None]
"""By kind, its weights, none of a part that a network has not; None where it is not known which they are."""


def readings(model: Model, task: Task, recipe: Recipe) -> dict[str, float]:
    """Return every reading of the module's table, by name.

    Args:
        model: An embedding, a network and a head, at initialisation; nothing in it is changed.
        task: What it is to learn.
        recipe: Learning rate, steps and batch of its training, and the seed of batches and of the drift.

    >>> from rankscope.lab.tasks import Copying
    >>> from rankscope.lab import Training
    >>> task = Copying(symbols=4, length=3)
    >>> training = Training(task, task.architecture(2, 8, 2), dtype=torch.float64)
    >>> values = readings(training.models[0], task, Recipe())
    >>> -30 <= values["residual_last"] <= 0, -1 <= values["agreement_all"] <= 1
    (True, True)
    """
    with eval_mode(model):
        batches = [task.batch(recipe.batch_size, recipe.seed, step) for step in (0, 1)]
        weights = trained_weights(model)
        kinds = _kinds(weights)
        values, logits = _look(model, recipe, batches, kinds, keep=True)
        values |= curvature_readings(task.loss(logits, batches[0]), list(weights.values()), recipe)
        values |= weight_readings(weights, kinds, recipe)
        with drifted(model, recipe):
            later, _ = _look(model, recipe, batches, kinds)
        return values | {f"drift_{name}": value for name, value in later.items()}


def architecture_numbers(arch: Architecture, lr: float) -> dict[str, float]:
    """Numbers of a network and its training, `lr` its largest learning rate, that are no readings, as the predictor
    takes them.

    >>> architecture_numbers(Architecture(layers=8, width=64, heads=4, norm_place="post"), 1e-3)["depth"]
    3.0
    """
    skips = (arch.attention_skip, arch.mlp_skip if arch.mlp != "none" else arch.attention_skip)
    return {
        "depth": math.log2(arch.layers),
        "rate": math.log10(lr),
        "attention_skip": float(skips[0]),
        "mlp_skip": float(skips[1]),
        "no_norm": float(arch.norm == "none"),
        "norm_after": float(arch.norm_place == "post" and arch.norm != "none"),
        "centred_norm": float(arch.norm == "layer"),
        "last_norm": float(arch.final_norm),
        "no_mlp": float(arch.mlp == "none"),
        "gated_mlp": float(arch.mlp == "gated"),
        "bounded": float(arch.activation == "tanh"),
        "window": float("window" in str(arch.mask)),
        "no_table": float(arch.positions != "absolute"),
        "remedies": float(len(arch.parts) > 0),
    }


@contextmanager
def drifted(model: nn.Module, recipe: Recipe) -> Iterator[None]:
    """Within this context every weight is moved by a normal number times `lr sqrt(steps)`; then they are as before.
    Writing to `.data` leaves their version as it is, so a graph that the user made of them can still be differentiated.
    """
    distance, draw = recipe.lr * math.sqrt(recipe.steps), torch.Generator().manual_seed(recipe.seed)
    kept = [(weight, weight.detach().clone()) for weight in trained_weights(model).values()]
    try:
        with torch.no_grad():
            for weight, _ in kept:
                noise = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
                weight.data.add_(distance * noise.to(weight))
        yield
    finally:
        with torch.no_grad():
            for weight, before in kept:
                weight.data.copy_(before)


def _look(
    model: Model, recipe: Recipe, batches: Sequence[Batch], kinds: WeightKinds, keep: bool = False
) -> tuple[dict[str, float], Tensor]:
    """(Gradients of two batches, shares of the output, residuals and entropy; logits of the first batch, whose graph
    can still be differentiated if `keep`)."""
    weights, batch = trained_weights(model), batches[0]
    Y = model.net(model.tokens(batch.inputs), batch.padding)
    first = model.logits(Y, batch.padding)
    values = output_readings(Y, first, batch.inputs if batch.inputs.ndim == 2 else None)
    gradients = []
    for index, batch in enumerate(batches):
        logits = model(batch.inputs, batch.padding) if index else first
        labelled = batch.labels != UNLABELLED
        loss = input_loss(logits[labelled], batch.labels[labelled])
        gradients.append(gradient_of(loss, weights, keep=keep and not index))
    part = batches[0].part(slice(SAMPLES))
    X = model.tokens(part.inputs).detach().double()
    residual, entropy = token_curves(model.network(torch.float64), X, part.padding)
    values |= gradient_readings(gradients, kinds, recipe)
    return values | profile_readings(residual.log10, entropy[:, 1:]), first


def _kinds(weights: Mapping[str, Tensor]) -> WeightKinds:
    """Weights of a model of the lab by kind, as their names say."""
    kinds: dict[str, list[WeightPart]] = {kind: [] for kind in ("all", "blocks", *KINDS)}
    for name in weights:
        _, in_block, rest = name.partition("layers.")
        part = WeightPart(name, int(rest.partition(".")[0]) if in_block else None)
        kinds["all"].append(part)
        if in_block:
            kinds["blocks"].append(part)
        for kind, marks in KINDS.items():
            for mark in marks:
                if mark in name:
                    kinds[kind].append(part)
                    break
    return kinds


def curvature_readings(loss: Tensor, weights: Sequence[Tensor], recipe: Recipe) -> dict[str, float]:
    """start_loss · curvature · edge, of the loss of the first batch, with a graph that can be differentiated twice, and
    what is trained; the learning rate is the recipe's."""
    gradient = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
    present = [(g, w) for g, w in zip(gradient, weights, strict=True) if g is not None and g.requires_grad]
    slope = sum([(g * g.detach().sign()).sum() for g, _ in present], torch.zeros(()).to(loss))
    curved = torch.autograd.grad(slope, [w for _, w in present], allow_unused=True) if present else ()
    pairs = zip(curved, present, strict=True)
    bent = sum([float((c * g.detach().sign()).sum()) for c, (g, _) in pairs if c is not None])
    values = {"start_loss": float(loss.detach()), "curvature": log10(abs(bent))}
    values["edge"] = log10(abs(bent) * recipe.lr / (2 * float(slope.detach()))) if float(slope.detach()) else LOWEST
    return values


def weight_readings(weights: Mapping[str, Tensor], kinds: WeightKinds, recipe: Recipe) -> dict[str, float]:
    """The readings `weights_*`, of kinds that are known.

    Args:
        weights: What is trained, by name.
        kinds: Which weights are of which kind. Of queries, keys and values biases count too: one for each head, they
            are matrices in the lab.
        recipe: The drift is `lr sqrt(steps)`.
    """
    drift, values = recipe.lr * math.sqrt(recipe.steps), {}
    for kind in KINDS:
        if (parts := kinds[kind]) is None:
            continue
        biases = kind in ("query", "key", "value")
        matrices = [part.choose(weights[part.name]) for part in parts if biases or weights[part.name].ndim > 1]
        square = sum([float(matrix.detach().double().square().sum()) for matrix in matrices])
        count = sum(map(torch.Tensor.numel, matrices))
        values[f"weights_{kind}"] = log10(math.sqrt(square / count) / drift) if matrices else ABSENT
    return values


def gradient_of(loss: Tensor, weights: Mapping[str, Tensor], keep: bool = False) -> dict[str, Tensor]:
    """The gradient at each weight, zero where the loss does not depend on it; `keep` keeps the graph."""
    gradient = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, retain_graph=keep)
    pairs = zip(weights.items(), gradient, strict=True)
    return {name: torch.zeros_like(weight) if g is None else g for (name, weight), g in pairs}


def gradient_readings(
    gradients: Sequence[Mapping[str, Tensor]], kinds: WeightKinds, recipe: Recipe
) -> dict[str, float]:
    """The readings `reach_*`, `agreement_*`, `lowest_*` and `tilt_*`, of kinds that are known.

    Args:
        gradients: The input gradients of two batches, by the names of weights.
        kinds: Which weights are of which kind; "all" and "blocks" are kinds too.
        recipe: The reach is `lr steps |input gradient|_1`.
    """
    (first, second), distance = gradients, recipe.lr * recipe.steps
    values: dict[str, float] = {}
    for kind, parts in kinds.items():
        if parts is None:
            continue
        if not parts:
            values |= dict.fromkeys((f"reach_{kind}", f"agreement_{kind}"), ABSENT)
            continue
        a, b = (torch.cat([part.choose(gradient[part.name]) for part in parts]) for gradient in (first, second))
        values[f"reach_{kind}"] = log10(distance * float(a.abs().sum()))
        one_way, other_way = (F.normalize(gradient.double(), dim=0, eps=0.0) for gradient in (a, b))
        cosine = float(one_way @ other_way)
        values[f"agreement_{kind}"] = 0.0 if math.isnan(cosine) else cosine
    for kind in IN_BLOCKS:
        if (parts := kinds[kind]) is not None:
            logs = list(norms_by_layer(first, parts).values())
            values[f"lowest_{kind}"] = min(logs, default=ABSENT)
            values[f"tilt_{kind}"] = logs[-1] - logs[0] if logs else ABSENT
    return values


def norms_by_layer(gradient: Mapping[str, Tensor], parts: Sequence[WeightPart]) -> dict[int, float]:
    """By layer, log10 of the norm of a gradient at some of the weights."""
    squares: dict[int, float] = {}
    for part in parts:
        if part.layer is not None:
            square = float(part.choose(gradient[part.name]).square().sum())
            squares[part.layer] = squares.get(part.layer, 0.0) + square
    return {layer: log10(math.sqrt(squares[layer])) for layer in sorted(squares)}


def input_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A number whose gradient is the input gradient, of the logits `[token, class]` of tokens that have a label."""
    r = ((logits.softmax(-1) - F.one_hot(labels, logits.shape[-1]).to(logits)) / len(labels)).detach()
    return (logits * (r - r.mean(0))).sum()


@torch.no_grad()
def output_readings(Y: Tensor | None, logits: Tensor, symbols: Tensor | None) -> dict[str, float]:
    """The readings `share_*` and `logits_*`.

    Args:
        Y: What the head takes, `[sample, token, width]`; None where it is not known, which leaves out all shares.
        logits: `[sample, token, class]` or `[sample, class]`.
        symbols: The symbol of each token, `[sample, token]`; None where tokens are none.
    """
    z, values = logits.flatten(0, -2), {}
    apart, common = log10(float((z - z.mean(0)).square().mean().sqrt())), log10(float(z.mean(0).std()))
    if Y is None:
        return {"logits_apart": apart, "logits_common": common}
    H = Y.flatten(0, -2)
    centred = H - H.mean(0)
    total = float(centred.square().sum())
    values["share_batch"] = log10(math.sqrt(total) / float(H.norm())) if float(H.norm()) else LOWEST
    values |= {"logits_apart": apart, "logits_common": common}
    values["share_position"] = _explained(centred, torch.arange(Y.shape[1]).repeat(len(Y)), total)
    values["share_current"] = ABSENT if symbols is None else _explained(centred, symbols.flatten(), total)
    return values


def _explained(centred: Tensor, group: Tensor, total: float) -> float:
    """The share of the variance of rows that the means of groups of rows have."""
    if not total:
        return 0.0
    group = group.to(centred.device)
    count = torch.bincount(group).clamp(min=1)
    sums = torch.zeros(len(count), centred.shape[1], dtype=centred.dtype, device=centred.device)
    means = sums.index_add(0, group, centred) / count[:, None]
    return float((means[group]).square().sum()) / total


@torch.no_grad()
def token_curves(net: Transformer, X: Tensor, padding: Tensor | None, *, check: bool = False) -> tuple[Reading, Tensor]:
    """(Relative residuals `[sample, layer]`, layer 0 the input; entropy of attention `[sample, layer, head]`, NaN at
    layer 0) of tokens X, in deviation arithmetic where it has rules; with `check` a second pass says which residuals
    rounding decided, as in `measure`."""
    metrics = METRICS["relative_residual"], METRICS["entropy"]
    reader = MetricReader(metrics)
    one_pass(net, X, padding, [reader], check=check)
    rows = reader.result()
    residuals = [row.reading for row in rows if row.metric is metrics[0]]
    by_head = torch.full((len(X), len(residuals), net.arch.heads), torch.nan, dtype=torch.float64)
    for row in rows:
        if row.metric is metrics[1]:
            by_head[:, row.layer] = row.reading.value
    columns = ([getattr(reading, name) for reading in residuals] for name in ("value", "log10", "floor"))
    return Reading(*(torch.stack(column, 1) for column in columns)), by_head


def profile_readings(residual: Tensor, entropy: Tensor | None) -> dict[str, float]:
    """The readings `residual_*` and `entropy_*`.

    Args:
        residual: log10 of the relative residual, `[sample, layer]`, layer 0 the input; NaN of a network that gives no
            number.
        entropy: Of attention in nats, `[sample, layer, head]`, from layer 1 on; None where it is not known.
    """
    logs = residual.nan_to_num(nan=LOWEST).clamp(LOWEST, 0.0).mean(0)
    values = {
        "residual_last": float(logs[-1]),
        "residual_middle": float(logs[len(logs) // 2]),
        "residual_worst": float(logs.min()),
    }
    if entropy is not None:
        heads = entropy.nan_to_num(nan=0.0).mean(0)
        values |= {"entropy_mean": float(heads.mean()), "entropy_least": float(heads.min())}
    return values


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """What is trained, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def log10(value: float) -> float:
    """log10, cut to what matters; NaN where a network gives no number."""
    if math.isnan(value):
        return HIGHEST
    return LOWEST if value <= 0 else min(HIGHEST, max(LOWEST, math.log10(value)))
