"""Whose each weight of a block is: of queries and keys, values and outputs, or the MLP; by name and shape.

A weight is a matrix, or a stack of them as experts have: biases and the gains of norms are left out. Many
models keep queries, keys and values in one matrix. How its outputs are laid out:

| name                                          | outputs                                                    |
|-----------------------------------------------|------------------------------------------------------------|
| `c_attn`, `qkv`, `Wqkv`, `in_proj`            | all queries, all keys, all values                          |
| `qkv_proj`                                    | the same; fewer keys and values where the module says so   |
| `query_key_value` (GPT-NeoX, BLOOM, Falcon)   | by head: its query, its key, its value                     |

A name that is not here, and a shape that does not fit, is nobody's: `parts_of` says which were left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

Group = Literal["query_key", "value_output", "mlp"]
GROUPS: tuple[Group, ...] = get_args(Group)
Cut = Callable[[Tensor], Tensor]
"""Of one number for each output of a fused matrix, those that count."""

QUERY_KEY = {"q", "k", "query", "key", "wq", "wk", "to_q", "to_k", "linear_q", "linear_k"}
QUERY_KEY |= {f"{part}_{word}" for part in ("q", "k", "query", "key") for word in ("proj", "lin", "linear")}
QUERY_KEY |= {f"q_{part}_proj" for part in "ab"}  # queries through a bottleneck (DeepSeek)
VALUE_OUTPUT = {"v", "value", "wv", "to_v", "v_proj", "v_lin", "v_linear", "value_proj", "linear_v"}
VALUE_OUTPUT |= {
    "o",
    "wo",
    "to_out",
    "o_proj",
    "out_proj",
    "out_lin",
    "out",
    "output",
    "proj",
    "c_proj",
    "dense",
}
IN_TURN = {"c_attn", "qkv", "wqkv", "in_proj", "qkv_proj"}
BY_HEAD = {"query_key_value"}
OTHERWISE = {"CodeGenAttention", "GPTBigCodeAttention"}
"""Modules that have one of these names for outputs in another order."""
MLP = {"mlp", "ffn", "ff", "feed_forward", "feedforward", "densereludense", "intermediate", "output"}
MLP |= {"fc1", "fc2", "fc_in", "fc_out", "c_fc", "linear1", "linear2", "lin1", "lin2", "ffn_output"}
MLP |= {"experts", "moe", "block_sparse_moe", "gate_proj", "up_proj", "down_proj", "gate_up_proj"}


@dataclass(frozen=True)
class Part:
    """A weight, or some of the outputs of one. It is looked up whenever it is asked for: what shards a model
    puts others in its place."""

    owner: nn.Module
    name: str
    axis: int = 0
    """Along which its outputs lie."""
    cut: Cut | None = None
    """All of them, where there is none."""

    @property
    def weight(self) -> nn.Parameter:
        """As it is now."""
        found: nn.Parameter = getattr(self.owner, self.name)
        return found


Parts = dict[tuple[int, Group], list[Part]]
"""By layer (the first block is 1) and group."""


def parts_of(blocks: Sequence[nn.Module]) -> tuple[Parts, list[str]]:
    """The weights that are trained of each block and group, and the names of those that are nobody's.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
    >>> parts, left_out = parts_of([layer])
    >>> {group: len(found) for (_, group), found in parts.items()}
    {'query_key': 1, 'value_output': 2, 'mlp': 2}
    """
    found: Parts = {}
    left_out: dict[str, None] = {}
    for layer, block in enumerate(dict.fromkeys(blocks), 1):
        for name, weight in block.named_parameters():
            if weight.ndim > 1 and weight.requires_grad:
                mine = _whose(block, name, weight)
                for group, part in mine:
                    found.setdefault((layer, group), []).append(part)
                if not mine:
                    left_out[name] = None
    return found, list(left_out)


def _whose(block: nn.Module, name: str, weight: Tensor) -> list[tuple[Group, Part]]:
    """Whose a weight is: one group's, two where it is fused, or nobody's."""
    *way, last = name.split(".")
    owners = [block.get_submodule(".".join(way[: k + 1])) for k in range(len(way))]
    owner = owners[-1] if owners else block
    words = [each.lower() for each in (*way, last.removesuffix("weight").removesuffix("_")) if each]
    attends = [_says_attention(word, part) for word, part in zip(way, owners, strict=True)]
    if not any(attends):
        return [("mlp", Part(owner, last))] if MLP & {*words} else []
    inside = words[attends.index(True) + 1 :]
    for word in reversed(inside):
        if word in IN_TURN | BY_HEAD:
            return _fused(word, owners, owner, last, weight) if word == inside[-1] else []
        if word in QUERY_KEY:
            return [("query_key", Part(owner, last))]
        if word in VALUE_OUTPUT:
            return [("value_output", Part(owner, last))]
    return []


def _says_attention(word: str, part: nn.Module) -> bool:
    said = (word.lower(), type(part).__name__.lower())
    return any("attn" in each or "attention" in each for each in said)


def _fused(
    word: str, owners: Sequence[nn.Module], owner: nn.Module, last: str, weight: Tensor
) -> list[tuple[Group, Part]]:
    """Queries and keys of a fused weight, and its values."""
    axis = 1 if type(owner).__name__ == "Conv1D" else 0
    outputs, inputs = weight.shape[axis], weight.shape[1 - axis]
    attention = owners[-1] if last != "weight" else owners[-2]
    if weight.ndim != 2 or type(attention).__name__ in OTHERWISE:
        return []
    few = _said(attention, "num_key_value_heads") * _said(attention, "head_dim")
    if word in BY_HEAD:
        heads = _said(attention, "num_attention_heads", "num_heads", "n_head", "n_heads")
        if outputs != 3 * inputs or not heads or inputs % heads:
            return []
        cuts = _by_head(heads)
    elif outputs == 3 * inputs:
        cuts = _in_turn(inputs)
    elif word == "qkv_proj" and 0 < 2 * few < outputs:
        cuts = _in_turn(few)
    else:
        return []
    return [
        ("query_key", Part(owner, last, axis, cuts[0])),
        ("value_output", Part(owner, last, axis, cuts[1])),
    ]


def _by_head(heads: int) -> tuple[Cut, Cut]:
    return (
        lambda each: each.reshape(heads, 3, -1)[:, :2].reshape(-1),
        lambda each: each.reshape(heads, 3, -1)[:, 2].reshape(-1),
    )


def _in_turn(values: int) -> tuple[Cut, Cut]:
    return (lambda each: each[:-values], lambda each: each[-values:])


def _said(module: nn.Module, *names: str) -> int:
    """A size that a module, or its config, says; 0 where neither does."""
    for where in (module, getattr(module, "config", None)):
        for name in names:
            found: Any = getattr(where, name, None)
            if isinstance(found, int):
                return found
    return 0
