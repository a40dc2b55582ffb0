"""How a network knows where a token stands.

| scheme     | what it does                                                                              |
|------------|-------------------------------------------------------------------------------------------|
| `absolute` | adds row i of a table to token i, once, before layer 1                                    |
| `rotary`   | turns each query and key by an angle that grows with its position (Su et al. 2021)        |
| `relative` | adds `(q_i + v) . r_{i-j}`, r a projected sinusoid (Transformer-XL, XLNet)                |
| `bias`     | adds a learned number per head and bucket of `j - i` (T5)                                 |
| `alibi`    | adds `-slope_h |i - j|` (Press et al. 2022)                                               |
"""

import math

import torch
from torch import Tensor

from rankscope.nets.architecture import Architecture
from rankscope.nets.weights import AttentionWeights, Weights
from rankscope.shapes import Float, Int

Heads = Float[Tensor, "batch head token head_width"]
Queries = Float[Tensor, "batch head row head_width"]
Offsets = Float[Tensor, "offset width"]
Scores = Float[Tensor, "head row token"]
Table = Float[Tensor, "token half"]


def rotary_tables(arch: Architecture, n: int, like: Tensor) -> tuple[tuple[Table, Table], ...]:
    """Cosine and sine of every angle `position * frequency`, times the layer's scale; by layer, repeating."""
    half = arch.rotary_width // 2
    usual = arch.rotary_base ** -(torch.arange(half, dtype=torch.float64) / half)
    position = torch.arange(n, dtype=torch.float64, device=like.device)[:, None]
    given, scales = arch.rotary_frequencies or ((),), arch.rotary_scales or (1.0,)
    period = math.lcm(len(given), len(scales))
    by_layer = [(given[layer % len(given)], scales[layer % len(scales)]) for layer in range(period)]
    distinct = {}
    for frequencies, scale in dict.fromkeys(by_layer):
        frequency = torch.tensor(frequencies, dtype=torch.float64) if frequencies else usual
        angle = position * frequency.to(like.device)
        parts = (angle.cos() * scale, angle.sin() * scale)
        distinct[frequencies, scale] = parts[0].to(like.dtype), parts[1].to(like.dtype)
    return tuple(distinct[key] for key in by_layer)


def rotate(x: Heads, tables: tuple[Table, Table], pairs: str) -> Heads:
    """Turn the first entries of every query or key by its position's angles."""
    cos, sin = tables
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if pairs == "half":
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([turned, rest], -1)


def by_offset(
    q: Queries, layer: AttentionWeights, positions: Offsets, heads: slice = slice(None), start: int = 0
) -> Float[Tensor, "batch head row token"]:
    """`q_i . r_{i-j}` before the divisor; `positions` are the sinusoids of offsets n-1 .. -(n-1). The queries
    are those of `heads`, and of rows from `start` on."""
    assert layer.position is not None
    n = (len(positions) + 1) // 2
    r = torch.einsum("od,dhc->hoc", positions, layer.position[:, heads])
    scores = q @ r.mT  # [batch, head, row, 2n - 1]
    i, j = torch.arange(start, start + q.shape[-2], device=q.device), torch.arange(n, device=q.device)
    column = n - 1 - (i[:, None] - j[None, :])
    return scores.gather(-1, column.expand(*q.shape[:-1], n))


def sinusoids(arch: Architecture, n: int, like: Tensor) -> Offsets:
    """Sines then cosines of the offsets n-1, ..., -(n-1) at wavelengths 2 pi .. 10000 * 2 pi."""
    half = arch.width // 2
    power = torch.arange(half, dtype=torch.float64, device=like.device) / half
    offset = torch.arange(n - 1, -n, -1, dtype=torch.float64, device=like.device)
    angle = offset[:, None] * 10000.0**-power
    return torch.cat([angle.sin(), angle.cos()], -1).to(like.dtype)


def score_bias(
    arch: Architecture, weights: Weights, n: int, like: Tensor, start: int = 0, stop: int | None = None
) -> Scores | None:
    """Return what `bias` and `alibi` add to the scores, after the divisor; None for other schemes.

    Args:
        arch: The architecture of the network.
        weights: Its weights, for the table of `bias`.
        n: The number of tokens.
        like: A tensor of the dtype and device to make it in.
        start: The first row.
        stop: The row after the last; None: all.
    """
    if arch.positions not in ("bias", "alibi"):
        return None
    j = torch.arange(n, device=like.device)
    ahead = j[None, :] - j[start:stop, None]  # j - i
    if arch.positions == "bias":
        assert weights.bias_table is not None
        ahead = ahead if arch.bias_ahead else ahead.clamp(max=0)
        bucket = buckets(ahead, arch.bias_buckets, arch.bias_reach, both=arch.bias_ahead)
        return weights.bias_table[bucket].permute(2, 0, 1)
    return (-ahead.abs() * alibi_slopes(arch.heads).to(like.device)[:, None, None]).to(like.dtype)


def buckets(ahead: Int[Tensor, "row token"], number: int, reach: int, both: bool = True) -> Int[Tensor, "row token"]:
    """T5's buckets of `j - i`, those of tokens behind and those of tokens ahead, or of those behind alone:
    exact up to half of a side's, then logarithmic to `reach`."""
    side = number // 2 if both else number
    exact = max(side // 2, 1)
    distance = ahead.abs()
    span = math.log(max(reach, exact + 1) / exact)
    far = exact + ((distance.clamp(min=1) / exact).log() / span * (side - exact)).long()
    near = torch.where(distance < exact, distance, far.clamp(max=max(side - 1, 0)))
    return near + (ahead > 0).long() * side


def alibi_slopes(heads: int) -> Float[Tensor, " head"]:
    """2^(-8/h), 2^(-16/h), ...; for h not a power of two, the missing ones interleave the next power's."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (k + 1) / power) for k in range(power)]
    slopes += [2 ** (-8 * (k + 0.5) / power) for k in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)
