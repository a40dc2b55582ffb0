"""Live models, measured as they run: hooks read each layer and keep only the numbers."""

from rankscope.live.attention import OBSERVERS
from rankscope.live.attention.observer import AttentionCall, AttentionObserver, OnAttention
from rankscope.live.attention.row_statistics import row_statistics
from rankscope.live.attention.scores import AttentionScores, WrittenScores
from rankscope.live.call_follower import CallFollower, has_listed_parts, modules_around
from rankscope.live.hidden_states import (
    candidates_in,
    exchanged,
    floating_tensors,
    hidden_states_in,
    rows_and_columns,
    same,
    sizes_in,
)
from rankscope.live.hooks import Hook, Hooks, isolated, to_float64_device, without_dropout
from rankscope.live.model_call import WatchTotals
from rankscope.live.modules import (
    Blocks,
    NamedStacks,
    WatchedBlocks,
    describe_model,
    hooked,
    is_compiled,
    own_parameters,
    submodules,
    unwrapped,
)
from rankscope.live.notes import layout_note
from rankscope.live.padding import CallArguments, arguments_of, library_of, mask_arguments_of
from rankscope.live.plan import Layers, Mask, Padding, WatchPlan, make_plan, make_plans
from rankscope.live.processes import TensorParallel, gathered, is_sharded, local_tokens, require_agreement, world_size
from rankscope.live.stack_watch import StackWatch, on_return
from rankscope.live.state_readings import arithmetic_of
from rankscope.live.watching import Watch, watch

__all__ = [
    "AttentionCall", "AttentionObserver", "AttentionScores", "Blocks", "CallArguments", "CallFollower", "Hook", "Hooks",
    "Layers", "Mask", "NamedStacks", "OBSERVERS", "OnAttention", "Padding", "StackWatch", "TensorParallel", "Watch",
    "WatchPlan", "WatchTotals", "WatchedBlocks", "WrittenScores", "arguments_of", "arithmetic_of", "candidates_in",
    "describe_model", "exchanged", "floating_tensors", "gathered", "has_listed_parts", "hidden_states_in", "hooked",
    "is_compiled", "is_sharded", "isolated", "layout_note", "library_of", "local_tokens", "make_plan", "make_plans",
    "mask_arguments_of", "modules_around", "on_return", "own_parameters", "require_agreement", "row_statistics",
    "rows_and_columns", "same", "sizes_in", "submodules", "to_float64_device", "unwrapped", "watch", "without_dropout",
    "world_size",
]  # fmt: skip
