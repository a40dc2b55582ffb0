"""`rankscope metrics`: what is measured, in words."""

from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.cli import names
from rankscope.cli import options as opt
from rankscope.cli.show import machine, say

if TYPE_CHECKING:
    from rankscope.metrics import Metric

OF = {
    "tokens": "of tokens X, a number a layer",
    "attention": "of attention P, a number a head and layer",
    "heads": "of what each head adds, a number a head and layer",
    "routing": "of how a mixture of experts routes tokens, a number a layer",
}
"""What a metric is of, as a heading."""
LEGEND = (
    "res X: tokens less their mean. n tokens of width d; ‖ ‖₁,∞ is the root of largest column sum times "
    "largest row sum, ‖ ‖_F the root of the sum of squares, ‖ ‖₂ and σ₁ the largest singular value.",
    "Relative metrics are shares of the tokens' size, so that networks can be compared; in the ‖ ‖₁,∞ and "
    "max norms they can be above 1, up to 2: rankscope metrics relative_residual says why.",
    "residual@argmin and the like take the residual about another centre (midrange, argmin); head_mu and the "
    "like read a metric of tokens off what each head adds.",
)


def metrics(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="A metric to explain in full.", autocompletion=names.complete_one(names.METRICS)
        ),
    ] = None,
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """List the metrics: what each is, between which values it lies, and what small and large ones mean."""
    from rankscope.metrics import METRICS, metric

    chosen = list(METRICS.values()) if name is None else [metric(name)]
    if printing.as_json:
        return machine([described(known) for known in chosen])
    if name is not None:
        return say(*explanation(chosen[0]))
    for of in dict.fromkeys(known.of for known in chosen):
        say(f"{OF[of][0].upper()}{OF[of][1:]}:", "")
        say(*(line for known in chosen if known.of == of for line in list_entry(known)), "")
    if not printing.quiet:
        say(*(line for part in LEGEND for line in (part, "")))
        say("rankscope metrics NAME explains one. rankscope measure --metrics NAME,NAME measures them.")


def described(metric: "Metric") -> dict[str, Any]:
    """A metric as JSON has it."""
    words = {} if metric.meaning is None else metric.meaning._asdict()
    plain = {name: getattr(metric, name) for name in ("name", "symbol", "tex", "of")}
    return {**plain, "definition": definition(metric), **words}


def explanation(metric: "Metric") -> list[str]:
    """All that is known of a metric, in lines."""
    lines = [f"{metric.name}: {metric.symbol}", "", f"Is {OF[metric.of]}.", definition(metric)]
    if metric.meaning is not None:
        words = metric.meaning
        lines += [f"Range: {words.range}.", f"Small: {words.small}.", f"Large: {words.large}."]
        lines += [f"Where all tokens are equal: {words.equal}."] if words.equal else []
        lines += [words.note] if words.note else []
    scaled = "the same" if metric.degree == 0 else f"{'c' if metric.degree == 1 else f'c^{metric.degree:g}'} times it"
    lines += [f"Of tokens c times as large: {scaled}."] if metric.of in ("tokens", "heads") else []
    return [*lines, "", f"rankscope measure --metrics {metric.name}"]


def definition(metric: "Metric") -> str:
    """The definition of a metric: the first paragraph of the docstring of its function."""
    compute: Any = metric.compute
    words = (getattr(compute, "func", compute).__doc__ or "").partition("\n\n")[0].partition("\n    >>>")[0]
    return " ".join(words.split()).replace("`", "")


def list_entry(metric: "Metric") -> list[str]:
    """A metric in two lines: name, symbol and range, and what small and large values mean."""
    words = metric.meaning
    assert words is not None
    ends = f"    small: {words.small}; large: {words.large}"
    return [f"{metric.name:<27} {metric.symbol:<24} {words.range}", *wrap(ends, 78, subsequent_indent="    ")]
