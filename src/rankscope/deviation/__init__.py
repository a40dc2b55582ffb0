"""Deviation arithmetic: a network at any depth, to full relative precision of what its tokens differ by."""

from rankscope.deviation.activations import VALUES
from rankscope.deviation.attention import DeviationPattern, Values, common_heads, deviation_heads
from rankscope.deviation.by_rows import AT_ONCE, PatternByRows
from rankscope.deviation.comparison import attends_elsewhere, state_distance, steep_scores, tokens_lost, undecided
from rankscope.deviation.decisions import at_layer, can_skip, must_compute
from rankscope.deviation.dissect import (
    BlockRecord,
    HalfRecord,
    dissect,
    recording_rules,
    records,
    starting_state,
    starting_tokens,
)
from rankscope.deviation.float_passes import ROUNDING, FloatLayer
from rankscope.deviation.mlp import REACH
from rankscope.deviation.norms import normalise
from rankscope.deviation.perturbation import PerturbedDeviation, PerturbedPlain, is_cached
from rankscope.deviation.propagate import (
    DeviationStep,
    PassInputs,
    StartingTensors,
    applies,
    block_by_block,
    finish,
    layers,
    propagate,
    restored,
    rounded,
    without_rule,
)
from rankscope.deviation.readings import read, reads_rows
from rankscope.deviation.replay import NumberTable, can_replay, joined, joined_by_form, parts, replay_cache, samples
from rankscope.deviation.rules import Deviation
from rankscope.deviation.scaled import LOWEST, Scaled, spread
from rankscope.deviation.scores import StateHeads
from rankscope.deviation.second_pass import (
    EXAGGERATED,
    Confirmation,
    DeviationSecondPass,
    FloatSecondPass,
    SecondPassLayer,
    confirmations,
    with_second_pass,
)
from rankscope.deviation.state import State, ValidTokens

__all__ = [
    "AT_ONCE", "BlockRecord", "Confirmation", "Deviation", "DeviationPattern", "DeviationSecondPass", "DeviationStep",
    "EXAGGERATED", "FloatLayer", "FloatSecondPass", "HalfRecord", "LOWEST", "NumberTable", "PassInputs",
    "PatternByRows", "PerturbedDeviation", "PerturbedPlain", "REACH", "ROUNDING", "Scaled", "SecondPassLayer",
    "StartingTensors", "State", "StateHeads", "VALUES", "ValidTokens", "Values", "applies", "at_layer",
    "attends_elsewhere", "block_by_block", "can_replay", "can_skip", "common_heads", "confirmations", "deviation_heads",
    "dissect", "finish", "is_cached", "joined", "joined_by_form", "layers", "must_compute", "normalise", "parts",
    "propagate", "read", "reads_rows", "recording_rules", "records", "replay_cache", "restored", "rounded", "samples",
    "spread", "starting_state", "starting_tokens", "state_distance", "steep_scores", "tokens_lost",
    "undecided", "with_second_pass", "without_rule",
]  # fmt: skip
