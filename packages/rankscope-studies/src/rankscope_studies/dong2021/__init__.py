"""Dong, Cordonnier, Loukas 2021: pure attention loses rank doubly exponentially with depth."""

from rankscope_studies.dong2021 import fig2, fig3, fig4, lengths, rate
from rankscope_studies.study import Study

STUDIES: tuple[Study, ...] = tuple(figure.STUDY for figure in (fig2, fig3, fig4, lengths, rate))
