"""Networks built by hand: a bound that fails, skips that never let tokens collapse, equilibria of every rank.

**Thm 2.3 of Dong et al. 2021 with gamma = 1 is false for many tokens** (`counterexample`). Its proof needs
`|E_ij - E_ij'| <= 1.2564`. Beyond that the column sums of `P - 1 p^T` are not bounded by those of E: a row
can move its weight to a token of its own, and no column of E sees more than one such row. Take d + 1
dimensions and

- one token `s e_0` that almost all attention of the centre goes to (weight p_0, by the key bias b_QK),
- d active tokens `s e_i`, each of which scores itself by a: `E = a 1` among them, so that `||E||_1 = a`,
- d idle tokens at the centre, which attend as the centre does.

Active tokens turn from token 0 to themselves once e^a p_i outweighs p_0, at `a = log(y d)`. The column of
token 0 then sums to about d (p_0 - P_i0), while the bound grows as `4 a = 4 log(y d)`. In the measure
`sqrt(columns * rows)`, with W = 1,

    measured ~ s sqrt(0.64 d * 0.8),     bound with gamma = 1:  4 a s:

the bound fails from d about 4000 on (n about 8000), and from d about 3500 with p_0 = 0.86 and y = 85: it is this
construction that crosses there, and a narrower one may exist. In column sums alone it fails from d about 60 on.

**Skips that never let tokens collapse**, at arbitrarily small beta (Dong et al. 2021, section 3;
`non_collapsing_network`). Heads read the first half of a token's entries and write to the second. With a skip
of weight one the first half then stays as it was, whatever the heads attend to and however small or large
their weights are, so `||res(X_L)|| >= ||res(X_0)||` for every depth L, with equality at layer 0 when the
second half starts at zero. W_V = 0 is the least of infinitely many such networks.

**Equilibria of attention with LayerNorm**: tokens that no further layer moves, of every rank (Wu et al. 2024,
Thm 3; `equilibrium`). Causal attention with `W_Q = W_K = 0` averages over what a token sees, LayerNorm only
scales, and every layer has the values `W_V = I + w N`, N ones above the diagonal (`e_j N = e_{j+1}`):

    X' = D A X W_V,    A_ij = 1/i for j <= i,    D = diag(1 / ||row||).

Write S_i for the sum of the first i tokens. X is fixed if `S_i W_V = lambda_i X_i` with lambda_i > 0 for
every i, that is, if `lambda_i X_i = lambda_{i-1} X_{i-1} + X_i W_V`. Take the first m tokens equal to e_d:
there lambda_m = m. Every later token with lambda_i = 1 solves `X_i (-w N) = lambda_{i-1} X_{i-1}`: it is the
token before it, moved one place to the left and divided by -w (times m, right after the equal ones), with its
last entry left to make its length one, in either sign. N - m of them on top of e_d: rank N - m + 1.
"""

import math
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, Transformer
from rankscope.shapes import Float


def _one_head(arch: Architecture, query: Tensor, key: Tensor, value: Tensor, more: dict[str, Tensor]) -> Transformer:
    """One layer of one head, whose output projection is the identity."""
    weights = {f"{part}.weight": W[:, None] for part, W in (("query", query), ("key", key), ("value", value))}
    weights |= {"output.weight": torch.eye(len(value), dtype=torch.float64)[None], **more}
    return Transformer.from_weights(arch, {f"layers.0.attention.{name}": W for name, W in weights.items()})


def counterexample(d: int) -> tuple[Transformer, Float[Tensor, "1 token width"]]:
    """(network, tokens): one layer of one head and `2 d + 1` tokens of width `d + 1`, every |E_ij| <= a."""
    width, p_0 = d + 1, 0.8
    a = math.log(20.0 * d)
    arch = Architecture(
        layers=1, width=width, heads=1, mlp="none", norm="none", attention_skip=0.0, biases=("query",), divisor=1.0
    )
    eye = torch.eye(width, dtype=torch.float64)
    active = torch.ones(width, dtype=torch.float64)
    active[0] = 0.0
    # The centre's scores: token 0 has p_0, the active ones share the rest, the idle (score 0) get nothing.
    shown = 60.0
    bias = torch.full((width,), shown + math.log((1 - p_0) / d), dtype=torch.float64)
    bias[0] = shown + math.log(p_0)
    net = _one_head(arch, a * torch.diag(active), eye, eye, {"query.bias": bias[None]})
    return net, torch.cat([eye, torch.zeros(d, width, dtype=torch.float64)])[None]


