"""What an attention pattern does to differences between tokens.

P is `[*batch, head, token, token]`, row i the weights with which token i averages; padding is
`[*batch, token]`. Rows of padded tokens never count. A sample without tokens has no value: NaN; nor has a head whose
pattern holds NaN or infinity.
"""

from operator import attrgetter

import torch
from torch import Tensor

from rankscope.errors import TokensError, require
from rankscope.metrics.base import ROUNDING, Meaning, Metric, Reading, nobody_can_look, valid_tokens
from rankscope.metrics.log_readings import LOWEST, UNIT, ScaledPattern, reading_of_pattern
from rankscope.metrics.norms import largest_sum_distance
from rankscope.metrics.rows import PatternRows, RowStatistics, dobrushin_by_head, gap_by_head, second_by_head
from rankscope.shapes import Bool, Float

HeadValues = Float[Tensor, "*batch head"]
RowValues = Float[Tensor, "*batch head row"]
FEW = 256  # the most tokens of which all pairs of rows are compared at once
NARROW = 0.05  # by how much the weights of a row may miss one in all: bfloat16 has two to three digits
Valid = Bool[Tensor, "*batch #head token"]
RowsOf = Float[Tensor, "*batch head row token"]  # Some rows of P, zero at padding, in the arithmetic that made them


def _ready(P: Tensor, padding: Tensor | None) -> tuple[Float[Tensor, "*batch head token token"], Valid]:
    """P in float64 with padded rows and columns zero, and which rows count: none of a head that holds NaN or infinity,
    which is zero here."""
    P, valid = _square(P, padding)
    P = P.to(torch.float64).masked_fill(~(valid[..., :, None] & valid[..., None, :]), 0.0)
    finite = P.isfinite()
    if nobody_can_look(P) or not bool(finite.all()):
        finite = finite.all(-1, keepdim=True).all(-2, keepdim=True)  # [*batch, head, 1, 1]
        P, valid = P.masked_fill(~finite, 0.0), valid & finite[..., 0]
    if not P.shape[-1]:  # as of one token that does not count
        return P.new_zeros((*P.shape[:-2], 1, 1)), valid.new_zeros((*valid.shape[:-1], 1))
    return P, valid


def _square(P: Tensor, padding: Tensor | None) -> tuple[Tensor, Valid]:
    """P as it is, and which tokens are valid; refused if P is no square of floating numbers."""
    sentence = f"attention must be [batch, head, token, token]; received {tuple(P.shape)}"
    require(P.ndim >= 3 and P.shape[-1] == P.shape[-2], sentence, TokensError, "P")
    require(P.is_floating_point(), f"attention must be of a floating dtype; received {P.dtype}", TokensError, "P")
    return P, valid_tokens(torch.Size((*P.shape[:-3], P.shape[-1])), padding, P.device)[..., None, :]


def _over_rows(value: Float[Tensor, "*batch head token"], valid: Valid) -> HeadValues:
    """Mean over valid rows; NaN where there is none (0 / 0)."""
    return value.masked_fill(~valid, 0.0).sum(-1) / valid.sum(-1)


def _nan_where_empty(value: HeadValues, valid: Valid) -> HeadValues:
    return value.masked_fill(~valid.any(-1), torch.nan)


def dobrushin(P: Tensor, padding: Tensor | None = None) -> HeadValues:
    """Dobrushin's coefficient `max_{i,i'} 1/2 sum_j |P_ij - P_i'j|`, in [0, 1] for row-stochastic P.

    It bounds the contraction of one averaging step: `osc(P x) <= dobrushin(P) osc(x)`, osc = max - min.
    """
    P, valid = _ready(P, padding)
    if P.shape[-1] > FEW and P.device.type == "cpu":
        distances = dobrushin_by_head(PatternRows.of(P, valid.any(-2, keepdim=True))).reshape(P.shape[:-2])
        return _nan_where_empty(distances, valid)
    return _nan_where_empty(largest_sum_distance(P, valid) / 2, valid)


def entropy(P: Tensor, padding: Tensor | None = None) -> HeadValues:
    """Mean over rows of `-sum_j P_ij log P_ij`, in nats; at most log n, 0 when each row picks one token.

    A matrix with a negative entry (linformer's, a remedy's), or with rows that sum to anything but one, has
    no entropy: NaN.
    """
    P, valid = _ready(P, padding)
    return _over_rows(entropy_of_rows(P, valid), valid)


def entropy_of_rows(P: RowsOf, valid: Valid) -> RowValues:
    """`-sum_j P_ij log P_ij`; NaN of a row with a negative entry or of another sum than one."""
    logs = P.clamp(min=torch.finfo(P.dtype).tiny).log()  # a weight of zero adds nothing, whatever its log
    entropies = -torch.linalg.vecdot(P, logs)
    return entropies.masked_fill(_no_average(P), torch.nan)


