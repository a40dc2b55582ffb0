"""Dong, Cordonnier, Loukas 2021: pure attention loses rank doubly exponentially with depth."""

from rankscope.studies.dong2021.fig2 import FIG2
from rankscope.studies.dong2021.fig3 import FIG3
from rankscope.studies.dong2021.fig4 import FIG4
from rankscope.studies.dong2021.lengths import LENGTHS
from rankscope.studies.dong2021.rate import RATE
from rankscope.studies.study import Study

STUDIES: tuple[Study, ...] = (FIG2, FIG3, FIG4, LENGTHS, RATE)
