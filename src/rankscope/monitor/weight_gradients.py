"""Measures the gradients of a block's weights, and how far a step of the optimiser moves them.

Of the weights W of a parameter group, at a step that is measured:

    grad_GROUP   = ||G||_F,  G the gradient as the optimiser uses it (after clipping, if the loop clips)
    update_GROUP = ||W_after - W_before||_F / ||W_before||_F

While a step is recorded, hooks around `optimizer.step()` copy the weights and take sums of squares, which stay on their
device. If the optimiser makes several steps in between, the last one counts. Neither weights nor gradients are written
to.

Groups are queries and keys, values and outputs, MLP (`parameter_groups`), told apart by name and shape. A
weight is a matrix, or a stack of matrices as experts have: biases and gains of norms are left out. Many
models keep queries, keys and values in one fused matrix, whose outputs are laid out like this:

| name                                          | outputs                                                    |
|-----------------------------------------------|------------------------------------------------------------|
| `c_attn`, `qkv`, `Wqkv`, `in_proj`            | all queries, all keys, all values                          |
| `qkv_proj`                                    | the same; fewer keys and values where the module says so   |
| `query_key_value` (GPT-NeoX, BLOOM, Falcon)   | by head: its query, its key, its value                     |
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from rankscope.errors import MonitorError
from rankscope.live import WatchPlan, processes, without_dropout
from rankscope.monitor.instrument import Instrument
from rankscope.monitor.measurement import MetricValues
from rankscope.sources import first_line

Group = Literal["query_key", "value_output", "mlp"]
GROUPS: tuple[Group, ...] = get_args(Group)
Kind = Literal["query", "key", "value", "output", "mlp"]
GROUP_OF: dict[Kind, Group] = {"query": "query_key", "key": "query_key", "value": "value_output",
                               "output": "value_output", "mlp": "mlp"}  # fmt: skip
QUERY = {"q", "query", "wq", "to_q", "linear_q"}
QUERY |= {f"{part}_{word}" for part in ("q", "query") for word in ("proj", "lin", "linear")}
QUERY |= {"q_a_proj", "q_b_proj"}  # queries through a bottleneck (DeepSeek)
KEY = {"k", "key", "wk", "to_k", "linear_k"}
KEY |= {f"{part}_{word}" for part in ("k", "key") for word in ("proj", "lin", "linear")}
VALUE = {"v", "value", "wv", "to_v", "v_proj", "v_lin", "v_linear", "value_proj", "linear_v"}
OUTPUT = {"o", "wo", "to_out", "o_proj", "out_proj", "out_lin", "out", "output", "proj", "c_proj", "dense"}
IN_ATTENTION: dict[Kind, set[str]] = {"query": QUERY, "key": KEY, "value": VALUE, "output": OUTPUT}
IN_TURN = {"c_attn", "qkv", "wqkv", "in_proj", "qkv_proj"}
BY_HEAD = {"query_key_value"}
OTHER_LAYOUTS = {"CodeGenAttention", "GPTBigCodeAttention"}  # use one of these names otherwise
MLP = {"mlp", "ffn", "ff", "feed_forward", "feedforward", "densereludense", "intermediate", "output"}
MLP |= {"ffwd", "fc1", "fc2", "fc_in", "fc_out", "c_fc", "linear1", "linear2", "lin1", "lin2", "ffn_output"}
MLP |= {"experts", "moe", "block_sparse_moe", "gate_proj", "up_proj", "down_proj", "gate_up_proj"}


@dataclass(frozen=True)
class ParameterSlice:
    """A weight, or some of its outputs; looked up at every use, because what shards a model replaces parameters."""

    owner: nn.Module
    name: str
    axis: int = 0  # the dimension of the weight along which its outputs lie
    heads: int = 1  # the parts in which the outputs of a fused weight come
    outputs: tuple[int | None, int | None] = (None, None)  # of each part, from which output to which are of the slice

    @property
    def weight(self) -> nn.Parameter:
        """The parameter as it is now."""
        parameter: nn.Parameter = getattr(self.owner, self.name)
        return parameter

    @property
    def applied(self) -> Tensor:
        """The weight that the module applies: parametrized, and with adapters of peft merged into a copy."""
        with torch.no_grad(), without_dropout(self.owner):  # a parametrization in train mode may change itself
            return merged_weight(self.owner) if hasattr(self.owner, "get_base_layer") else self.weight.detach()

    @property
    def key(self) -> "SliceKey":
        """The module by its id, and the name of the weight in it."""
        return id(self.owner), self.name

    def choose(self, numbers: Tensor) -> Tensor:
        """Return the numbers of this slice, out of those of all outputs of the weight."""
        return numbers.reshape(self.heads, -1)[:, slice(*self.outputs)].reshape(-1)

    def entries(self, tensor: Tensor) -> Tensor:
        """Return the entries of this slice, flat, out of a tensor shaped like the weight or like its bias."""
        if self.outputs == (None, None):
            return tensor.flatten()
        outputs = tensor.movedim(self.axis if tensor.ndim > 1 else 0, 0)
        return outputs.reshape(self.heads, -1, *outputs.shape[1:])[:, slice(*self.outputs)].flatten()


SliceKey = tuple[int, str]
Place = tuple[int, Group]  # the first place of a block, from 1, and a group of its weights
ParameterGroups = dict[Place, list[ParameterSlice]]


def parameter_groups(blocks: Sequence[nn.Module], applied: bool = False) -> tuple[ParameterGroups, list[str]]:
    """The trainable weights of each block and group, and the names of weights that belong to no group. A block that
    stands in the list several times has the number of its first place.

    Args:
        blocks: The blocks.
        applied: Whether to take the weights that blocks apply, where trained ones are parts of them (`applied_name`).

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
    >>> groups, left_out = parameter_groups([layer])
    >>> {group: len(slices) for (_, group), slices in groups.items()}
    {'query_key': 1, 'value_output': 2, 'mlp': 2}
    """
    groups: ParameterGroups = {}
    left_out: dict[str, None] = {}
    for layer, block in enumerate(blocks, 1):
        taken: set[str] = set()
        if block in blocks[: layer - 1]:
            continue
        for name, weight in block.named_parameters():
            effective_name = applied_name(block, name)
            if weight.ndim < 2 or not weight.requires_grad or (applied and effective_name in taken):
                continue
            slices: list[tuple[Kind, ParameterSlice]] = []
            if effective_name is not None:
                path, _, last = effective_name.rpartition(".")
                slices = kind_slices(block, effective_name, ParameterSlice(block.get_submodule(path), last).applied)
            if not applied:
                slices = _slices_of_part(block, name, slices) if effective_name else kind_slices(block, name, weight)
            taken.add(effective_name or "")
            slices = [] if applied and not all(is_matrix(part) for _, part in slices) else slices
            for kind, part in slices:
                parts = groups.setdefault((layer, GROUP_OF[kind]), [])
                if parts and parts[-1].key == part.key:  # keys lie beside queries: their sum is one
                    part = replace(parts.pop(), outputs=(None, part.outputs[1]))
                parts.append(part)
            if not slices:
                left_out[name] = None
    return groups, list(left_out)


def is_matrix(part: ParameterSlice) -> bool:
    """False for a convolution of several places, and for a weight that is quantised."""
    places = {*part.owner.kernel_size} if isinstance(part.owner, _ConvNd) else {1}
    return places == {1} and part.applied.is_floating_point()


def applied_name(block: nn.Module, name: str) -> str | None:
    """The name of the weight that a block applies and of which a trained one is a part, as `linear1.weight` of
    `linear1.parametrizations.weight.original0` and `q_proj.weight` of `q_proj.lora_A.default.weight` (peft); of most
    weights it is their own, and None where it cannot be told."""
    before, parametrized, after = f".{name}".partition(".parametrizations.")
    if parametrized:
        return f"{before}.{after.split('.')[0]}"[1:]
    *path, last = name.split(".")
    for k in range(1, len(path) + 1):
        if hasattr(block.get_submodule(".".join(path[:k])), "get_base_layer"):
            return ".".join((*path[:k], "weight"))
    stem = last.rpartition("_")[0]  # `weight_g` and `weight_v`, of which a hook makes `weight`
    made_of_parts = isinstance(block.get_submodule(".".join(path)).__dict__.get(stem), Tensor)
    return None if made_of_parts or "lora" in name.lower() else name


def _slices_of_part(
    block: nn.Module, name: str, slices: list[tuple[Kind, "ParameterSlice"]]
) -> list[tuple[Kind, "ParameterSlice"]]:
    """The slices of a trained weight, from those of the weight that it is a part of: none if that has several and the
    outputs of the part are not theirs."""
    path, _, last = name.rpartition(".")
    owner = block.get_submodule(path)
    weight, parts = getattr(owner, last), [(kind, replace(part, owner=owner, name=last)) for kind, part in slices]
    alike = all(weight.shape[part.axis] == part.applied.shape[part.axis] for _, part in slices[1:])
    return parts if alike else []


def kind_slices(block: nn.Module, name: str, weight: Tensor) -> list[tuple[Kind, ParameterSlice]]:
    """The slices of a weight by what they are of: one, three of a fused matrix, or none if its name does not tell.

    Args:
        block: The block that the weight is in.
        name: Its name in the block.
        weight: The weight, a matrix or a stack of matrices.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
    >>> [kind for kind, _ in kind_slices(layer, "self_attn.in_proj_weight", layer.self_attn.in_proj_weight)]
    ['query', 'key', 'value']
    """
    *path, last = name.split(".")
    modules = [block.get_submodule(".".join(path[: k + 1])) for k in range(len(path))]
    owner = modules[-1] if modules else block
    words = [word.lower() for word in (*path, last.removesuffix("weight").removesuffix("_")) if word]
    in_attention = attending(path, modules)
    if not any(in_attention) and MLP & {*words}:
        return [("mlp", ParameterSlice(owner, last))]
    if not any(in_attention) and (len(path) > 1 or not has_queries(block)):
        return []
    inside = words[in_attention.index(True) + 1 :] if any(in_attention) else words
    for word in reversed(inside):
        if word in IN_TURN | BY_HEAD:
            return _fused_slices(word, [block, *modules], owner, last, weight) if word == inside[-1] else []
        for kind, names in IN_ATTENTION.items():
            if word in names:
                return [(kind, ParameterSlice(owner, last))]
    return []


def attending(path: Sequence[str], modules: Sequence[nn.Module]) -> list[bool]:
    """True for each module on the way to a weight that attends: its name or class says so, or it has queries."""
    names = [f"{word} {type(module).__name__}".lower() for word, module in zip(path, modules, strict=True)]
    named_attention = ["attn" in name or "attention" in name for name in names]
    return [named or has_queries(module) for named, module in zip(named_attention, modules, strict=True)]


def has_queries(module: nn.Module) -> bool:
    """True if a module holds queries and keys, in two matrices or in one: it attends, whatever it is called. (Some
    mixers without attention have an `in_proj`, and some MLPs a `key` and a `value`.)"""
    names = {name.lower() for name in (*module._modules, *module._parameters)}
    return bool(names & (IN_TURN - {"in_proj"} | BY_HEAD)) or bool(names & QUERY and names & KEY)


def _fused_slices(
    word: str, modules: Sequence[nn.Module], owner: nn.Module, last: str, weight: Tensor
) -> list[tuple[Kind, ParameterSlice]]:
    """Three slices of a fused weight: queries, keys and values; none if its layout is not known."""
    inner = owner.get_base_layer() if callable(getattr(owner, "get_base_layer", None)) else owner  # type: ignore[operator]
    axis = 1 if type(inner).__name__.endswith("Conv1D") else 0
    outputs, inputs = weight.shape[axis], weight.shape[1 - axis]
    attention = modules[-1] if last != "weight" else modules[-2]
    if weight.ndim != 2 or type(attention).__name__ in OTHER_LAYOUTS:
        return []
    narrow = _size(attention, "num_key_value_heads") * _size(attention, "head_dim")
    heads = _size(attention, "num_attention_heads", "num_heads", "n_head", "n_heads") if word in BY_HEAD else 1
    if outputs == 3 * inputs and heads and not inputs % heads:
        values = inputs // heads  # of each head, or of all together
    elif word == "qkv_proj" and 0 < 2 * narrow < outputs:
        values = narrow
    else:
        return []
    ends: dict[Kind, tuple[int | None, int | None]]
    ends = {"query": (None, -2 * values), "key": (-2 * values, -values), "value": (-values, None)}
    return [(kind, ParameterSlice(owner, last, axis, heads, end)) for kind, end in ends.items()]


def merged_weight(layer: Any) -> Tensor:
    """The weight of a layer of peft with its active adapters merged, in float32 or wider; the layer stays as it is."""
    twin, base = copy(layer), copy(layer.get_base_layer())
    weight = base.weight.detach()
    if layer.merged or layer.disable_adapters or not weight.is_floating_point():
        return weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    copies = {name: weight.to(dtype, copy=True) for name, weight in base._parameters.items() if weight is not None}
    base._parameters = {name: nn.Parameter(weight.detach()) for name, weight in copies.items()}
    vars(twin).update({name: copy(value) for name, value in vars(layer).items() if isinstance(value, dict | list)})
    adapters = {name: deepcopy(part).to(dtype) for name, part in layer._modules.items() if name != "base_layer"}
    twin._modules = {**adapters, "base_layer": base}
    twin.merge()
    return base.weight.detach()


def _size(module: nn.Module, *names: str) -> int:
    """A size that a module, or its config, has under one of these names; 0 if neither has one."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            size: Any = getattr(holder, name, None)
            if isinstance(size, int):
                return size
    return 0


