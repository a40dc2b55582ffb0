"""Tensor parallelism: several processes share each block, and what one of them has is completed by the others.

Where q, k, v are split by columns and the output projection by rows, each process attends with some of the heads. With
sequence parallelism it also has some of the tokens between attention and MLP. All processes of such a group are called
with the same samples, so that what is measured of them counts once.

`plan.py` calls `tensor_parallel_of`, once for a watch or a `Monitor`. At the first block of a call the follower and
`monitor/inline.py` call `begin_call`, then `whole` for the hidden states of every block; when the call ends, the
follower has `gathered` bring the readings of all heads together (`attention_readings.py`). Weights themselves are
`DTensor`s, which know how they are split; `processes.py` gathers those.

The processes of a group must do the same things in the same order, so an error in a hook of one is raised when the call
ends, in all of them.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankscope.errors import WatchError, require
from rankscope.live import processes
from rankscope.live.hooks import Replacements
from rankscope.live.modules import submodules
from rankscope.shapes import Float

FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
SAMPLED = 1024  # entries of hidden states by which processes find out whether they have the same
ALIKE = 1e-2  # by how much of their size these may differ, as sums in another order do
CONVERSIONS = ("from_local", "to_local", "redistribute", "full_tensor")  # of DTensor
WeightKey = tuple[int, str]  # a module by its id, and the name of the weight in it
TokenCounts = tuple[Sequence[int], Sequence[int]]  # of integer arguments of a call, and of floating ones
_conversions = Replacements()  # those of DTensor report their results


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
        return processes.gathered(value, self.group)

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

    def refuse_samples(self, came: str) -> NoReturn:
        """Raise a sentence: the processes of the group have not the same samples; `came` says what they have."""
        who = f"the {self.size} processes that share a tensor-parallel model must be given the same samples"
        raise WatchError(f"{who}; {came}: call the model with one batch on all of them", subject="ranks")

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
        came = f"heads {own_width} wide came in a {type(block).__name__}, and {together} on all {self.size} together"
        sentence = f"heads of a tensor-parallel model must fit an output projection in its attention; {came}"
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
    if processes.world_size() == 1:
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
            came = f"{name} of a {type(module).__name__} is Megatron's: watch a model of torch's DTensors"
            known = spec is not None or not getattr(weight, "tensor_model_parallel", False)
            require(known, f"weights that are split must tell how; {came}", WatchError, "model")
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
    came = "with context parallelism this process has some of them: measure a probe, outside of it"
    sentence = f"a model must be called with all tokens of a sample; {came}"
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
