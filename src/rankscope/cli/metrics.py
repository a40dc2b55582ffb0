"""`rankscope metrics`: what is measured, in words."""

from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.cli import names
from rankscope.cli import options as opt
from rankscope.cli.complete import one

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
        typer.Argument(metavar="[NAME]", help="One of them, in full.", autocompletion=one(names.METRICS)),
    ] = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """List the metrics: what each is, between which values it lies, and what small and large ones mean."""
    from rankscope.cli.show import machine, say
    from rankscope.metrics import METRICS, metric

    found = list(METRICS.values()) if name is None else [metric(name)]
    if as_json:
        machine([described(each) for each in found])
        return
    if name is not None:
        say(*told(found[0]))
        return
    for of in dict.fromkeys(each.of for each in found):
        say(f"{OF[of][0].upper()}{OF[of][1:]}:", "")
        for each in found:
            if each.of == of:
                say(*in_the_list(each))
        say("")
    if not quiet:
        say(*(line for part in LEGEND for line in (part, "")))
        say("rankscope metrics NAME: more of one. rankscope measure --metrics NAME,NAME measures them.")


def described(each: "Metric") -> dict[str, Any]:
    """A metric as JSON has it."""
    words = {} if each.meaning is None else each.meaning._asdict()
    return {
        "name": each.name, "symbol": each.symbol, "tex": each.tex, "of": each.of,
        "definition": definition(each), **words,
    }  # fmt: skip


def told(each: "Metric") -> list[str]:
    """All that is known of one, in lines."""
    lines = [f"{each.name}: {each.symbol}", "", f"Is {OF[each.of]}.", definition(each)]
    if each.meaning is not None:
        words = each.meaning
        lines += [f"Range: {words.range}.", f"Small: {words.small}.", f"Large: {words.large}."]
        lines += [f"Where all tokens are equal: {words.equal}."] if words.equal else []
        lines += [words.note] if words.note else []
    scaled = (
        "the same" if each.degree == 0 else f"{'c' if each.degree == 1 else f'c^{each.degree:g}'} times it"
    )
    lines += [f"Of tokens c times as large: {scaled}."] if each.of in ("tokens", "heads") else []
    return [*lines, "", f"rankscope measure --metrics {each.name}"]


def definition(each: "Metric") -> str:
    """The first paragraph of what computes it."""
    compute: Any = each.compute
    words = (getattr(compute, "func", compute).__doc__ or "").partition("\n\n")[0].partition("\n    >>>")[0]
    return " ".join(words.split()).replace("`", "")


def in_the_list(each: "Metric") -> list[str]:
    """Two lines: its name, symbol and range, and what its ends mean."""
    words = each.meaning
    assert words is not None
    ends = f"    small: {words.small}; large: {words.large}"
    return [f"{each.name:<27} {each.symbol:<24} {words.range}", *wrap(ends, 78, subsequent_indent="    ")]
