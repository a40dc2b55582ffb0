"""What can be said of a network before it is trained: where its tokens and gradients go, and whether it will train.

`forecast.py` has `forecast` and what it returns. It asks `readings.py` for what is read off a network at its
initialisation, `layers.py` for tokens and gradients layer by layer (`mean_field.py`, `phases.py` and `gradients.py`
have the theory and the arithmetic), `predictor.py` for what became of trained networks that read alike, `verdict.py`
for sentences, and `changes.py` for what might mend it. A module of a person's own is read by `live_module.py`: it goes
forward in `live_passes.py`, and `weight_kinds.py` tells its weights apart. `calibration.py` has
what became of the trainings that the predictor was fitted to (`rankscope_studies.forecasts`).
"""

from rankscope.forecasts.calibration import DIGITS, LEARNT, STEPS, TABLE, outcomes, trainings
from rankscope.forecasts.changes import changes
from rankscope.forecasts.forecast import Forecast, Mend, forecast, forecast_of
from rankscope.forecasts.layers import by_layer
from rankscope.forecasts.mean_field import Moments, mean_field
from rankscope.forecasts.phases import giorlandino
from rankscope.forecasts.plan import Plan, goes_onto, point_of
from rankscope.forecasts.predictor import POINTS, WEIGHTS, Outcome, Predictor

__all__ = [
    "DIGITS", "Forecast", "LEARNT", "Mend", "Moments", "Outcome", "POINTS", "Plan", "Predictor", "STEPS", "TABLE",
    "WEIGHTS", "by_layer", "changes", "forecast", "forecast_of", "giorlandino", "goes_onto", "mean_field", "outcomes",
    "point_of", "trainings",
]  # fmt: skip
