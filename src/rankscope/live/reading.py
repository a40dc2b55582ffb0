"""Reading a running model: states, attention and heads reduced to numbers on the device where they are."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live.call import Call, Plan
from rankscope.live.isolation import float64_device, isolated, to_float64_device
from rankscope.live.modules import parts, weights
from rankscope.live.sizes import MOST, PIECE, Sizes
from rankscope.metrics.tokens import unit_of
from rankscope.profiles.rows import readings, row_sum_defect

TOGETHER = 2**24
"""Off the CPU, as many entries of states are kept until they are read together: an accelerator is done with
one layer before its next call is made. On it small ones are kept, since reading is faster in one go."""
ARITHMETICS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""From the finest to the coarsest."""


def read_state(plan: Plan, call: Call, layer: int, state: Tensor) -> None:
    """Metrics of a layer's tokens, where they are asked for."""
    if not plan.measures(layer):
        return
    if state.shape[:2] != call.shape:
        raise WatchError(
            f"every layer must have the tokens of the first {tuple(call.shape or ())}; layer {layer} has "
            f"{tuple(state.shape[:2])}: name blocks between which tokens are neither merged nor split"
            + (f": {said}" if (said := plan.finer()) else "")
        )
    if "states" in plan.keep:
        call.kept.append(("states", layer, state.to("cpu", copy=True)))
    near = state.device.type == "cpu"
    if near and not (plan.by_sizes and state.numel() <= PIECE):
        read_waiting(plan, call)
        _read_alike(plan, call, [(layer, state)])
        return
    call.waiting.append((layer, state.detach().clone()))
    if sum(each.numel() for _, each in call.waiting) >= (4 * PIECE if near else TOGETHER):
        read_waiting(plan, call)


def read_waiting(plan: Plan, call: Call) -> None:
    """The states that wait to be read together."""
    waiting, call.waiting = call.waiting, []
    for _, alike in groupby(waiting, key=lambda each: (each[1].shape, each[1].dtype, each[1].device)):
        _read_alike(plan, call, list(alike))


def _read_alike(plan: Plan, call: Call, states: Sequence[tuple[int, Tensor]]) -> None:
    if not _sized(plan, call, states):
        _read(plan, call, states)


def _sized(plan: Plan, call: Call, states: Sequence[tuple[int, Tensor]]) -> bool:
    """Whether these states of one shape, on a CPU, are read by their sizes, which are now noted."""
    first = states[0][1]
    if first.device.type != "cpu" or not plan.by_sizes or not 0 < first.numel() <= MOST * len(first):
        return False
    with isolated(first.device):
        if call.sizes is None:
            call.sizes = Sizes(_real(call, first), call.whole, call.unit)
        return call.sizes.take(*zip(*states, strict=True))


def _read(plan: Plan, call: Call, states: Sequence[tuple[int, Tensor]]) -> None:
    """States of one shape, as so many more samples."""
    layers, (first, *others) = zip(*states, strict=True)
    batch = len(first)
    with isolated(first.device):
        real = _real(call, first)
        state = torch.cat([first, *others]) if others else first
        found, broken = readings(
            "tokens", to_float64_device(state), real.repeat(len(layers), 1) if others else real,
            plan.metrics, call.unit, call.whole,
        )  # fmt: skip
    for k, layer in enumerate(layers):
        here = slice(k * batch, (k + 1) * batch)
        call.found.append((layer, [(metric, each.of_samples(here)) for metric, each in found]))
        call.broken.append((layer, broken[here].any()))


def read_attention(plan: Plan, call: Call, layer: int, P: Tensor) -> bool:
    """Metrics of a layer's attention; whether a model in float64 computed it in float32."""
    with isolated(P.device):
        real = _real(call, P)
        call.defects.append(row_sum_defect(to_float64_device(P), real))
        narrow = P.dtype == torch.float64 and all(
            bool((part.float() == part).all()) for part in torch.split(P.flatten(0, 1), _several(P))
        )
        if narrow:
            call.attention_unit = unit_of(torch.float32)  # many models take softmax in float32 always
        if any(each.of == "attention" for each in plan.metrics):
            unit = max(call.unit, call.attention_unit)
            found, _ = readings("attention", to_float64_device(P), real, plan.metrics, unit)
            call.found.append((layer, found))
    if "attention" in plan.keep:
        call.kept.append(("attention", layer, P.to("cpu", copy=True)))
    return narrow


def read_routing(plan: Plan, call: Call, layer: int, p: Tensor) -> None:
    """Metrics of how a layer routes its tokens."""
    with isolated(p.device):
        found, _ = readings("routing", to_float64_device(p), _real(call, p), plan.metrics, call.unit)
    call.found.append((layer, found))


def read_heads(plan: Plan, call: Call, added: Tensor) -> None:
    """Metrics of what each head of the layer entered last adds."""
    unit = max(call.unit, call.attention_unit)
    found, _ = readings("heads", added, _real(call, added), plan.metrics, unit)
    call.found.append((call.inside[-1], found))


def _several(P: Tensor) -> int:
    """So many matrices of P are looked at together."""
    return max(1, TOGETHER // max(1, P[0, 0].numel() if P.numel() else 1))


def _real(call: Call, x: Tensor) -> Tensor:
    """Which tokens count, on the device of x."""
    device = float64_device(x.device)
    if device not in call.real:
        call.real[device] = next(iter(call.real.values())).to(device)
    return call.real[device]


def arithmetic_of(blocks: Sequence[nn.Module], state: Tensor) -> torch.dtype:
    """The coarsest of the dtypes at work: the state's, the weights', autocast's."""
    kind = state.device.type
    dtypes = {state.dtype} | {weight.dtype for weight in weights(parts(*blocks))}
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    return max(dtypes & set(ARITHMETICS), key=ARITHMETICS.index)


def dropout_of(block: nn.Module) -> float:
    """The largest probability of dropping something, among modules in train mode."""
    names = ("p", "dropout", "attention_dropout", "dropout_prob", "drop_prob")
    found = [getattr(part, name, 0.0) for part in parts(block) if part.training for name in names]
    return max([p for p in found if isinstance(p, float)], default=0.0)
