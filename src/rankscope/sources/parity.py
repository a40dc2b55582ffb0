"""Parity: does the canonical network compute what the original does? Checked at every load.

The original runs in float64 on inputs with padding on either side, longer than any length that its config
names, where that can be afforded: two networks that agree on 24 tokens may differ on 60, behind a window or in a far
bucket of relative positions. Every hidden state, the output and every attention pattern are compared with the
canonical network's, and at lengths too long to run, masks and rotary angles alone. The original runs twice:
with its own attention implementation, whose states count, and with eager attention, which returns patterns.
Above `TOLERANCE` the load is refused.

Many models compute a part in float32 whatever their dtype: a softmax, an RMSNorm, tables of angles. Two
float64 networks that agree to 1e-15 disagree there by 1e-7, wherever an entry rounds the other way. So the
original is run with these parts **lifted** to float64, the canonical network is held against that, and how
far the original's own float32 parts take it from itself is measured and said (`float32_parts`).
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from inspect import signature
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rankscope.errors import ParityError, require
from rankscope.nets import Architecture, ForwardPass, Transformer, masks, rotary_tables
from rankscope.sources.checkpoint import first_line, quiet
from rankscope.sources.embedding import Embedding
from rankscope.sources.families import Family
from rankscope.sources.families.family import config_of, is_of_transformers

TOLERANCE = 1e-9
"""Largest difference, relative to the largest entry of a state; of an attention weight or angle, absolute."""
LONGEST = 8300  # Most tokens to compare masks on: a mask of that size in float64 takes half a gigabyte
SHORTEST = 24  # Tokens of the inputs where the config names no length
PADDING = (0, 7, 15)  # Padded tokens of the three samples: none, at the end, at the beginning
SOURCE = 17  # Tokens of the memory that a decoder reads
LENGTHS = re.compile("window|chunk|distance|buckets|relative_positions|local_attention|original_max_position")
"""Names of config fields that hold a number of tokens at which something changes."""
WORK = 1e11  # Most weights x tokens of inputs longer than `ALWAYS`: a few seconds in float64
ALWAYS = 192
ROOM = 1e9  # Most bytes of all its attention matrices
UNMAPPED = "it asks for something that this family does not map; watch measures it as it is"


@dataclass(frozen=True)
class Parity:
    """How far the canonical network is from the original, and on how many tokens both were compared."""

    states: float  # Over all hidden states and the output, relative to the largest entry of each
    attention: float | None
    """Over all attention weights; None where the original, a module of one's own, hands none out."""
    float32_parts: float | None
    """How far the original is from itself with its float32 parts lifted; None where it has none."""

    tokens: int = 0  # Length of the longest sample on which all was compared; 0 for images, which have one size
    reach: int = 0  # The number of tokens up to which masks and rotary angles were compared as well
    named: int | None = None
    """The longest window, bucket or the like that the config names, where `reach` does not go beyond it."""

    def described(self) -> dict[str, Any]:
        """The fields of this parity that go into a run's manifest."""
        return asdict(self)


def named_lengths(config: Any) -> list[int]:
    """Every number of tokens at which the config may mean something to change, in ascending order."""

    def found(fields: Mapping[Any, Any]) -> Iterator[int]:
        for name, value in fields.items():
            if isinstance(value, Mapping):
                yield from found(value)
            elif type(value) is int and value > 0 and LENGTHS.search(str(name)):  # a bool is no length
                yield value

    fields = config.to_dict() if hasattr(config, "to_dict") else config
    return sorted(set(found(fields if isinstance(fields, Mapping) else vars(fields))))


def beyond(length: int) -> int:
    """The number of tokens with which every sample, less its padding, is longer than `length`."""
    return length + max(PADDING) + 9


def affordable(n: int, arch: Architecture, weights: int) -> bool:
    """True if original and network can both run on inputs of n tokens in reasonable time and memory."""
    samples = len(PADDING)
    works = n <= ALWAYS or samples * n * weights <= WORK
    return works and 8 * samples * n * n * arch.heads * arch.layers <= ROOM


