"""What can be said of a network before it is trained: where its tokens and gradients go, and whether it will train.

`forecast.py` has `forecast` and what it returns. It asks `readings.py` for what is read off a network at its
initialisation, `layers.py` for tokens and gradients layer by layer (`mean_field.py`, `phases.py` and `gradients.py`
have the theory and the arithmetic), `predictor.py` for what became of trained networks that read alike, `verdict.py`
for sentences, and `changes.py` for what might mend it. A module of a person's own is read by `live_module.py`: it goes
forward in `live_passes.py`, and `weight_kinds.py` tells its weights apart. `designs.py` draws trainings of the lab at
random, `calibration.py` has what became of them, and `fitting.py` fits the predictor to that.
"""

from rankscope.forecasts.calibration import EVALUATION, LEARNT, lines_of
from rankscope.forecasts.changes import changes
from rankscope.forecasts.designs import Design, draw_design
from rankscope.forecasts.forecast import Forecast, Mend, forecast, forecast_of
from rankscope.forecasts.layers import by_layer
from rankscope.forecasts.mean_field import Moments, mean_field
from rankscope.forecasts.phases import giorlandino
from rankscope.forecasts.plan import Plan

__all__ = [
    "Design", "EVALUATION", "Forecast", "LEARNT", "Mend", "Moments", "Plan", "by_layer", "changes", "draw_design",
    "forecast", "forecast_of", "giorlandino", "lines_of", "mean_field",
]  # fmt: skip
