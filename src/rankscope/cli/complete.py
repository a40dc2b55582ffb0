"""What a shell offers on Tab."""

from collections.abc import Callable, Iterable

import typer

from rankscope.cli import names

Completer = Callable[[str], list[str]]


def one(known: Iterable[str]) -> Completer:
    """Names of which one is given."""
    offered = list(known)

    def complete(incomplete: str) -> list[str]:
        return [name for name in offered if name.startswith(incomplete)]

    return complete


def several(known: Iterable[str]) -> Completer:
    """Names joined by commas: those not given yet, after those that are.

    >>> several(("mu", "entropy"))("mu,e")
    ['mu,entropy']
    """
    offered = list(known)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        given = before.split(",")
        return [f"{before}{comma}{name}" for name in offered if name.startswith(last) and name not in given]

    return complete


def compared(ctx: typer.Context, incomplete: str) -> list[str]:
    """A model, or after its colon a variant. Bash takes the colon for a word of its own."""
    before = ctx.params.get("things") or ()
    if before and before[-1] == ":":
        return one(names.VARIANTS)(incomplete)
    model, colon, variant = incomplete.partition(":")
    if colon:
        return [f"{model}:{name}" for name in one(names.VARIANTS)(variant)]
    return one(names.MODELS)(incomplete)


def figure(ctx: typer.Context, incomplete: str) -> list[str]:
    """The figures of the paper that was named before."""
    return one(names.FIGURES.get(str(ctx.params.get("paper")), ()))(incomplete)