def shared_weights_notes(plans: Mapping[str, WatchPlan]) -> list[str]:
    """Notes on weights that serve several layers of a stack: of one block that is called again and again, or of
    several."""
    notes = []
    for plan in plans.values():
        holders: dict[int, dict[int, str]] = {}  # by weight, its name in the block of each layer
        for block_number, block in enumerate(plan.blocks, 1):
            first, *repeats = sorted(layer for layer, at in plan.called.items() if at == block_number) or [block_number]
            if repeats:
                same = f"layers {', '.join(map(str, (first, *repeats)))} are one block"
                what = "gradients, updates and spectra of its weights are of all of them"
                notes.append(f"{same}: {what}, at layer {first}")
            for name, weight in block.named_parameters() if block not in plan.blocks[: block_number - 1] else ():
                if weight.ndim > 1 and weight.requires_grad:
                    holders.setdefault(id(weight), {})[first] = name
        shared: dict[tuple[int, ...], list[str]] = {}
        for names_by_layer in holders.values():
            shared.setdefault(tuple(names_by_layer), []).append(next(iter(names_by_layer.values())))
        for layers, names in shared.items():
            if len(layers) > 1:
                more = " and more" * (len(names) > 4)
                share = f"layers {', '.join(map(str, layers))} share {', '.join(names[:4])}{more}"
                notes.append(f"{share}: the gradient of such a weight is of all of them, and stands at each")
    return notes


