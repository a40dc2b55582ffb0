"""What theory says of each remedy, in a sentence or two, with its reason and where that is from.

`order` is m in `r' = k r^m`, the relative residual after a layer by that before it, both small, of a network
*without skips*. It is derived here, from tokens that are a common one c and deviations of size r. Scores
`x_i A x_j` vary with i and j together only through `r_i A r_j`, which is of size r^2; what depends on j alone
is common to all rows. Rows of attention therefore differ by r^2, and applied to values that differ by r they
leave r^3: the logarithm triples in every layer (Dong et al. 2021). Whatever brings a larger term in lowers m.
"""

from typing import NamedTuple


class Said(NamedTuple):
    """Of one remedy."""

    order: int | None
    """m; None where nothing is left of tokens without skips."""
    theory: str
    source: str
    branch: str = "1"
    """The weight of a branch beside its skip, as a formula of L (depth), in post-norm networks."""


CUBE = "Dong et al. 2021; derived here"
SAID: dict[str, Said] = {
    "none": Said(
        3, "Without skips the log of the residual triples in every layer; a skip makes the fall exponential "
        "at most, as the branch adds what tokens have in common.", CUBE,
    ),
    "shaped": Said(
        1, "alpha I passes deviations on as they are. With W_Q = 0 attention is C, and at 1, 1, 1 its map "
        "of tokens is the identity: no collapse at any depth, with or without skips.",
        "Noci et al. 2023; He & Hofmann 2023",
    ),
    "attnscale": Said(
        3, "P - C is of the order r^2, so 1 + w changes the factor and not the law; at its start, w = 0, it "
        "changes nothing at all.", "Wang et al. 2022; order derived here",
    ),
    "centred": Said(
        1, "Rows sum to zero, so the common token is taken out: what is left of it is of the order r^2 and "
        "deviations r^3, relative to each other r. The eigenvalue 1 that outgrows all others is gone.",
        "Ali et al. 2023; Nait Saada et al. 2025; order derived here",
    ),
    "sinkhorn": Said(
        3, "Dividing columns adds to scores what depends on j alone, which is common to all rows: the law "
        "is softmax's, doubly exponential.", "Lapenna et al. 2026 (abstract); derived here",
    ),
    "logn": Said(
        3, "A factor on scores sharpens attention while tokens differ, and is a constant in front of r^3 "
        "once they do not. In their model tokens contract where gamma < 1 / (1 - rho), rho their cosine.",
        "Chen et al. 2026 (abstract); order derived here",
    ),
    "differential": Said(
        3, "Both attentions have rows that sum to one number and differ by r^2: so does what is left; "
        "the norm of heads gives attention's branch a fixed size.", "Ye et al. 2024; derived here",
    ),
    "differential2": Said(
        1, "lambda is of the token itself, so rows sum to numbers that differ by r: as with gates the fall "
        "without skips is exponential, not doubly so. About a half at the start, it halves attention's "
        "branch.", "derived here", "1/2",
    ),
    "rezero": Said(
        None, "At its start every layer is the identity: no collapse and no signal through branches, until "
        "the weights leave zero. Without skips nothing at all passes.", "Bachlechner et al. 2020",
    ),
    "skipinit": Said(
        None, "As ReZero, with a number for each branch: the identity at the start.", "De & Smith 2020"
    ),
    "sqrtl": Said(
        3, "L branches of weight 1/sqrt(L) add a variance that does not grow with L, so tokens stay apart at "
        "any depth. Without skips a common factor is all it is.", "Noci et al. 2022", "L^(-1/2)",
    ),
    "lnscale": Said(
        3, "Branches of a pre-norm network add variance 1/l in layer l: the stream grows as log L in place "
        "of L, and late layers count for less. Without skips a common factor.", "Sun et al. 2025",
    ),
    "deepnorm": Said(
        3, "The branch has weight (8L)^(-1/2) beside a skip of (2L)^(1/4): updates are bounded at any depth. "
        "Without skips a common factor.", "Wang et al. 2022", "(8L)^(-1/2) (2L)^(-1/4)",
    ),
    "lambda": Said(
        3, "Beside a skip of weight lambda attention's branch weighs 1/lambda: the fall is slower, and stays "
        "exponential. Without skips there is nothing to weigh.", "Joseph et al. 2024; derived here", "1/2",
    ),
    "valueresidual": Said(
        2, "Rows that differ by r^2 mix first-layer values that differ by a constant: r^2 in place of r^3. "
        "The log doubles in place of tripling: doubly exponential still.", "derived here",
    ),
    "neutreno": Said(
        0, "V_1 reaches every layer past attention, so a difference of fixed size is added in each: tokens "
        "cannot become more alike than the first values let them.", "Nguyen et al. 2023; derived here",
    ),
    "featscale": Said(
        3, "It weighs what attention adds by a constant; at its start, s = t = 0, it changes nothing.",
        "Wang et al. 2022; derived here",
    ),
    "contranorm": Said(
        3, "(1 + s) I - s S multiplies deviations by about 1 + s and leaves the common token: a factor in "
        "front of r^3, and in a whole network (1 + s) against each layer's fall.",
        "Guo et al. 2023; derived here",
    ),
    "gate": Said(
        1, "A gate of the token's own makes equal averages differ by r: without skips the fall is "
        "exponential in place of doubly so. Half open at the start, it halves attention's branch.",
        "derived here", "1/2",
    ),
    "headgate": Said(
        1, "As the gate by entry, with one factor a head: exponential in place of doubly exponential, and "
        "half the branch at the start.", "derived here", "1/2",
    ),
}  # fmt: skip


def said_of(remedy: str) -> Said | None:
    """Of a remedy as `contranorm:s=0.1` has it, whatever its numbers; None of one that is not known here."""
    return SAID.get(remedy.partition(":")[0])