def _no_average(P: RowsOf) -> Bool[Tensor, "*batch head row"]:
    """True at rows that are no average: with a negative entry, or of another sum than one."""
    return (P.amin(-1) < 0) | ((P.sum(-1) - 1).abs() > NARROW)


def effective_keys(P: Tensor, padding: Tensor | None = None) -> HeadValues:
    """Mean over rows of `1 / sum_j P_ij^2`: how many tokens a token averages over, 1 when each row picks one and n when
    each row takes all alike. NaN where entropy is."""
    P, valid = _ready(P, padding)
    return _over_rows(effective_keys_of_rows(P, valid), valid)


def effective_keys_of_rows(P: RowsOf, valid: Valid) -> RowValues:
    """`1 / sum_j P_ij^2`; NaN of a row with a negative entry or of another sum than one."""
    return (1 / P.square().sum(-1)).masked_fill(_no_average(P), torch.nan)


def largest_logit(S: Tensor, padding: Tensor | None = None) -> HeadValues:
    """`max_{i,j} S_ij`, the largest score of a query and a key that it sees, as the softmax takes it: after scale, cap
    and bias. S is `[*batch, head, token, token]`, minus infinity at keys that a query does not see.

    Where it grows from step to step, the softmax saturates (Zhai et al. 2023).
    """
    S, valid = _square(S, padding)
    if not S.shape[-1]:
        return S.new_full(S.shape[:-2], torch.nan, dtype=torch.float64)
    both = valid[..., :, None] & valid[..., None, :]
    largest = S.to(torch.float64).masked_fill(~both, -torch.inf).amax((-2, -1))
    return largest.masked_fill(~largest.isfinite(), torch.nan)


def _two_largest(P: Tensor, padding: Tensor | None) -> tuple[HeadValues, HeadValues]:
    P, valid = _ready(P, padding)
    s = torch.linalg.svdvals(P)
    s = torch.cat([s, s.new_zeros((*s.shape[:-1], 2))], -1)
    return _nan_where_empty(s[..., 0], valid), _nan_where_empty(s[..., 1], valid)


def second_singular_value(P: Tensor, padding: Tensor | None = None) -> HeadValues:
    """s_2(P): 0 exactly when every row is a multiple of one row. With one token there is no second: 0."""
    return _two_largest(P, padding)[1]


def spectral_gap(P: Tensor, padding: Tensor | None = None) -> HeadValues:
    """`s_1(P) - s_2(P)`, singular values (Nait Saada et al. 2024): where it is wide, one layer with
    random weights already makes the tokens of a long text nearly the same."""
    first, second = _two_largest(P, padding)
    return first - second


def first_token_mass(P: Tensor, padding: Tensor | None = None) -> HeadValues:
    """Mean over rows of the weight on the first valid token: an attention sink is near 1."""
    P, valid = _ready(P, padding)
    return _over_rows(first_token_of_rows(P, valid), valid)


def first_token_of_rows(P: RowsOf, valid: Valid) -> RowValues:
    """The weight of each row on the first valid token."""
    first = valid.to(torch.int8).argmax(-1)[..., None, None]
    return P.gather(-1, first.expand(*P.shape[:-1], 1))[..., 0]


def row_sum_defect(P: Tensor, padding: Tensor | None = None) -> HeadValues:
    """`max_i |sum_j P_ij - 1|`: above rounding, the theorems on averaging do not apply."""
    P, valid = _ready(P, padding)
    return _nan_where_empty(defect_of_rows(P, valid).masked_fill(~valid, 0.0).amax(-1), valid)


def defect_of_rows(P: RowsOf, valid: Valid) -> RowValues:
    """The defect of each row, `|sum_j P_ij - 1|`."""
    return (P.sum(-1) - 1).abs()


def _dobrushin_rule(pattern: ScaledPattern) -> Reading:
    """Rows of P differ by rows of `P - 1 p^T`, at any scale."""
    Delta, log = pattern.differences
    value = dobrushin_by_head(Delta) if isinstance(Delta, PatternRows) else dobrushin(Delta, pattern.padding)
    return reading_of_pattern(torch.where(value == 0, torch.full_like(value, LOWEST), value.log() + log))


def _entropy_rule(pattern: ScaledPattern) -> Reading:
    """The mean over rows of `-sum_j P_ij log P_ij`, in logs."""
    padding, rows = pattern.padding, pattern.log_rows(_log_entropy)
    if rows is None:
        P = pattern.matrix()  # a sum of two parts: one of zero may be rounding, to either side
        P = P.masked_fill(P.abs() < ROUNDING * UNIT, 0.0)
        return Metric("entropy", entropy, of="attention").read(P, padding, unit=UNIT)
    rows = rows.masked_fill(padding[:, None], -torch.inf)
    log = rows.logsumexp(-1) - (~padding).sum(-1, keepdim=True).double().log()
    reading = reading_of_pattern(log.clamp(min=LOWEST))
    empty = padding.all(-1, keepdim=True).expand_as(log)
    parts = reading.value, reading.log10, reading.floor
    return Reading(*(part.masked_fill(empty, torch.nan) for part in parts))


