"""How a network knows where a token stands.

| scheme     | what it does                                                                              |
|------------|-------------------------------------------------------------------------------------------|
| `absolute` | adds row i of a table to token i, once, before layer 1                                    |
| `rotary`   | turns each query and key by an angle that grows with its position (Su et al. 2021)        |
| `relative` | adds `(q_i + v) . r_{i-j}`, r a projected sinusoid (Transformer-XL, XLNet)                |
| `bias`     | adds a learned number per head and bucket of `j - i` (T5)                                 |
| `alibi`    | adds `-slope_h |i - j|` (Press et al. 2022)                                               |

`disentangled` positions add `q_i . r_b + k_j . t_b`, r and t two projections of row b of a table, and b the bucket of
`i - j` (DeBERTa; He et al. 2021).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.errors import TokensError, require
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
    if arch.rotary_grid:
        position = on_grid(arch.rotary_grid, n, half).to(like.device)
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


def on_grid(grid: tuple[int, ...], n: int, half: int) -> Float[Tensor, "token half"]:
    """The position of each token, from -1 to 1, for each of the `half` frequencies of the rotation: the row of its
    patch in the first half of them, the column in the second. Tokens before the patches get 0, so none is rotated.
    `grid` is (rows, columns, tokens before the patches)."""
    rows, columns, unplaced = grid
    sentence = f"this network takes {rows} x {columns} patches and {unplaced} other tokens; received {n} tokens"
    require(n == rows * columns + unplaced, sentence, TokensError, "rotary_grid")
    y, x = (2 * (torch.arange(count, dtype=torch.float64) + 0.5) / count - 1 for count in (rows, columns))
    places = torch.stack([y[:, None].expand(rows, columns), x.expand(rows, columns)], -1).flatten(0, 1)
    return F.pad(places.repeat_interleave(half // 2, 1), (0, 0, unplaced, 0))


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


def disentangled(
    q: Heads, k: Heads, layer: AttentionWeights, table: Float[Tensor, "row width"], row: Int[Tensor, "token token"]
) -> Float[Tensor, "batch head token token"]:
    """`q_i . r_b + k_j . t_b` before the divisor, b = `row[i, j]`."""
    assert layer.relative_key is not None and layer.relative_query is not None
    r, t = (
        torch.einsum("od,dhc->hoc", table, part.weight) + (0.0 if part.bias is None else part.bias[:, None])
        for part in (layer.relative_key, layer.relative_query)
    )
    of_queries, of_keys = (index.expand(*q.shape[:2], -1, -1) for index in (row, row.mT))
    return (q @ r.mT).gather(-1, of_queries) + (k @ t.mT).gather(-1, of_keys).mT


def table_rows(arch: Architecture, n: int, device: torch.device) -> Int[Tensor, "token token"]:
    """The row of DeBERTa's table for `i - j`: exact up to half of a side's buckets, then logarithmic."""
    side, half = arch.bias_buckets, arch.bias_buckets // 2
    i = torch.arange(n, device=device)
    behind = i[:, None] - i[None, :]
    if arch.bias_reach > 1:
        share = (behind.abs().clamp(min=half).double() / half).log() / math.log((arch.bias_reach - 1) / half)
        far = ((share * (half - 1) - 1e-9).ceil().long() + half) * behind.sign()  # at the reach the share is one
        behind = torch.where(behind.abs() <= half, behind, far)
    return (behind + side).clamp(0, 2 * side - 1)


def sinusoids(arch: Architecture, n: int, like: Tensor) -> Offsets:
    """Sines then cosines of the offsets n-1, ..., -(n-1) at wavelengths 2 pi .. 10000 * 2 pi."""
    half = arch.width // 2
    power = torch.arange(half, dtype=torch.float64, device=like.device) / half
    offset = torch.arange(n - 1, -n, -1, dtype=torch.float64, device=like.device)
    angle = offset[:, None] * 10000.0**-power
    return torch.cat([angle.sin(), angle.cos()], -1).to(like.dtype)


def score_bias(
    arch: Architecture, weights: Weights, n: int, like: Tensor, start: int = 0, stop: int | None = None
) -> Scores:
    """Return what `bias` (by the table in `weights`) and `alibi` add to scores among n tokens, after the divisor, in
    rows `start` to `stop` (all, if left out), of the dtype and on the device of `like`."""
    j = torch.arange(n, device=like.device)
    ahead = j[None, :] - j[start:stop, None]  # j - i
    if arch.positions == "bias":
        assert weights.bias_table is not None
        ahead = ahead if arch.bias_ahead else ahead.clamp(max=0)
        bucket = buckets(ahead, arch.bias_buckets, arch.bias_reach, both=arch.bias_ahead)
        return weights.bias_table[bucket].permute(2, 0, 1).to(like.dtype)
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
