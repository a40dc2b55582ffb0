"""How far two passes over the same network are apart, and where rounding decided between them.

`second_pass.py`, `profiles/agreement.py` and `theory/rounding.py` compare a pass with one that
was rounded differently: by their states (`state_distance`, `direction_difference`), by their attention
patterns (`attends_elsewhere`, `undecided`, which only matter where scores are steep), and by tokens that left
float64's range (`tokens_lost`, `short_tokens`).
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rankscope.deviation.attention import DeviationPattern
from rankscope.deviation.by_rows import PatternByRows
from rankscope.deviation.decisions import piecewise
from rankscope.deviation.state import LOWEST, STEEPEST, WIDEST, LogScales, State, largest_entry, spread
from rankscope.doubled import precision
from rankscope.shapes import Bool, Float

STEEP = math.log(1e4)  # the log of scores from which on their rounding may decide a softmax
DIFFERENT = 1e-6  # the difference of entries of P from which on two passes attend to different tokens
UNDECIDED = 1e-3  # the relative difference of entries of log P from which on rounding decided the order of scores
CUT = STEEPEST - 2 * WIDEST  # the log of scores from which on they may have been cut (`scores.py`)
FAINT = math.log(1e-12)  # the log of what a row attends to beside one token below which it may be due to a cut
COLLAPSED = math.log(1e-100)  # the log of the share of tokens below which what they differ by may be due to a cut
SHORTEST = 1e-140  # the size of a token, beside the largest, below which a product of two like it may leave float64


AnyPattern = DeviationPattern | PatternByRows


def _none(P: AnyPattern) -> Bool[Tensor, " batch"]:
    """False for every sample."""
    return torch.zeros(len(P.p), dtype=torch.bool, device=P.p.device)


def steep_scores(P: AnyPattern) -> Bool[Tensor, " batch"]:
    """True for samples with scores so large, before a cap, that their rounding may decide the softmax."""
    if (largest := _largest_score(P)) is None:
        return _none(P)
    largest = largest if (before_cap := P.largest_before_cap) is None else torch.maximum(largest, before_cap)
    finer = math.log(torch.finfo(torch.float64).eps / precision(P.p))  # doubled precision rounds so much less
    return largest.amax(-1) > STEEP + finer


def _largest_score(P: AnyPattern) -> LogScales | None:
    """The log of the largest part of a score, by head; None without scores."""
    if not P.p.numel() or (sizes := P.score_sizes) is None:
        return None
    return torch.maximum(sizes[1], sizes[0].clamp(min=1e-300).log())


def attends_elsewhere(P: AnyPattern, second: AnyPattern) -> Bool[Tensor, " batch"]:
    """True for samples with steep scores where the second pass attends to other tokens than the first."""
    return steep_scores(P) & (pattern_difference(P, second).amax(1) > DIFFERENT)


def pattern_difference(P: AnyPattern, second: AnyPattern) -> Float[Tensor, "batch head"]:
    """The largest |difference| of an entry of the pattern between two passes, by head."""
    return P.farthest(lambda rows: (P.matrix(rows) - second.matrix(rows)).abs())


def undecided(P: AnyPattern, second: AnyPattern) -> Bool[Tensor, " batch"]:
    """True for samples with steep scores where two passes disagree on log P, by how much one token is attended to more
    than another, or under a cap, which hides that, on scores before it. They may have attended to the same token by
    chance."""
    if P.logits is None or second.logits is None:
        return _none(P)

    def relative(rows: slice) -> Tensor:  # |a - b| / max(|a|, |b|, 1); 0 where both are infinite
        a, b = P.deciding(rows), second.deciding(rows)
        return ((a - b).abs() / torch.maximum(a.abs(), b.abs()).clamp(min=1.0)).nan_to_num(nan=0.0)

    def differs() -> Tensor:
        return P.farthest(relative).amax(1) > UNDECIDED

    return piecewise("comparison.undecided", steep_scores(P), differs, _none(P))


def cut_heads(P: AnyPattern) -> Bool[Tensor, "batch head"]:
    """True for heads with scores so large that all were cut alike: which score of a row is largest is known, and not by
    how much."""
    largest = _largest_score(P)
    return _none(P)[:, None].expand(P.p.shape[:2]) if largest is None else largest > CUT


def alike_rows(P: AnyPattern) -> Bool[Tensor, "batch head"]:
    """True for heads whose rows are the same but for what a cut of scores may have made."""
    return P.log < FAINT


def cut_away(P: AnyPattern, state: State) -> Bool[Tensor, " batch"]:
    """True for samples with scores that were cut where more than the largest score of each row decides about the
    tokens after the layer, `state`: a row attends to several tokens, or tokens differ by next to nothing."""
    cut = cut_heads(P)

    def matters() -> Tensor:
        several = P.farthest(lambda rows: P.matrix(rows) - P.matrix(rows).square())
        differences = state.R.log_size()
        collapsed = differences - torch.maximum(state.x.log_size(), differences) < COLLAPSED
        return (cut & (several > math.exp(FAINT))).any(1) | collapsed

    return piecewise("comparison.cut_away", cut.any(1), matters, _none(P))


def tokens_lost(before: State, after: State) -> Bool[Tensor, " batch"]:
    """True for samples where a token that was not zero is now zero, or too short for one scale (`short_tokens`)."""
    was = (_sizes(before) > 0) | (before.x.log > LOWEST)[:, None]
    return (was & short_tokens(after)).any(-1)


def short_tokens(state: State) -> Bool[Tensor, "batch token"]:
    """True for tokens that are zero, or too short, beside the longest, for one scale to hold. Only in samples that have
    no common token: beside one, a short deviation is no short token."""
    size = _sizes(state)
    longest = size.amax(-1, keepdim=True) if size.shape[-1] else size
    short = (size < SHORTEST * longest) | (size == 0)
    return short & state.valid.mask & (state.x.log <= LOWEST)[:, None]


def _sizes(state: State) -> Float[Tensor, "batch token"]:
    """The largest |entry| of each token's deviation."""
    return largest_entry(state.R.value, 2)


