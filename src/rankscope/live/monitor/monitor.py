"""`Monitor`: measures a model every so many steps of its training, and writes a run folder.

The loop, or a callback of `rankscope.live.loops`, calls `Monitor.step`; the docstring of `rankscope.live.monitor` says
what happens then, file by file. With a probe, a fixed batch is measured in eval mode, and the training does not notice.
Without one, training batches are measured inline, as they pass.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rankscope.errors import MonitorError
from rankscope.live import processes
from rankscope.live.attention import OBSERVERS, AttentionObserver
from rankscope.live.block_hooks import has_listed_parts
from rankscope.live.modules import Blocks, NamedStacks, is_compiled, submodules, unwrapped
from rankscope.live.monitor import distributed
from rankscope.live.monitor.alarm_rules import default_rules
from rankscope.live.monitor.alarms import AlarmSource, RuleSet
from rankscope.live.monitor.block_jacobians import BlockJacobians
from rankscope.live.monitor.embeddings import EmbeddingsLike, ProbeEmbeddings
from rankscope.live.monitor.failures import UNMEASURED, Failures
from rankscope.live.monitor.forecast_check import ForecastCheck, TrainingForecast
from rankscope.live.monitor.inline import inline_measurement
from rankscope.live.monitor.measurement import ENTRY, Alarm, Measurement, RunWriter, rows_of
from rankscope.live.monitor.probe import GRADIENT_METRIC, LossFunction, Probe, join_gradients
from rankscope.live.monitor.probe_paths import ProbePaths
from rankscope.live.monitor.running_sums import MetricValues, joined_stacks
from rankscope.live.monitor.schedule import Schedule
from rankscope.live.monitor.weight_gradients import WeightGradients, shared_weights_notes
from rankscope.live.monitor.weight_spectra import WeightSpectra
from rankscope.live.notes import describe_model, layout_note
from rankscope.live.plan import Layers, Mask, Padding, make_plans
from rankscope.metrics import MetricsLike
from rankscope.profiles import DEFAULT_METRICS
from rankscope.results import card
from rankscope.runs import manifest_of, read
from rankscope.trainings import in_stack, read_training

LEARNT = ("grad", "update")  # what is measured of a block's weights with an optimiser
T = TypeVar("T")
Writer = Callable[[Measurement], None]  # see `rankscope.live.writers` for its optional methods


class Monitor:
    """Measures a model every so many steps of its training, and writes the measurements to a run folder.

    Call `step` after each step of the optimiser. A measurement is due when the step counter reaches or passes
    a multiple of `every`; with a probe also before the first step. Its numbers are rows of the table
    `training` of the run folder, its alarms rows of `alarms`. If the folder holds an earlier part of this
    training, `step=`, `load_state_dict` or `resume` says from which step it continues.

    What is wrong at the start is raised: an argument, a probe that the model does not take, a folder that cannot be
    written. Once a measurement has succeeded nothing is raised any more: what fails later is a warning and an alarm
    ("not measured since step N"), and the training goes on.

    Args:
        model: The model that is trained; it may be compiled, or wrapped for several processes.
        metrics: What to read at each layer, as in `watch`.
        every: Steps between two measurements.
        probe: A fixed batch to measure, as the model is called with it: a tensor, a dictionary of arguments,
            or a tuple of them. Without one, training batches are measured as they pass.
        run: The run folder.
        writers: Functions that receive every `Measurement` as well; `rankscope.live.writers` has some.
        optimizer: The optimiser, to measure gradients and updates of weights.
        spectra: Whether to measure the spectral norm and the stable rank of each block's weights as well.
        jacobians: Whether to measure the norm of each block's Jacobian on the probe, and its alignment with the next
            one's, as well; that takes as long as some 18 forward passes of the probe.
        loss: A function of what the model returns for the probe, to measure gradients at each layer's tokens;
            not needed if the model returns a loss of its own, as it does for a probe with labels.
        embeddings: To measure whether the probe's samples become the same (RankMe and its like): "mean" takes the mean
            of each sample's tokens, at every layer; a function of what the model returns for the probe gives
            `[sample, width]` or, with several views of each sample, `[sample, view, width]`.
        paths_every: Steps between measurements of path shares and certificates of the probe, a multiple of
            `every`; the model must be of a family that `load` knows.
        alarms: The rules that raise alarms; by default `default_rules()`, none: `()`.
        forecast: What `rankscope.forecast` returned of this network and training. The run says from the start what is
            expected, and then whether it holds (`monitor.forecast.sentences`); an alarm says that it does not.
        layers, blocks, padding, attention_mask, layout, attention: As in `watch`. Where the model has two stacks of
            blocks, as an encoder and a decoder, both are measured, and the stack is part of the metrics' names:
            `relative_mu/encoder`, `relative_mu/decoder`.
        step: The number of steps that the model has made already.
        first_block: The number of blocks before those of this process, where each has some of the blocks (pipeline
            stages); `layers` then count those of the whole network.

    Raises:
        MonitorError: An argument does not fit; the model cannot be called with the probe, or keeps something of the
            call; the run in the folder is of another network or probe; processes disagree, or some do not come.
        WatchError: The blocks of the model are not found.
        FileError: Another process writes to the run folder.

    >>> import tempfile, rankscope
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> with Monitor(model, "relative_mu", every=2, probe=torch.randn(2, 5, 8), run=tempfile.mkdtemp()) as m:
    ...     for _ in range(4):
    ...         m.step(loss=1.0)
    >>> rankscope.read(m.run).tables["training"]["step"].unique().sort().to_list()
    [0, 2, 4]
    """

    def __init__(
        self,
        model: nn.Module,
        metrics: MetricsLike = DEFAULT_METRICS,
        every: int = 100,
        probe: object = None,
        *,
        run: str | Path = "runs/training",
        writers: Sequence[Writer] = (),
        optimizer: Any = None,
        spectra: bool = False,
        jacobians: bool = False,
        loss: LossFunction | None = None,
        embeddings: EmbeddingsLike | None = None,
        paths_every: int | None = None,
        alarms: Sequence[AlarmSource] | None = None,
        forecast: TrainingForecast | None = None,
        layers: Layers = None,
        blocks: Blocks | NamedStacks | None = None,
        padding: Padding = "model",
        attention_mask: Mask = None,
        layout: str | None = None,
        attention: Sequence[AttentionObserver] = OBSERVERS,
        step: int = 0,
        first_block: int = 0,
    ) -> None:
        _check_arguments(model, every, probe, run, writers, loss, embeddings, step, first_block)
        self._number, self._resumed = processes.next_number("Monitor"), 0
        processes.require_all_ranks("Monitor(...)", str(self._number))
        self.model = unwrapped(model)
        self.every, self.run, self.writers = every, Path(run), tuple(writers)
        self.stage = distributed.Stage.of(first_block)
        # Of the whole network, where this process has some of its blocks; those are of one stack.
        self._layers = layers if self.stage.one_of_several and not isinstance(layers, Mapping) else None
        with distributed.failing_together():
            self.plans = make_plans(
                self.model, metrics, None if self.stage.one_of_several else layers, blocks=blocks, padding=padding,
                attention_mask=attention_mask, layout=layout, keep="embeddings" if embeddings == "mean" else (),
                attention=attention,
            )  # fmt: skip
        plans = list(self.plans.values())
        if len(plans) > 1:
            self._refuse_for_several(forecast, paths_every)
        depth = self.stage.depth(self.model, [block for plan in plans for block in plan.blocks])
        if self.stage.one_of_several and probe is not None:
            sentence = "pipeline stages are measured on training batches, which pass through all of them; got a probe"
            raise MonitorError(f"{sentence}: leave probe= out", subject="probe")
        together = plans[0].tensor_parallel
        self._counts_samples = together is None or together.index == 0
        if probe is None and is_compiled(submodules(model)):
            self._refuse_compiled()
        stacks = [name for name in self.plans if name]
        self.rules = RuleSet(default_rules() if alarms is None else alarms, stacks)
        self.forecast = None if forecast is None else ForecastCheck(forecast, whole=layers is None)
        if self.forecast is not None:
            self.rules = RuleSet([*self.rules.rules, self.forecast])
        names = [metric.name for metric in plans[0].metrics]
        options = {"metrics": names, "every": every, "paths_every": paths_every, "alarms": self.rules.names}
        options |= {
            "probe": probe is not None,
            "optimizer": optimizer is not None,
            "loss": loss is not None,
            "embeddings": None if embeddings is None else "mean" if embeddings == "mean" else "a function",
            "spectra": spectra,
            "jacobians": jacobians,
        }
        distributed.require_agreement("metrics and steps", options)
        self.embeddings = None if embeddings is None else ProbeEmbeddings(embeddings, self._counts_samples)
        self.probe = None if probe is None else Probe.of(probe, loss, self.embeddings, together)
        distributed.require_agreement("labels of the probe", self.probe is not None and self.probe.has_loss)
        self.jacobians = [BlockJacobians(model, plan, self.probe) for plan in plans if jacobians]
        self.paths = None if paths_every is None else ProbePaths(model, self.probe, every, paths_every)
        of_each = " and ".join(f"{len(plan.blocks)} in its {name}" for name, plan in self.plans.items() if name)
        self._what = f"a network of {depth} layers{f' ({of_each})' if of_each else ''}, measured on "
        self._what += "training batches" if self.probe is None else self.probe.description
        if probe is None and is_compiled(submodules(model)):
            torch.compiler.reset()  # graphs of earlier calls have no hooks
        counts = self.stage.counts
        of_weights = [(plan.blocks, counts, plan.called) for plan in plans]
        self.gradients = [WeightGradients(optimizer, *given) for given in of_weights if optimizer is not None]
        self.spectra = [WeightSpectra(*given) for given in of_weights if spectra]
        self.inline = [inline_measurement(self.model, plan) for plan in plans if probe is None]
        self._recorders = [*self.inline, *self.gradients]
        self._notes = self._initial_notes(names)
        self.schedule = Schedule(step)
        self.should_stop = False  # True once an alarm has said that the training should end
        self._scalars: dict[str, list[Tensor]] = {}
        self.last: Measurement | None = None  # the last measurement
        self._overdue = False  # True if a measurement of training batches waits for a step that is recorded
        self._failures = Failures(lambda: self.steps)
        self._raised: tuple[Alarm, ...] = ()  # alarms of rules that wait to be acted upon
        self._run_writer: RunWriter | None = None
        # The last step of an earlier part of this run, until it is said from where it continues.
        self._earlier: int | None = None
        try:
            self._run_writer = self._open_run(names)
            last = None if self._run_writer is None else self._run_writer.measurements.last
            self._earlier = distributed.from_writer(last)
            if self._earlier is None:
                self._write_forecast()
                self._begin()
            elif step:
                self.resume(step)
            self._act()
        except BaseException:
            with suppress(Exception):
                self.close()
            raise

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = "a probe" if self.probe is not None else "training batches"
        return f"Monitor({type(self.model).__name__}, {what} every {self.every} steps, at step {self.steps})"

    def _repr_html_(self) -> str:
        """For notebooks: what was measured so far, as the run folder has it, and what is not."""
        rows, draw = [["measured on", self._what.partition("measured on ")[2]], ["step", f"{self.steps:,}"]], None
        if self._run_writer is not None and self.last is not None:
            run = read_training(self._run_writer.store.folder)
            rows += [["so far", run.sentence]]
            draw = run.plot if run.metrics else None
        return card(repr(self), draw, ("", ""), rows, self.notes)

    @property
    def steps(self) -> int:
        """The step counter: the number of the last step."""
        return self.schedule.step

    @property
    def recording(self) -> bool:
        """True if gradients or training batches of the step that comes next are recorded."""
        return any(part.recording for part in self._recorders)

    @property
    def notes(self) -> list[str]:
        """Sentences about what is not measured, about rules that can raise nothing, and about what fails."""
        measured = (*self.gradients, *self.spectra, self.probe, *self.jacobians, self.embeddings, self.paths)
        parts = [part for part in measured if part is not None]
        notes = [*dict.fromkeys(note for part in parts for note in part.notes), *self._notes]
        notes += [*self._failures.sentences.values(), *self.rules.over]
        for plan in self.plans.values() if self.gradients or self.spectra else ():
            notes += shared_weights_notes(plan.blocks, plan.called)
        for plan in [part.plan for part in self.inline] or self.plans.values():
            if self.last is not None and not plan.layout_known and layout_note(plan) not in notes:
                notes.append(layout_note(plan))
            if self.last is not None:
                notes += [remark for remark in plan.remarks if remark not in notes]
            if plan.decoder and plan.unmasked:
                counts = "padding of the decoder, if there is any, counts as tokens, as no mask of it was found"
                notes.append(f"{counts}: call the model with one (decoder_attention_mask), or give padding=")
        if self.gradients and self.schedule.counted and not self.gradients[0].steps:
            made = f"in {self.schedule.counted} calls of monitor.step the optimizer that was given made no step"
            notes.append(f"gradients and updates of weights are not measured: {made}")
        first, calls = self.schedule.first, self.schedule.counted
        if calls > 1 and self.steps // self.every == first // self.every:
            came = f"monitor.step was called {calls} times, and has come to step {self.steps}"
            notes.append(f"no step after {first} was measured: one is at each multiple of every={self.every}; {came}")
        return notes

    def step(self, step: int | None = None, *, loss: Any = None, **scalars: Any) -> None:
        """Count a step of the optimiser, and measure the model if a measurement is due (`Schedule`).

        If training batches fall due at a step that was not recorded, because the counter leapt farther than
        before, the next step is measured instead. Once a measurement has succeeded, nothing is raised.

        Args:
            step: The number of the step; by default one more than the last.
            loss: The loss of the step: a number, or a tensor of one.
            **scalars: Further numbers of the step, such as `lr`. All are averaged from measurement to measurement.

        Raises:
            MonitorError: The run folder holds an earlier part of the run; or, before the first measurement, the step is
                not later than the last one, or training batches are measured and the model was not called.
        """
        self._refuse_earlier()
        with self._failures.contained("steps are not counted"):
            self.schedule.advance(step)
            given = {"loss": loss, **scalars}
            for name, value in [(name, _scalar(value)) for name, value in given.items() if value is not None]:
                self._scalars.setdefault(name, []).append(value)
            self._overdue |= self.schedule.crossed(self.every)
            if self._overdue and all(part.recording for part in self.inline):
                self._try_to_measure()
            else:
                self._prepare_recording()
        self._act()

    def measure_now(self) -> Measurement | None:
        """Measure the model now, whether or not a measurement is due.

        Returns:
            The measurement; the same again if this step was measured already. None if it failed, or if training
            batches are measured and none was read since the last step: then the next step is measured.

        Raises:
            MonitorError: The run folder holds an earlier part of the run.
        """
        self._refuse_earlier()
        if self.last is not None and self.last.step == self.steps:
            return self.last
        if self.inline and not any(part.has_recorded for part in self.inline):
            self._overdue = True
            self._prepare_recording()
            return None
        measurement = self._try_to_measure()
        self._act()
        return measurement

    def resume(self, step: int) -> None:
        """Continue after `step`, the number of steps that the model has made; what was written of later steps
        is removed. At step 0 the probe is measured again."""
        _check_step(step)
        self.load_state_dict({"step": step, "scalars": {}})

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of the training should hold for the run to continue without gap or repetition."""
        scalars = {name: list(values) for name, values in self._scalars.items()}
        state = {"step": self.steps, "scalars": scalars, "alarms": self.rules.state_dict()}
        if self.spectra:  # of this pipeline stage
            state["spectra"] = {str(self.stage.first_block): [spectra.state_dict() for spectra in self.spectra]}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: `resume` at its step, with the numbers and alarms of `state_dict()`. Rules
        that have no state there are as they were after the measurements that the run folder has."""
        step, rule_states = int(state["step"]), state.get("alarms")
        _check_step(step)
        if self._run_writer is not None:
            with self._failures.contained("later steps are not removed from the run folder"):
                self._run_writer.cut(step or -1)  # step 0 is measured again
            self._call_writers("resume", step or -1)
        if rule_states is not None and list(rule_states["rules"]) == self.rules.names:
            self.rules.load_state_dict(rule_states)
        else:
            table = None if self._run_writer is None else read(self.run).table("training")
            self.rules.replay(distributed.from_writer(table))
        vectors = state.get("spectra", {}).get(str(self.stage.first_block), [{}] * len(self.spectra))
        for spectra, begun in zip(self.spectra, vectors, strict=False):
            spectra.load_state_dict(begun)
        self.schedule = Schedule(step)
        self._resumed += 1
        self._earlier, self._scalars, self.last, self._overdue = None, {}, None, False
        if step == 0:
            self._begin()
            self._act()
        elif self.probe is not None and not self._failures.measured:
            # What is wrong with the probe is found now, not in mid-training.
            self.probe.measure(self.model, self.plans)
            for jacobians in self.jacobians:
                jacobians.measure(self.model)
            if self.embeddings is not None:
                self.embeddings.values()
            self._failures.measured = True
        self._prepare_recording()
        self._scalars = {name: list(map(_scalar, values)) for name, values in state["scalars"].items()}
        self._write_forecast()

    def close(self) -> None:
        """Remove all hooks, close the writers and release the run folder."""
        try:
            self._write_forecast()
            self._call_writers("close")
        finally:
            self._write_failures()
            for part in (*self._recorders, self._run_writer):
                if part is not None:
                    part.close()

    def _refuse_earlier(self) -> None:
        """Raise if the run folder holds an earlier part of the run and nobody has said from where it continues."""
        if self._earlier is not None:
            ways = "continue it (monitor.resume(step) or load_state_dict(...)), or give another folder"
            raise MonitorError(f"{self.run} holds a run up to step {self._earlier}: {ways}", subject="run")

    def _try_to_measure(self) -> Measurement | None:
        """Measure, and prepare for the next step whether that succeeds or not."""
        measurement = None
        with self._failures.contained(UNMEASURED):
            measurement = self._measure()
        self._failures.measured = True
        for part in self.inline:
            part.contained = True
        self._scalars, self._overdue = {}, False
        self._prepare_recording()
        return measurement

    def _act(self) -> None:
        """Warn of the alarms that rules have raised, or call their functions, whose errors are the user's own."""
        self._write_failures()
        alarms, self._raised = self._raised, ()
        self.should_stop |= self.rules.act(alarms, warn=self._run_writer is not None)

    def _write_failures(self) -> None:
        """Write the alarms of failures that no measurement was written with."""
        alarms = self._failures.take()
        if self._run_writer is not None and not self._run_writer.store.closed:
            with suppress(Exception):  # then they wait
                self._run_writer.write_alarms(self.steps, alarms)

    def _write_forecast(self) -> None:
        """Write to the run's manifest what is forecast, and whether it holds as far as is known."""
        writer = self._run_writer
        if self.forecast is None or writer is None or writer.store.closed or self._earlier is not None:
            return
        with self._failures.contained("whether the forecast holds is not written to the run folder"):
            writer.describe(forecast=self.forecast.described())

    def _read(self) -> tuple[MetricValues, Any]:
        """What this process reads of the model and of the step, and certificates if they are due: instrument by
        instrument, each of which may fail by itself."""

        def read_each(parts: Sequence[Any], read: Callable[[Any], MetricValues]) -> Callable[[], MetricValues]:
            return lambda: joined_stacks({name: read(part) for name, part in zip(self.plans, parts, strict=False)})

        values, nothing = MetricValues(), MetricValues()
        layers = "training batches are" if self.probe is None else "the probe is"
        jacobians = read_each(self.jacobians, lambda part: part.measure(self.model))
        values.update(self._taken(layers, lambda: joined_stacks(self._layers_by_stack()), nothing))
        values.update(self._taken("Jacobians of blocks are", jacobians, nothing))
        values.update(self._taken("numbers given to monitor.step are", self._numbers_of_steps, nothing))
        if not self._counts_samples:
            values = values.without_samples()
        if self.embeddings is not None:
            values.update(self._taken("embeddings are", self.embeddings.values, nothing))
        values = values.of_stage(self.stage.first_block, self._layers)
        with_rate = [] if "lr" in self._scalars else self.gradients[:1]
        gradients = read_each(self.gradients, lambda part: part.values(rate=part in with_rate))
        of_weights = self._taken("gradients and updates of weights are", gradients, nothing)
        spectra = read_each(self.spectra, lambda part: part.values())
        of_spectra = self._taken("spectra of weights are", spectra, nothing)
        certified: tuple[MetricValues, Any] = nothing, None
        if (paths := self.paths) is not None and self.schedule.crossed(paths.every):
            certified = self._taken("paths and certificates are", lambda: paths.measure(self.steps), certified)
        values.update(certified[0])
        for block_values in (of_weights, of_spectra):
            values.update(block_values.of_stage(self.stage.first_block))
        return values, certified[1]

    def _taken(self, instrument: str, read: Callable[[], T], otherwise: T) -> T:
        """What an instrument reads, or, if it fails on some rank, `otherwise` and an alarm. Ranks go on to the next
        instrument together: none waits for one that has failed."""
        with self._failures.contained(f"{instrument} not measured"):
            with distributed.failing_together():
                reading = read()
            return reading
        return otherwise

    def _layers_by_stack(self) -> dict[str, MetricValues]:
        """What the probe, or training batches, show of the layers of each stack."""
        if self.probe is not None:
            by_stack = self.probe.measure(self.model, self.plans)
        else:
            by_stack = {name: inline.values() for name, inline in zip(self.plans, self.inline, strict=True)}
        for of_stack, plan in zip(by_stack.values(), self.plans.values(), strict=True):
            join_gradients(of_stack, plan.tensor_parallel)
        return by_stack

    def _numbers_of_steps(self) -> MetricValues:
        """The numbers that `step` was given since the last measurement, such as the loss."""
        distributed.require_agreement("numbers in monitor.step", sorted(self._scalars), self.stage.first_block)
        values = MetricValues()
        for name, scalars in sorted(self._scalars.items()):
            values.add(None, name, torch.stack([scalar.double().cpu().reshape(()) for scalar in scalars]))
        return values

    def _measure(self) -> Measurement | None:
        """Measure, ask the rules for alarms, and write; `_act` warns of the alarms later."""
        processes.require_all_ranks("monitor.step", f"{self._number}/{self._resumed}/{self.steps}")
        values, certificates = self._read()
        plans = [part.plan for part in self.inline] or self.plans.values()
        read, tokens = zip(*processes.gathered((bool(values), [plan.tokens for plan in plans])), strict=True)
        if not any(read):
            return None
        longest = (max(filter(None, of_ranks), default=None) for of_ranks in zip(*tokens, strict=True))
        self.rules.set_tokens(dict(zip(self.plans, longest, strict=True)))
        rows = rows_of(self.steps, *distributed.merged_over_ranks(values.keys(), values.sums()))
        alarms: tuple[Alarm, ...] = ()
        stage = None if self.forecast is None else self.forecast.stage
        for k, rule in enumerate(self.rules.rules):
            with self._failures.contained(f"rule {k + 1} ({self.rules.names[k]}) fails"):
                alarms += tuple(rule.on_measurement(rows, self.steps))
        measurement = Measurement(self.steps, rows, (*self._failures.take(), *alarms), certificates)
        self.last = measurement
        if self._run_writer is not None:
            with self._failures.contained("measurements are not written to the run folder"):
                self._run_writer.write(measurement)
            if self.forecast is not None and self.forecast.stage != stage:
                self._write_forecast()
            self._call_writers("__call__", measurement)
        self._raised = alarms
        return measurement

    def _begin(self) -> None:
        """Measure a probe before the first step; training batches come with it."""
        if self.probe is not None:
            self._try_to_measure()
        else:
            self._prepare_recording()

    def _prepare_recording(self) -> None:
        """Switch recording on if the next step may be measured, and otherwise off."""
        on = self._overdue or self.schedule.may_cross(self.every)
        for part in self._recorders:
            part.record(on)

    def _call_writers(self, method: str, *args: Any) -> None:
        """Call a method of each writer that has it."""
        for k, writer in enumerate(self.writers):
            with self._failures.contained(f"writer {k + 1} ({type(writer).__name__}) fails in {method}"):
                getattr(writer, method, lambda *_: None)(*args)

    def _open_run(self, metrics: Sequence[str]) -> RunWriter | None:
        """Open the folder on the rank that writes; if that fails, raise on every rank."""
        run_writer, failure = None, None
        if distributed.is_writer():
            description = describe_model(self.model)
            device = ", ".join(description["model"]["devices"])
            of_stacks = [in_stack(metric, stack) for metric in metrics for stack in self.plans]
            manifest = manifest_of(description, device, "as given", "as trained", of_stacks, {})
            manifest = manifest.adding(monitored=self._what)
            try:
                run_writer = RunWriter(self.run, manifest, self.paths is not None)
                earlier = run_writer.store.run.manifests[ENTRY].more.get("monitored", self._what)
                if earlier != self._what and run_writer.measurements.last is None:
                    run_writer.store.describe(ENTRY, manifest)  # of a run that never began
                elif earlier != self._what:
                    run_writer.close()
                    sentence = f"{self.run} holds a run of {earlier}; this one is of {self._what}: give another folder"
                    raise MonitorError(sentence, subject="run")
            except Exception as error:
                failure = error
        reason = distributed.from_writer(None if failure is None else str(failure))
        if reason is not None:
            raise failure or MonitorError(reason, subject="run")
        return run_writer

    def _initial_notes(self, metrics: Sequence[str]) -> list[str]:
        """Notes on rules none of whose metrics is measured."""
        measured = [*metrics]
        inline_gradients = any(part.has_gradients for part in self.inline)
        if inline_gradients or (self.probe is not None and self.probe.has_loss):
            measured.append(GRADIENT_METRIC)
        measured += [name for part in self.spectra for name in part.names]
        measured += [name for part in self.jacobians for name in part.names]
        measured += [f"{kind}_{group}" for part in self.gradients for _, group in part.groups for kind in LEARNT]
        return self.rules.notes(measured)

    def _refuse_for_several(self, forecast: object, paths_every: object) -> None:
        """Raise if something was asked for that one stack of blocks has, and several have not."""
        holds = f"{type(self.model).__name__} is measured in {' and '.join(self.plans)}"
        way = f"name one stack, as in blocks={next(iter(self.plans.values())).stack!r}"
        for name, option in (("forecast", forecast), ("paths_every", paths_every)):
            if option is not None:
                raise MonitorError(f"{name} is about one stack of blocks; {holds}: {way}", subject=name)
        if self.stage.one_of_several:
            raise MonitorError(f"a pipeline stage has blocks of one stack; {holds}: {way}", subject="blocks")

    def _refuse_compiled(self) -> None:
        """Raise if training batches of a compiled model cannot show what was asked for."""
        shows = f"of training batches a compiled {type(self.model).__name__} shows"
        plans = self.plans.values()
        metric = next((metric.name for plan in plans for metric in plan.metrics if metric.of != "tokens"), None)
        if metric is not None:
            raise MonitorError(f"{shows} its tokens alone, not {metric}: give a probe", subject="metrics")
        if any(has_listed_parts(plan.blocks) for plan in plans):
            raise MonitorError(f"{shows} blocks that are called, not lists of parts: give a probe", subject="blocks")


