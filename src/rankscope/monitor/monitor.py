"""`Monitor`: measures a model every so many steps of its training, and writes a run folder.

The loop, or a callback of `rankscope.monitor.loops`, calls `Monitor.step`; the docstring of `rankscope.monitor` says
what happens then, file by file. With a probe, a fixed batch is measured in eval mode, and the training does not notice.
Without one, training batches are measured inline, as they pass.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import polars as pl
from torch import nn

from rankscope.errors import MonitorError, require, require_one_of
from rankscope.live import (
    AttentionObserver,
    Blocks,
    Layers,
    Mask,
    NamedStacks,
    Padding,
    describe_model,
    layout_note,
    make_plans,
    processes,
    unwrapped,
)
from rankscope.metrics import MetricsLike
from rankscope.monitor.alarm_rules import default_rules
from rankscope.monitor.alarms import AlarmSource, RuleSet
from rankscope.monitor.block_jacobians import BlockJacobians
from rankscope.monitor.embeddings import EmbeddingsLike, ProbeEmbeddings
from rankscope.monitor.forecast_check import ForecastCheck, TrainingForecast
from rankscope.monitor.inline import TrainingBatches
from rankscope.monitor.instrument import Instrument, Schedule, StepNumbers
from rankscope.monitor.measurement import (
    ENTRY,
    UNMEASURED,
    Alarm,
    Failures,
    Measurement,
    MetricValues,
    RunWriter,
    merged_over_ranks,
    rows_of,
)
from rankscope.monitor.probe import LossFunction, Probe
from rankscope.monitor.probe_paths import ProbePaths
from rankscope.monitor.weight_gradients import WeightGradients
from rankscope.monitor.weight_spectra import WeightSpectra
from rankscope.plugins import Group
from rankscope.profiles import DEFAULT_METRICS
from rankscope.results import card
from rankscope.runs import manifest_of, read
from rankscope.trainings import in_stack, read_training

Writer = Callable[[Measurement], None]  # see `rankscope.monitor.writers` for its optional methods
SHIPPED: Sequence[Any] = (WeightSpectra, BlockJacobians, ProbeEmbeddings, ProbePaths)
INSTRUMENTS: Group[Any] = Group(
    "instruments",
    "a class derived from Instrument, with a name",
    lambda given: isinstance(given, type) and issubclass(given, Instrument) and isinstance(given().name, str),
)
"""The instruments that need no arguments, by the names under which `Monitor(instruments=[...])` knows them."""
WATCHED = ("layers", "blocks", "padding", "attention_mask", "layout", "attention")  # options that are those of `watch`
T = TypeVar("T")


class MonitorOptions(TypedDict, total=False):
    """The options of `Monitor` beside its arguments; each may be left out."""

    writers: Sequence[Writer]
    """Functions that receive every `Measurement` as well; `rankscope.monitor.writers` has some."""
    spectra: bool
    """Whether to measure the spectral norm and the stable rank of each block's weights as well."""
    jacobians: bool
    """Whether to measure the norm of each block's Jacobian on the probe, and its alignment with the next one's, as
    well; that takes as long as some 18 forward passes of the probe."""
    loss: LossFunction | None
    """A function of what the model returns for the probe, to measure gradients at each layer's tokens; not needed if
    the model returns a loss of its own, as it does for a probe with labels."""
    embeddings: EmbeddingsLike | None
    """To measure whether the probe's samples become the same (RankMe and its like): "mean" takes the mean of each
    sample's tokens, at every layer; a function of what the model returns for the probe gives `[sample, width]` or, with
    several views of each sample, `[sample, view, width]`."""
    paths_every: int | None
    """Steps between measurements of path shares and certificates of the probe, a multiple of `every`; the model must be
    of a family that `load` knows."""
    alarms: Sequence[AlarmSource] | None
    """The rules that raise alarms; by default `default_rules()`, none: `()`."""
    forecast: TrainingForecast | None
    """What `rankscope.forecast` returned of this network and training. The run says from the start what is expected,
    and then whether it holds (`monitor.forecast.sentences`); an alarm says that it does not."""
    layers: Layers
    """The layers to measure, as in `watch`; all if None. Of several stacks of blocks each may have its own."""
    blocks: Blocks | NamedStacks | None
    """The stack of blocks where it is not found by itself, as in `watch`. Where the model has two, as an encoder and a
    decoder, both are measured, and the stack is part of the metrics' names: `relative_mu/encoder`."""
    padding: Padding
    """Which tokens are padding, as in `watch`: `[batch, token]`, True at padded ones, "model" or "none"."""
    attention_mask: Mask
    """`[batch, token]`, 1 at tokens and 0 at padding, in place of `padding`."""
    layout: str | None
    """"batch first" or "token first" where blocks do not say."""
    attention: Sequence[AttentionObserver]
    """The ways to see attention, as in `watch`."""
    first_block: int
    """The number of blocks before those of this process, where each has some of the blocks (pipeline stages); `layers`
    then count those of the whole network."""


