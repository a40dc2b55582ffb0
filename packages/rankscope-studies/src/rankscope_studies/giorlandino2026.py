"""The setting of figure 1 of Giorlandino & Goldt (2026): cosines of tokens by layer, in theory and measured.

Published are encoders of 50 post-norm layers, width 720 (MLP too), one head without output projection, ReLU, skips of
weight 1, entries of weights of values and of the MLP with variance 0.2 / width, biases with 4e-4, 512 tokens of short
stories; beta 0.5 and 3, three networks each, against the closed form that starts at the measured cosine (0.03 or so).
Weights of queries and keys have the standard deviation `sqrt(beta / width) (ln n)^(1/4)`, n the longest input: shorter
texts have a larger beta than is said. Here every input has n tokens, normal ones of a given cosine, and points are of
any beta and skip.
"""

import math
from collections.abc import Iterable

import polars as pl
import torch
from torch import Tensor

from rankscope.forecasts import giorlandino, mean_field
from rankscope.nets import Architecture, Transformer, shapes
from rankscope.shapes import Float

GAIN, BIAS = 0.2, 4e-4  # mean-square gain of values and of each map of the MLP; mean square of biases


def figure_1(
    betas: Iterable[float] = (0.5, 3.0),
    skips: Iterable[float] = (1.0,),
    *,
    layers: int = 50,
    width: int = 720,
    tokens: int = 512,
    cosine: float = 0.03,
    networks: int = 3,
    draws: int = 2,
    dtype: torch.dtype = torch.float32,
) -> pl.DataFrame:
    """Return the cosine of two tokens after every layer, at points (beta, skip) of the plane.

    Args:
        betas: Standard deviations of scores over `sqrt(ln n)`.
        skips: Weights of the skip around attention; that around the MLP is 1.
        layers: Layers of a network.
        width: The width of tokens and of the MLP.
        tokens: Tokens of an input.
        cosine: The cosine of two tokens of the input.
        networks: Networks that are measured at each point.
        draws: Sets of queries and keys that our recursion averages over.
        dtype: The precision of what is measured.

    Returns:
        A row for each point and layer (0 is the input): `closed_form`, `mean_field` and `measured` are the mean cosine
        in the published theory, in ours, and of networks; `measured_sd` is its standard deviation over pairs of tokens
        and networks, the published error bar.

    >>> figure_1([1.0], layers=1, width=16, tokens=4, networks=1).columns
    ['beta', 'skip', 'layer', 'closed_form', 'mean_field', 'measured', 'measured_sd']
    """
    X = equiangular_tokens(tokens, width, cosine)
    points = [(beta, skip) for beta in betas for skip in skips]
    return pl.concat([_point(beta, skip, layers, X, networks, draws, dtype) for beta, skip in points])


def _point(
    beta: float, skip: float, layers: int, X: Tensor, networks: int, draws: int, dtype: torch.dtype
) -> pl.DataFrame:
    tokens, width = X.shape[1:]
    net = published_network(beta, skip, layers, width, tokens, seed=0)
    ours = [cosines(moments.covariance[0]) for moments in mean_field(net, X, draws=draws)]
    start = float(ours[0].mean())
    theirs = [start, *(phase.cosine for phase in giorlandino(net, 1.0, start, tokens))]
    measured: list[list[Tensor]] = [[] for _ in theirs]
    for seed in range(networks):
        net = published_network(beta, skip, layers, width, tokens, seed).to(dtype)
        for step in net.steps(X.to(dtype)):
            measured[step.layer].append(cosines(step.state[0] @ step.state[0].mT))
    layer_cosines = [torch.cat(parts).double() for parts in measured]
    return pl.DataFrame(
        {
            "beta": [float(beta)] * len(theirs),
            "skip": [float(skip)] * len(theirs),
            "layer": range(len(theirs)),
            "closed_form": theirs,
            "mean_field": [float(values.mean()) for values in ours],
            "measured": [float(values.mean()) for values in layer_cosines],
            "measured_sd": [float(values.std()) for values in layer_cosines],
        }
    )


def published_network(beta: float, skip: float, layers: int, width: int, tokens: int, seed: int = 0) -> Transformer:
    """Draw a network of the published kind; without an output projection that of values is followed by the identity.

    Args:
        beta: Scores have the variance `beta^2 ln(tokens)` for tokens of unit mean square.
        skip: The weight of the skip around attention.
        layers: How many layers it has.
        width: The width of tokens, and of the MLP's hidden layer.
        tokens: How many tokens it reads.
        seed: What weights are drawn from.
    """
    arch = Architecture(
        layers=layers, width=width, heads=1, mlp_width=width, activation="relu", norm_place="post",
        attention_skip=skip, biases=("value", "mlp"),
    )  # fmt: skip
    scores = beta * math.sqrt(math.log(tokens))
    square = {"query.weight": scores / width, "key.weight": scores / width, "bias": BIAS, "weight": GAIN / width}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes(arch).items():
        if name.endswith("gain"):
            tensors[name] = torch.ones(shape, dtype=torch.float64)
        elif name.endswith("output.weight"):
            tensors[name] = torch.eye(width, dtype=torch.float64).reshape(shape)
        else:
            size = next(value for ending, value in square.items() if name.endswith(ending))
            tensors[name] = math.sqrt(size) * torch.randn(shape, generator=generator, dtype=torch.float64)
    return Transformer.from_weights(arch, tensors)


def equiangular_tokens(tokens: int, width: int, cosine: float, seed: int = 0) -> Float[Tensor, "1 token width"]:
    """Draw tokens of mean square 1 whose cosines are near to the given one."""
    X = torch.randn(1, tokens + 1, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    X = math.sqrt(cosine) * X[:, :1] + math.sqrt(1 - cosine) * X[:, 1:]
    return X / X.square().mean(-1, keepdim=True).sqrt()


def cosines(C: Float[Tensor, "token token"]) -> Float[Tensor, " pair"]:
    """Return the cosine of every two tokens of a matrix of their products."""
    length = C.diagonal().sqrt()
    pairs = torch.triu_indices(len(C), len(C), offset=1)
    return (C / (length[:, None] * length))[pairs[0], pairs[1]]