def _check_arguments(
    model: object,
    every: Any,
    probe: object,
    run: object,
    writers: Any,
    loss: object,
    embeddings: object,
    step: Any,
    first_block: Any,
) -> None:
    """Raise a sentence about the first argument of `Monitor` that is of a wrong type."""
    received = {name: type(value).__name__ for name, value in locals().items()}
    is_list = isinstance(writers, Sequence) and not isinstance(writers, str)
    wrong = [w for w in writers if not callable(w) or isinstance(w, type)] if is_list else []
    no_embeddings = "there is no probe: give probe=" if probe is None else f"got {embeddings!r}"
    no_loss = "there is no probe: give probe=" if probe is None else f"got a {received['loss']}"
    for name, fits, sentence in (
        ("model", isinstance(model, nn.Module),
         f"a monitor takes a torch module; received a {received['model']}"),
        ("every", type(every) is int and every > 0,
         f"every must be a number of steps, 1 or more; got {every!r}"),
        ("run", isinstance(run, str | Path), f"run must be the path of a folder; got a {received['run']}"),
        ("loss", loss is None or (probe is not None and callable(loss)),
         f"loss must be a function of what the model returns for the probe; {no_loss}"),
        ("embeddings", embeddings is None or (probe is not None and (embeddings == "mean" or callable(embeddings))),
         f"embeddings must be 'mean', or a function of what the model returns for the probe; {no_embeddings}"),
        ("first_block", type(first_block) is int and first_block >= 0,
         f"first_block must be the number of blocks in earlier pipeline stages, 0 or more; got {first_block!r}"),
        ("writers", is_list, f"writers must be a list, writers=[...]; received a {received['writers']}"),
        ("writers", not wrong, "a writer must be a function of a Measurement, or one that is made by "
         f"rankscope.live.writers, such as JSONLines(path); got {[*wrong, None][0]!r}"),
    ):  # fmt: skip
        if not fits:
            raise MonitorError(sentence, subject=name)
    _check_step(step)


def _check_step(step: Any) -> None:
    if not isinstance(step, Integral) or int(step) < 0:
        raise MonitorError(f"step must be a whole number, 0 or more; got {step!r}", subject="step")


def _scalar(value: Any) -> Tensor:
    """A number as a tensor, left on its device: copying it would make the device wait at every step."""
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(float(value), dtype=torch.float64, device="cpu")
