"""No two of many lines look the same."""

from rankscope.figures import line_style
from rankscope.figures.page import DASHES, SYMBOLS


def test_no_two_of_many_lines_look_the_same() -> None:
    styles = [line_style(number) for number in range(60)]
    assert len({(style.colour, SYMBOLS[style.marker], DASHES[style.marker]) for style in styles}) == 60
