"""Every metric: symbol, definition, range, and what becomes of it when tokens become the same."""

from functools import partial

from rankscope.metrics import METRICS, Metric
from sitegen.docstrings import markdown, of
from sitegen.markdown import math, table

KINDS = {
    "tokens": ("Of tokens", "Read off the tokens X of each layer, `[batch, token, width]`, n of them."),
    "attention": (
        "Of attention",
        "Read off each head's attention matrix P: row i holds the weights with which token i averages.",
    ),
    "scores": (
        "Of scores",
        "Read by `watch` and `Monitor` off what the softmax takes, `s_ij` of query i and key j; not by `measure`.",
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
    meaning = metric.meaning
    assert meaning is not None
    written = f"Written {math(metric.tex)}; in a terminal {metric.symbol}."
    row = [meaning.range, meaning.equal, _scaled(metric), _floor(metric)]
    head = ["range", "where all tokens are equal", "where tokens are c times as large", "floor"]
    words = f"Small: {meaning.small}. Large: {meaning.large}. {meaning.note}".strip()
    return "\n\n".join([f"### {metric.name}", markdown(of(compute)), written, words, table(head, [row])])


def _scaled(metric: Metric) -> str:
    if metric.of in ("attention", "scores", "routing"):
        return "not of their size"
    return {0: "the same", 1: "c times", 2: "c² times"}[int(metric.degree)]


def _floor(metric: Metric) -> str:
    if metric.count:
        return "none: a count"
    power = f"({{}})^{metric.power}" if metric.power != 1 else "{}"
    return power.format("8 eps") + ("" if metric.scale is None else " times the size of what it is read off")
