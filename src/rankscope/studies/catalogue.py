"""Every study, in the order of the papers."""

from rankscope.studies.dong2021 import STUDIES as DONG
from rankscope.studies.study import Study
from rankscope.studies.wu2024 import STUDIES as WU

STUDIES: tuple[Study, ...] = (*DONG, *WU)