def _log_entropy(log_P: RowsOf) -> RowValues:
    """The log of each row's entropy. The largest weight of a row is `1 - s`, s the sum of the others: it adds
    `-(1 - s) log(1 - s)`."""
    top, at = log_P.max(-1, keepdim=True)
    small = log_P.scatter(-1, at, -torch.inf)
    terms = (small + (-small).log()).masked_fill(small == -torch.inf, -torch.inf).logsumexp(-1)
    log_s = small.logsumexp(-1)
    s = log_s.exp()
    largest = torch.where(log_s < -40, log_s, (-(1 - s) * torch.log1p(-s)).log())
    return torch.where(top[..., 0].isnan(), top[..., 0], torch.logaddexp(terms, largest))


def _first_from_scores(found: RowStatistics) -> Tensor:
    return found.first.masked_fill(found.blind, 0.0)  # as of a row of zeros


_UNMASKED = "without mask and positions"
METRICS = [
    Metric("dobrushin", dobrushin, "δ(P)", r"\delta(P)", "attention", by_head=dobrushin_by_head,
        rule=_dobrushin_rule, rule_streams=True, sensitive_to="row differences",
        meaning=Meaning("0 to 1", "all tokens average alike, and one step makes them the same",
            "two tokens look at nothing in common (1)", "What differs after the averaging is at most this "
            "share of what differed before. Above 1 only where rows do not sum to one.",
            equal=f"0 {_UNMASKED}")),
    Metric("entropy", entropy, "H(P)", "H(P)", "attention", by_row=entropy_of_rows, rule=_entropy_rule,
        rule_streams=True, from_scores=attrgetter("entropy"),
        meaning=Meaning("0 to log n", "each token looks at one", "each token looks at all alike",
            "In nats. NaN where weights are negative or do not sum to one. A learnt sink (gpt-oss) counts "
            "as one more token where `watch` sees its score.", equal=f"log n {_UNMASKED}")),
    Metric("second_singular_value", second_singular_value, "σ₂(P)", r"\sigma_2(P)", "attention",
        by_head=second_by_head,
        meaning=Meaning("0 to sqrt(n/2)", "all tokens average alike", "tokens average differently",
            equal=f"0 {_UNMASKED}")),
    Metric("spectral_gap", spectral_gap, "σ₁(P) − σ₂(P)", r"\sigma_1(P) - \sigma_2(P)", "attention",
        by_head=gap_by_head,
        meaning=Meaning("0 to sqrt(n)", "tokens average differently", "one averaging is common to all tokens",
            equal=f"1 {_UNMASKED}")),
    Metric("first_token_mass", first_token_mass, "mean Pᵢ₁", r"\mathrm{mean}\,P_{i1}", "attention",
        by_row=first_token_of_rows, from_scores=_first_from_scores,
        meaning=Meaning(
            "0 to 1", "nobody looks at the first token", "all look at the first token (1), an attention sink",
            equal=f"1/n {_UNMASKED}")),
    Metric("effective_keys", effective_keys, "mean 1/Σⱼ Pᵢⱼ²", r"\mathrm{mean}\,1/\sum_j P_{ij}^2", "attention",
        by_row=effective_keys_of_rows, from_scores=attrgetter("effective_keys"),
        meaning=Meaning("1 to n", "each token looks at one", "each token looks at all alike",
            "At most e to the entropy. NaN where weights are negative or do not sum to one; a sink counts as for the "
            "entropy.", equal=f"n {_UNMASKED}")),
    Metric("row_sum_defect", row_sum_defect, "max |Σⱼ Pᵢⱼ − 1|", r"\max_i |\sum_j P_{ij} - 1|", "attention",
        by_row=defect_of_rows, largest=True,
        meaning=Meaning("0 and above", "weights sum to one, to rounding", "attention is no average",
            "Theorems on averaging need weights that sum to one.",
            equal="whatever it was: it says whether attention averages, not how tokens differ")),
    Metric("largest_logit", largest_logit, "max sᵢⱼ", r"\max_{ij} s_{ij}", "scores", largest=True,
        from_scores=attrgetter("largest"),
        meaning=Meaning("any number", "queries and keys are small, as where a training begins",
            "queries and keys have grown, and the softmax picks single tokens",
            "`watch` and `Monitor` read it while fused kernels run, without the attention pattern. Learnt sinks are "
            "left out.", equal="any number")),
]  # fmt: skip