ARGUMENTS = ("model", "metrics", "every", "probe", "instruments", "optimizer", "run", "step")
OPTIONS = (*ARGUMENTS, *MonitorOptions.__annotations__)  # all that `Monitor` takes


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
        instruments: What else to read: objects of classes derived from `rankscope.monitor.Instrument`, or names of
            instruments that an installed package adds. (Some options make instruments, too: `spectra=True` is
            `instruments=["spectra"]`.)
        optimizer: The optimiser, to measure gradients and updates of weights.
        run: The run folder.
        step: The number of steps that the model has made already.
        **options: Further options, each described in `MonitorOptions`: what else is measured (`spectra`, `jacobians`,
            `loss`, `embeddings`, `paths_every`), who hears of it (`writers`, `alarms`, `forecast`), and how the model
            is watched (`layers`, `blocks`, `padding`, `attention_mask`, `layout`, `attention`, `first_block`).

    Raises:
        MonitorError: An argument does not fit; the model cannot be called with the probe, or keeps something of the
            call; the run in the folder is of another network or probe; processes disagree, or some do not come.
        WatchError: The blocks of the model are not found.
        FileError: Another process writes to the run folder.

    >>> import tempfile, torch, rankscope
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> with Monitor(model, "relative_mu", every=2, probe=torch.randn(2, 5, 8), run=tempfile.mkdtemp()) as m:
    ...     for _ in range(4):
    ...         m.step(loss=1.0)
    >>> rankscope.read(m.run).tables["training"]["step"].unique().sort().to_list()
    [0, 2, 4]
    """

    def __init__(
        self, model: nn.Module, metrics: MetricsLike = DEFAULT_METRICS, every: int = 100, probe: object = None, *,
        instruments: Sequence[Instrument | str] = (), optimizer: Any = None, run: str | Path = "runs/training",
        step: int = 0, **options: Unpack[MonitorOptions],
    ) -> None:  # fmt: skip
        for name in options:
            require_one_of("an option of Monitor", name, OPTIONS, MonitorError, name)
        self.writers, first_block = options.get("writers", ()), options.get("first_block", 0)
        _check_arguments(model, every, instruments, run, self.writers, step, first_block)
        switched = _switched_instruments(probe, optimizer, options)
        asked = _in_order([*switched, *map(_instrument, instruments)])
        self._number, self._resumed = processes.next_number("Monitor"), 0
        processes.require_all_ranks("Monitor(...)", str(self._number))
        self.model, self.wrapped, self.layers = unwrapped(model), model, options.get("layers")  # the last two as given
        self.every, self.run = every, Path(run)
        self.stage, self.schedule = processes.Stage.of(first_block), Schedule(step)
        self.last: Measurement | None = None  # the last measurement
        self.should_stop = False  # True once an alarm has said that the training should end
        self._overdue = False  # True if a measurement of training batches waits for a step that is recorded
        self._failures = Failures(lambda: self.steps)
        self._raised: tuple[Alarm, ...] = ()  # alarms of rules that wait to be acted upon
        watched: Any = {name: value for name, value in options.items() if name in WATCHED}
        watched["layers"] = None if self.stage.one_of_several else self.layers
        with processes.failing_together():
            keep = [name for part in asked for name in part.keeps]
            self.plans = make_plans(self.model, metrics, keep=keep, **watched)
        alarms = options.get("alarms")
        self._start(asked, default_rules() if alarms is None else alarms)

    def _start(self, asked: Sequence[Instrument], alarms: Sequence[AlarmSource]) -> None:
        """Attach the instruments, open the run folder, and measure a probe before the first step."""
        self.instruments: list[Instrument] = []  # those that are attached, in the order in which they read
        self.probe, self.batches = _first(Probe, asked), _first(TrainingBatches, asked)
        self.paths, self.forecast = _first(ProbePaths, asked), _first(ForecastCheck, asked)
        self.numbers = next(part for part in asked if isinstance(part, StepNumbers))
        self._run_writer: RunWriter | None = None
        # The last step of an earlier part of this run, until it is said from where it continues.
        self._earlier: int | None = None
        try:
            self._attach(asked, alarms)
            self._run_writer = self._open_run()
            last = None if self._run_writer is None else self._run_writer.measurements.last
            self._earlier = processes.from_writer(last)
            if self._earlier is None:
                self._write_forecast()
                self._begin()
            elif self.steps:
                self.resume(self.steps)
            self._act()
        except BaseException:
            with suppress(Exception):
                self.close()
            raise

    def _attach(self, asked: Sequence[Instrument], alarms: Sequence[AlarmSource]) -> None:
        """Attach each instrument; one of the user's own that fails is left out, and said to be."""
        plans = list(self.plans.values())
        if self.stage.one_of_several:
            self.require_one_stack("blocks", "a pipeline stage has blocks of one stack")
        depth = self.stage.depth(self.model, [block for plan in plans for block in plan.blocks])
        together = plans[0].tensor_parallel
        self.counts_samples = together is None or together.index == 0
        rules = [*RuleSet(alarms).rules, *(part for part in asked if isinstance(part, AlarmSource))]
        self.rules = RuleSet(rules, [name for name in self.plans if name])
        options = {"metrics": [metric.name for metric in plans[0].metrics], "every": self.every}
        options |= {"alarms": self.rules.names, "instruments": [repr(part) for part in asked]}
        processes.require_agreement("metrics and steps", options)
        for part in (*asked, self.rules):
            with self._contained(part, "measured"), processes.failing_together():
                part.monitor = self
                part.attach()
                self.instruments.append(part)
        self._recorders = [part for part in self.instruments if _defines(part, "record")]
        of_each = " and ".join(f"{len(plan.blocks)} in its {name}" for name, plan in self.plans.items() if name)
        self._what = f"a network of {depth} layers{f' ({of_each})' if of_each else ''}, measured on "
        self._what += "training batches" if self.probe is None else self.probe.description

    def require_one_stack(self, option: str, expected: str = "") -> None:
        """Raise where the model has several stacks of blocks, of which this option is only for one."""
        way = f"name one stack, as in blocks={next(iter(self.plans.values())).stack!r}"
        received = f"{type(self.model).__name__} is measured in {' and '.join(self.plans)}: {way}"
        expected = expected or f"{option} is about one stack of blocks"
        require(len(self.plans) == 1, f"{expected}; {received}", MonitorError, option)

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
    def measured(self) -> bool:
        """True once a measurement has succeeded: from then on nothing is raised."""
        return self._failures.measured

    @property
    def recording(self) -> bool:
        """True if gradients or training batches of the step that comes next are recorded."""
        return any(part.recording for part in self.instruments)

    @property
    def notes(self) -> list[str]:
        """Sentences about what is not measured, about rules that can raise nothing, and about what fails."""
        notes = [*dict.fromkeys(note for part in self.instruments for note in part.notes)]
        notes += self._failures.sentences.values()
        for plan in self.plans.values():
            if self.last is not None:
                of_plan = [*plan.remarks] if plan.layout_known else [layout_note(plan), *plan.remarks]
                notes += [note for note in of_plan if note not in notes]
            if plan.decoder and plan.unmasked:
                counts = "padding of the decoder, if there is any, counts as tokens, as no mask of it was found"
                notes.append(f"{counts}: call the model with one (decoder_attention_mask), or give padding=")
        first, calls = self.schedule.first, self.schedule.counted
        if calls > 1 and self.steps // self.every == first // self.every:
            made = f"monitor.step was called {calls} times, and has come to step {self.steps}"
            notes.append(f"no step after {first} was measured: one is at each multiple of every={self.every}; {made}")
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
            self.numbers.add({"loss": loss, **scalars})
            self._overdue |= self.schedule.crossed(self.every)
            if self._overdue and (self.batches is None or self.batches.recording):
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
        if self.batches is not None and not any(part.has_read for part in self.batches.stacks.values()):
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
        self.load_state_dict({"step": step})

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of the training should hold for the run to continue without gap or repetition."""
        return {"step": self.steps} | {part.name: part.state_dict() for part in self._with_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: `resume` at its step, each instrument as `state_dict()` had it. Rules that have
        no state there are as they were after the measurements that the run folder has."""
        step = int(state["step"])
        _check_step(step)
        if self._run_writer is not None:
            with self._failures.contained("later steps are not removed from the run folder"):
                self._run_writer.cut(step or -1)  # step 0 is measured again
            self._call_writers("resume", step or -1)
        for part in self._with_state():
            with self._contained(part, "restored"):
                part.load_state_dict({} if part is self.numbers else state.get(part.name, {}))
        self.schedule = Schedule(step)
        self._resumed += 1
        self._earlier, self.last, self._overdue = None, None, False
        if step == 0:
            self._begin()
            self._act()
        elif self.probe is not None and not self.measured:
            for part in self.instruments:  # what is wrong with the probe is found now, not in mid-training
                if part.of_samples and part.must_work:
                    part.read(step)
            self._failures.measured = True
        self._prepare_recording()
        self.numbers.load_state_dict(state.get(self.numbers.name, {}))
        self._write_forecast()

    def close(self) -> None:
        """Remove all hooks, close the writers and release the run folder."""
        try:
            self._write_forecast()
            self._call_writers("close")
        finally:
            for part in self.instruments:
                with self._failures.contained(f"{part.subject} not closed", from_start=True):
                    part.close()
            self._write_failures()
            if self._run_writer is not None:
                self._run_writer.close()

    def measured_rows(self) -> pl.DataFrame:
        """The rows of the table `training` that the run folder has, on every rank."""
        rows: pl.DataFrame = processes.from_writer(None if self._run_writer is None else read(self.run).table(ENTRY))
        return rows

    def _with_state(self) -> list[Instrument]:
        """The instruments with a state of their own: that of an alarm rule is among those of the rules."""
        rules: list[Any] = [*self.rules.rules]
        return [part for part in self.instruments if _defines(part, "state_dict") and part not in rules]

    def _contained(self, part: Instrument, verb: str) -> AbstractContextManager[None]:
        """Inside, an instrument may fail: that it is not measured, or what else the verb says, is an alarm."""
        return self._failures.contained(f"{part.subject} not {verb}", from_start=not part.must_work)

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
        self.numbers.given, self._overdue = {}, False
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

    def _read(self, part: Instrument, values: MetricValues) -> None:
        """Add what an instrument reads on this process to the values of the others."""
        read = part.read(self.steps)
        if part.of_samples and not self.counts_samples:
            read = read.without_samples()
        if self.stage.one_of_several:  # `layers` count those of the whole network
            layers = None if isinstance(self.layers, Mapping) or not part.of_samples else self.layers
            read = read.of_stage(self.stage.first_block, layers)
        for _, metric, _ in values.parts.keys() & read.parts.keys():
            raise MonitorError(f"{metric} is read by another instrument: it needs another name", subject="instruments")
        values.update(read)

    def _measure(self) -> Measurement | None:
        """Measure, ask the rules for alarms, and write; `_act` warns of the alarms later."""
        processes.require_all_ranks("monitor.step", f"{self._number}/{self._resumed}/{self.steps}")
        values = MetricValues()
        for part in self.instruments:
            if _defines(part, "read") or _defines(part, "read_stack"):
                # Ranks go on to the next instrument together: none waits for one that has failed.
                with self._contained(part, "measured"), processes.failing_together():
                    self._read(part, values)
        tokens_of_stacks = [plan.tokens for plan in self.plans.values()]
        read, tokens = zip(*processes.gathered((bool(values), tokens_of_stacks)), strict=True)
        if not any(read):
            return None
        longest = (max(filter(None, of_ranks), default=None) for of_ranks in zip(*tokens, strict=True))
        self.rules.set_tokens(dict(zip(self.plans, longest, strict=True)))
        rows = rows_of(self.steps, *merged_over_ranks(values.keys(), values.sums()))
        alarms: tuple[Alarm, ...] = ()
        stage = None if self.forecast is None else self.forecast.stage
        for k, rule in enumerate(self.rules.rules):
            with self._failures.contained(f"rule {k + 1} ({self.rules.names[k]}) fails", from_start=True):
                alarms += tuple(rule.on_measurement(rows, self.steps))
        certificates = None if self.paths is None else self.paths.certificates
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
            with self._contained(part, "recorded"):
                part.record(on)

    def _call_writers(self, method: str, *args: Any) -> None:
        """Call a method of each writer that has it."""
        for k, writer in enumerate(self.writers):
            with self._failures.contained(f"writer {k + 1} ({type(writer).__name__}) fails in {method}"):
                getattr(writer, method, lambda *_: None)(*args)

    def _open_run(self) -> RunWriter | None:
        """Open the folder on the rank that writes; if that fails, raise on every rank."""
        run_writer, failure = None, None
        if processes.is_writer():
            description = describe_model(self.model)
            device = ", ".join(description["model"]["devices"])
            metrics = next(iter(self.plans.values())).metrics
            of_stacks = [in_stack(metric.name, stack) for metric in metrics for stack in self.plans]
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
        reason = processes.from_writer(None if failure is None else str(failure))
        if reason is not None:
            raise failure or MonitorError(reason, subject="run")
        return run_writer


