"""Sorts the weights of a block into three groups: queries and keys, values and outputs, MLP.

`WeightGradients` measures gradients and updates by these groups. They are told apart by name and shape. A
weight is a matrix, or a stack of matrices as experts have: biases and gains of norms are left out. Many
models keep queries, keys and values in one fused matrix, whose outputs are laid out like this:

| name                                          | outputs                                                    |
|-----------------------------------------------|------------------------------------------------------------|
| `c_attn`, `qkv`, `Wqkv`, `in_proj`            | all queries, all keys, all values                          |
| `qkv_proj`                                    | the same; fewer keys and values where the module says so   |
| `query_key_value` (GPT-NeoX, BLOOM, Falcon)   | by head: its query, its key, its value                     |

A weight whose name or shape is not known belongs to no group; `parameter_groups` returns the names of those.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

Group = Literal["query_key", "value_output", "mlp"]
GROUPS: tuple[Group, ...] = get_args(Group)
OutputChoice = Callable[[Tensor], Tensor]
"""Takes one number for each output of a fused matrix, and returns those of the outputs in a group."""

QUERY_KEY = {"q", "k", "query", "key", "wq", "wk", "to_q", "to_k", "linear_q", "linear_k"}
QUERY_KEY |= {f"{part}_{word}" for part in ("q", "k", "query", "key") for word in ("proj", "lin", "linear")}
QUERY_KEY |= {"q_a_proj", "q_b_proj"}  # queries through a bottleneck (DeepSeek)
VALUE_OUTPUT = {"v", "value", "wv", "to_v", "v_proj", "v_lin", "v_linear", "value_proj", "linear_v", "o"}
VALUE_OUTPUT |= {"wo", "to_out", "o_proj", "out_proj", "out_lin", "out", "output", "proj", "c_proj", "dense"}
IN_TURN = {"c_attn", "qkv", "wqkv", "in_proj", "qkv_proj"}
BY_HEAD = {"query_key_value"}
OTHER_LAYOUTS = {"CodeGenAttention", "GPTBigCodeAttention"}
"""Modules that use one of these names for a matrix whose outputs are laid out in another way."""
MLP = {"mlp", "ffn", "ff", "feed_forward", "feedforward", "densereludense", "intermediate", "output"}
MLP |= {"fc1", "fc2", "fc_in", "fc_out", "c_fc", "linear1", "linear2", "lin1", "lin2", "ffn_output"}
MLP |= {"experts", "moe", "block_sparse_moe", "gate_proj", "up_proj", "down_proj", "gate_up_proj"}


@dataclass(frozen=True)
class ParameterSlice:
    """A weight, or some of its outputs. The parameter is looked up at every use, because what shards a model
    replaces parameters."""

    owner: nn.Module
    name: str
    axis: int = 0
    """The dimension of the weight along which its outputs lie."""
    choose: OutputChoice | None = None
    """The outputs that belong to the slice; None: all."""

    @property
    def weight(self) -> nn.Parameter:
        """The parameter as it is now."""
        parameter: nn.Parameter = getattr(self.owner, self.name)
        return parameter


ParameterGroups = dict[tuple[int, Group], list[ParameterSlice]]
"""The slices of each group, by layer (the first block is 1) and group."""


def parameter_groups(blocks: Sequence[nn.Module]) -> tuple[ParameterGroups, list[str]]:
    """The trainable weights of each block and group, and the names of weights that belong to no group.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
    >>> groups, left_out = parameter_groups([layer])
    >>> {group: len(slices) for (_, group), slices in groups.items()}
    {'query_key': 1, 'value_output': 2, 'mlp': 2}
    """
    groups: ParameterGroups = {}
    left_out: dict[str, None] = {}
    for layer, block in enumerate(dict.fromkeys(blocks), 1):
        for name, weight in block.named_parameters():
            if weight.ndim > 1 and weight.requires_grad:
                slices = _slices(block, name, weight)
                for group, part in slices:
                    groups.setdefault((layer, group), []).append(part)
                if not slices:
                    left_out[name] = None
    return groups, list(left_out)


def _slices(block: nn.Module, name: str, weight: Tensor) -> list[tuple[Group, ParameterSlice]]:
    """The slices of a weight: one, two of a fused matrix, or none if its group is not known."""
    *path, last = name.split(".")
    modules = [block.get_submodule(".".join(path[: k + 1])) for k in range(len(path))]
    owner = modules[-1] if modules else block
    words = [word.lower() for word in (*path, last.removesuffix("weight").removesuffix("_")) if word]
    in_attention = [_is_attention(word, module) for word, module in zip(path, modules, strict=True)]
    if not any(in_attention):
        return [("mlp", ParameterSlice(owner, last))] if MLP & {*words} else []
    inside = words[in_attention.index(True) + 1 :]
    for word in reversed(inside):
        if word in IN_TURN | BY_HEAD:
            return _fused_slices(word, modules, owner, last, weight) if word == inside[-1] else []
        if word in QUERY_KEY:
            return [("query_key", ParameterSlice(owner, last))]
        if word in VALUE_OUTPUT:
            return [("value_output", ParameterSlice(owner, last))]
    return []


def _is_attention(word: str, module: nn.Module) -> bool:
    names = (word.lower(), type(module).__name__.lower())
    return any("attn" in name or "attention" in name for name in names)


def _fused_slices(
    word: str, modules: Sequence[nn.Module], owner: nn.Module, last: str, weight: Tensor
) -> list[tuple[Group, ParameterSlice]]:
    """Two slices of a fused weight: queries and keys, and values; none if its layout is not known."""
    axis = 1 if type(owner).__name__ == "Conv1D" else 0
    outputs, inputs = weight.shape[axis], weight.shape[1 - axis]
    attention = modules[-1] if last != "weight" else modules[-2]
    if weight.ndim != 2 or type(attention).__name__ in OTHER_LAYOUTS:
        return []
    value_width = _size(attention, "num_key_value_heads") * _size(attention, "head_dim")
    if word in BY_HEAD:
        heads = _size(attention, "num_attention_heads", "num_heads", "n_head", "n_heads")
        if outputs != 3 * inputs or not heads or inputs % heads:
            return []
        choices = _by_head(heads)
    elif outputs == 3 * inputs:
        choices = _in_turn(inputs)
    elif word == "qkv_proj" and 0 < 2 * value_width < outputs:
        choices = _in_turn(value_width)
    else:
        return []
    return [
        ("query_key", ParameterSlice(owner, last, axis, choices[0])),
        ("value_output", ParameterSlice(owner, last, axis, choices[1])),
    ]


def _by_head(heads: int) -> tuple[OutputChoice, OutputChoice]:
    return (
        lambda outputs: outputs.reshape(heads, 3, -1)[:, :2].reshape(-1),
        lambda outputs: outputs.reshape(heads, 3, -1)[:, 2].reshape(-1),
    )


def _in_turn(value_width: int) -> tuple[OutputChoice, OutputChoice]:
    return (lambda outputs: outputs[:-value_width], lambda outputs: outputs[-value_width:])


def _size(module: nn.Module, *names: str) -> int:
    """A size that a module, or its config, has under one of these names; 0 if neither has one."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            size: Any = getattr(holder, name, None)
            if isinstance(size, int):
                return size
    return 0