@dataclass(frozen=True)
class ParityInputs:
    """The inputs of a parity check: ids or images, with padding, positions and a decoder's memory."""

    inputs: Tensor  # Token ids, or images
    padding: Tensor | None
    position_ids: Tensor | None = None
    """The position of each valid token, for a model that would otherwise count padding as well."""
    memory: Tensor | None = None  # What a decoder reads `[batch, source, width]`, padded on either side where it can be
    memory_padding: Tensor | None = None

    @classmethod
    def of(cls, family: Family, core: Any, embedding: Embedding, arch: Architecture) -> "ParityInputs":
        """Random inputs from a fixed seed, as long as the config asks for and can be afforded."""
        weights = sum(weight.numel() for weight in core.parameters())
        lengths = [SHORTEST, *map(beyond, named_lengths(config_of(core)))]
        longest = max(n for n in lengths if n == SHORTEST or affordable(n, arch, weights))
        return cls.long(family, core, embedding, min(longest, arch.rotary_reach or longest))

    @classmethod
    def long(cls, family: Family, core: Any, embedding: Embedding, n: int) -> "ParityInputs":
        """Random inputs of n tokens, or of as many as the model has positions for."""
        generator = torch.Generator().manual_seed(0)
        if family.continuous_inputs:
            image_embedding: Any = embedding
            shape = (2, *image_embedding.shape)
            return cls(torch.randn(shape, generator=generator, dtype=torch.float64), None)
        words: Any = embedding
        n = n if words.positions is None else min(n, len(words.positions))
        padding = torch.zeros(len(PADDING), n, dtype=torch.bool)
        parameters = signature(core.forward).parameters
        if "attention_mask" in parameters:  # a module of one's own may know no padding
            padding[1, max(n - PADDING[1], 1) :] = True
            padding[2, : min(PADDING[2], n - 1)] = True
        ids = torch.randint(0, len(words.words), padding.shape, generator=generator)
        pad = int(getattr(config_of(core), "pad_token_id", None) or 0)
        # RoBERTa tells padding by the id itself.
        ids = torch.where(ids == pad, (pad + 1) % len(words.words), ids)
        # A table whose first rows are spare is read by a count of valid tokens; else the count is given.
        counts = words.positions is not None and family.first_position(core) == 0
        positions = ((~padding).cumsum(1) - 1).clamp(min=0)
        position_ids = positions if counts and "position_ids" in parameters else None
        inputs = ids.masked_fill(padding, pad), padding, position_ids
        if family.side != "decoder":
            return cls(*inputs)
        shape = len(PADDING), SOURCE, core.config.hidden_size
        memory = torch.randn(shape, generator=generator, dtype=torch.float64)
        memory_padding = torch.zeros(shape[:2], dtype=torch.bool)
        memory_padding[1, : PADDING[1]] = memory_padding[2, -PADDING[1] :] = True
        return cls(*inputs, memory, memory_padding if "encoder_attention_mask" in parameters else None)

    def attach_memory(self, net: Transformer) -> Transformer:
        """A decoder with these inputs' memory attached; any other network unchanged."""
        return net if self.memory is None else net.with_memory(self.memory, self.memory_padding)

    @property
    def tokens(self) -> int:
        """The length of the samples in tokens; 0 for images, which have one size."""
        return 0 if self.padding is None else self.padding.shape[1]

    def arguments(self, family: Family) -> dict[str, Tensor]:
        """The inputs as keyword arguments of the original's `forward`."""
        if family.continuous_inputs:
            return {family.input_name: self.inputs}
        assert self.padding is not None
        arguments = {
            "input_ids": self.inputs,
            "attention_mask": (~self.padding).long(),
            "position_ids": self.position_ids,
            "encoder_hidden_states": self.memory,
            "encoder_attention_mask": None if self.memory_padding is None else (~self.memory_padding).long(),
        }
        return {name: value for name, value in arguments.items() if value is not None}


@dataclass(frozen=True)
class Original:
    """Hidden states, output and attention patterns that the original computed."""

    states: list[Tensor]  # The input of the first block, then the output of every block
    output: Tensor
    attention: list[Tensor]  # Of every block, and then of every block's cross-attention where there is one
    wrapped: bool  # True if blocks return tuples


@torch.no_grad()
def original(family: Family, core: Any, arguments: Mapping[str, Any], attention: bool = True) -> Original:
    """Run the original and keep its hidden states, output and (with `attention`) patterns."""
    blocks = family.blocks(core)
    states: list[Tensor] = []
    wrapped: list[bool] = []

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not states:
            hidden: Any = kwargs.get("hidden_states", kwargs.get("output_h"))  # output_h: XLNet
            states.append(args[0] if args else hidden)

    def after(module: Any, args: Any, output: Any) -> None:
        wrapped.append(isinstance(output, tuple))
        states.append(output[0] if wrapped[-1] else output)

    handles = [handle for block in dict.fromkeys(blocks) for handle in family.attach(block, before, after)]
    last: list[Tensor] = []
    if family.final_norm and not is_of_transformers(core):
        norm = attrgetter(family.final_norm)(core)
        handles.append(norm.register_forward_hook(lambda module, args, output: last.append(output)))
    try:
        output, weights = family.call(core, arguments, attention)
    finally:
        for handle in handles:
            handle.remove()
    if family.tokens_first:
        states = [state.transpose(0, 1) for state in states]
    if output is None:
        output = last[-1] if last else states[-1]
    return Original(states, output, weights, any(wrapped))