def _switched_instruments(probe: object, optimizer: Any, options: MonitorOptions) -> list[Instrument]:
    """The instruments that the arguments of `Monitor` ask for."""
    loss, embeddings, forecast = options.get("loss"), options.get("embeddings"), options.get("forecast")
    sentence = "loss must be a function of what the model returns for the probe; there is no probe: give probe="
    require(loss is None or probe is not None, sentence, MonitorError, "loss")
    made: list[Instrument] = [StepNumbers()]
    made += [Probe(probe, loss)] if probe is not None else []
    made += [BlockJacobians()] if options.get("jacobians") else []
    made += [ProbeEmbeddings(embeddings)] if embeddings is not None else []
    made += [ProbePaths(every)] if (every := options.get("paths_every")) is not None else []
    made += [WeightGradients(optimizer)] if optimizer is not None else []
    made += [WeightSpectra()] if options.get("spectra") else []
    return made + ([ForecastCheck(forecast)] if forecast is not None else [])


def _in_order(asked: Sequence[Instrument]) -> list[Instrument]:
    """Instruments in the order in which they are attached, and read: the probe, or training batches, first."""
    batches = [] if _first(Probe, asked) is not None else [TrainingBatches()]
    names = [part.name for part in asked]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"instruments must have different names; two are {twice!r}", MonitorError, "instruments")
    kinds: tuple[type[Instrument], ...] = (Probe, TrainingBatches, BlockJacobians, StepNumbers)
    return sorted([*batches, *asked], key=lambda part: kinds.index(type(part)) if type(part) in kinds else len(kinds))