def state_distance(a: State, b: State, deep: bool = True) -> LogScales:
    """The distance of two states, by sample: the largest of three numbers.

    With the residuals e^t r and e^u q, r and q of norm one: ||r - q||, |t - u|, and how far the mean tokens
    are apart, as a share of the size of tokens. Infinite where one residual is zero. With `deep`, and where
    |t| is beyond 1000, as a share of |t| / 1000: each layer of pure attention triples an error, and the log
    with it."""
    (r, log_r), (q, log_q) = _direction(a), _direction(b)
    difference = torch.maximum(torch.linalg.vector_norm(r - q, dim=(1, 2)), (log_r - log_q).abs())
    difference = difference / (log_r.abs() / 1e3).clamp(min=1.0) if deep else difference
    unit = a.log_size()
    mean_a, mean_b = ((state.x + state.mean).at(unit) for state in (a, b))
    shift = torch.linalg.vector_norm(mean_a - mean_b, dim=1)
    shift = shift / (unit.abs() / 1e3).clamp(min=1.0) if deep else shift
    return torch.maximum(difference, shift).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _direction(state: State) -> tuple[Tensor, LogScales]:
    """(the residual divided by its norm, the log of that norm)."""
    R = state.residual
    norm = torch.linalg.vector_norm(R.value, dim=(1, 2))
    safe = norm.masked_fill(norm == 0, 1.0)
    return R.value / safe[:, None, None], torch.where(norm == 0, R.log, R.log + safe.log())


def direction_difference(
    a: Float[Tensor, "batch token width"], b: Float[Tensor, "batch token width"]
) -> Float[Tensor, " batch"]:
    """The largest `|u_i - v_i|`, u_i and v_i the tokens of two passes scaled to length one."""

    def units(X: Tensor) -> Tensor:
        size = X.abs().amax(-1, keepdim=True)
        X = X / size.masked_fill(size == 0, 1.0)
        return X / torch.linalg.vector_norm(X, dim=-1, keepdim=True).masked_fill(size == 0, 1.0)

    return torch.linalg.vector_norm(units(a) - units(b), dim=-1).amax(-1).nan_to_num(nan=torch.inf)


def relative_change(
    a: Float[Tensor, "*batch token width"],
    b: Float[Tensor, "*batch token width"],
    valid: Bool[Tensor, "*batch token"],
    unpadded: bool = False,
) -> Float[Tensor, "*batch"]:
    """`|b - a| / |a - mean row of a|` in Frobenius norms, over rows that are `valid`; of a single row `|b - a| / |a|`.
    Both are ordinary tensors, b of any dtype; infinite where rows of a are equal or a number is out of range.
    `unpadded` where every row is known to be valid."""
    count = valid.sum(-1)[..., None, None]

    def kept(t: Tensor) -> Tensor:
        return t if unpadded else t.masked_fill(~valid[..., None], 0.0)

    change = torch.linalg.vector_norm(kept(b - a), dim=(-2, -1))
    mean = kept(a).sum(-2, keepdim=True) / count.clamp(min=1)
    differences = kept(a - mean.masked_fill(count <= 1, 0.0))
    return (change / torch.linalg.vector_norm(differences, dim=(-2, -1))).nan_to_num(nan=torch.inf)


def pattern_distance(P: PatternByRows, Q: PatternByRows) -> Float[Tensor, "batch head"]:
    """The distance of two patterns, as `state_distance` of Delta: about its mean row, by its direction and
    the log of its norm. The reference row that Delta is written about may be another in each."""
    valid, both = P.maker.valid, (P, Q)
    sums = [sum(pattern.Delta(rows).sum(2) for rows in pattern.maker.blocks()) for pattern in both]
    means = [total / valid.count[..., None] for total in sums]

    def centred(which: int, rows: slice) -> Tensor:
        tokens = valid.mask[:, None, rows, None]
        return (both[which].Delta(rows) - means[which][:, :, None]).masked_fill(~tokens, 0.0)

    def norm(of_rows: Callable[[slice], Tensor], pattern: PatternByRows) -> Tensor:
        squares = [of_rows(rows).square().sum((-2, -1)) for rows in pattern.maker.blocks()]
        return torch.stack(squares).sum(0).sqrt()

    norms = [norm(partial(centred, which), pattern) for which, pattern in enumerate(both)]
    safe = [spread(size.masked_fill(size == 0, 1.0), means[0][..., None]) for size in norms]
    turn = norm(lambda rows: centred(0, rows) / safe[0] - centred(1, rows) / safe[1], P)
    logs = [pattern.log + size.flatten(2)[..., 0].log() for pattern, size in zip(both, safe, strict=True)]
    deep = (logs[0].abs() / 1e3).clamp(min=1.0)
    difference = torch.maximum(turn, (logs[0] - logs[1]).abs()) / deep
    return difference.nan_to_num(nan=torch.inf, posinf=torch.inf)
