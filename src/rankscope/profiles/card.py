"""What a profile and a summary show of themselves: a card in a notebook, a few lines in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankscope.cards import card, counted, lines
from rankscope.figures.text import power
from rankscope.profiles.views import CurveView, zeros_said

if TYPE_CHECKING:
    from rankscope.figures.matplotlib import Figure

DRAWN = 8
"""Lines of a figure at most: there are as many colours."""


def curves_repr(kind: str, many: tuple[int, str], curves: Sequence[CurveView]) -> str:
    """Its size, and the ends of each line; `many` is of how many samples, or excerpts."""
    rows = [[each.label, each.metric, f"{power(each.ends[0])} → {power(each.ends[-1])}"] for each in curves]
    return lines(f"{kind}: {_size(many, curves)}", rows)


def curves_card(kind: str, many: tuple[int, str], curves: Sequence[CurveView], metrics: int) -> str:
    """The first of so many metrics: its figure, and the ends of each line."""
    title = f"{kind}: {_size(many, curves)}"
    if not curves:
        return card(title, None, (), ())
    also = f" And {counted(metrics - 1, 'other metric')}: plot(metric), table." if metrics > 1 else ""
    said = [f"{curves[0].metric}. {curves[0].statistic.capitalize()}.{also}", zeros_said(curves)]
    if len(curves) > DRAWN:
        said.append(f"Drawn: the first {DRAWN} of {len(curves)} lines.")

    def draw() -> "Figure":
        from rankscope.figures.plot import plot
        from rankscope.profiles.figures import curves_chart

        return plot(curves_chart(curves[:DRAWN]))

    return card(title, draw, *_table(curves), [note for note in said if note])


def _size(many: tuple[int, str], curves: Sequence[CurveView]) -> str:
    if not curves:
        return "no rows"
    networks = counted(len({each.variant for each in curves}), "network")
    layers = counted(max(each.depth for each in curves), "layer")
    arithmetics = ", ".join(dict.fromkeys(each.arithmetic for each in curves))
    return f"{networks}, {counted(*many)}, {layers}, {arithmetics}"


def _table(curves: Sequence[CurveView]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines; the floor is spoken of only where a line ends at it."""
    headings, rows = (
        ["", "first", "middle", "last"],
        [[each.label, *map(power, each.ends)] for each in curves],
    )
    if all(each.floor_from is None for each in curves):
        return headings, rows
    floors = ["" if each.floor_from is None else f"from layer {each.floor_from}" for each in curves]
    return [*headings, "at floor"], [[*row, floor] for row, floor in zip(rows, floors, strict=True)]