def _instrument(given: Any) -> Instrument:
    """An instrument that was given, or the one of this name."""
    if isinstance(given, str):
        require_one_of("an instrument", given, INSTRUMENTS, MonitorError, "instruments")
        given = INSTRUMENTS[given]()
    if not isinstance(given, Instrument):
        received = f"received {given.__name__ if isinstance(given, type) else f'a {type(given).__name__}'}"
        expected = "instruments must be names, or objects of classes derived from Instrument"
        raise MonitorError(f"{expected}; {received}", subject="instruments")
    return given


def _first(kind: type[T], asked: Sequence[Instrument]) -> T | None:
    return next((part for part in asked if isinstance(part, kind)), None)


def _defines(part: Instrument, method: str) -> bool:
    """True if the instrument has a method of its own in place of the default."""
    return getattr(type(part), method) is not getattr(Instrument, method)


def _check_arguments(
    model: object, every: Any, instruments: Any, run: object, writers: Any, step: Any, first_block: Any
) -> None:
    """Raise a sentence about the first argument of `Monitor` that is of a wrong type."""
    received = {name: type(value).__name__ for name, value in locals().items()}
    is_list = isinstance(writers, Sequence) and not isinstance(writers, str)
    wrong = [w for w in writers if not callable(w) or isinstance(w, type)] if is_list else []
    for name, fits, sentence in (
        ("model", isinstance(model, nn.Module),
         f"a monitor takes a torch module; received a {received['model']}"),
        ("every", type(every) is int and every > 0,
         f"every must be a number of steps, 1 or more; got {every!r}"),
        ("instruments", isinstance(instruments, list | tuple),
         f"instruments must be a list, instruments=[...]; received a {received['instruments']}"),
        ("run", isinstance(run, str | Path), f"run must be the path of a folder; got a {received['run']}"),
        ("first_block", type(first_block) is int and first_block >= 0,
         f"first_block must be the number of blocks in earlier pipeline stages, 0 or more; got {first_block!r}"),
        ("writers", is_list, f"writers must be a list, writers=[...]; received a {received['writers']}"),
        ("writers", not wrong, "a writer must be a function of a Measurement, or one that is made by "
         f"rankscope.monitor.writers, such as JSONLines(path); got {[*wrong, None][0]!r}"),
    ):  # fmt: skip
        require(fits, sentence, MonitorError, name)
    _check_step(step)


def _check_step(step: Any) -> None:
    if not isinstance(step, Integral) or int(step) < 0:
        raise MonitorError(f"step must be a whole number, 0 or more; got {step!r}", subject="step")
