"""The processes (ranks) that run one model together: how they meet, say the same and fail together, which blocks of the
network each has, and how what one has of a block is completed by the others.

The monitor calls the functions of the first half on every rank alike; without `torch.distributed`, or with one process,
each returns at once.

Tensor parallelism: several processes share each block. Where q, k, v are split by columns and the output projection by
rows, each process attends with some of the heads. With sequence parallelism it also has some of the tokens between
attention and MLP. All processes of such a group are called with the same samples, so that what is measured of them
counts once. `plan.py` calls `tensor_parallel_of`, once for a watch or a `Monitor`. At the first block of a call
`call_follower.py` calls `begin_call`, then `whole` for the hidden states of every block; when the call ends, it has
`gathered` bring the readings of all heads together (`attention_readings.py`). Weights
themselves are `DTensor`s, which know how they are split. The processes of a group must do the same things in the same
order, so an error in a hook of one is raised when the call ends, in all of them.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from itertools import pairwise
from traceback import walk_stack
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankscope.errors import MonitorError, WatchError, require
from rankscope.live.hooks import Replacements
from rankscope.live.modules import submodules
from rankscope.shapes import Float
from rankscope.sources import first_line

PATIENCE = 300.0  # seconds that ranks wait for one another; torch itself gives up after ten minutes or more
TRIAL = "_forward_metadata_inference"  # the function of torch that calls a stage so; earlier ones compute no gradients
_missed: list[str] = []  # the last meetings, if not all ranks came
FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
SAMPLED = 1024  # entries of hidden states by which processes find out whether they have the same
ALIKE = 1e-2  # by how much of their size these may differ, as sums in another order do
CONVERSIONS = ("from_local", "to_local", "redistribute", "full_tensor")  # of DTensor
WeightKey = tuple[int, str]  # a module by its id, and the name of the weight in it
TokenCounts = tuple[Sequence[int], Sequence[int]]  # of integer arguments of a call, and of floating ones
_conversions = Replacements()  # those of DTensor report their results


def world_size() -> int:
    """How many processes train the model."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gathered(value: Any, group: Any = None) -> list[Any]:
    """The value of every rank, or of those in a group, in the order of ranks."""
    size = world_size() if group is None else dist.get_world_size(group)
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def in_trial_of_stage() -> bool:
    """True while torch's pipeline schedule calls a stage with made-up tokens, to learn the shapes that it gives."""
    if (stage := sys.modules.get("torch.distributed.pipelining.stage")) is None:
        return False
    running = (frame.f_code for frame, _ in walk_stack(sys._getframe()))
    return any(code.co_name == TRIAL and code.co_filename == stage.__file__ for code in running)


def next_number(kind: str) -> int:
    """How many things of a kind this rank has made with this call, since the ranks have known one another: those that
    make the same ones count alike."""
    store = dist.distributed_c10d._get_default_store() if world_size() > 1 else None
    return 0 if store is None else store.add(f"rankscope/{kind}/made by {dist.get_rank()}", 1)


def require_all_ranks(where: str, meeting: str, ranks: Sequence[int] | None = None) -> None:
    """Wait until every rank is here, before anything that only all ranks together can do; if some do not come, raise.
    All ranks decide alike, also if one comes just when the others give up.

    Args:
        where: What the ranks call, for the sentence.
        meeting: A name that all ranks know and no other meeting has.
        ranks: Those that meet; all if left out.
    """
    size = world_size() if ranks is None else len(ranks)
    store = dist.distributed_c10d._get_default_store() if size > 1 else None
    if store is None:  # one process, or MPI, which has none
        return
    among = "" if ranks is None else "/" + "-".join(map(str, ranks))
    arrivals, verdict = (f"rankscope{among}/{meeting}/{what}" for what in ("arrivals", "verdict"))
    seconds = PATIENCE / 30 if _missed else PATIENCE  # who did not come once will hardly come again
    if store.add(arrivals, 1) == size:
        store.compare_set(verdict, "", "all")
    else:
        try:
            store.wait([verdict], timedelta(seconds=seconds))
        except RuntimeError:  # none is there in time; the first to write it decides for all
            store.compare_set(verdict, "", "not all")
    if store.get(verdict) == b"all":
        _missed.clear()
        return
    _missed.append(meeting)
    missing = f"{size - store.add(arrivals, 0)} of {size} ranks did not come within {seconds:g} s"
    sentence = f"every rank must call {where}; {missing}: call it on all of them, not inside of `if rank == 0`"
    raise MonitorError(sentence, subject="ranks")


