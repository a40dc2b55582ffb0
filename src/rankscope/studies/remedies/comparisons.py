"""What was published of each remedy, and what came out here in the small.

Sizes are a thousandth of the published ones and below, tasks are others: that a claim does not come out here
is no verdict on the claim at its own size, and that it does is no proof. What can be told is what a remedy
does to tokens and to a short training, on the same weights and texts as all the others.
"""

from typing import NamedTuple

from rankscope.studies.remedies.measurements import RemedyMeasurements
from rankscope.studies.remedies.verdicts import (
    Judge,
    deeper,
    higher,
    lasting,
    learns,
    lower,
    order,
    slower,
    spread_out,
)
from rankscope.studies.study import Comparison


class Claim(NamedTuple):
    """One thing that is said of a remedy."""

    remedy: str
    what: str
    published: str
    judge: Judge


CLAIMS: tuple[Claim, ...] = (
    Claim("none", "without skips collapse is doubly exponential", "Dong et al. 2021: rate 3", order("none")),
    Claim(
        "shaped",
        "tokens stay apart without skips, at the start",
        "He & Hofmann 2023: the identity at the start; 18 layers train without skips",
        deeper("shaped", "no skips"),
    ),
    Claim(
        "shaped",
        "without skips it learns what a plain network does not",
        "He & Hofmann 2023: 18 layers, loss 1.245 without skips and norms, 1.155 with both",
        lower("shaped", "loss", "no skips"),
    ),
    Claim(
        "attnscale",
        "better in training",
        "Wang et al. 2022: up to +1.1% on ImageNet",
        higher("attnscale", "accuracy", "pre"),
    ),
    Claim(
        "attnscale",
        "tokens differ more after training",
        "Wang et al. 2022: high frequencies kept",
        higher("attnscale", "relative_residual", "pre"),
    ),
    Claim(
        "featscale",
        "better in training",
        "Wang et al. 2022: up to +1.1% on ImageNet",
        higher("featscale", "accuracy", "pre"),
    ),
    Claim(
        "featscale",
        "tokens differ more after training",
        "Wang et al. 2022: high frequencies kept",
        higher("featscale", "relative_residual", "pre"),
    ),
    Claim(
        "centred",
        "tokens stay apart for more layers, without skips",
        "Nait Saada et al. 2025; Ali et al. 2023: the outlying eigenvalue is gone",
        deeper("centred", "no skips"),
    ),
    Claim(
        "contranorm",
        "tokens stay apart for more layers",
        "Guo et al. 2023: it keeps collapse off",
        deeper("contranorm", "post", "pre"),
    ),
    Claim(
        "contranorm",
        "better in training",
        "Guo et al. 2023: GLUE 82.59 to 83.54, DeiT-24 76.76 to 81.28",
        higher("contranorm", "accuracy", "post", "pre"),
    ),
    Claim(
        "neutreno",
        "tokens stay apart for more layers",
        "Nguyen et al. 2023: less over-smoothing",
        deeper("neutreno", "post", "pre", "no skips"),
    ),
    Claim(
        "neutreno",
        "better in training",
        "Nguyen et al. 2023: images and WikiText-103",
        lower("neutreno", "loss", "pre"),
    ),
    Claim("valueresidual", "a lower loss", "Zhou et al. 2024", lower("valueresidual", "loss", "pre")),
    Claim(
        "gate", "a lower loss", "Qiu et al. 2025 (15B mixture of experts, 1.7B)", lower("gate", "loss", "pre")
    ),
    Claim("headgate", "a lower loss", "Qiu et al. 2025", lower("headgate", "loss", "pre")),
    Claim("differential", "a lower loss", "Ye et al. 2024", lower("differential", "loss", "pre")),
    Claim(
        "deepnorm",
        "post-norm networks of any depth keep tokens apart",
        "Wang et al. 2022: 1000 layers train",
        deeper("deepnorm", "post"),
    ),
    Claim(
        "deepnorm",
        "deep post-norm networks learn",
        "Wang et al. 2022: 1000 layers train",
        learns("deepnorm", "post"),
    ),
    Claim(
        "rezero",
        "deep networks learn without norms",
        "Bachlechner et al. 2020",
        learns("rezero", "pre", "post"),
    ),
    Claim(
        "skipinit",
        "deep networks learn without norms",
        "De & Smith 2020 (residual networks)",
        learns("skipinit", "pre", "post"),
    ),
    Claim("lnscale", "a lower perplexity", "Sun et al. 2025: -5 to -8%", lower("lnscale", "loss", "pre")),
    Claim(
        "sqrtl",
        "tokens stay apart for more layers",
        "Noci et al. 2022: branches of 1/sqrt(L) keep them",
        deeper("sqrtl", "post", "pre"),
    ),
    Claim(
        "sqrtl",
        "gradients of the first layer do not vanish at the start",
        "Noci et al. 2022",
        lasting("sqrtl", "gradient_first_start", "post"),
    ),
    Claim(
        "sqrtl",
        "nor do they after training",
        "Noci et al. 2022",
        lasting("sqrtl", "gradient_first_end", "post"),
    ),
    Claim(
        "lambda",
        "a heavier skip keeps tokens apart",
        "Joseph et al. 2024: collapse is prevented",
        deeper("lambda", "post", "pre"),
    ),
    Claim(
        "sinkhorn",
        "without skips it collapses doubly exponentially as well",
        "Lapenna et al. 2026 (abstract)",
        order("sinkhorn"),
    ),
    Claim(
        "sinkhorn",
        "but more slowly than softmax attention",
        "Lapenna et al. 2026 (abstract)",
        slower("sinkhorn"),
    ),
    Claim(
        "logn",
        "a temperature of ln n keeps tokens apart for more layers",
        "Chen et al. 2026 (abstract): no contraction above a critical gamma",
        deeper("logn", "post", "pre"),
    ),
    Claim(
        "sigmareparam",
        "attention's entropy does not collapse in training",
        "Zhai et al. 2023",
        spread_out("sigmareparam", "pre", "post"),
    ),
)


def comparisons(tables: RemedyMeasurements) -> list[Comparison]:
    """Those of the remedies that are in the tables."""
    known = {*tables.remedies, *tables.trained["remedy"].unique()}
    found = []
    for claim in CLAIMS:
        if claim.remedy not in known:
            continue
        came = claim.judge(tables)
        found.append(
            Comparison(
                f"{claim.remedy}: {claim.what}", claim.published, came.ours, came.agrees, came.because,
                came.verdict,
            )
        )  # fmt: skip
    return found
