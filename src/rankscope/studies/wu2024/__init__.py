"""Wu, Ajorlou, Wang, Jegelka, Jadbabaie 2024: the role of attention masks and LayerNorm."""

from rankscope.studies.study import Study
from rankscope.studies.wu2024.fig1 import FIG1
from rankscope.studies.wu2024.fig2 import FIG2
from rankscope.studies.wu2024.fig3 import FIG3
from rankscope.studies.wu2024.fig4 import FIG4
from rankscope.studies.wu2024.fig6 import FIG6
from rankscope.studies.wu2024.fig8 import FIG8
from rankscope.studies.wu2024.fig9 import FIG9
from rankscope.studies.wu2024.thm3 import THM3

STUDIES: tuple[Study, ...] = (FIG1, FIG2, FIG3, FIG4, FIG6, FIG8, FIG9, THM3)
