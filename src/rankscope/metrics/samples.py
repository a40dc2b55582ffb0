"""Collapse across samples: numbers of a set of embeddings, as those who train without labels watch them.

Z is `[*batch, sample, width]`: a row for each sample (its pooled tokens, its class token), or for each token of many
samples. Where tokens of one sample become the same, `residuals.py` tells; here all samples may become the same
(complete collapse), or fill a few directions only (dimensional collapse).

| function     | whose               | where all samples are the same | where all directions are alike      |
|--------------|---------------------|--------------------------------|-------------------------------------|
| `rankme`     | Garrido et al. 2023 | 1                              | the width, or the number of samples |
| `alpha_req`  | Agrawal et al. 2022 | no value (NaN)                 | 0                                   |
| `lidar`      | Thilak et al. 2023  | no value (NaN)                 | the width, or the samples minus one |
| `uniformity` | Wang & Isola 2020   | 0                              | about `-2 t`                        |
| `alignment`  | Wang & Isola 2020   | 0                              | grows as views of a sample differ   |

Formulas are the authors', with their constants as defaults. Everything is computed in float64, but embeddings that come
in float32 differ by rounding where they should be the same, and rounding fills all directions alike. So `rankme_floor`
and `distance_floor` say which values are rounding's, and `alpha_req` and `lidar`, which divide what differs by what
differs, have no value there. `monitor/embeddings.py` reads all five during a training.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.errors import MetricError, TokensError, require
from rankscope.metrics.base import ROUNDING, unit_of
from rankscope.shapes import Float

Embeddings = Float[Tensor, "*batch sample width"]
Views = Float[Tensor, "*batch sample view width"]
Numbers = Float[Tensor, "*batch"]


def rankme(Z: Embeddings, eps: float = 1e-7) -> Numbers:
    """RankMe, the effective rank of embeddings: `exp(-sum_k p_k log p_k)`, `p_k = s_k / sum_j s_j + eps`, s_k the
    singular values of Z. Z is not centred, as in the paper: equal samples have rank 1, not 0, also if all are zero.

    Args:
        Z: Embeddings.
        eps: What is added to every share; with it the value may pass the width by a little.

    >>> round(float(rankme(torch.eye(8))), 3)
    8.0
    """
    s = torch.linalg.svdvals(_wide(Z))
    p = s / s.sum(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny) + eps
    return (-(p * p.log()).sum(-1)).exp()


def rankme_floor(samples: int, width: int, dtype: torch.dtype = torch.float32, eps: float = 1e-7) -> float:
    """The value of `rankme` up to which embeddings of a dtype may be all the same: one singular value, and rounding.

    Rounding adds a matrix whose Frobenius norm is at most `ROUNDING` times the dtype's eps of that of Z, which is s_1
    where samples are the same. The entropy is largest where all its singular values are as large as each other.

    Args:
        samples: Rows of Z.
        width: Columns of Z.
        dtype: The dtype that embeddings were computed in.
        eps: As in `rankme`.
    """
    count = min(samples, width)
    noise = ROUNDING * unit_of(dtype) / math.sqrt(count)
    shares = [1.0, *[noise] * (count - 1)]
    p = [share / sum(shares) + eps for share in shares]
    return math.exp(-sum(share * math.log(share) for share in p))


def alpha_req(Z: Embeddings, first: int = 11, last: int = 50, dtype: torch.dtype | None = None) -> Numbers:
    """The exponent alpha of the eigenvalues of the covariance of embeddings, `lambda_k ~ k^-alpha`; near 1 is good.

    A line is fitted to `log lambda_k` over `log k`, with weights `1 / k`, as Stringer et al. (2019) do. NaN where an
    eigenvalue of the range is zero, or as small as rounding makes it: rounding is spread over all directions alike, and
    would look like a good spectrum.

    Args:
        Z: Embeddings; their mean is taken out.
        first: The first eigenvalue of the fit, counted from 1: the largest ones follow no power law.
        last: The last eigenvalue of the fit; one that Z does not have is left out.
        dtype: The dtype that embeddings were computed in, if it is coarser than their own, as under autocast.

    Raises:
        MetricError: Fewer than two eigenvalues are left to fit.
    """
    X = _wide(Z)
    size = torch.linalg.matrix_norm(X)
    X = X - X.mean(-2, keepdim=True)
    last = min(last, X.shape[-1], X.shape[-2] - 1)
    available = f"of {X.shape[-2]} samples of width {X.shape[-1]} those from {first} to {last} came"
    sentence = f"alpha-ReQ must have two eigenvalues to fit; {available}: give more samples"
    require(1 <= first < last, sentence, MetricError, "first")
    values = torch.linalg.svdvals(X).square()[..., first - 1 : last]
    rank = torch.arange(first, last + 1, dtype=X.dtype, device=X.device)
    x, y, w = rank.log(), values.log(), 1 / rank
    x_mean, y_mean = (x * w).sum() / w.sum(), (y * w).sum(-1, keepdim=True) / w.sum()
    slope = (w * (x - x_mean) * (y - y_mean)).sum(-1) / (w * (x - x_mean).square()).sum()
    rounding = ROUNDING * unit_of(dtype or Z.dtype) * size / math.sqrt(min(X.shape[-2:]))
    return torch.where(values.amin(-1) > rounding.square(), -slope, torch.nan)


def lidar(views: Views, delta: float = 1e-4, eps: float = 1e-8, dtype: torch.dtype | None = None) -> Numbers:
    """LiDAR: the effective rank of what tells samples apart, as against views of the same sample.

    With m_i the mean of the views of sample i, m that of all, and

        B = mean_i (m_i - m)(m_i - m)^T,   W = mean_i mean_v (z_iv - m_i)(z_iv - m_i)^T + delta I,

    it is `exp(-sum_k p_k log p_k)`, `p_k = l_k / sum_j l_j + eps`, l_k the eigenvalues of `W^-1/2 B W^-1/2`. NaN where
    no two samples differ by more than rounding, which would have a high rank.

    Args:
        views: Embeddings of several views (augmentations, crops) of every sample.
        delta: What is added to W, so that it has an inverse.
        eps: What is added to every share.
        dtype: The dtype that embeddings were computed in, if it is coarser than their own, as under autocast.
    """
    X = _wide(views)
    sentence = f"views must be [sample, view, width]; received {tuple(X.shape)}: stack the views of a sample"
    require(X.ndim >= 3, sentence, TokensError, "views")
    centre = X.mean(-2)
    between = centre - centre.mean(-2, keepdim=True)
    within = (X - centre[..., None, :]).flatten(-3, -2)
    B = between.mT @ between / between.shape[-2]
    W = within.mT @ within / within.shape[-2]
    W = W + delta * torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)
    root = torch.linalg.cholesky(W)
    half = torch.linalg.solve_triangular(root, B, upper=False)
    values = torch.linalg.eigvalsh(torch.linalg.solve_triangular(root, half.mT, upper=False)).clamp(min=0.0)
    p = values / values.sum(-1, keepdim=True) + eps
    rounding = (ROUNDING * unit_of(dtype or views.dtype)) ** 2 * X.square().sum(-1).mean((-2, -1))
    return torch.where(between.square().sum(-1).mean(-1) > rounding, (-(p * p.log()).sum(-1)).exp(), torch.nan)


def uniformity(Z: Embeddings, t: float = 2.0) -> Numbers:
    """`log mean_{i<j} exp(-t |z_i - z_j|^2)` of embeddings of length one: 0 where all are the same, lower where not.

    Args:
        Z: Embeddings; each is divided by its length.
        t: The sharpness of the kernel.
    """
    X = F.normalize(_wide(Z), dim=-1)
    pairs = torch.triu_indices(X.shape[-2], X.shape[-2], offset=1, device=X.device)
    if X.shape[-2] <= 256:
        square = (X[..., pairs[0], :] - X[..., pairs[1], :]).square().sum(-1)
    else:  # of many points, their products are fewer numbers
        square = (2 - 2 * (X @ X.mT)[..., pairs[0], pairs[1]]).clamp(min=0.0)
    return (-t * square).logsumexp(-1) - math.log(max(1, pairs.shape[1]))


def alignment(Z: Embeddings, other: Embeddings, power: float = 2.0) -> Numbers:
    """`mean_i |z_i - z'_i|^power` of two views of every sample, embeddings of length one: 0 where they agree.

    Args:
        Z: Embeddings of one view.
        other: Embeddings of another view of the same samples.
        power: The power of the distance.
    """
    sentence = f"two views must have the same shape; got {tuple(Z.shape)} and {tuple(other.shape)}"
    require(Z.shape == other.shape, sentence, TokensError, "other")
    X, Y = F.normalize(_wide(Z), dim=-1), F.normalize(_wide(other), dim=-1)
    return (X - Y).norm(dim=-1).pow(power).mean(-1)


def distance_floor(dtype: torch.dtype = torch.float32) -> float:
    """The squared distance of two embeddings of length one up to which they may be the same: `(2 ROUNDING eps)^2`.

    It is the floor of `alignment` of power 2, and, times t, of what `uniformity` is away from 0.

    Args:
        dtype: The dtype that embeddings were computed in.
    """
    float64_floor = 2 * ROUNDING * unit_of(torch.float64)  # of the products from which distances are computed here
    return max((2 * ROUNDING * unit_of(dtype)) ** 2, float64_floor)


def _wide(Z: Tensor) -> Tensor:
    """Embeddings in float64; raises if they have another shape, or entries that are no numbers."""
    sentence = f"embeddings must be floating, [sample, width]; got {Z.dtype} of shape {tuple(Z.shape)}"
    require(Z.ndim >= 2 and Z.is_floating_point() and 0 not in Z.shape[-2:], sentence, TokensError, "Z")
    require(Z.isfinite().all(), "embeddings must be finite; some entries are NaN or infinite", TokensError, "Z")
    return Z.to(torch.float64)
