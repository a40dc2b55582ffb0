"""Both papers, figure by figure: run again, with the published numbers beside ours."""

from rankscope_studies.reproduce import STUDIES, chosen, reproduce, write_page, write_study
from rankscope_studies.study import Comparison, PageTable, Setup, Study, StudyResult

__all__ = [
    "STUDIES", "Comparison", "PageTable", "Setup", "Study", "StudyResult", "chosen", "reproduce",
    "write_page", "write_study",
]  # fmt: skip
