"""What each metric says, for who meets it: its range, what small and large values mean, and what to know.

n tokens of width d; of attention, P has n rows that sum to one. Residuals are about the mean token.
"""

from typing import NamedTuple


class Meaning(NamedTuple):
    """A metric in words."""

    range: str
    """Between which values it lies."""
    small: str
    """What a small value says."""
    large: str
    """What a large value says."""
    note: str = ""
    """What else one should know to read it."""


SAME, DIFFER = "tokens are nearly the same", "tokens differ"
ABOVE = (
    "It can be above 1. Taking the mean away can make columns of a matrix larger: of four tokens, one 1 and "
    "three 0, the mean is 1/4; less the mean the column sums to |3/4| + 3 |1/4| = 3/2, where it was 1. It "
    "is 2 (1 - 1/n) at most; at 1, tokens differ from their mean by as much as they are large."
)
VERDICT = (
    "The verdict in a terminal and a report is in this metric, as a geometric mean over all excerpts. The "
    "cloud of a report says relative_mu of the one excerpt that it draws: another norm, and one excerpt "
    "instead of all, so the two numbers are alike and not equal."
)
CLOUD = "The cloud of a report says this of the one excerpt that it draws; its verdict, relative_residual."
SIZE = "In the tokens' own units: it grows when a network makes its tokens larger, though none moves apart."
RANKED = "0 where all entries are."

MEANINGS = {
    "residual": Meaning("0 and above", SAME, DIFFER, SIZE),
    "relative_residual": Meaning("0 to 2", SAME, DIFFER, f"{ABOVE} {VERDICT}"),
    "mu": Meaning("0 and above", SAME, DIFFER, SIZE),
    "relative_mu": Meaning("0 to 1", SAME, "the mean token is zero (1)", CLOUD),
    "spectral_residual": Meaning("0 and above", SAME, "tokens differ along one direction at least", SIZE),
    "relative_spectral_residual": Meaning(
        "0 to 1", SAME, "tokens differ most along the direction in which they are largest"
    ),
    "max_residual": Meaning("0 and above", SAME, "some token differs in some coordinate", SIZE),
    "relative_max_residual": Meaning(
        "0 to 2", SAME, "the largest coordinate belongs to few tokens",
        "It can be above 1: a token on the other side of the mean from the others is further from it than "
        "from zero.",
    ),
    "high_frequency_share": Meaning(
        "0 to 1", SAME, "the mean token is zero (1)", "The square of relative_mu."
    ),
    "numerical_rank": Meaning(
        "0 to min(n, d)", "tokens are multiples of one vector (1)", "tokens are linearly independent",
        "It counts singular values above what the arithmetic resolves.",
    ),
    "affine_rank": Meaning(
        "0 to min(n - 1, d)", "tokens are the same (0)", "tokens differ in many directions",
        "It counts singular values above what the arithmetic resolves.",
    ),
    "stable_rank": Meaning(
        "1 to min(n, d)", "one direction has all the energy", "many directions share it", RANKED
    ),
    "effective_rank": Meaning(
        "1 to min(n, d)", "one direction has all the weight", "many directions share it", RANKED
    ),
    "participation_ratio": Meaning(
        "1 to min(n, d)", "one direction has all the energy", "many directions share it", RANKED
    ),
    "sigma_min": Meaning("0 and above", "tokens nearly miss a direction", "tokens fill all directions", SIZE),
    "mean_cosine": Meaning(
        "-1/(n - 1) to 1", "tokens point in all directions", "all tokens point the same way (1)",
        "It does not see lengths: tokens of other lengths on one ray have cosine 1.",
    ),
    "mean_abs_cosine": Meaning(
        "0 to 1", "tokens are orthogonal to each other", "all tokens lie on one line through zero (1)",
        "Two tokens that point opposite ways count as one.",
    ),
    "min_cosine": Meaning("-1 to 1", "two tokens point opposite ways", "all tokens point the same way (1)"),
    "residual_stable_rank": Meaning(
        "1 to min(n - 1, d)", "tokens differ along one direction", "tokens differ in many directions",
        "Of how they differ, however little: it does not see by how much. 0 where they are the same.",
    ),
    "residual_effective_rank": Meaning(
        "1 to min(n - 1, d)", "tokens differ along one direction", "tokens differ in many directions",
        "Of how they differ, however little: it does not see by how much. 0 where they are the same.",
    ),
    "residual_singular_ratio": Meaning(
        "0 to 1", "tokens lie on a line", "tokens differ in two directions alike",
        "Of how they differ, however little: it does not see by how much.",
    ),
    "mean_cosine_gap": Meaning(
        "0 to n/(n - 1)", "all tokens point the same way", "tokens point in all directions",
        "1 - mean_cosine, without losing digits where that is near 1.",
    ),
    "max_cosine_gap": Meaning("0 to 2", "all tokens point the same way", "two tokens point opposite ways"),
    "dobrushin": Meaning(
        "0 to 1", "all tokens average alike, and one step makes them the same",
        "two tokens look at nothing in common (1)", "What differs after the averaging is at most this share "
        "of what differed before. Above 1 only where rows do not sum to one.",
    ),
    "entropy": Meaning(
        "0 to log n", "each token looks at one", "each token looks at all alike",
        "In nats. NaN where weights are negative or do not sum to one.",
    ),
    "second_singular_value": Meaning(
        "0 to sqrt(n/2)", "all tokens average alike", "tokens average differently"
    ),
    "spectral_gap": Meaning(
        "0 to sqrt(n)", "tokens average differently", "one averaging is common to all tokens"
    ),
    "first_token_mass": Meaning(
        "0 to 1", "nobody looks at the first token", "all look at the first token (1), an attention sink"
    ),
    "row_sum_defect": Meaning(
        "0 and above", "weights sum to one, to rounding", "attention is no average",
        "Theorems on averaging speak of attention whose weights sum to one.",
    ),
    "expert_load": Meaning(
        "k/E to 1", "all E experts take as many tokens", "every token goes through one of them (1)",
        "k experts are chosen for each token.",
    ),
    "expert_entropy": Meaning(
        "log k to log E", "all tokens go through the same k experts", "all E experts take as many tokens"
    ),
}  # fmt: skip


def about(meaning: Meaning | None, centre: str, relative: bool) -> Meaning | None:
    """What a residual about another centre than the mean means."""
    if meaning is None or centre == "mean":
        return meaning
    # Zero is one of the centres among which the argmin is sought, and leaves the tokens as they are.
    least = "0 to 1" if centre == "argmin" else "0 and above"
    note = "" if relative else meaning.note
    return meaning._replace(
        range=least if relative else meaning.range, note=f"About the {centre}. {note}".strip()
    )
