"""`Monitor`: measures a model while it trains.

What happens when `Monitor.step` is called (`monitor.py`):

1. The step counter moves (`schedule.py`), and `loss` and other numbers of the step are kept.
2. Unless the counter has crossed a multiple of `every`, recording is switched on or off for the next step,
   and that is all.
3. Otherwise the model is measured. With a probe, `probe.py` calls the model with the fixed batch, in eval
   mode and with everything that training uses put back afterwards (`training_state.py`), reads each layer
   with `rankscope.live.watch`, hands embeddings of its samples to `embeddings.py`, and differentiates the
   probe's loss. Inline, without a probe, `inline.py` has
   read the training batches of this step as they passed.
4. `block_jacobians.py` adds norms and alignments of the blocks' Jacobians on the probe, `weight_gradients.py`
   gradients and updates of the weights, recorded around `optimizer.step()`, and `weight_spectra.py` the norms and
   stable ranks of weights; every `paths_every` steps `probe_paths.py` adds path shares and certificates.
5. `running_sums.py` reduces all values to sums, `distributed.py` merges those of all processes.
6. `measurement.py` makes them rows of a table; the rules of `alarm_rules.py` raise alarms (`alarms.py`), and
   `forecast_check.py` compares them with what was forecast of the training.
7. The first process writes measurement and alarms to the run folder and calls the writers
   (`rankscope.live.writers`); alarms then warn, stop the training or call a function.

What fails on the way is kept away from the training by `failures.py`.

The callbacks of `rankscope.live.loops` call `Monitor.step` for the Hugging Face Trainer and for Lightning.
"""

from rankscope.live.monitor.alarm_rules import default_rules
from rankscope.live.monitor.alarms import AlarmRule, AlarmSource, Fault
from rankscope.live.monitor.measurement import Alarm, Measurement
from rankscope.live.monitor.monitor import Monitor

__all__ = ["Alarm", "AlarmRule", "AlarmSource", "Fault", "Measurement", "Monitor", "default_rules"]
