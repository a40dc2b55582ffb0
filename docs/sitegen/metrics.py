"""Every metric: symbol, definition, range, and what becomes of it when tokens become the same."""

from functools import partial

from rankscope.metrics import METRICS, Metric
from sitegen.docstrings import markdown, of
from sitegen.markdown import math, table

RANGES: dict[str, tuple[str, str]] = {
    "residual": ("0 and up", "0"),
    "relative_residual": ("0 to 2(1 - 1/n), mostly below 1", "0"),
    "mu": ("0 and up", "0"),
    "relative_mu": ("0 to 1", "0"),
    "spectral_residual": ("0 and up", "0"),
    "relative_spectral_residual": ("0 to 1", "0"),
    "max_residual": ("0 and up", "0"),
    "relative_max_residual": ("0 to 2(1 - 1/n), mostly below 1", "0"),
    "high_frequency_share": ("0 to 1", "0"),
    "numerical_rank": ("0 to the smaller of tokens and width", "1"),
    "affine_rank": ("0 to the smaller of tokens - 1 and width", "0"),
    "stable_rank": ("1 to the rank", "1"),
    "effective_rank": ("1 to the rank", "1"),
    "participation_ratio": ("1 to the rank", "1"),
    "sigma_min": ("0 and up", "0"),
    "mean_cosine": ("-1 to 1", "1"),
    "mean_abs_cosine": ("0 to 1", "1"),
    "residual_stable_rank": ("1 to the affine rank; 0 where tokens are equal", "how they differed last"),
    "residual_effective_rank": ("1 to the affine rank; 0 where tokens are equal", "how they differed last"),
    "residual_singular_ratio": ("0 to 1", "how they differed last"),
    "mean_cosine_gap": ("0 to 2", "0"),
    "max_cosine_gap": ("0 to 2", "0"),
    "min_cosine": ("-1 to 1", "1"),
    "dobrushin": ("0 to 1 where rows sum to one", "0 without mask and positions"),
    "entropy": ("0 to log n", "log n without mask and positions"),
    "second_singular_value": (
        "0 to the square root of n/2 where rows sum to one",
        "0 without mask and positions",
    ),
    "spectral_gap": ("0 to the square root of n where rows sum to one", "1 without mask and positions"),
    "first_token_mass": ("0 to 1", "1/n without mask and positions"),
    "row_sum_defect": ("0 and up", "as before: it says whether attention averages at all"),
    "expert_load": ("k/E to 1, k chosen of E experts", "1"),
    "expert_entropy": ("log k to log E", "log k"),
}
"""Of each metric its range, and its value where all tokens are equal."""
KINDS = {
    "tokens": ("Of tokens", "Read off the tokens X of each layer, `[batch, token, width]`, n of them."),
    "attention": (
        "Of attention",
        "Read off each head's attention matrix P: row i holds the weights with which token i averages.",
    ),
    "routing": ("Of routing", "Read off a mixture of experts: which experts each token goes through."),
}


def page() -> str:
    """A section for each kind, an entry for each metric."""
    parts = []
    for kind, (title, said) in KINDS.items():
        parts += [f"## {title}", said]
        parts += [entry(each) for each in METRICS.values() if each.of == kind]
    return "\n\n".join(parts)


def entry(metric: Metric) -> str:
    """What it is, between which numbers it lies, where it ends, and what its floor is."""
    compute = metric.compute.func if isinstance(metric.compute, partial) else metric.compute
    said, end = RANGES[metric.name]
    written = f"Written {math(metric.tex)}; in a terminal {metric.symbol}."
    row = [said, end, _scaled(metric), _floor(metric)]
    head = ["range", "where all tokens are equal", "where tokens are c times as large", "floor"]
    return "\n\n".join([f"### {metric.name}", markdown(of(compute)), written, table(head, [row])])


def _scaled(metric: Metric) -> str:
    if metric.of in ("attention", "routing"):
        return "not of their size"
    return {0: "the same", 1: "c times", 2: "c² times"}[int(metric.degree)]


def _floor(metric: Metric) -> str:
    if metric.count:
        return "none: a count"
    power = f"({{}})^{metric.power}" if metric.power != 1 else "{}"
    return power.format("8 eps") + ("" if metric.scale is None else " times the size of what it is read off")
