"""Figures: one description of each, which `figures.plot` draws with matplotlib and `figures.page` on a page.

Only `figures.matplotlib` and `figures.plot` import matplotlib.
"""

from rankscope.figures.description import *  # noqa: F403  the names of its __all__
from rankscope.figures.description import __all__ as __all__
