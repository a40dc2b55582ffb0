"""Wu, Ajorlou, Wang, Jegelka, Jadbabaie 2024: the role of attention masks and LayerNorm."""

from rankscope_studies.study import Study
from rankscope_studies.wu2024 import fig1, fig2, fig3, fig4, fig6, fig8, fig9, thm3

STUDIES: tuple[Study, ...] = tuple(figure.STUDY for figure in (fig1, fig2, fig3, fig4, fig6, fig8, fig9, thm3))
