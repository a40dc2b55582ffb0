"""The trainings behind the predictor of forecasts, and the registered test of what it says.

`designs.py` draws designs of the lab at random, `trainings.py` trains and reads them, `fitting.py` fits the predictor
to what became of them, and `registration.py` writes forecasts down before the trainings and scores them after.
`python -m rankscope_studies.forecasts COMMAND` runs each.
"""

from rankscope_studies.forecasts.designs import Design, draw_design
from rankscope_studies.forecasts.trainings import EVALUATION, lines_of

__all__ = ["EVALUATION", "Design", "draw_design", "lines_of"]
