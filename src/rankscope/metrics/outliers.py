"""Massive activations and tokens of high norm: single numbers and single tokens that dwarf all others.

Over the entries of the valid tokens of a sample, and over their lengths:

| metric                | definition                                      | criterion of                              |
|-----------------------|-------------------------------------------------|-------------------------------------------|
| `activation_ratio`    | `max |x_tj| / median |x_tj|`                     |                                           |
| `massive_activations` | how many `|x_tj|` pass 1,000 times their median | Sun et al. 2024, who also ask for 100     |
| `token_norm_ratio`    | `max |x_t| / median |x_t|`                       |                                           |
| `high_norm_tokens`    | how many `|x_t|` pass 5 times their median      | after Darcet et al. 2024, who ask for 150 |

Zero tokens have 0 of each; where the median alone is zero there is nothing to compare with: NaN.
The criteria of the papers are of one model's scale (100; 150 of DINOv2-g): both functions take them, `least=`. The
metrics leave them out, so that they say the same of tokens at any scale. `where` names the entries.
"""

import torch
from torch import Tensor

from rankscope.metrics.base import Meaning, Metric, Tokens, TokensLike, Values, nan_where_empty, ratio, tokens
from rankscope.metrics.norms import max_norm
from rankscope.shapes import Bool, Float

Sizes = Float[Tensor, "*batch token number"]
MASSIVE, HIGH = 1000.0, 5.0  # How many medians make an activation massive, and a token's norm high


def activation_ratio(X: TokensLike, padding: Tensor | None = None) -> Values:
    """The largest entry of tokens over the median of all, in absolute value."""
    ready = tokens(X, padding)
    return _against_median(ready.X.abs(), ready)


def massive_activations(
    X: TokensLike, padding: Tensor | None = None, *, times: float = MASSIVE, least: float = 0.0,
    unit: float | None = None,
) -> Values:  # fmt: skip
    """How many entries of tokens are massive (Sun et al. 2024: `times=1000, least=100`).

    Args:
        X: Tokens.
        padding: True at padded tokens.
        times: From how many medians of the absolute values on an entry is massive.
        least: What it must pass besides.
        unit: Not used: an entry a thousand times the median is no rounding.
    """
    ready = tokens(X, padding)
    return _against_median(ready.X.abs(), ready, (times, least))


def where(X: TokensLike, times: float = MASSIVE, least: float = 0.0) -> Bool[Tensor, "*batch token width"]:
    """True at massive activations, by sample, token and channel; the arguments are those of `massive_activations`."""
    ready = tokens(X)
    size = ready.X.abs()
    return _passing(size, ready, _median(size, ready), times, least)


def token_norm_ratio(X: TokensLike, padding: Tensor | None = None) -> Values:
    """The longest token over the median of their lengths."""
    ready = tokens(X, padding)
    return _against_median(_lengths(ready), ready)


def high_norm_tokens(
    X: TokensLike, padding: Tensor | None = None, *, times: float = HIGH, least: float = 0.0, unit: float | None = None
) -> Values:
    """How many tokens are much longer than most (Darcet et al. 2024: `times=0, least=150` for DINOv2-g).

    Args:
        X: Tokens.
        padding: True at padded tokens.
        times: From how many medians of the lengths on a token is long.
        least: What its length must pass besides.
        unit: Not used.
    """
    ready = tokens(X, padding)
    return _against_median(_lengths(ready), ready, (times, least))


def _median(size: Sizes, ready: Tokens) -> Values:
    """The median of sizes of valid tokens, the lower one of two in the middle."""
    if not size.shape[-2]:
        return size.new_full(size.shape[:-2], torch.nan)
    known = size.masked_fill(~ready.valid[..., None], torch.nan).flatten(-2)
    return _median_by_sorting(known) if known.is_cuda else known.nanmedian(-1).values


def _median_by_sorting(known: Float[Tensor, "*batch number"]) -> Values:
    """The lower median of numbers that are not NaN. A GPU sorts a long row by all its cores, and would select from it
    by those of one block: seconds for ten million numbers."""
    middle = ((~known.isnan()).sum(-1, keepdim=True) - 1).clamp(min=0) // 2
    return known.sort(-1).values.gather(-1, middle)[..., 0]  # NaN comes last


def _lengths(ready: Tokens) -> Sizes:
    """The length of every token; squares are of entries below one, so that none leaves the range."""
    scale = max_norm(ready.X)[..., None, None]
    scale = scale.masked_fill(scale == 0, 1.0)
    return (ready.X / scale).norm(dim=-1, keepdim=True) * scale


def _passing(
    size: Sizes, ready: Tokens, median: Values, times: float, least: float
) -> Bool[Tensor, "*batch token number"]:
    """Sizes of tokens that pass so many medians, and `least`."""
    return (size > times * median[..., None, None]) & (size > least) & ready.valid[..., None]


def _against_median(size: Sizes, ready: Tokens, passing: tuple[float, float] | None = None) -> Values:
    """The largest size over the median, or how many pass (times the median, least); NaN without tokens, and where only
    the median is zero."""
    largest, median = max_norm(size), _median(size, ready)
    if passing is None:
        value = ratio(largest, median)
    else:
        value = _passing(size, ready, median, *passing).flatten(-2).sum(-1).to(torch.float64)
    return nan_where_empty(value.masked_fill((median == 0) & (largest > 0), torch.nan), ready)


_DWARFED = "one entry dwarfs all others: a massive activation"
METRICS = [
    Metric("activation_ratio", activation_ratio, "max |x| / med |x|", r"\max|x| / \mathrm{med}|x|",
        meaning=Meaning("1 and above", "all entries are of one size", _DWARFED,
            "Trained decoders reach 1e3 and more at the first token.", equal="as of one token")),
    Metric("massive_activations", massive_activations, "# |x| > 1000 med", r"\#\{|x| > 1000\,\mathrm{med}\}",
        count=True,
        meaning=Meaning("0 to n d", "no entry dwarfs the others (0)", "several entries do",
            equal="n times that of one token")),
    Metric("token_norm_ratio", token_norm_ratio, "max ‖xᵢ‖ / med ‖xᵢ‖", r"\max\|x_i\| / \mathrm{med}\|x_i\|",
        meaning=Meaning("1 and above", "tokens are of one length (1)", "one token is much longer than most",
            equal="1")),
    Metric("high_norm_tokens", high_norm_tokens, "# ‖xᵢ‖ > 5 med", r"\#\{\|x_i\| > 5\,\mathrm{med}\}", count=True,
        meaning=Meaning("0 to n", "no token is much longer than most (0)", "several tokens are, as registers would be",
            equal="0")),
]  # fmt: skip
