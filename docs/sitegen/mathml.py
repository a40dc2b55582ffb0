"""Formulas as MathML, which browsers draw themselves: no script, no fonts, no network."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

LONG = 40
"""Characters of TeX from which on a formula may be wider than a phone, and then scrolls."""


def drawn(formula: str, as_block: bool = False) -> str:
    """As MathML. Bars are letters here: as operators they would be stretched, and their scripts drop."""
    found = tex2mathml(formula, as_block=as_block)
    return re.sub(r"<mo[^>]*>([‖|∣∥])</mo>", r'<mi mathvariant="normal">\1</mi>', found)


def inline(translator: Any, node: nodes.math) -> None:
    """A formula in a line of text."""
    found = drawn(node.astext())
    long = len(node.astext()) > LONG
    translator.body.append(f'<span class="long-formula" tabindex="0">{found}</span>' if long else found)
    raise nodes.SkipNode


def block(translator: Any, node: nodes.math_block) -> None:
    """A formula on a line of its own, which scrolls where it is wider than the page."""
    found = drawn(node.astext(), as_block=True)
    translator.body.append(f'<div class="formula" tabindex="0">{found}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Make it one of Sphinx's ways to draw formulas."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