class WeightInstrument(Instrument):
    """The base of instruments that read weights of groups, which several ranks may have."""

    of_samples, must_work = False, True
    applied = False  # True: of the weights that blocks apply
    kinds: tuple[str, ...]  # what is read of each group, as names of metrics begin

    def attach(self) -> None:
        """Find the weights of each group."""
        self.groups: dict[str, ParameterGroups] = {}
        for stack, plan in self.monitor.plans.items():
            self.groups[stack], names = parameter_groups(plan.blocks, self.applied)
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            left_out = f"{self.name} of weights: {shown} of a block belong to no known group, and are left out"
            self.remarks += [left_out] * bool(names)
        groups = dict.fromkeys(group for of_stack in self.groups.values() for _, group in of_stack)
        self.metrics = [f"{kind}_{group}" for group in groups for kind in self.kinds]

    @property
    def notes(self) -> list[str]:
        """What is not measured, and why; and which weights serve several layers."""
        return self.remarks + shared_weights_notes(self.monitor.plans)

    def read_stack(self, plan: WatchPlan) -> MetricValues:
        """The numbers of every block and group. Where a block is called as several layers, the one gradient of its
        weights is written at the first of these."""
        values = MetricValues()
        for (block_number, group), parts in self.groups[plan.name].items():
            layers = (layer for layer, at in plan.called.items() if at == block_number)
            layer = min(layers, default=block_number)
            for kind, value in zip(self.kinds, self.read_group(plan.name, (block_number, group), parts), strict=True):
                values.add_once(layer, f"{kind}_{group}", value, self.monitor.stage.counts)
        return values

    def read_group(self, stack: str, place: Place, parts: list[ParameterSlice]) -> tuple[Tensor | None, ...]:
        """The number of each of the `kinds`, or None."""
        raise NotImplementedError


