"""Training runs as they are written: metrics by layer and step, alarms, loss spikes, and runs side by side.

`training.py` has the numbers of a run, `figures.py` draws them, and `run.py` makes a result of that, and of
several side by side. `signals.py` reads numbers of trainings from wherever they are, and `spikes.py` finds which of
them moved before each spike of a loss. Reading needs no torch.
"""

from rankscope.trainings.figures import STEPS, ends, layer_curves, layer_map, path_shares, run_curves, side_by_side
from rankscope.trainings.run import RunComparison, TrainingRun, compare_runs, read_training
from rankscope.trainings.signals import read_signals, run_events, run_loss, split_loss
from rankscope.trainings.spikes import SURE, Signal, Spikes, find_spikes, order_of_events
from rankscope.trainings.training import (
    ALARMS,
    CERTIFICATES,
    CERTIFICATES_TABLE,
    NAMES,
    PATHS,
    TRAINING,
    TRAINING_TABLE,
    Grid,
    decades,
    in_stack,
    stamp,
    title_of,
)

__all__ = [
    "ALARMS", "CERTIFICATES", "CERTIFICATES_TABLE", "Grid", "NAMES", "PATHS", "RunComparison", "STEPS", "SURE",
    "Signal", "Spikes", "TRAINING", "TRAINING_TABLE", "TrainingRun", "compare_runs", "decades", "ends", "find_spikes",
    "in_stack", "layer_curves", "layer_map", "order_of_events", "path_shares", "read_signals", "read_training",
    "run_curves", "run_events", "run_loss", "side_by_side", "split_loss", "stamp", "title_of",
]  # fmt: skip