@contextmanager
def lifted() -> Iterator["_Lift"]:
    """Inside, what a model would compute in float32 it computes in float64."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Lift() as lift:
            yield lift
    finally:
        torch.set_default_dtype(usual)


class _Lift(TorchFunctionMode):
    """Puts float64 in the place of float32 in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            self.calls += 1
            return args[0].to(torch.float64, copy=True)  # as float() does: some code asks for its strides
        return func(*map(self._wide, args), **{name: self._wide(arg) for name, arg in (kwargs or {}).items()})

    def _wide(self, argument: Any) -> Any:
        if argument is torch.float32:
            self.calls += 1
            return torch.float64
        return argument


def check(net: Transformer, family: Family, core: Any, embedding: Embedding, name: str) -> Parity:
    """Compare, and refuse the network if it is not the original. `core` must be in float64, on the CPU, and a
    copy of our own: it is left with eager attention."""
    inputs = ParityInputs.of(family, core, embedding, net.arch)
    X, padding = embedding.embed(inputs.inputs, inputs.padding)
    arguments = inputs.arguments(family)
    net = inputs.attach_memory(net)
    network_run, valid = net.run(X, padding, attention=True), ~padding
    own_difference = _own(network_run, valid, family, core, arguments, name)
    if is_of_transformers(core):
        with quiet():
            core.set_attn_implementation("eager")
    with lifted() as lift:
        original_run = original(family, core, arguments)
    parity = Parity(
        states=max(own_difference, distance(network_run, original_run, valid, family.output(core), name)),
        attention=_attention(network_run, original_run, valid),
        float32_parts=_own_rounding(original(family, core, arguments), original_run) if lift.calls else None,
        tokens=inputs.tokens,
    )
    if not max(parity.states, parity.attention or 0.0) <= TOLERANCE:
        weights = "" if parity.attention is None else f" and {parity.attention:.1e} in its attention"
        message = f"the canonical network must agree with the original within {TOLERANCE:g}; {name} ({family.name})"
        message += f" is off by {parity.states:.1e} in its states{weights}"
        raise ParityError(f"{message}: {UNMAPPED}", subject="states")
    table = getattr(embedding, "positions", None)
    most = min(math.inf if table is None else len(table), net.arch.rotary_reach or math.inf)
    lengths_named = [] if family.continuous_inputs else named_lengths(config_of(core))
    lengths = [n for n in lengths_named if inputs.tokens < beyond(n) <= most]
    reach = max((beyond(n) for n in lengths if beyond(n) <= LONGEST), default=0)
    with lifted():
        masks_compared = reach > 0 and _check_reach(net, family, core, reach, original_run.wrapped, name)
    reach = max(inputs.tokens, reach if masks_compared else 0)
    return replace(parity, reach=reach, named=max((n for n in lengths if beyond(n) > reach), default=None))


def _own(
    network_run: ForwardPass, valid: Tensor, family: Family, core: Any, arguments: Mapping[str, Any], name: str
) -> float:
    """How far the states are from the original's as it runs; 0 where that is eager attention, or one of
    transformers' own that needs another device or dtype and computes the same."""
    from transformers import AttentionInterface

    implementation: Any = getattr(config_of(core), "_attn_implementation", None)
    function = AttentionInterface._global_mapping.get(implementation)
    # Flash, flex and paged attention of transformers do not run in float64 on a CPU.
    if implementation in (None, "eager") or (implementation != "sdpa" and is_transformers_own(function)):
        return 0.0
    prefix = f"{name} must compute attention as the canonical network does; it runs with {implementation!r}, and"
    try:
        with lifted():
            original_run = original(family, core, arguments, attention=False)
    except Exception as error:
        if implementation == "sdpa":
            raise
        reason = f"{prefix} cannot be run in float64 on the CPU to compare ({first_line(error)})"
        advice = "set 'eager' if that computes the same, or watch the model as it is"
        raise ParityError(f"{reason}: {advice}", subject="attn_implementation") from error
    difference = distance(network_run, original_run, valid, family.output(core), name)
    if not difference <= TOLERANCE and implementation != "sdpa":
        message = f"{prefix} is off by {difference:.1e} in its states: watch measures it as it is"
        raise ParityError(message, subject="attn_implementation")
    return difference


