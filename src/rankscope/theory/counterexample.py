"""Thm 2.3 with gamma = 1 is false for many tokens: a network and an input where it fails.

The proof with gamma = 1 needs `|E_ij - E_ij'| <= 1.2564`. Beyond that the column sums of `P - 1 p^T` are
not bounded by those of E: a row can move its weight to a token of its own, and no column of E sees more
than one such row. Take d + 1 dimensions and

- one token `s e_0` that almost all attention of the centre goes to (weight p_0, by the key bias b_QK),
- d active tokens `s e_i`, each of which scores itself by a: `E = a 1` among them, so that `||E||_1 = a`,
- d idle tokens at the centre, which attend as the centre does.

Active tokens turn from token 0 to themselves once e^a p_i outweighs p_0, at `a = log(y d)`. The column of
token 0 then sums to about d (p_0 - P_i0), while the bound grows as `4 a = 4 log(y d)`. In the measure
`sqrt(columns * rows)`, with W = 1,

    measured ~ s sqrt(0.64 d * 0.8),     bound with gamma = 1:  4 a s:

the bound fails from d about 4000 on (n about 8000). In column sums alone it fails from d about 60 on.
"""

import math

import torch
from torch import Tensor

from rankscope.nets import Architecture, Transformer
from rankscope.shapes import Float

TOP = 0.8
"""p_0."""
SHARPNESS = 20.0
"""y: e^a / d."""


def counterexample(d: int) -> tuple[Transformer, Float[Tensor, "1 token width"]]:
    """(network, tokens): one layer of one head and `2 d + 1` tokens of width `d + 1`, every |E_ij| <= a."""
    width = d + 1
    a = math.log(SHARPNESS * d)
    arch = Architecture(
        layers=1, width=width, heads=1, mlp="none", norm="none", attention_skip=0.0, biases=("query",),
        divisor=1.0,
    )  # fmt: skip
    eye = torch.eye(width, dtype=torch.float64)
    active = torch.ones(width, dtype=torch.float64)
    active[0] = 0.0
    # The centre's scores: token 0 has p_0, the active ones share the rest, the idle (score 0) get nothing.
    shown = 60.0
    bias = torch.full((width,), shown + math.log((1 - TOP) / d), dtype=torch.float64)
    bias[0] = shown + math.log(TOP)
    net = Transformer.from_weights(
        arch,
        {
            "layers.0.attention.query.weight": (a * torch.diag(active))[:, None],
            "layers.0.attention.query.bias": bias[None],
            "layers.0.attention.key.weight": eye[:, None],
            "layers.0.attention.value.weight": eye[:, None],
            "layers.0.attention.output.weight": eye[None],
        },
    )
    return net, torch.cat([eye, torch.zeros(d, width, dtype=torch.float64)])[None]


def smallest_residual(X: Float[Tensor, "token width"]) -> float:
    """A lower bound of `min_x ||X - 1 x^T||_{1,inf}`, without a linear programme: no centre has a smaller
    column sum than the medians', nor a smaller row sum than half the largest L1 distance of two tokens (of
    two hundred that are tried)."""
    columns = (X - X.median(0).values).abs().sum(0).max()
    some = X[torch.linspace(0, len(X) - 1, min(200, len(X))).long()]
    rows = torch.cdist(some, some, p=1.0).max() / 2
    return float((columns * rows).sqrt())
