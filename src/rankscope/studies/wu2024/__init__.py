"""Wu, Ajorlou, Wang, Jegelka, Jadbabaie 2024: the role of attention masks and LayerNorm."""

from rankscope.studies.study import Study

STUDIES: tuple[Study, ...] = ()
