"""Linear readouts that are fitted anew: what a linear classifier can tell from features, whatever a trained head says.

Multinomial logistic regression of many sets of features at once, each with its own classifier. Features are whitened
first (mean zero, covariance one), so that a direction counts however small its variance is: the question is whether
the information is there, not whether it is large. On white features the loss has a curvature of at most 1/2, so that
accelerated gradient steps of a fixed length converge without anything to tune.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.errors import StudyError
from rankscope.shapes import Float, Int

RIDGE = 1e-3  # Times half the square of the weights on white features, added to the mean loss in nats
ROUNDING = 1e-10  # Directions whose variance is a smaller share of the largest are left out
STEPS = 200  # Of accelerated gradient descent: the distance to the optimum falls by e in 1 / sqrt(2 * RIDGE) steps


class Readout(NamedTuple):
    """The linear classifiers of some sets of features."""

    weight: Float[Tensor, "set width class"]
    bias: Float[Tensor, "set class"]

    def logits(self, Y: Float[Tensor, "set token width"]) -> Float[Tensor, "set token class"]:
        """The logits that each set's classifier gives for that set's features."""
        return torch.baddbmm(self.bias[:, None], Y, self.weight)


def fitted_readout(
    Y: Float[Tensor, "set token width"], labels: Int[Tensor, " token"], classes: int, steps: int = STEPS
) -> Readout:
    """The classifiers that minimise cross-entropy plus `RIDGE / 2 ||B||^2`, B the weights on white features.

    Args:
        Y: Features of tokens, of several sets that share the tokens.
        labels: The class of each token.
        classes: How many classes there are.
        steps: Of accelerated gradient descent.

    Raises:
        StudyError: Features and labels are not of the same tokens.
    """
    if Y.ndim != 3 or labels.shape != Y.shape[1:2]:
        wanted = "features [set, token, width] must have one label for each token"
        raise StudyError(f"{wanted}; got {tuple(Y.shape)} and {tuple(labels.shape)}", subject="labels")
    mean, whiten = _whitening(Y)
    Z = ((Y - mean) @ whiten).float()  # of size one in every direction: float32 resolves all that a step needs
    Z = torch.cat([Z, torch.ones_like(Z[..., :1])], -1)  # the last feature is the bias, on which there is no penalty
    wanted_classes = F.one_hot(labels, classes).to(Z)
    penalty = torch.full_like(Z[:1, 0, :, None], RIDGE)
    penalty[:, -1] = 0.0
    curvature = 0.5 + RIDGE
    ratio = math.sqrt(RIDGE / curvature)
    momentum = (1 - ratio) / (1 + ratio)
    B = ahead = Z.new_zeros(len(Z), Z.shape[2], classes)
    for _ in range(steps):
        errors = (Z @ ahead).softmax(-1) - wanted_classes
        after = ahead - (Z.mT @ errors / Z.shape[1] + penalty * ahead) / curvature
        ahead, B = after + momentum * (after - B), after
    weight = whiten @ B[:, :-1].to(Y)
    return Readout(weight, B[:, -1].to(Y) - (mean @ weight)[:, 0])


def _whitening(Y: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of features, and the map that makes their covariance one on all directions but those of rounding."""
    mean = Y.mean(1, keepdim=True)
    centred = Y - mean
    variances, directions = torch.linalg.eigh(centred.mT @ centred / Y.shape[1])
    most = variances.amax(-1, keepdim=True)
    known = variances > (ROUNDING * most).clamp_min(torch.finfo(Y.dtype).tiny)
    scale = torch.where(known, variances, torch.inf).rsqrt()
    return mean, directions * scale[:, None, :]