def is_writer() -> bool:
    """True on the one process that writes the run, rank 0."""
    return world_size() == 1 or dist.get_rank() == 0


def require_agreement(what: str, value: Any, stage: int = 0) -> None:
    """Raise on every rank unless all ranks of a pipeline stage have the same value. `what` names it in the sentence; a
    stage is known by the number of blocks before it."""
    first: dict[int, tuple[int, Any]] = {}  # of each stage, its first rank and what that has
    for rank, (theirs, fault) in enumerate(gathered((stage, value))):
        earlier, expected = first.setdefault(theirs, (rank, fault))
        if fault != expected:
            differ = f"rank {earlier} has {expected!r} and rank {rank} has {fault!r}: build the monitor alike on both"
            raise MonitorError(f"all ranks must be given the same {what}; {differ}", subject=what)


@contextmanager
def failing_together() -> Iterator[None]:
    """An error inside is raised on every rank, so that none waits for one that has failed."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    reasons = [why for why in gathered(None if failure is None else first_line(failure)) if why]
    if reasons:
        raise failure or MonitorError(f"another rank could not measure the model: {reasons[0]}", subject="ranks")


@dataclass(frozen=True)
class Stage:
    """The blocks that this rank has, where each has some of them, as pipeline stages do."""

    first_block: int  # the number of blocks before them
    one_of_several: bool  # other ranks have other blocks
    counts: bool  # this rank is the first of those that have them

    @classmethod
    def of(cls, first_block: int) -> "Stage":
        """The stage with so many blocks before it."""
        stages = gathered(first_block)
        return cls(first_block, any(stages), world_size() == 1 or stages.index(first_block) == dist.get_rank())

    def depth(self, model: nn.Module, blocks: Sequence[nn.Module]) -> int:
        """The number of blocks of the whole network, of which this stage has these.

        Raises:
            MonitorError: Ranks that should have the same blocks have others, or blocks are missing between stages.
        """
        inside = {id(weight) for block in blocks for weight in block.parameters()}
        outside = {name for name, weight in model.named_parameters() if id(weight) not in inside}
        way = "pipeline stages say with first_block= how many blocks come before theirs"
        first: dict[int, tuple[int, set[str]]] = {}  # of each stage: its number of blocks, and the weights beside them
        for rank, (start, count, names) in enumerate(gathered((self.first_block, len(blocks), outside))):
            expected, expected_names = first.setdefault(start, (count, names))
            if count != expected or names != expected_names:
                only = f", and {min(names ^ expected_names)} is in one of them" if names != expected_names else ""
                fault = f"rank {rank} has {count}, an earlier one {expected}{only}: {way}"
                raise MonitorError(f"ranks must have the same blocks; {fault}", subject="first_block")
        stages = sorted((start, start + count) for start, (count, _) in first.items())
        for (_, end), (start, _) in pairwise(stages):
            if end != start:
                fault = f"one that begins after {start} blocks comes after one that ends with block {end}: {way}"
                raise MonitorError(f"pipeline stages must follow one another; {fault}", subject="first_block")
        return stages[-1][1]


def from_writer(value: Any) -> Any:
    """The value that rank 0 has, on every rank."""
    return gathered(value)[0]


def is_sharded(model: nn.Module) -> bool:
    """True if no rank holds all weights of the model, as under FSDP or ZeRO-3."""
    wrapped = any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules())
    return wrapped or any(hasattr(weight, "full_tensor") or hasattr(weight, "ds_id") for weight in model.parameters())


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor that is sharded over ranks, whole on every rank."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


class TensorParallel:
    """The processes that share the blocks of a model, this one among them.

    Args:
        group: Their process group.
        splits: The weights that are split over the group, with the dimension along which each is.
        keeps_copies: True if the group has weights, such as those of norms, that are declared to be the same in all of
            it: that is how sequence parallelism is written.
    """

    def __init__(self, group: Any, splits: Mapping[WeightKey, int], keeps_copies: bool) -> None:
        self.group, self.splits, self.keeps_copies = group, splits, keeps_copies
        self.ranks = dist.get_process_group_ranks(group)
        self.size, self.index = len(self.ranks), dist.get_rank(group)
        self.tokens: list[int] | None = None  # the number of tokens of each process; None if each has all of them

    def gathered(self, value: Any) -> list[Any]:
        """The value of every process of the group, in order."""
        return gathered(value, self.group)

    def begin_call(self, hidden: Float[Tensor, "batch token width"], counts: TokenCounts) -> None:
        """Find out whether each process has all tokens, or some of them.

        Args:
            hidden: What the first block takes, as this process has it.
            counts: What `token_counts` gives of the arguments of the model.

        Raises:
            WatchError: The processes have different samples, or nothing says how their tokens belong together.
        """
        sample = hidden.detach().flatten()[:: max(1, hidden.numel() // SAMPLED)][:SAMPLED].double().cpu()
        shapes, samples, theirs = zip(*self.gathered((tuple(hidden.shape), sample, counts)), strict=True)
        size = float(samples[0].square().mean().sqrt()) if len(samples[0]) else 0.0
        same = len({*shapes}) == 1
        same = same and all(torch.allclose(x, samples[0], ALIKE, ALIKE * size, equal_nan=True) for x in samples)
        tokens = [shape[1] for shape in shapes]
        given, floating = ({count for counts in theirs for count in counts[kind]} for kind in (0, 1))
        if same:
            split = sum(tokens) in given | floating and tokens[0] not in given | floating
        else:
            split = tokens[0] not in given and (sum(tokens) in given | floating or self.keeps_copies)
        if not same and not split:
            self.refuse_samples("the first block has different tokens on them, by its batch or by dropout before it")
        self.tokens = tokens if split else None

    def refuse_samples(self, differ: str) -> NoReturn:
        """Raise a sentence: the processes of the group have not the same samples; `differ` says what they have."""
        who = f"the {self.size} processes that share a tensor-parallel model must be given the same samples"
        raise WatchError(f"{who}; {differ}: call the model with one batch on all of them", subject="ranks")

    def whole(self, hidden: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch token width"]:
        """Return hidden states with the tokens of all processes; `begin_call` has found out who has which. Tensors with
        another number of tokens are returned as they are."""
        if self.tokens is None or hidden.shape[1] != self.tokens[self.index]:
            return hidden
        batch, _, width = hidden.shape
        padded = hidden.new_zeros(batch, max(self.tokens), width)
        padded[:, : hidden.shape[1]] = hidden.detach()
        entries = padded.reshape(-1).view(torch.uint8)  # every backend knows how to gather bytes
        parts = [torch.empty_like(entries) for _ in self.ranks]
        dist.all_gather(parts, entries, group=self.group)
        pieces = [part.view(hidden.dtype).reshape(padded.shape) for part in parts]
        return torch.cat([piece[:, :count] for piece, count in zip(pieces, self.tokens, strict=True)], 1)

    def has_all_heads(self, block: nn.Module, widths: Sequence[int]) -> bool:
        """True if this process attends with all heads of a block, False if each of the group has its own.

        Args:
            block: The block.
            widths: For each process, the width of all its heads side by side; 0 if that is not known.

        Raises:
            WatchError: No output projection of the block tells.
        """
        own_width, together = widths[self.index], sum(widths)
        by_rows, not_by_rows = self._inputs_in_attention(block)
        if not by_rows or (together in by_rows) != (own_width in by_rows | not_by_rows):
            return together not in by_rows
        fault = f"heads {own_width} wide came in a {type(block).__name__}, and {together} on all {self.size} together"
        sentence = f"heads of a tensor-parallel model must fit an output projection in its attention; {fault}"
        raise WatchError(f"{sentence}: watch metrics of tokens", subject="heads")

    def is_split_by_rows(self, linear: nn.Module) -> bool:
        """True if each process of the group multiplies some inputs of a linear layer, whose results are added."""
        return self.splits.get((id(linear), "weight")) == _input_axis(linear)

    def _inputs_in_attention(self, block: nn.Module) -> tuple[set[int], set[int]]:
        """The numbers of inputs of linear layers in a block's attention: of those split by rows, and of others. In a
        block none of whose parts is named after attention, of all its linear layers."""
        parts = dict.fromkeys(
            inner
            for name, part in block.named_modules()
            if name and any(word in f"{name} {type(part).__name__}".lower() for word in ("attn", "attention"))
            for inner in part.modules()
        )
        by_rows, not_by_rows = set[int](), set[int]()
        for part in parts or block.modules():
            weight = part._parameters.get("weight")
            if weight is not None and weight.ndim == 2 and not isinstance(part, nn.Embedding):
                (by_rows if self.is_split_by_rows(part) else not_by_rows).add(weight.shape[_input_axis(part)])
        return by_rows, not_by_rows


def tensor_parallel_of(model: nn.Module) -> TensorParallel | None:
    """The processes that share the weights of a model while it runs; None if this one has all it needs, as with DDP and
    FSDP.

    Raises:
        WatchError: Weights are split in a way that they do not tell themselves, or over several groups.
    """
    if world_size() == 1:
        return None
    groups: dict[tuple[int, ...], Any] = {}
    splits: dict[WeightKey, int] = {}
    copied: set[tuple[int, ...]] = set()  # groups that hold a weight in full
    gathered_by_fsdp = _specs_under_fsdp(model)
    for module in submodules(model):
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            key = (id(module), name)
            spec: Any = gathered_by_fsdp[key] if key in gathered_by_fsdp else getattr(weight, "_spec", None)
            fault = f"{name} of a {type(module).__name__} is Megatron's: watch a model of torch's DTensors"
            known = spec is not None or not getattr(weight, "tensor_model_parallel", False)
            require(known, f"weights that are split must tell how; {fault}", WatchError, "model")
            for axis, placement in enumerate([] if spec is None else spec.placements):
                if spec.mesh.size(axis) == 1 or placement.is_partial():
                    continue
                group = spec.mesh.get_group(axis)
                ranks = tuple(dist.get_process_group_ranks(group))
                if placement.is_replicate():
                    copied.add(ranks)
                elif not (weight.ndim == 3 and placement.dim == 0):  # experts, each whole on one process
                    groups[ranks], splits[key] = group, placement.dim % weight.ndim
    shown = " and ".join(str(list(ranks)) for ranks in groups)
    sentence = f"all weights of a model must be split over the same processes; they are over {shown}"
    way = "watch a model with one kind of tensor parallelism"
    require(len(groups) <= 1, f"{sentence}: {way}", WatchError, "model")
    if not groups:
        _refuse_plain_shards(model)
        return None
    ((ranks, group),) = groups.items()
    return TensorParallel(group, splits, ranks in copied)


def _refuse_plain_shards(model: nn.Module) -> None:
    """Raise if transformers has split the weights of a model into plain tensors, as some of its versions do."""
    size = next((size for part in submodules(model) if (size := getattr(part, "_tp_size", None))), 1)
    what = f"those of this {type(model).__name__} are plain tensors, split over {size} processes"
    sentence = f"weights that are split must tell how, as a DTensor does; {what}: update transformers"
    require(not isinstance(size, int) or size <= 1, sentence, WatchError, "model")


def _specs_under_fsdp(model: nn.Module) -> dict[WeightKey, Any]:
    """Of each weight that FSDP2 shards, how it is spread while its block runs: None if it is whole then."""
    specs: dict[WeightKey, Any] = {}
    for module in submodules(model):
        state: Any = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)  # one in older versions of torch
        for group in groups if groups is not None else [getattr(state, "_fsdp_param_group", None)]:
            for sharded in [] if group is None else group.fsdp_params:
                spec = None
                if sharded.is_dtensor:
                    spec = vars(sharded)["_tp_spec" if "_tp_spec" in vars(sharded) else "_unsharded_dtensor_spec"]
                info = sharded._module_info
                holders = [info.module, *info.shared_modules]
                names = [info.param_name, *info.shared_param_names]
                specs |= {(id(holder), name): spec for holder, name in zip(holders, names, strict=True)}
    return specs


def refuse_context_parallel() -> None:
    """Raise inside of torch's context parallelism, where each process has some tokens of every sample, and no weight
    tells."""
    DTensor = _distributed_tensor()
    dispatcher = getattr(DTensor, "_op_dispatcher", None)
    fault = "with context parallelism this process has some of them: measure a probe, outside of it"
    sentence = f"a model must be called with all tokens of a sample; {fault}"
    require(FLASH_ATTENTION not in getattr(dispatcher, "_custom_op_handlers", {}), sentence, WatchError, "model")


def _distributed_tensor() -> Any:
    """The class `DTensor`; None if nobody has imported it, or another thread is about to."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def _input_axis(linear: nn.Module) -> int:
    """The axis of a linear layer's weight along which its inputs lie; a Conv1D of transformers has them first."""
    return 0 if type(linear).__name__ == "Conv1D" else 1


