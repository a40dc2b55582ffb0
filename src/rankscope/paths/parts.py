"""What passes through a layer's heads, its MLP, or one head, on its way to the output.

Everything that passes through a part is one term: the part's branch of the full stream (biases and all),
carried to the end by the frozen layers after it. Its inner product with the output is also `<branch, A^T
output>`, A the map of all later layers: one backward pass gives it for every head of every layer.
"""

import polars as pl
import torch
from torch import Tensor

from rankscope.metrics import dobrushin
from rankscope.metrics.catalogue import metric
from rankscope.metrics.residuals import frobenius_norm, mu, residual
from rankscope.metrics.tokens import tokens
from rankscope.paths.frozen import Frozen, FrozenLayer
from rankscope.paths.shares import cosine
from rankscope.paths.shares import share as share_of


@torch.no_grad()
def by_layer(frozen: Frozen) -> pl.DataFrame:
    """One row per sample, layer (from 1) and part (heads, mlp):

    sample · layer · part · norm · residual · share · residual_share · cosine

    of everything that passes through it: its size and residual at the output, its share of the output
    (`<term, output> / <output, output>`) and of the output's residual (NaN where that is noise), its cosine
    with the output.
    """
    Y = frozen.X[None]  # part 0 is the whole stream, biases included
    names: list[tuple[int, str]] = []
    for layer in frozen.layers:
        stream, carried = Y[:1], Y[1:]
        heads = layer.through(stream, start=0)
        whole = layer.settle(layer.past(stream, start=0) + heads, start=0)
        parts, new = [layer.close(heads)], [(layer.index + 1, "heads")]
        if layer.serial:
            inside = layer.mlp(whole, start=0)
            parts.append(layer.finish(inside))
            whole = inside + layer.arch.mlp_skip * whole
        elif layer.arch.mlp != "none":
            parts.append(layer.close(layer.mlp(stream, start=0)))
        new += [(layer.index + 1, "mlp")] if len(parts) > 1 else []
        if len(carried):
            carried = layer.close(layer.past(carried) + layer.through(carried))
        Y = torch.cat([layer.finish(whole, start=0), carried, *parts])
        names += new
    terms = frozen.end(Y)[1:]
    return pl.concat([_rows(term, frozen, *name) for term, name in zip(terms, names, strict=True)])


def by_head(frozen: Frozen) -> pl.DataFrame:
    """One row per sample, layer (from 1) and head:

    sample · layer · head · norm · share · residual_share · contraction · averaging · dobrushin

    `norm`: of what the head says, `P_h Z W_h` with its value bias, before a sandwich's second norm; 0 of a
    head that does not speak. `share` and `residual_share`: what everything that passes through it is of the
    output, and of the output's residual. `contraction`: the residual of what it says over that of what it
    reads, `mu(P_h Z W_h) / mu(Z)`; `averaging`: the same without its weights, `mu(P_h Z) / mu(Z)`, where rows
    sum to one at most `sqrt(n / 2)` times Dobrushin's coefficient of P_h, n the number of tokens. Where Z is
    uniform as far as the arithmetic can see, both would be noise: NaN, as is `residual_share` where the
    output is uniform.
    """
    spoken, read, output = _with_graph(frozen)
    centred = _residual(frozen.output, frozen.real)
    shares = []
    for target in (frozen.output, centred):
        size = frobenius_norm(target.double()).to(target)
        size = size.masked_fill(size == 0, torch.inf)[:, None]
        pulled = torch.autograd.grad(output, spoken, target / size[..., None], retain_graph=True)
        shares.append([(U * v)[0].sum((2, 3)) / size for U, v in zip(spoken, pulled, strict=True)])
    frames = []
    for layer, U, Z, share, residual_share in zip(frozen.layers, spoken, read, *shares, strict=True):
        frames.append(_head_rows(layer, U.detach()[0], Z, share.detach(), residual_share.detach(), frozen))
    return pl.concat(frames)


def _with_graph(frozen: Frozen) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(what every head mixed, `[1, batch, head, token, head_width]`, what the heads of each layer read, the
    output): the first and the last as nodes of one graph."""
    spoken, read = [], []
    with torch.enable_grad():
        Y = frozen.X[None].clone().requires_grad_(True)
        for layer in frozen.layers:
            U = layer.spoken(Y, start=0)
            spoken.append(U)
            read.append(layer.inside(Y.detach(), start=0)[0])
            Y = layer.close(layer.past(Y, start=0) + layer.added(U), start=0)
        return spoken, read, frozen.end(Y, 0)[0]


def _head_rows(
    layer: FrozenLayer, U: Tensor, Z: Tensor, share: Tensor, residual_share: Tensor, frozen: Frozen
) -> pl.DataFrame:
    padding = ~frozen.real
    batch, heads = U.shape[:2]
    wide = padding[:, None].expand(batch, heads, -1)
    speaks = torch.tensor([head in layer.ways for head in range(heads)], device=U.device)
    adds = (U @ layer.weights.attention.output.weight) * speaks[:, None, None]  # [batch, head, token, width]
    read = mu(Z, padding).masked_fill(_uniform(Z, frozen), torch.nan)[:, None]
    mixed = layer.P @ Z[:, None]
    columns: dict[str, Tensor] = {
        "norm": frobenius_norm(adds * frozen.real[:, None, :, None]),
        "share": share,
        "residual_share": residual_share.masked_fill(_uniform(frozen.output, frozen)[:, None], torch.nan),
        "contraction": mu(adds, wide) / read,
        "averaging": mu(mixed, wide) / read,
        "dobrushin": dobrushin(layer.P, padding),
    }
    return pl.DataFrame(
        {
            "sample": [sample for sample in range(batch) for _ in range(heads)],
            "layer": [layer.index + 1] * (batch * heads),
            "head": list(range(heads)) * batch,
            **{name: value.double().flatten().tolist() for name, value in columns.items()},
        }
    )


def _rows(term: Tensor, frozen: Frozen, layer: int, part: str) -> pl.DataFrame:
    padding = ~frozen.real
    centred = _residual(frozen.output, frozen.real)
    alike = _uniform(frozen.output, frozen)
    return pl.DataFrame(
        {
            "sample": list(range(len(term))),
            "layer": [layer] * len(term),
            "part": [part] * len(term),
            "norm": frobenius_norm(term.double()).tolist(),
            "residual": residual(term, padding).tolist(),
            "share": share_of(term, frozen.output).tolist(),
            "residual_share": share_of(term, centred).masked_fill(alike, torch.nan).tolist(),
            "cosine": cosine(term, frozen.output).tolist(),
        }
    )


def _uniform(X: Tensor, frozen: Frozen) -> Tensor:
    """[batch]: whether tokens are alike as far as the arithmetic can see, so that their residual is noise."""
    return metric("relative_residual").read(tokens(X, ~frozen.real)).below_floor.to(X.device)


def _residual(X: Tensor, real: Tensor) -> Tensor:
    """X about the mean of its real tokens."""
    number = real.sum(-1).clamp(min=1)[:, None, None]
    mean = (X * real[..., None]).sum(1, keepdim=True) / number
    return (X - mean) * real[..., None]
