"""`Monitor`: measures a model while it trains.

A monitor is a schedule, a list of instruments (`instrument.py` says what one is, and which there are), alarm rules and
a run folder. What happens when `Monitor.step` is called (`monitor.py`):

1. The step counter moves, and `loss` and other numbers of the step are kept (`instrument.py`).
2. Unless the counter has crossed a multiple of `every`, recording is switched on or off for the next step,
   and that is all.
3. Otherwise each instrument reads, by itself: the probe or training batches first, each with all that training uses
   put back afterwards (`training_state.py`).
4. `measurement.py` reduces all values to sums, and merges those of all processes.
5. It makes them rows of a table; the rules of `alarm_rules.py` raise alarms (`alarms.py`), and
   `forecast_check.py` compares them with what was forecast of the training.
6. The first process writes measurement and alarms to the run folder and calls the writers
   (`rankscope.monitor.writers`); alarms then warn, stop the training or call a function.

What fails on the way is kept away from the training by `Failures` (`measurement.py`).

The callbacks of `rankscope.monitor.loops` call `Monitor.step` for the Hugging Face Trainer and for Lightning.
"""

from rankscope.monitor.alarm_rules import default_rules
from rankscope.monitor.alarms import AlarmRule, AlarmSource, Fault
from rankscope.monitor.block_jacobians import leading_vectors
from rankscope.monitor.instrument import Instrument
from rankscope.monitor.measurement import Alarm, Measurement, MetricValues, RunWriter, alarm_rows
from rankscope.monitor.monitor import INSTRUMENTS, Monitor, MonitorOptions
from rankscope.monitor.probe import GRADIENT_METRIC, TokenGradients, loss_in, token_gradients
from rankscope.monitor.training_state import preserved_training_state
from rankscope.monitor.weight_gradients import Kind, ParameterSlice, attending, kind_slices

__all__ = [
    "Alarm", "AlarmRule", "AlarmSource", "Fault", "GRADIENT_METRIC", "INSTRUMENTS", "Instrument", "Kind", "Measurement",
    "MetricValues", "Monitor", "MonitorOptions", "ParameterSlice", "RunWriter", "TokenGradients", "alarm_rows",
    "attending", "default_rules", "kind_slices", "leading_vectors", "loss_in", "preserved_training_state",
    "token_gradients",
]  # fmt: skip
