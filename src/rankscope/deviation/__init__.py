"""Deviation arithmetic: a network at any depth, to full relative precision of what its tokens differ by.

The axes of the tensors that pass through this room:

- `batch`: samples, and after all samples perturbed copies of them where passes run as one batch;
- `token`: the tokens of a sample, valid ones first and padding last while a pass runs;
- `width`: the entries of a token; `head_width` those of one head, `unit` those of the MLP inside;
- `head`: the heads of a layer, from 0; a log-scale (`Scaled.log`) is `[batch]` or `[batch, head]`;
- `row`: queries, and `token` or `column` keys, of a pattern `[batch, head, row, token]`; in cross-attention keys are of
  the memory;
- `expert`: the experts of a mixture, from 0.
"""

from rankscope.deviation.activations import VALUES
from rankscope.deviation.attention import DeviationPattern, Values, common_heads, deviation_heads
from rankscope.deviation.by_rows import AT_ONCE, PatternByRows
from rankscope.deviation.comparison import attends_elsewhere, state_distance, steep_scores, tokens_lost, undecided
from rankscope.deviation.confirmation import Confirmation, confirmations
from rankscope.deviation.decisions import at_layer, can_skip, must_compute, piecewise
from rankscope.deviation.dissect import (
    BlockRecord,
    HalfRecord,
    dissect,
    recording_rules,
    records,
    starting_state,
    starting_tokens,
)
from rankscope.deviation.mlp import REACH
from rankscope.deviation.norms import normalise
from rankscope.deviation.perturbation import PerturbedDeviation, PerturbedPlain, is_cached
from rankscope.deviation.propagate import (
    DeviationStep,
    PassInputs,
    StartingTensors,
    applies,
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
from rankscope.deviation.scores import StateHeads
from rankscope.deviation.second_pass import (
    EXAGGERATED,
    ROUNDING,
    DeviationSecondPass,
    FloatLayer,
    FloatSecondPass,
    SecondPassLayer,
    with_second_pass,
)
from rankscope.deviation.state import LOWEST, Scaled, State, ValidTokens, spread

__all__ = [
    "AT_ONCE", "BlockRecord", "Confirmation", "Deviation", "DeviationPattern", "DeviationSecondPass", "DeviationStep",
    "EXAGGERATED", "FloatLayer", "FloatSecondPass", "HalfRecord", "LOWEST", "NumberTable", "PassInputs",
    "PatternByRows", "PerturbedDeviation", "PerturbedPlain", "REACH", "ROUNDING", "Scaled", "SecondPassLayer",
    "StartingTensors", "State", "StateHeads", "VALUES", "ValidTokens", "Values", "applies", "at_layer",
    "attends_elsewhere", "can_replay", "can_skip", "common_heads", "confirmations", "deviation_heads", "dissect",
    "finish", "is_cached", "joined", "joined_by_form", "layers", "must_compute", "normalise", "parts", "piecewise",
    "propagate", "read", "reads_rows", "recording_rules", "records", "replay_cache", "restored", "rounded", "samples",
    "spread", "starting_state", "starting_tokens", "state_distance", "steep_scores", "tokens_lost",
    "undecided", "with_second_pass", "without_rule",
]  # fmt: skip
