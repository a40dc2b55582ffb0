"""Where looks are written besides the run folder: tools that people have open anyway.

Each is given to a monitor as one of its `sinks`, opens at the first look, and needs a package of its own but
for `JSONLines`. A sink of your own is a function of a `Look`.
"""

from rankscope.live.sinks.json_lines import JSONLines
from rankscope.live.sinks.mlflow import MLflow
from rankscope.live.sinks.tensorboard import TensorBoard
from rankscope.live.sinks.trackio import Trackio
from rankscope.live.sinks.wandb import WandB

__all__ = ["JSONLines", "MLflow", "TensorBoard", "Trackio", "WandB"]