def is_transformers_own(function: Any) -> bool:
    """True if an attention function comes with transformers, bound to a kernel or not."""
    return str(getattr(getattr(function, "func", function), "__module__", "")).startswith("transformers.")


def distance(network_run: ForwardPass, original_run: Original, valid: Tensor, whole: bool, name: str) -> float:
    """The largest relative difference of hidden states at valid tokens; with `whole`, also of the output."""
    layers, runs = len(network_run.states) - 1, len(original_run.states) - 1
    message = f"every block must run once per layer; {name} has {layers} layers and its blocks ran {runs} times"
    require(runs == layers, message, ParityError, "blocks")
    pairs = list(zip(network_run.states, original_run.states, strict=True))
    pairs += [(network_run.output, original_run.output)] if whole else []
    return max(relative(a, b, valid) for a, b in pairs)


def relative(a: Tensor, b: Tensor, valid: Tensor) -> float:
    """The largest difference at valid tokens, relative to the largest entry there; infinite for NaN."""
    difference = float((a - b)[valid].abs().max() / b[valid].abs().max().clamp(min=1e-300))
    return math.inf if math.isnan(difference) else difference


def _attention(network_run: ForwardPass, original_run: Original, valid: Tensor) -> float | None:
    """The largest difference of attention patterns in rows of valid tokens (padded columns are zero)."""
    if not original_run.attention:
        return None
    rows = ~valid[:, None, :, None]
    pairs = zip([*network_run.attention, *network_run.cross], original_run.attention, strict=True)
    differences = [float((a - b).masked_fill_(rows, 0.0).abs().max()) for a, b in pairs]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def _own_rounding(first: Original, second: Original) -> float:
    """The largest relative difference of two runs of the original in the first sample, which has no padding.

    In float64, a window beyond which all is padding overflows transformers' softmax in float32, and the whole sample
    becomes NaN."""
    pairs = [*zip(first.states, second.states, strict=True), (first.output, second.output)]
    return max(relative(a[:1], b[:1], torch.ones(a[:1].shape[:2], dtype=torch.bool)) for a, b in pairs)


@torch.no_grad()
def _check_reach(net: Transformer, family: Family, core: Any, n: int, wrapped: bool, name: str) -> bool:
    """Compare masks and rotary angles on n tokens, layer by layer; raise `ParityError` where they differ.

    The original prepares both before its first block, from its config. So it is called with blocks that only
    record their arguments: at 4,000 tokens that costs a mask of 4,000 x 4,000 and no weights. False where
    nothing can be compared: positions are not rotary, or blocks make masks themselves. `wrapped`: the
    original's blocks return tuples."""
    if net.arch.positions != "rotary":
        return False
    tables = rotary_tables(net.arch, n, torch.zeros(1, dtype=torch.float64))
    visible: dict[Any, Tensor] = {}
    blocks, block_arguments, ids = family.blocks(core), list[dict[str, Any]](), torch.ones(1, n, dtype=torch.long)

    def note(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        block_arguments.append(kwargs)
        return (hidden_states,) if wrapped else hidden_states

    for block in blocks:
        block.forward = note
    try:
        core(input_ids=ids, attention_mask=ids, use_cache=False, return_dict=True)
    finally:
        for block in dict.fromkeys(blocks):
            del block.forward
    if not all({"attention_mask", "position_embeddings"} <= arguments.keys() for arguments in block_arguments):
        return False
    for layer, arguments in enumerate(block_arguments):
        mask = net.arch.mask_of(layer)
        if mask not in visible:
            visible[mask] = masks.matrix(mask, n)
        theirs, angles = arguments["attention_mask"], arguments["position_embeddings"]
        if isinstance(angles, Tensor):  # cosines and sines as complex numbers
            angles = angles.real, angles.imag
        # Eager attention adds the mask to the scores: where there is none, every token sees every other.
        visible_to_original = torch.ones(n, n, dtype=torch.bool) if theirs is None else theirs[0, 0] == 0
        pairs = zip(tables[layer % len(tables)], angles, strict=True)
        angles_agree = all(bool(((a - b[0, :, : a.shape[1]]).abs() <= TOLERANCE).all()) for a, b in pairs)
        if not angles_agree or not torch.equal(visible_to_original, visible[mask]):
            what = "sees other tokens" if angles_agree else "turns positions by other angles"
            message = f"the canonical network must be the original at every length its config names; at {n} tokens"
            message += f" layer {layer + 1} of {name} ({family.name}) {what}"
            raise ParityError(f"{message}: {UNMAPPED}", subject="masks")
    return True