class WeightGradients(WeightInstrument):
    """Records gradients and updates by hooks of an optimiser, while `recording` is True."""

    name, subject = "gradients", "gradients and updates of weights are"
    kinds = ("grad", "update")

    def __init__(self, optimizer: Any) -> None:
        inner = torch_optimizer(optimizer)
        if inner is None:
            received = f"received a {type(optimizer).__name__}: give the one whose step() the loop calls"
            raise MonitorError(f"optimizer must be a torch optimiser; {received}", subject="optimizer")
        self.optimizer, self.steps = inner, 0  # the steps that the optimiser has made
        self._hooks: list[Any] = []
        self._before: dict[SliceKey, Tensor] = {}

    def attach(self) -> None:
        """Find the weights of each group, and hook the optimiser."""
        super().attach()
        why = "no block has weights whose names say whether they are of queries, keys, values, outputs or"
        without = not all(self.groups.values())
        self.remarks += [f"gradients of weights are not measured: {why} the MLP"] * without
        every_part = (part for of_stack in self.groups.values() for parts in of_stack.values() for part in parts)
        self._slices = {part.key: part for part in every_part}
        self._scale: float | Tensor = 1.0
        self._skipped: bool | Tensor = False
        self.record(False)
        before, after = self.optimizer.register_step_pre_hook, self.optimizer.register_step_post_hook
        self._hooks = [before(self._before_step), after(self._after_step)]

    @property
    def notes(self) -> list[str]:
        """What is not measured, and why; and which weights serve several layers."""
        notes, calls = super().notes, self.monitor.schedule.counted
        if calls and not self.steps:
            made = f"in {calls} calls of monitor.step the optimizer that was given made no step"
            notes.append(f"gradients and updates of weights are not measured: {made}")
        return notes

    def record(self, on: bool) -> None:
        """Drop what was recorded, and record the next step or not."""
        self.recording = on
        # Of gradients, of weights and of updates: for each weight, a sum of squares for each output.
        self._squares: dict[str, dict[SliceKey, Tensor]] = {}
        self._rate: Any = None
        self._failure: str | None = None  # why the step could not be recorded; the optimiser makes it all the same

    @torch.no_grad()
    def read(self, step: int) -> MetricValues:
        """The numbers of the last recorded step, and its learning rate if `Monitor.step` was given none; no numbers if
        a scaler skipped the step."""
        if not self.recording:
            return MetricValues()
        failure = next(filter(None, processes.gathered(self._failure)), None)
        if failure is not None and not any(failure in note for note in self.remarks):
            self.remarks.append(f"gradients and updates of weights were not recorded: {failure}")
        self._made = "update" in self._squares and not self._skipped and failure is None
        values = super().read(step)
        self.record(False)
        return values

    def read_stack(self, plan: WatchPlan) -> MetricValues:
        """Sizes of gradients and of updates of one stack's weights, and with the first the learning rate."""
        values = super().read_stack(plan)
        rate = self.optimizer.param_groups[0].get("lr") if self._rate is None else self._rate
        first = plan.name == next(iter(self.groups)) and "lr" not in self.monitor.numbers.given
        if first and rate is not None:
            as_tensor = rate if isinstance(rate, Tensor) else torch.tensor(rate, dtype=torch.float64, device="cpu")
            values.add_once(None, "lr", as_tensor.double(), processes.is_writer())
        return values

    def read_group(self, stack: str, place: Place, parts: list[ParameterSlice]) -> tuple[Tensor | None, ...]:
        """The sizes of the gradient and of the update, if a step was made."""
        if not self._made:
            return None, None
        norm = {name: _norm(parts, squares) for name, squares in self._squares.items()}
        return norm["gradient"] / self._scale, norm["update"] / norm["weight"]

    def close(self) -> None:
        """Remove the hooks from the optimiser."""
        for hook in self._hooks:
            hook.remove()
        self._before = {}

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Note what `values` reports of the step: the weights before it, by which its update is measured; gradients,
        after the closure if one (Lightning's) computes them; and the first group's learning rate. As torch calls
        hooks, `args[0]` is the optimiser; where it calls a closure several times, the last gradients count."""
        if not self.recording:
            return None
        rate = optimizer.param_groups[0].get("lr")
        self._rate = rate.clone() if isinstance(rate, Tensor) else rate
        with self._contained():
            self._before = {key: part.weight.detach().clone() for key, part in self._slices.items()}
            self._squares = {"weight": self._sums(self._before.items())}
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._take_gradients()
            return None

        def closure_then_gradients() -> Any:
            loss = closure()
            self._take_gradients()
            return loss

        if len(args) > 1:
            return (args[0], closure_then_gradients, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_gradients}

    @torch.no_grad()
    def _take_gradients(self) -> None:
        """Take the gradients; a fused optimiser divides them by a scaler's scale itself, or skips the step."""
        with self._contained():
            self._squares["gradient"] = self._sums((key, part.weight.grad) for key, part in self._slices.items())
            scale = getattr(self.optimizer, "grad_scale", None)
            self._scale = 1.0 if scale is None else scale.double().clone()
            infinite = getattr(self.optimizer, "found_inf", None)
            self._skipped = False if infinite is None else infinite.clone()

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        if self._before:
            with self._contained():
                updates = ((key, self._slices[key].weight - before) for key, before in self._before.items())
                self._squares["update"] = self._sums(updates)
            self._before = {}

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Errors inside, as of too little memory for a copy of the weights, do not reach the optimiser's step."""
        try:
            yield
        except Exception as error:
            self._before, self._failure = {}, first_line(error)

    def _sums(self, tensors: Iterable[tuple[SliceKey, Tensor | None]]) -> dict[SliceKey, Tensor]:
        """The sum of squares at each output, of one tensor after the other; a weight without gradient has none."""
        sums = {}
        for key, tensor in tensors:
            if tensor is not None:
                dims = [k for k in range(tensor.ndim) if k != self._slices[key].axis]
                sums[key] = torch.linalg.vector_norm(tensor, dim=dims, dtype=torch.float64).square()
        return sums


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The torch optimiser that Accelerate may have wrapped; None for any other kind, such as DeepSpeed's."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def _norm(parts: list[ParameterSlice], squares: dict[SliceKey, Tensor]) -> Tensor:
    """The Frobenius norm of these slices together."""
    measured = [part for part in parts if part.key in squares]
    sums = [part.choose(processes.full_tensor(squares[part.key])).sum() for part in measured]
    if not sums:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.stack([total.to(sums[0].device) for total in sums]).sum().sqrt()
