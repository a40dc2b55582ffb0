"""Does the canonical network compute what the original does? Checked at every load, before anything is said.

The original runs in float64 on a probe with padding; every hidden state, the output and every attention
matrix are compared with the canonical network's. Above `TOLERANCE` the load is refused.

Many models compute a part in float32 whatever their dtype: a softmax, an RMSNorm, tables of angles. Two
float64 networks that agree to 1e-15 disagree there by 1e-7, wherever an entry rounds the other way. So the
original is run with these parts **lifted** to float64, the canonical network is held against that, and how
far the original's own float32 parts take it from itself is measured and said (`float32_parts`).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rankscope.errors import ParityError
from rankscope.nets import Encoded, Transformer
from rankscope.sources.embedding import Embedding
from rankscope.sources.families import Family

TOLERANCE = 1e-9
"""Largest difference, relative to the largest entry of a state; of an attention weight, absolute."""
PROBE = (24, 17, 9)
"""Tokens of the probe's samples."""


@dataclass(frozen=True)
class Parity:
    """How far the canonical network is from the original."""

    states: float
    """Over all hidden states and the output, relative to the largest entry of each."""
    attention: float
    """Over all attention weights."""
    float32_parts: float | None
    """How far the original is from itself with its float32 parts lifted; None where it has none."""

    def described(self) -> dict[str, float | None]:
        """For the manifest."""
        return {"states": self.states, "attention": self.attention, "float32_parts": self.float32_parts}


@dataclass(frozen=True)
class Probe:
    """What the original is given."""

    inputs: Tensor
    """Token ids, or images."""
    padding: Tensor | None

    @classmethod
    def of(cls, family: Family, config: Any, embedding: Embedding) -> "Probe":
        """Random inputs, padded at the end, from a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        if family.sees:
            kernel: Any = embedding
            shape = (2, kernel.kernel.shape[1], *kernel.size)
            return cls(torch.randn(shape, generator=generator, dtype=torch.float64), None)
        words: Any = embedding
        most = max(PROBE) if words.positions is None else min(max(PROBE), len(words.positions))
        lengths = torch.tensor([min(length, most) for length in PROBE])
        padding = torch.arange(most)[None] >= lengths[:, None]
        ids = torch.randint(0, len(words.words), padding.shape, generator=generator)
        pad = getattr(config, "pad_token_id", None)
        pad = 0 if pad is None else int(pad)
        # RoBERTa tells padding by the id itself.
        ids = torch.where(ids == pad, (pad + 1) % len(words.words), ids)
        return cls(ids.masked_fill(padding, pad), padding)

    def arguments(self, family: Family) -> dict[str, Tensor]:
        """As the original takes them."""
        if family.sees:
            return {"pixel_values": self.inputs}
        assert self.padding is not None
        return {"input_ids": self.inputs, "attention_mask": (~self.padding).long()}


@dataclass(frozen=True)
class Original:
    """What the original computed."""

    states: list[Tensor]
    """The input of the first block, then the output of every block."""
    output: Tensor
    attention: list[Tensor]


@torch.no_grad()
def original(family: Family, core: Any, probe: Probe) -> Original:
    """Run the original and keep what its blocks give."""
    blocks = family.blocks(core)
    states: list[Tensor] = []

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not states:
            given: Any = kwargs.get("hidden_states", kwargs.get("output_h"))  # output_h: XLNet
            states.append(args[0] if args else given)

    def after(module: Any, args: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    handles = [blocks[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [block.register_forward_hook(after) for block in dict.fromkeys(blocks)]
    try:
        cached = {} if family.sees or not hasattr(core.config, "use_cache") else {"use_cache": False}
        found = core(**probe.arguments(family), **cached, output_attentions=True, return_dict=True)
    finally:
        for handle in handles:
            handle.remove()
    if family.tokens_first:
        states = [state.transpose(0, 1) for state in states]
    return Original(states, found.last_hidden_state, list(found.attentions))


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
            func, self.calls = Tensor.double, self.calls + 1
        return func(*map(self._wide, args), **{name: self._wide(arg) for name, arg in (kwargs or {}).items()})

    def _wide(self, argument: Any) -> Any:
        if argument is torch.float32:
            self.calls += 1
            return torch.float64
        return argument


def check(net: Transformer, family: Family, core: Any, embedding: Embedding, name: str) -> Parity:
    """Compare, and refuse the network if it is not the original. `core` must be in float64, on the CPU."""
    probe = Probe.of(family, core.config, embedding)
    with lifted() as lift:
        theirs = original(family, core, probe)
    mine = embedding.embed(probe.inputs, probe.padding)
    parity = Parity(
        states=_states(net, theirs, mine, family.output(core), name),
        attention=_attention(net, theirs, mine),
        float32_parts=_distance(original(family, core, probe), theirs) if lift.calls else None,
    )
    worst = max(parity.states, parity.attention)
    if not worst <= TOLERANCE:
        raise ParityError(
            f"the canonical network must agree with the original within {TOLERANCE:g}; {name} "
            f"({family.name}) is off by {parity.states:.1e} in its states and {parity.attention:.1e} in its "
            "attention: its config asks for something this family does not map; watch measures it as it is"
        )
    return parity


def _states(net: Transformer, theirs: Original, mine: Encoded, whole: bool, name: str) -> float:
    if len(theirs.states) != net.arch.layers + 1:
        raise ParityError(
            f"every block must run once per layer; {name} has {net.arch.layers} layers and its blocks ran "
            f"{len(theirs.states) - 1} times"
        )
    run = net.run(mine.X, mine.padding)
    pairs = list(zip(run.states, theirs.states, strict=True))
    pairs += [(run.output, theirs.output)] if whole else []
    return max(_relative(a, b, ~mine.padding) for a, b in pairs)


def _attention(net: Transformer, theirs: Original, mine: Encoded) -> float:
    """Of real rows; a padded column has weight zero in both."""
    steps = (step.attention for step in net.steps(mine.X, mine.padding) if step.attention is not None)
    rows = ~mine.padding[:, None, :, None]
    found = [
        float((a - b).masked_fill(~rows, 0.0).abs().max())
        for a, b in zip(steps, theirs.attention, strict=True)
    ]
    return math.inf if any(map(math.isnan, found)) else max(found)


def _distance(one: Original, other: Original) -> float:
    """Of the first sample, which has no padding: in float64, a window beyond which all is padding overflows
    transformers' softmax in float32, and the whole sample becomes NaN."""
    pairs = [*zip(one.states, other.states, strict=True), (one.output, other.output)]
    return max(_relative(a[:1], b[:1], torch.ones(a[:1].shape[:2], dtype=torch.bool)) for a, b in pairs)


def _relative(a: Tensor, b: Tensor, real: Tensor) -> float:
    """The largest difference at real tokens, relative to the largest entry there; NaN is infinitely far."""
    found = float((a - b)[real].abs().max() / b[real].abs().max().clamp(min=1e-300))
    return math.inf if math.isnan(found) else found
