"""Equilibria of attention with LayerNorm: tokens that no further layer moves, of every rank (Wu et al. 2024,
Thm 3).

Causal attention with `W_Q = W_K = 0` averages over what a token sees, LayerNorm only scales, and every layer
has the values `W_V = I + w N`, N ones above the diagonal (`e_j N = e_{j+1}`):

    X' = D A X W_V,    A_ij = 1/i for j <= i,    D = diag(1 / ||row||).

Write S_i for the sum of the first i tokens. X is fixed if `S_i W_V = lambda_i X_i` with lambda_i > 0 for
every i, that is, if `lambda_i X_i = lambda_{i-1} X_{i-1} + X_i W_V`. Take the first m tokens equal to e_d:
there lambda_m = m. Every later token with lambda_i = 1 solves `X_i (-w N) = lambda_{i-1} X_{i-1}`: it is the
token before it, moved one place to the left and divided by -w (times m, right after the equal ones), with its
last entry left to make its length one, in either sign. N - m of them on top of e_d: rank N - m + 1.
"""

from typing import Any

import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, Transformer
from rankscope.shapes import Float

Tokens = Float[Tensor, "token width"]


def equilibrium(tokens: int, rank: int, w: float, signs: list[int] | None = None) -> Tokens:
    """Tokens `[N, N]` of this rank that the network of `network(N, w)` leaves where they are.

    `signs` are those of the last entries of the tokens after the equal ones: the paper's alternate, beginning
    with -1. `w > N - rank + 1` is needed below full rank, `w > 1` at full rank, for lengths to come out as
    one.

    >>> X = equilibrium(tokens=3, rank=2, w=4.0)
    >>> torch.allclose(step(X, 4.0), X), int(torch.linalg.matrix_rank(X))
    (True, 2)
    """
    if not 1 <= rank <= tokens:
        raise ArchitectureError(
            f"rank must lie in 1..{tokens}, the number of tokens; got {rank}", subject="rank"
        )
    equal = tokens - rank + 1
    if rank > 1 and not abs(w) > equal:
        raise ArchitectureError(
            f"an equilibrium of rank {rank} among {tokens} tokens needs |w| > {equal}; got {w}", subject="w"
        )
    chosen = [(-1) ** (k + 1) for k in range(rank - 1)] if signs is None else signs
    if len(chosen) != rank - 1 or any(sign not in (1, -1) for sign in chosen):
        raise ArchitectureError(
            f"signs must be {rank - 1} of 1 and -1, one for each further token; got {signs}", subject="signs"
        )
    X = torch.zeros(tokens, tokens, dtype=torch.float64)
    X[:equal, -1] = 1.0
    for index, sign in enumerate(chosen, equal):
        weight = float(equal) if index == equal else 1.0  # lambda of the token before
        X[index, :-1] = X[index - 1, 1:] * (-weight / w)
        X[index, -1] = sign * (1 - X[index].square().sum()).sqrt()
    return X


def step(X: Float[Tensor, "*batch token width"], w: float) -> Float[Tensor, "*batch token width"]:
    """One layer: `D A X W_V`."""
    n, d = X.shape[-2:]
    seen = torch.arange(1, n + 1, dtype=X.dtype, device=X.device)[:, None]
    averaged = X.cumsum(-2) / seen
    moved = averaged + w * torch.nn.functional.pad(averaged[..., : d - 1], (1, 0))
    return moved / torch.linalg.vector_norm(moved, dim=-1, keepdim=True)


def network(tokens: int, w: float, layers: int = 1) -> Transformer:
    """The dynamics of `step` as a `Transformer`, so that `measure`, variants and paths work on it."""
    arch = Architecture(
        layers=layers, width=tokens, heads=1, mask="causal", mlp="none", norm="scale", norm_eps=0.0,
        attention_skip=0.0, biases=False, shared=True,
    )  # fmt: skip
    eye = torch.eye(tokens, dtype=torch.float64)
    values = eye + w * torch.diag(torch.ones(tokens - 1, dtype=torch.float64), 1)
    return Transformer.from_weights(
        arch,
        {
            "layers.0.attention.query.weight": torch.zeros_like(eye)[:, None],
            "layers.0.attention.key.weight": torch.zeros_like(eye)[:, None],
            "layers.0.attention.value.weight": values[:, None],
            "layers.0.attention.output.weight": eye[None],
        },
    )


def spectral_radius(X: Tokens, w: float) -> float:
    """The largest |eigenvalue| of one layer, linearised at an equilibrium, over moves that keep every token's
    length (the token's sphere): below one it is stable, above one some nearby start leaves it."""
    n, d = X.shape
    differentiate: Any = torch.autograd.functional.jacobian
    jacobian = differentiate(lambda Y: step(Y, w), X).reshape(n * d, n * d)
    joined: Any = torch.block_diag
    T = joined(*(torch.linalg.svd(row[None]).Vh[1:] for row in X))  # moves orthogonal to each token
    return float(torch.linalg.eigvals(T @ jacobian @ T.T).abs().max()) if d > 1 else 0.0


def anisotropy_bound(tokens: int, w: float) -> float:
    """Upper bound of the stable rank `||X||_F^2 / ||X||_2^2` at the full-rank equilibria: full rank, yet
    nearly one direction (Wu et al. 2024)."""
    return tokens / (tokens - (tokens - 1) / w**2)