def non_collapsing_network(width: int, heads: int, layers: int, scale: float, seed: int = 0) -> Transformer:
    """A network of attention and skips that keeps the residual of every input of `non_collapsing_tokens`.

    >>> net = non_collapsing_network(width=8, heads=2, layers=3, scale=1e-3)
    >>> X = non_collapsing_tokens(tokens=5, width=8)
    >>> bool((net.run(X).output[..., :4] == X[..., :4]).all())
    True
    """
    if width % 2:
        raise ArchitectureError(f"width must be even, to read and to write; got {width}", subject="width")
    arch = Architecture(layers=layers, width=width, heads=heads, mlp="none", norm="none", biases=False)
    tensors = Transformer.random(arch, seed, init="xavier").state_dict()
    for name, tensor in tensors.items():
        if name.endswith("value.weight"):
            tensor = tensor * scale
            tensor[width // 2 :] = 0.0  # reads the first half
        elif name.endswith("output.weight"):
            tensor = tensor.clone()
            tensor[..., : width // 2] = 0.0  # writes to the second
        tensors[name] = tensor
    return Transformer.from_weights(arch, tensors)


def non_collapsing_tokens(tokens: int, width: int, seed: int = 0) -> Float[Tensor, "1 token width"]:
    """Random tokens whose second half is zero."""
    X = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    X[..., width // 2 :] = 0.0
    return X


Tokens = Float[Tensor, "token width"]


def equilibrium(tokens: int, rank: int, w: float, signs: list[int] | None = None) -> Tokens:
    """Tokens `[N, N]` of this rank that the network of `equilibrium_network(N, w)` leaves in place.

    `signs` are those of the last entries of the tokens after the equal ones: the paper's alternate, beginning
    with -1. `w > N - rank + 1` is needed below full rank, `w > 1` at full rank, for lengths to come out as
    one.

    >>> X = equilibrium(tokens=3, rank=2, w=4.0)
    >>> torch.allclose(equilibrium_step(X, 4.0), X), int(torch.linalg.matrix_rank(X))
    (True, 2)
    """
    if not 1 <= rank <= tokens:
        raise ArchitectureError(f"rank must lie in 1..{tokens} (tokens); got {rank}", subject="rank")
    equal = tokens - rank + 1
    if rank > 1 and not abs(w) > equal:
        raise ArchitectureError(f"|w| must be above {equal} at rank {rank}; got {w}", subject="w")
    chosen = [(-1) ** (k + 1) for k in range(rank - 1)] if signs is None else signs
    if len(chosen) != rank - 1 or any(sign not in (1, -1) for sign in chosen):
        raise ArchitectureError(f"signs must be {rank - 1} of 1 and -1; got {signs}", subject="signs")
    X = torch.zeros(tokens, tokens, dtype=torch.float64)
    X[:equal, -1] = 1.0
    for index, sign in enumerate(chosen, equal):
        weight = float(equal) if index == equal else 1.0  # lambda of the token before
        X[index, :-1] = X[index - 1, 1:] * (-weight / w)
        X[index, -1] = sign * (1 - X[index].square().sum()).sqrt()
    return X


def equilibrium_step(X: Float[Tensor, "*batch token width"], w: float) -> Float[Tensor, "*batch token width"]:
    """One layer: `D A X W_V`."""
    n, d = X.shape[-2:]
    seen = torch.arange(1, n + 1, dtype=X.dtype, device=X.device)[:, None]
    averaged = X.cumsum(-2) / seen
    moved = averaged + w * torch.nn.functional.pad(averaged[..., : d - 1], (1, 0))
    return moved / torch.linalg.vector_norm(moved, dim=-1, keepdim=True)


def equilibrium_network(tokens: int, w: float, layers: int = 1) -> Transformer:
    """The dynamics of `equilibrium_step` as a `Transformer`, for `measure`, variants and paths."""
    arch = Architecture(
        layers=layers, width=tokens, heads=1, mask="causal", mlp="none", norm="scale", norm_eps=0.0,
        attention_skip=0.0, biases=False, shared=True,
    )  # fmt: skip
    eye = torch.eye(tokens, dtype=torch.float64)
    values = eye + w * torch.diag(torch.ones(tokens - 1, dtype=torch.float64), 1)
    return _one_head(arch, torch.zeros_like(eye), torch.zeros_like(eye), values, {})


def spectral_radius(X: Tokens, w: float) -> float:
    """The largest |eigenvalue| of one layer, linearised at an equilibrium, over moves that keep every token's
    length (the token's sphere): below one it is stable, above one some nearby start leaves it."""
    n, d = X.shape
    differentiate: Any = torch.autograd.functional.jacobian
    jacobian = differentiate(lambda Y: equilibrium_step(Y, w), X).reshape(n * d, n * d)
    joined: Any = torch.block_diag
    T = joined(*(torch.linalg.svd(row[None]).Vh[1:] for row in X))  # moves orthogonal to each token
    return float(torch.linalg.eigvals(T @ jacobian @ T.T).abs().max()) if d > 1 else 0.0


def anisotropy_bound(tokens: int, w: float) -> float:
    """Upper bound of the stable rank `||X||_F^2 / ||X||_2^2` at the full-rank equilibria: full rank, yet
    nearly one direction (Wu et al. 2024)."""
    return tokens / (tokens - (tokens - 1) / w**2)
