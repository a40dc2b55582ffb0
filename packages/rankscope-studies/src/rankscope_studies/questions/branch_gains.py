"""What attention and MLPs do to differences between tokens, layer by layer, and what noise does to a network.

Called by `what_skips_pay.py`. Tokens X `[n, d]` are `1 x^T + R`, x their mean: `D = ||R||` is the size of the
differences and `C = ||1 x^T||` that of the common part, in Frobenius norms. A branch takes Z to F:

    differences   log10 D(F) / D(Z)     size of token differences in the branch output over that in its input
    common        log10 C(F) / C(Z)     the same of the common part
    stream        log10 (D/C)(S) / (D/C)(X)   what the half block, S = w X + F(norm X), does to the ratio of both
    growth        log10 ||S|| / ||X||         how much longer tokens are after the sum
    bound         log10 Lip(act) ||W_1||_2 ||W_2||_2, of an MLP: no difference grows more
    steepest      log10 of the largest singular value of the MLP's Jacobian at one of these tokens

so that `stream` below zero makes tokens more alike: with a skip, a branch that loses differences may yet leave most of
them. Norms on the sums of a post-norm block change the ratio too: `stream` of the part `norms` is what the norms of one
layer do to it, and of the part `layer` what the layer does from its input to its output, the sum of all parts. All
numbers are read in deviation arithmetic, since a network without skips makes tokens equal to more digits
than float64 has.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.deviation import BlockRecord, State, dissect
from rankscope.lab import Batch, Model, Task, Trainable
from rankscope.monitor import leading_vectors
from rankscope.nets import ACTIVATIONS, Architecture, MLPWeights, Transformer, affine
from rankscope.shapes import Float
from rankscope.theory import MLPNorms

TEN = math.log(10.0)
STEPS = 12  # Of the search for the largest singular value of an MLP's Jacobian
PARTS = ("attention", "mlp", "norms", "layer")  # What has numbers; `norms` only where norms stand on the sums
HALF = 0.5  # Of what was learnt: where noise has taken so much, its size is what a network tolerates


class BranchNumber(NamedTuple):
    """One number of one part of one layer, of one sample."""

    sample: int
    layer: int  # From 1 on
    part: str  # One of `PARTS`
    quantity: str
    value: float  # log10


def branch_numbers(net: Transformer, X: Tensor, padding: Tensor | None = None) -> Iterator[BranchNumber]:
    """What every branch of a network does to differences and to the common part, how steep its MLPs are, and what norms
    on the sums and whole layers do to the ratio of both.

    Args:
        net: The network, taken in float64 on the CPU.
        X: Its input tokens `[sample, token, width]`.
        padding: `[sample, token]`, True at padding.
    """
    net, X = net.to(torch.float64, "cpu"), X.double().cpu()
    if padding is not None:  # records of padded samples are taken one at a time
        for sample, (tokens, empty) in enumerate(zip(X, padding.cpu(), strict=True)):
            for reading in _numbers(net, dissect(net, tokens[None], padding=empty[None])):
                yield reading._replace(sample=sample)
    else:
        yield from _numbers(net, dissect(net, X))


def _numbers(net: Transformer, records: Iterable[BlockRecord]) -> Iterator[BranchNumber]:
    """The numbers of every branch and layer, read off the records of all blocks."""
    for index, record in enumerate(records):
        layer = net.weights.layers[index]
        bound = _log10(MLPNorms.of_layers(net.arch, [layer])[0].spectral)
        for half in record.halves:
            before, summed = log_sizes(half.before), log_sizes(half.summed)
            for branch in half.branches:
                inside, out = log_sizes(branch.inside), log_sizes(branch.out)
                steep = None
                if branch.kind == "mlp" and layer.mlp is not None:
                    steep = mlp_steepness(net.arch, layer.mlp, branch.inside.tokens())
                for k in range(len(before)):
                    numbers = {
                        "differences": out[k].differences - inside[k].differences,
                        "common": out[k].common - inside[k].common,
                        "stream": summed[k].ratio - before[k].ratio,
                        "growth": summed[k].length - before[k].length,
                    }
                    if steep is not None:
                        numbers |= {"bound": bound, "steepest": _log10(steep[k])}
                    for quantity, value in numbers.items():
                        yield BranchNumber(k, index + 1, branch.kind, quantity, value)
        yield from _layer_numbers(index + 1, record)


def _layer_numbers(layer: int, record: BlockRecord) -> Iterator[BranchNumber]:
    """What the norms on the sums of a layer, where there are any, and the layer as a whole do to the ratio of
    differences and the common part."""
    start, end = log_sizes(record.halves[0].before), log_sizes(record.state)
    by_norm = [
        [after.ratio - sums.ratio for after, sums in zip(log_sizes(half.after), log_sizes(half.summed), strict=True)]
        for half in record.halves if half.after is not half.summed
    ]  # fmt: skip
    for k, (before, after) in enumerate(zip(start, end, strict=True)):
        if by_norm:
            yield BranchNumber(k, layer, "norms", "stream", sum(ratios[k] for ratios in by_norm))
        yield BranchNumber(k, layer, "layer", "stream", after.ratio - before.ratio)


class LogSizes(NamedTuple):
    """log10 D and log10 C of the tokens of one sample: of their differences and of their common part."""

    differences: float
    common: float

    @property
    def ratio(self) -> float:
        """log10 of D / C."""
        return self.differences - self.common

    @property
    def length(self) -> float:
        """log10 of `sqrt(D^2 + C^2)`, the Frobenius norm of the tokens."""
        most = max(self)
        return most + 0.5 * math.log10(sum(100 ** (size - most) for size in self)) if math.isfinite(most) else most


def log_sizes(state: State) -> list[LogSizes]:
    """The sizes of differences and of the common part, for each sample.

    >>> X = torch.tensor([[[3.0, 1.0], [3.0, -1.0]]], dtype=torch.float64)
    >>> sizes, = log_sizes(State.of(X, torch.ones(1, 2, dtype=torch.bool)))
    >>> [round(100**log, 6) for log in sizes]  # the squares
    [2.0, 18.0]
    """
    mean, R = state.centred()
    common = (state.x + mean).normalised()
    C = common.value.norm(dim=-1) * state.valid.count[:, 0].sqrt()
    parts = ((R.value.flatten(1).norm(dim=-1), R.log), (C, common.log))
    logs = [[_log10(size) + log / TEN for size, log in zip(*map(Tensor.tolist, part), strict=True)] for part in parts]
    return [LogSizes(*pair) for pair in zip(*logs, strict=True)]


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else -math.inf


def mlp_steepness(arch: Architecture, w: MLPWeights, Z: Float[Tensor, "sample token width"]) -> list[float]:
    """The largest singular value of an MLP's Jacobian at one of the tokens of each sample: from below, by Lanczos'
    method; NaN of a gated MLP, which is not of the form `act(z W_1 + b_1) W_2`."""
    if w.gate is not None:
        return [math.nan] * len(Z)
    up, down = w.up.weight.double(), w.down.weight.double()
    rows = Z.flatten(0, 1)
    hidden = affine(rows, w.up).requires_grad_()
    with torch.enable_grad():
        (slopes,) = torch.autograd.grad(ACTIVATIONS[arch.activation](hidden).sum(), hidden)
    start = torch.randn(2, *rows.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leading = leading_vectors(
        lambda v: ((v @ up) * slopes) @ down, lambda u: ((u @ down.mT) * slopes) @ up.mT, start, STEPS
    )
    return leading.norm.view(Z.shape[:-1]).amax(-1).tolist()


def sensitivities(net: Transformer, X: Tensor, draws: int, padding: Tensor | None = None) -> dict[str, float]:
    """How much of a small change at the embedding is seen in the output, both relative to their size: log10 of the
    root mean square of `(||J v|| / ||Y||) / (||v|| / ||X||)` over samples and random v.

    Args:
        net: The network, taken in float64 on the CPU.
        X: Its input tokens `[sample, token, width]`.
        draws: How many v are drawn.
        padding: `[sample, token]`, True at padding, where v and what is read are zero.

    Returns:
        `jacobian differences`, of changes that sum to zero over tokens, and `jacobian common`, of one change of all.
    """
    net, X = net.to(torch.float64, "cpu"), X.double().cpu()
    padding = None if padding is None else padding.cpu()
    valid = torch.ones_like(X[..., :1]) if padding is None else (~padding)[..., None].to(X)
    module, count, draw = Trainable(net).requires_grad_(False), valid.sum(1, keepdim=True), torch.Generator()
    draw.manual_seed(0)
    squares: dict[str, list[Tensor]] = {"jacobian differences": [], "jacobian common": []}
    for _ in range(draws):
        noise = valid * torch.randn(X.shape, generator=draw, dtype=X.dtype)
        common = valid * noise.sum(1, keepdim=True) / count
        for name, v in zip(squares, (noise - common, common), strict=True):
            Y, change = torch.func.jvp(lambda tokens: module(tokens, padding), (X,), (v,))
            sizes = [(part * valid).flatten(1).norm(dim=1) for part in (change, X, Y, v)]
            squares[name].append((sizes[0] * sizes[1] / (sizes[2] * sizes[3])).square())
    return {name: 0.5 * _log10(float(torch.stack(values).mean())) for name, values in squares.items()}


def accuracies_under_noise(
    model: Model, task: Task, batch: Batch, noise: Sequence[float], draws: int, added_to: str = "embedding"
) -> list[float]:
    """The accuracy of a network when noise is added to what it reads, for each size of the noise.

    Args:
        model: The network with its embedding and head.
        task: What the network has learnt.
        batch: Held-out samples.
        noise: Root mean squares of the noise. At the embedding, in units of the root mean square by which entries of
            embedded tokens differ from their sample's mean; of inputs, in units of the inputs' standard deviation.
        draws: How often noise is drawn.
        added_to: "embedding"; "gradient" for a step at the embedding, not drawn but along the gradient of the loss; or
            "inputs" for inputs that are numbers (the pixels of digits).
    """
    model.eval()
    with torch.no_grad():
        X = batch.inputs.float() if added_to == "inputs" else model.tokens(batch.inputs)
    unit = X.std() if added_to == "inputs" else (X - X.mean(1, keepdim=True)).square().mean().sqrt()

    def logits(changed: Tensor) -> Tensor:
        tokens = model.tokens(changed) if added_to == "inputs" else changed
        return model.logits(model.net(tokens, batch.padding), batch.padding)

    if added_to == "gradient":
        X = X.requires_grad_()
        (gradient,) = torch.autograd.grad(task.loss(logits(X), batch), X)
        sizes = gradient.square().mean((1, 2), keepdim=True).sqrt()
        added = [gradient / torch.where(sizes > 0, sizes, 1.0)]
    else:
        draw = torch.Generator().manual_seed(0)
        added = [torch.randn(X.shape, generator=draw).to(X) for _ in range(draws)]
    with torch.no_grad():
        accuracies = [
            [float(task.accuracy(logits(X + size * unit * change), batch)) for change in added] for size in noise
        ]
    return [sum(by_draw) / len(by_draw) for by_draw in accuracies]


def tolerance(noise: Sequence[float], accuracies: Sequence[float], chance: float) -> float:
    """The size of noise at which half of what the network knows is lost: where accuracy has come halfway from its
    value without noise down to chance, between two sizes by the line through them over the noise's logarithm.

    Args:
        noise: Sizes of the noise, rising; the first is 0.
        accuracies: The accuracy at each.
        chance: The accuracy of guessing.

    Returns:
        The size; NaN if there was nothing to lose, or halfway is not reached between two sizes above 0.

    >>> round(tolerance([0, 1, 4], [1.0, 0.75, 0.25], 0.0), 6), tolerance([0, 1], [1.0, 0.75], 0.0)
    (2.0, nan)
    """
    target = chance + HALF * (accuracies[0] - chance)
    if accuracies[0] <= chance or accuracies[1] < target:  # between no noise and the first size, nothing is known
        return math.nan
    for k in range(2, len(noise)):
        if accuracies[k] <= target:
            share = (accuracies[k - 1] - target) / (accuracies[k - 1] - accuracies[k])
            return math.exp((1 - share) * math.log(noise[k - 1]) + share * math.log(noise[k]))
    return math.nan
