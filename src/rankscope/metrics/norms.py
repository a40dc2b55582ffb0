"""Norms of tokens and of their residual, and the largest distance between two rows of a matrix.

**Norms**, all of them from reading the tokens once. `residuals.py` computes its metrics from these numbers, in
deviation arithmetic too; `base.py` sees in them whether tokens are finite. With m the mean token of a sample and
R = X - 1 m^T, of X and of R:

    ||A||_{1,inf} = sqrt(max_j sum_i |A_ij|  max_i sum_j |A_ij|),    ||A||_F,    max_ij |A_ij|.

Reading X is what takes time. On a GPU, `norms_triton.py` reads X once from memory, in its own dtype, without a
copy in float64. On a CPU, large X is converted a few samples at a time, so that their copies stay in the cache.

**Distances**: of attention patterns in the 1-norm, of tokens in the 2-norm. Dobrushin's coefficient is made of the
first (`attention.py`, `theory/readings.py`); the second are the widest angle (`cosine.py`) and the diameter
(`theory/readings.py`). Only the largest distance of each matrix is returned, so neither holds the distances of all
pairs where that can be avoided: on a GPU `norms_triton.py` compares rows where it reads them.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from rankscope.shapes import Bool, Float

Norms = Float[Tensor, "3 2 *batch"]
"""Composite, Frobenius and max norm; of X, and of X minus its mean token."""
ORDER = {"composite": 0, "frobenius": 1, "max": 2}
PIECE = 2**17  # entries in float64 that are held at once on a CPU, a sample at least
LARGE = {torch.float64: 2**20, torch.float32: PIECE, torch.float16: PIECE, torch.bfloat16: PIECE}
"""Entries of a dtype from which a CPU takes less time for all norms, piece by piece, than for one of a whole copy."""
AT_ONCE = 2**26  # Bytes of products of rows that are held at once
HAS_TRITON = find_spec("triton") is not None


def on_gpu(X: Tensor) -> bool:
    """True if the kernel for GPUs takes these tokens."""
    return X.is_cuda and HAS_TRITON and X.numel() > 0 and _plain(X)


def is_fused(X: Tensor) -> bool:
    """True if all norms together take less time than the formulas of some of them: on a GPU, and for large tokens."""
    if X.device.type != "cpu":
        return on_gpu(X)
    return X.numel() > LARGE.get(X.dtype, PIECE) and _plain(X)


def _plain(X: Tensor) -> bool:
    """True for ordinary tensors of ordinary numbers that nobody differentiates."""
    return type(X) is Tensor and X.dtype in LARGE and not (X.requires_grad and torch.is_grad_enabled())


def token_norms(X: Float[Tensor, "*batch token width"], valid: Bool[Tensor, "*batch token"] | None = None) -> Norms:
    """All norms of tokens of any floating dtype, in float64; entries may be of any size, and NaN or infinity among them
    gives NaN. Rows that are not `valid` may hold anything; None if every row is a token."""
    batch, samples = X.shape[:-2], X.shape[:-2].numel()
    X = X.reshape(samples, *X.shape[-2:])
    valid = None if valid is None else valid.reshape(X.shape[:-1])
    if on_gpu(X):
        from rankscope.metrics.norms_triton import fused_token_norms

        return fused_token_norms(X, valid).view(3, 2, *batch)
    at_once = max(1, samples if X.device.type != "cpu" else PIECE // max(1, X.shape[1:].numel()))
    pieces = torch.split(X, at_once)
    masks = [None] * len(pieces) if valid is None else torch.split(valid, at_once)
    parts = [_of_piece(piece, mask) for piece, mask in zip(pieces, masks, strict=True)]
    return torch.cat(parts, -1).view(3, 2, *batch)


def _of_piece(X: Tensor, valid: Tensor | None) -> Norms:
    """The norms of some samples, by torch; X and its residual lie side by side, for one call of each sum."""
    both = torch.empty(2, *X.shape, dtype=torch.float64, device=X.device)
    A, R = both.unbind()
    A.copy_(X)
    if valid is None:
        torch.sub(A, A.sum(-2, keepdim=True) / max(1, X.shape[-2]), out=R)
    else:
        A.masked_fill_(~valid[..., None], 0.0)
        mean = A.sum(-2, keepdim=True) / valid.sum(-1).clamp(min=1)[:, None, None]
        torch.addcmul(A, valid[..., None].to(A.dtype), mean, value=-1, out=R)
    frobenius = frobenius_norm(both)
    both.abs_()
    columns, rows = both.sum(-2), both.sum(-1)
    largest = _largest(_largest(both))
    norms = torch.stack([_largest(columns).sqrt() * _largest(rows).sqrt(), frobenius, largest])
    return norms.masked_fill(~largest[0].isfinite(), torch.nan)


def composite_norm(A: Float[Tensor, "*batch token width"]) -> Float[Tensor, "*batch"]:
    """`||A||_{1,inf} = sqrt(||A||_1 ||A||_inf)`, largest column sum times largest row sum of |A|.

    Submultiplicative, but not a norm: with A the 5 x 5 matrix of ones in its first column,
    c(A) = c(A^T) = sqrt 5 and c(A + A^T) = 6 > 2 sqrt 5.
    """
    if on_gpu(A):
        return token_norms(A)[0, 0]
    size = A.abs()
    columns, rows = size.sum(-2), size.sum(-1)
    return _largest(columns).sqrt() * _largest(rows).sqrt()  # the product could leave the range


def frobenius_norm(A: Float[Tensor, "*batch token width"]) -> Float[Tensor, "*batch"]:
    """`||A||_F`, the root of the sum of squares."""
    if on_gpu(A):
        return token_norms(A)[1, 0]
    if A.device.type == "cpu":  # elsewhere, looking would wait for all that was started before
        norm = torch.linalg.vector_norm(A, dim=(-2, -1))
        if bool(((norm > 1e-140) & (norm < 1e140)).all()):
            return norm
    size = max_norm(A)  # squares could leave the range
    unit = A / size.masked_fill(size == 0, 1.0)[..., None, None]
    return size * torch.linalg.vector_norm(unit, dim=(-2, -1))


def max_norm(A: Float[Tensor, "*batch token width"]) -> Float[Tensor, "*batch"]:
    """The largest entry, `max_ij |A_ij|`."""
    return _largest(A.abs().flatten(-2))


def _largest(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    return x.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def largest_sum_distance(
    P: Float[Tensor, "*batch row column"], valid: Bool[Tensor, "*batch row"] | None = None
) -> Float[Tensor, "*batch"]:
    """The largest `sum_k |P_ik - P_jk|` of two rows of each matrix of one row at least, NaN of a matrix that holds NaN;
    `valid` is True at rows that count, None if all do."""
    if P.dtype == torch.float64 and on_gpu(P):
        from rankscope.metrics.norms_triton import fused_sum_distance

        return fused_sum_distance(P, valid)
    distance = torch.cdist(P, P, p=1.0)
    if valid is not None:
        distance = distance.masked_fill(~(valid[..., :, None] & valid[..., None, :]), 0.0)
    return distance.amax((-2, -1))


def largest_square_distance(R: Float[Tensor, "*batch row column"], at_once: int = AT_ONCE) -> Float[Tensor, "*batch"]:
    """The largest `|r_i - r_j|^2` of two rows of each matrix, as `|r_i|^2 + |r_j|^2 - 2 <r_i, r_j>`.

    That formula loses what is small beside `|r_i|^2`, and distances of close rows with it, but not the largest distance
    if rows are written about a point between them: about their mean, or about one of them. Then no row is longer than
    the largest distance D (`r_i` is the mean of all `x_i - x_j`, or one of them), so each product is off by
    a few eps times the number of columns of D^2 at most, and the largest of all is D^2 to that share.
    R has such rows, of a size whose squares are in range; rows of zeros do not count. `at_once` bytes of products are
    held at a time.
    """
    n = R.shape[-2]
    square = torch.linalg.vecdot(R, R)
    if not n:
        return square.sum(-1)
    step = max(1, at_once // max(1, 8 * square.numel()))
    largest = [
        (torch.sub(square[..., None, :], R[..., start : start + step, :] @ R.mT, alpha=2).amax(-1)
         + square[..., start : start + step]).amax(-1)
        for start in range(0, n, step)
    ]  # fmt: skip
    return torch.stack(largest).amax(0).clamp(min=0.0) if len(largest) > 1 else largest[0].clamp(min=0.0)
