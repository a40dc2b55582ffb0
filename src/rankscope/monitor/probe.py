"""`Probe`: a fixed batch with which the model is called again at every measurement of a training.

It calls the model inside `preserved_training_state`, under a `StackWatch` for each stack of blocks, which reads each
layer. `listeners` are shown each call there, such as `embeddings.py`. If there is a loss, `TokenGradients` also
measures the gradient at each layer's tokens:

    grad_tokens = B ||dL/dX||_F   of each sample, B the number of samples

Where the loss is a mean over samples, that is the gradient of each sample's own loss. Hooks of the blocks
note where each layer's tokens lie in autograd's graph, and `torch.autograd.grad` differentiates with respect
to the tokens alone: no gradient of a weight is computed, accumulated or reduced, so nothing that waits for
one (an optimiser, DDP, a hook) notices. `inline.py` measures the same number of training batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rankscope.errors import MonitorError, RankscopeError, WatchError, require
from rankscope.live import (
    OBSERVERS,
    Hooks,
    StackWatch,
    TensorParallel,
    WatchPlan,
    floating_tensors,
    has_listed_parts,
    hidden_states_in,
    processes,
)
from rankscope.monitor.instrument import Instrument
from rankscope.monitor.measurement import MetricValues, joined_stacks
from rankscope.monitor.training_state import preserved_training_state
from rankscope.sources import first_line

GRADIENT_METRIC = "grad_tokens"
T = TypeVar("T")
LossFunction = Callable[[Any], Tensor]  # takes what the model returns, and gives a tensor of one number
ProbeListener = Callable[[Mapping[str, StackWatch], Any], None]  # of a call: the watch of each stack, what it returned


def gradient_norms(plan: WatchPlan, gradient: Tensor) -> Tensor:
    """`grad_tokens` of each sample, from the gradient at the tokens of all of them, as far as this process has them."""
    gradient = hidden_states_in(gradient, plan.layout, "a gradient", plan.grid)[0]
    return torch.linalg.vector_norm(gradient.double(), dim=(1, 2)) * len(gradient)


def join_gradients(values: MetricValues, together: TensorParallel | None) -> None:
    """Make `grad_tokens` those of the tokens of all processes that share the model, where each has some of them."""
    if together is None or together.tokens is None:
        return
    parts = {key: [value for value, _ in pairs] for key, pairs in values.parts.items() if key[1] == GRADIENT_METRIC}
    gathered = together.gathered({key: [value.double().cpu() for value in part] for key, part in parts.items()})
    for key, part in parts.items():
        norms = [torch.stack([theirs[key][k] for theirs in gathered]).norm(dim=0) for k in range(len(part))]
        values.parts[key] = [(norm.to(x.device), torch.zeros_like(x)) for norm, x in zip(norms, part, strict=True)]


class BlockFollower:
    """Follows the calls of a stack's blocks in this thread: `_on_input` and `_on_output` are their hooks."""

    _on_input: Callable[..., None]
    _on_output: Callable[..., None]

    def __init__(self, plan: WatchPlan) -> None:
        self.plan = plan
        self.first_layers = {id(block): layer for layer, block in reversed(list(enumerate(plan.blocks, 1)))}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Until the context ends, calls of a block in this thread call `_on_input` before and `_on_output` after."""
        if has_listed_parts(self.plan.blocks):
            raise RuntimeError("its layers are lists of parts, and are not called themselves")
        with Hooks(of_this_thread=True) as hooks:
            for block in dict.fromkeys(self.plan.blocks):
                hooks.attach(block, self._on_input, before=True, with_kwargs=True)
                hooks.attach(block, self._on_output)
            yield


class TokenGradients(BlockFollower):
    """Notes the place of each layer's tokens in the graph while the model is called, and differentiates."""

    def __init__(self, plan: WatchPlan) -> None:
        super().__init__(plan)
        self.layer = 0
        self.shape: torch.Size | None = None
        # The tensors of each layer that could be its tokens: of several, the next block takes the right one.
        self.edges: dict[int, list[tuple[Tensor, GradientEdge]]] = {}

    def known_edges(self) -> dict[int, GradientEdge]:
        """The edges of every layer that is measured and whose tokens are known: its block returned one tensor of their
        shape, or the next block took one of several."""
        certain = {layer: edges[0][1] for layer, edges in sorted(self.edges.items()) if len(edges) == 1}
        self.edges = {}
        return {layer: edge for layer, edge in certain.items() if self.plan.measures(layer)}

    def _on_input(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        inputs = (kwargs["hidden_states"],) if "hidden_states" in kwargs else (*args, *kwargs.values())
        if not self.layer:
            states = [x for x in floating_tensors(inputs) if x.ndim == 3] or floating_tensors(inputs)
            self.shape = states[0].shape if states else None
            self.edges[0] = self._edges(states[:1])
        elif len(self.edges[self.layer]) > 1:
            taken = {id(x) for x in inputs}
            self.edges[self.layer] = [pair for pair in self.edges[self.layer] if id(pair[0]) in taken]
        self.layer = max(self.layer + 1, self.first_layers[id(block)])

    def _on_output(self, block: nn.Module, args: Any, output: Any) -> None:
        self.edges[self.layer] = self._edges(floating_tensors(output))

    def _edges(self, states: Sequence[Tensor]) -> list[tuple[Tensor, GradientEdge]]:
        """The tensors of the tokens' shape, and their edges in the graph, which stay if a block writes into it."""
        return [(x, get_gradient_edge(x)) for x in states if x.shape == self.shape and x.requires_grad]


def token_gradients(loss: Tensor, by_stack: Mapping[str, TokenGradients]) -> dict[str, MetricValues]:
    """`grad_tokens` of the layers of every stack whose tokens are known, from one backward pass. The graph of the loss
    is freed."""
    edges = {(name, k): edge for name, noted in by_stack.items() for k, edge in noted.known_edges().items()}
    values = {name: MetricValues() for name in by_stack}
    gradients = torch.autograd.grad(loss, list(edges.values()), allow_unused=True) if edges else ()
    for (name, layer), gradient in zip(edges, gradients, strict=True):
        if gradient is not None:
            values[name].add(layer, GRADIENT_METRIC, gradient_norms(by_stack[name].plan, gradient))
    return values


def of_output(option: str, function: Callable[[Any], Any], output: Any) -> Any:
    """What a function that was given as this option makes of what the model returned."""
    try:
        return function(output)
    except (torch.OutOfMemoryError, MonitorError):
        raise
    except Exception as error:
        raised = f"of {type(output).__name__} it raised {type(error).__name__}: {first_line(error)}"
        sentence = f"{option} must be a function of what the model returns; {raised}"
        raise MonitorError(sentence, subject=option) from error


def loss_in(output: Any, loss: LossFunction | None) -> Tensor | None:
    """The loss to differentiate: what the function returns or, without one, the output's own `loss`."""
    if loss is None:
        value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        return value if isinstance(value, Tensor) and value.requires_grad else None
    value = of_output("loss", loss, output)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        given = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        cut = " that no weight has a part in" if isinstance(value, Tensor) and value.numel() == 1 else ""
        raise MonitorError(f"loss must give a tensor of one number, with a gradient; got {given}{cut}", subject="loss")
    return value


class Probe(Instrument):
    """Calls the model with a fixed batch at every measurement, and reads each layer.

    Args:
        batch: A tensor, a dictionary of the model's arguments, or a tuple or list of them; it is copied, so that the
            loop may change its own.
        loss: The loss to differentiate, a function of what the model returns; by default the output's own, if any.
    """

    name, subject, must_work = "probe", "the probe is", True
    together: TensorParallel | None = None  # the processes that share the model, and are given the same samples
    measured = False  # a measurement succeeded: a loss that fails from now on is a note
    _differentiable = True  # False once a rank could not compute gradients

    def __init__(self, batch: object, loss: LossFunction | None = None) -> None:
        if not isinstance(batch, Tensor | Mapping | tuple | list):
            received = f"received a {type(batch).__name__}: give one batch, as next(iter(loader)) has it"
            raise MonitorError(f"a probe must be a tensor, a dictionary or a tuple; {received}", subject="probe")
        args = [batch] if isinstance(batch, Tensor) else [] if isinstance(batch, Mapping) else batch
        self.args, self.loss = tuple(map(_copied, args)), loss
        self.kwargs = {str(name): _copied(value) for name, value in batch.items()} if isinstance(batch, Mapping) else {}
        holds = any(isinstance(value, Tensor) for value in (*self.args, *self.kwargs.values()))
        require(holds, "a probe must hold a tensor for the model; received none", MonitorError, "probe")
        wrong = f"loss must be a function of what the model returns for the probe; got a {type(loss).__name__}"
        require(loss is None or callable(loss), wrong, MonitorError, "loss")
        self.listeners: list[ProbeListener] = []
        self._watches: dict[str, StackWatch] = {}  # one of each stack, made at the first measurement

    def attach(self) -> None:
        """Refuse pipeline stages, and labels that not all processes have."""
        sentence = "pipeline stages are measured on training batches, which pass through all of them; got a probe"
        require(not self.monitor.stage.one_of_several, f"{sentence}: leave probe= out", MonitorError, "probe")
        self.together = next(iter(self.monitor.plans.values())).tensor_parallel
        processes.require_agreement("labels of the probe", self.has_loss)
        self.metrics = (GRADIENT_METRIC,) * self.has_loss

    @property
    def has_loss(self) -> bool:
        """True if there is something to differentiate: a loss, or labels of which the model makes one."""
        labelled = any(name.endswith("labels") and value is not None for name, value in self.kwargs.items())
        return self._differentiable and (self.loss is not None or labelled)

    @property
    def description(self) -> str:
        """The probe by a digest, the same in whatever order ranks have its samples.

        Raises:
            WatchError: Processes that share the model have different ones.
        """
        named = [(str(name), value) for name, value in (*enumerate(self.args), *self.kwargs.items())]
        tensors = [(name, value.cpu()) for name, value in named if isinstance(value, Tensor)]
        rows = [(name, row) for name, value in tensors for row in (value if value.ndim else value[None])]
        numbers = [(name, row.contiguous().reshape(-1).view(torch.uint8).numpy()) for name, row in rows]
        digests = [name + sha256(row.tobytes()).hexdigest() for name, row in numbers]
        if self.together is not None and any(theirs != digests for theirs in self.together.gathered(digests)):
            self.together.refuse_samples("their probes differ")
        shares = processes.gathered(digests if self.together is None or self.together.index == 0 else [])
        digest = sha256("".join(sorted(row for share in shares for row in share)).encode()).hexdigest()[:8]
        return f"the probe {digest}"

    def read(self, step: int) -> MetricValues:
        """What was read of each stack of blocks in one call with the probe; if a rank cannot compute gradients, all
        leave them out afterwards.

        Raises:
            MonitorError: The model cannot be called with the probe.
        """
        plans = self.monitor.plans
        by_stack = beside_plugins([*plans.values()], self._read_stacks)
        self.measured = True
        for name, plan in plans.items():
            join_gradients(by_stack[name], plan.tensor_parallel)
        return joined_stacks(by_stack)

    def _read_stacks(self) -> dict[str, MetricValues]:
        values, failure, why = dict[str, MetricValues](), None, None
        if self.has_loss:
            try:
                values = self._measure(differentiate=True)
            except Exception as error:  # too little memory, or code that has no gradient
                failure = error
            why = None if failure is None else first_line(failure)
            why = next((reason for reason in processes.gathered(why) if reason is not None), None)
        if not values or why is not None:
            with processes.failing_together():
                if isinstance(failure, RankscopeError) and not self.measured:
                    raise failure
                try:
                    values = self._measure(differentiate=False)
                except RankscopeError:
                    raise
                except Exception as error:
                    raised = f"{type(self.monitor.model).__name__} raised {type(error).__name__}: {first_line(error)}"
                    sentence = f"a probe must be a batch that the model can be called with; called with it, {raised}"
                    raise MonitorError(sentence, subject="probe") from error
            if why is not None:  # the loss failed, not the model
                self._differentiable = False
                self.remarks.append(f"gradients at the probe's tokens are not measured: {why}")
        return values

    def call(self, model: nn.Module) -> Any:
        """What the model returns for the probe, which is moved to its device."""
        device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        args, named = [*self.args, *self.kwargs.values()], len(self.args)
        args = [value.to(device) if isinstance(value, Tensor) else value for value in args]
        return model(*args[:named], **dict(zip(self.kwargs, args[named:], strict=True)))

    def _measure(self, differentiate: bool) -> dict[str, MetricValues]:
        model, plans, of_gradients = self.monitor.model, self.monitor.plans, dict[str, MetricValues]()
        gradients = {name: TokenGradients(plan) for name, plan in plans.items() if differentiate}
        self._watches = self._watches or {k: StackWatch(model, plan, of_this_thread=True) for k, plan in plans.items()}
        with preserved_training_state(model), torch.set_grad_enabled(differentiate):
            with ExitStack() as entered:
                enter = entered.enter_context
                watches = {name: enter(watch.restart()) for name, watch in self._watches.items()}
                for noted in gradients.values():
                    enter(noted.attached())
                output = self.call(model)
            for listener in self.listeners:
                listener(watches, output)
            if gradients and (loss := loss_in(output, self.loss)) is not None:
                of_gradients = token_gradients(loss, gradients)
        values = {name: values_of(watch) for name, watch in watches.items()}
        for name, more in of_gradients.items():
            values[name].update(more)
        return values


def beside_plugins(plans: Sequence[WatchPlan], read: Callable[[], T]) -> T:
    """What is read by these plans. If that fails with a plugin's way to see attention, and not without, the plugin is
    named in a warning and a note, and the plans are without from then on."""
    try:
        return read()
    except Exception as error:
        added, ways = OBSERVERS.group.added, [plan.attention for plan in plans]
        strangers = [name for name, way in added.items() if any(way in words for words in ways)]
        if not strangers:
            raise
        for plan in plans:
            plan.attention = [way for way in plan.attention if way not in added.values()]
        try:
            reading = read()
        except Exception:
            for plan, way in zip(plans, ways, strict=True):
                plan.attention = way
            raise error from None
        cause = error.__cause__ or error
        for name in strangers:
            OBSERVERS.group.failed(name, cause)
        why = f"{type(cause).__name__}: {first_line(cause)}"
        plans[0].remarks[f"attention is not seen by {', '.join(strangers)}, of a plugin: {why}"] = None
        return reading


def values_of(watch: StackWatch) -> MetricValues:
    """What a watch has read of a stack; raises if that is nothing, and says why."""
    values = MetricValues()
    for layer, _, readings in watch.totals.readings:
        values.add_readings(layer, readings)
    if (valid := watch.totals.valid).numel():
        watch.plan.tokens = int(valid.sum(-1).max())
    if not values:
        try:
            watch.profile()  # raises
        except WatchError as error:
            if not watch.plan.name:
                raise
            sentence = f"every stack of blocks must run when the model is called; of its {watch.plan.name}: {error}"
            raise WatchError(f"{sentence}: name one that does with blocks=", subject="blocks") from error
    return values


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
