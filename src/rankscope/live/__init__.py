"""Live models, measured as they run: hooks read each layer and keep only the numbers."""

from rankscope.live.attention import OBSERVERS, AttentionCall, AttentionObserver, OnAttention
from rankscope.live.attention.row_statistics import row_statistics
from rankscope.live.attention.scores import AttentionScores, WrittenScores
from rankscope.live.attention.torch_functions import FunctionTracer
from rankscope.live.block_hooks import has_listed_parts, modules_around
from rankscope.live.hidden_states import (
    candidates_in,
    exchanged,
    floating_tensors,
    hidden_states_in,
    layout_in_attention,
    rows_and_columns,
    same,
    sizes_in,
    times_changed,
)
from rankscope.live.hooks import Hook, Hooks, isolated, to_float64_device, without_dropout
from rankscope.live.modules import (
    Blocks,
    NamedStacks,
    describe_model,
    hooked,
    is_compiled,
    own_parameters,
    submodules,
    unwrapped,
)
from rankscope.live.notes import layout_note
from rankscope.live.padding import CallArguments, arguments_of, find_padding, library_of, mask_arguments_of
from rankscope.live.plan import Layers, Mask, Padding, WatchOptions, WatchPlan, make_plan, make_plans
from rankscope.live.processes import (
    TensorParallel,
    TokenCounts,
    gathered,
    in_trial_of_stage,
    is_sharded,
    local_tokens,
    refuse_context_parallel,
    require_agreement,
    token_counts,
    world_size,
)
from rankscope.live.stack_watch import StackWatch
from rankscope.live.state_readings import StateReadings, TokenBatch, arithmetic_of
from rankscope.live.watching import Watch, watch

__all__ = [
    "AttentionCall", "AttentionObserver", "AttentionScores", "Blocks", "CallArguments", "FunctionTracer", "Hook",
    "Hooks", "Layers", "Mask", "NamedStacks", "OBSERVERS", "OnAttention", "Padding", "StackWatch", "StateReadings",
    "TensorParallel", "TokenBatch", "TokenCounts", "Watch", "WatchOptions", "WatchPlan", "WrittenScores",
    "arguments_of", "arithmetic_of", "candidates_in", "describe_model", "exchanged", "find_padding",
    "floating_tensors", "gathered", "has_listed_parts", "hidden_states_in", "hooked", "in_trial_of_stage",
    "is_compiled", "is_sharded", "isolated", "layout_in_attention", "layout_note", "library_of", "local_tokens",
    "make_plan", "make_plans", "mask_arguments_of", "modules_around", "own_parameters", "refuse_context_parallel",
    "require_agreement", "row_statistics", "rows_and_columns", "same", "sizes_in", "submodules", "times_changed",
    "to_float64_device", "token_counts", "unwrapped", "watch", "without_dropout", "world_size",
]  # fmt: skip
