"""Both papers, figure by figure: run again, with the published numbers beside ours."""

from rankscope.studies.catalogue import STUDIES
from rankscope.studies.reproduce import chosen, reproduce, write_page
from rankscope.studies.study import Comparison, Outcome, Setup, Study

__all__ = ["STUDIES", "Comparison", "Outcome", "Setup", "Study", "chosen", "reproduce", "write_page"]