def token_counts(values: Iterable[object]) -> TokenCounts:
    """The numbers of tokens that arguments of a model may have: of integer tensors, and of floating ones.

    >>> token_counts([torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, 8), None])
    ([5], [5])
    """
    counts: tuple[list[int], list[int]] = ([], [])
    for x in values:
        if isinstance(x, Tensor) and x.ndim:
            counts[x.is_floating_point()].append(x.shape[min(1, x.ndim - 1)])
    return counts


def local_part(x: Tensor) -> Tensor:
    """What this process holds of a tensor, for reading: all of it, unless it is a `DTensor`; once it has arrived, where
    it is still on its way from other processes."""
    to_local = getattr(x, "to_local", None)
    x = x if to_local is None else to_local()
    arrived = getattr(x, "trigger_wait", None)  # torch's AsyncCollectiveTensor
    return x if arrived is None else arrived()


def local_tokens(x: Tensor) -> Tensor:
    """What this process holds of hidden states, each token with its whole width."""
    if type(x) is Tensor:
        return x
    if not hasattr(x, "to_local"):
        return local_part(x)
    from torch.distributed.tensor import Replicate

    last = x.ndim - 1
    kept = [p if p.is_shard() and p.dim % x.ndim != last else Replicate() for p in x.placements]  # type: ignore[attr-defined]
    return local_part(x.redistribute(placements=kept))  # type: ignore[attr-defined]


def conversions_followed(follower: Callable[[Tensor, Tensor], None]) -> AbstractContextManager[None]:
    """Inside, `follower` is called with the tensor and the result of every conversion to a `DTensor`, from one, and
    between two; torch's functions, by which tokens are followed through a block, do not show them."""
    if (DTensor := _distributed_tensor()) is None:  # nobody has made one
        return nullcontext()
    return _conversions.heard_by(follower, [(DTensor, name, _reporting(vars(DTensor)[name])) for name in CONVERSIONS])


def _reporting(conversion: Any) -> Any:
    """A conversion of `DTensor`, a method or a static one, that reports its tensor and its result."""
    function = getattr(conversion, "__func__", conversion)

    @wraps(function)
    def converted(x: Tensor, *args: Any, **named: Any) -> Any:
        result = function(x, *args, **named)
        for follower in _conversions.listeners:
            follower(x, result)
        return result

    return staticmethod(converted) if isinstance(conversion, staticmethod) else converted
