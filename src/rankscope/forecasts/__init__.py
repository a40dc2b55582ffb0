"""What can be said of a network before it is trained: where its tokens and gradients go, and whether it will train.

`forecasting.py` has `forecast` and what it returns. `plan.py` makes a `Plan` of what is asked (a network, a `Design`, a
`Recipe` of the lab). Then `readings.py` says what is read off the network at its initialisation, `layers.py` where
tokens and gradients go layer by layer (`mean_field.py`, `phases.py` and `gradients.py` have the theory and the
arithmetic), `predictor.py` what became of trained networks that read alike, `verdict.py` all of it in sentences, and
`plan.py` what might mend it; `maps.py` varies two numbers of a design. A module of a person's own (`ModuleInputs`) is
read by `live_module.py`: it goes forward in `live_passes.py`, and `weight_kinds.py` tells its weights apart.
"""

from rankscope.forecasts.forecasting import Forecast, Mend, forecast, forecast_of
from rankscope.forecasts.layers import by_layer, layers_chart
from rankscope.forecasts.live_passes import ModuleInputs
from rankscope.forecasts.maps import AXES, forecast_map, map_chart
from rankscope.forecasts.mean_field import Moments, mean_field
from rankscope.forecasts.phases import giorlandino
from rankscope.forecasts.plan import PARTS, Design, Plan, changes, goes_onto, point_of
from rankscope.forecasts.predictor import (
    DIGITS,
    LEARNT,
    POINTS,
    STEPS,
    TABLE,
    WEIGHTS,
    Outcome,
    Predictor,
    outcomes,
    trainings,
)
from rankscope.forecasts.verdict import chance_words, place_of_100
from rankscope.lab import Recipe

__all__ = [
    "AXES", "DIGITS", "Design", "Forecast", "LEARNT", "Mend", "ModuleInputs", "Moments", "Outcome", "PARTS", "POINTS",
    "Plan", "Predictor", "Recipe", "STEPS", "TABLE", "WEIGHTS", "by_layer", "chance_words", "changes", "forecast",
    "forecast_map", "forecast_of", "giorlandino", "goes_onto", "layers_chart", "map_chart", "mean_field", "outcomes",
    "place_of_100", "point_of", "trainings",
]  # fmt: skip
