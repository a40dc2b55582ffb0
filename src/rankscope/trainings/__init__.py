"""Training runs as they are written: metrics by layer and step, alarms, loss spikes, and runs side by side.

`training.py` has the numbers of a run, `figures.py` draws them, and `run.py` makes a result of that. `signals.py` reads
numbers of trainings from wherever they are, `spikes.py` finds what came before each spike of a loss
(`spike_report.py`), and `comparison.py` sets runs side by side. Reading needs no torch.
"""

from rankscope.trainings.comparison import RunComparison, compare_runs
from rankscope.trainings.run import TrainingRun, read_training
from rankscope.trainings.signals import read_signals
from rankscope.trainings.spike_report import SURE, Spikes
from rankscope.trainings.spikes import Signal, find_spikes, order_of_events
from rankscope.trainings.training import CERTIFICATES, TRAINING, TRAINING_TABLE, in_stack

__all__ = [
    "CERTIFICATES", "RunComparison", "SURE", "Signal", "Spikes", "TRAINING", "TRAINING_TABLE", "TrainingRun",
    "compare_runs", "find_spikes", "in_stack", "order_of_events", "read_signals", "read_training",
]  # fmt: skip
