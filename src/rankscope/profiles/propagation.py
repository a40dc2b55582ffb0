"""One pass of a network over tokens, for all readers at once: batches, arithmetic, padding, progress."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from rankscope.deviation import DeviationStep, applies
from rankscope.deviation.confirm import confirmations
from rankscope.deviation.propagate import PassInputs, at_once, layers
from rankscope.deviation.readings import reads_rows
from rankscope.deviation.second_pass import with_second_pass
from rankscope.errors import MetricError, TokensError, one_of
from rankscope.metrics.attention import defect_of_rows
from rankscope.metrics.metric import Of
from rankscope.metrics.tokens import real_tokens
from rankscope.nets import Transformer
from rankscope.nets.devices import free_memory
from rankscope.nets.kernels import kernel_of
from rankscope.nets.streaming import AttentionRequest, size_of_attention, streamed, streams
from rankscope.profiles.needs import MATRICES, batches_beside, check_memory
from rankscope.profiles.readers import Reader
from rankscope.profiles.rows import WHOLE
from rankscope.profiles.steps import DEFECT, LayerStep
from rankscope.profiles.together import Together

ARITHMETICS: dict[str, torch.dtype] = {
    "deviation": torch.float64,
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}

Gave = TypeVar("Gave")
Progress = Callable[[int, int], None]
"""Called with (done, in all), here after each layer; what it raises ends the work."""


class Ran(NamedTuple):
    """How a pass was run."""

    arithmetic: str
    device: str


def one_pass(
    net: Transformer,
    X: Tensor,
    padding: Tensor | None = None,
    readers: Sequence[Reader] = (),
    arithmetic: str = "deviation",
    *,
    batch: int = 16,
    progress: Progress | None = None,
    device: str | torch.device | None = None,
    check: bool = False,
    confirm: bool = False,
    compile: bool = False,
) -> Ran:
    """Propagate a network once, and let every reader take what it needs from each layer.

    Options are those of `measure`. A network without a rule in deviation arithmetic runs in float64.
    """
    (ran,) = side_by_side([
        passing(
            net, X, padding, readers, arithmetic, batch=batch, progress=progress, device=device,
            check=check, confirm=confirm, compile=compile,
        )
    ])  # fmt: skip
    return ran


def side_by_side(passes: Sequence[Generator[None, None, Gave]]) -> list[Gave]:
    """What each of these gives in the end, a layer of one after a layer of the other: networks whose layers
    are read from the same files read each once for all."""
    found: dict[int, Gave] = {}
    with torch.no_grad():
        while len(found) < len(passes):
            for number, each in enumerate(passes):
                if number not in found:
                    try:
                        next(each)
                    except StopIteration as end:
                        found[number] = end.value
    return [found[number] for number in range(len(passes))]


def passing(
    net: Transformer,
    X: Tensor,
    padding: Tensor | None,
    readers: Sequence[Reader],
    arithmetic: str,
    *,
    batch: int = 16,
    progress: Progress | None = None,
    device: str | torch.device | None = None,
    check: bool = False,
    confirm: bool = False,
    compile: bool = False,
    sharing: int = 1,
) -> Generator[None, None, Ran]:
    """`one_pass` as it goes on, layer by layer; to be followed without gradients. So many passes, `sharing`,
    go side by side, and share memory."""
    if arithmetic not in ARITHMETICS:
        raise MetricError(one_of("arithmetic", arithmetic, ARITHMETICS))
    if batch < 1:
        raise TokensError(f"batch must be at least 1 sample; got {batch}")
    if not isinstance(X, Tensor) or not X.is_floating_point():
        raise TokensError(
            "tokens must be a floating tensor [batch, token, width]; received "
            f"{X.dtype if isinstance(X, Tensor) else type(X).__name__}"
        )
    needs = frozenset[Of]().union(*(reader.needs for reader in readers))
    for need in needs - set(get_args(Of)):
        raise MetricError(one_of("what a reader needs", need, get_args(Of)))
    if "routing" in needs and not any(map(net.arch.mixes, range(net.arch.layers))):
        raise MetricError(
            "expert_load, expert_entropy and their like are of a mixture of experts; this network has none: "
            "leave them out"
        )
    if arithmetic == "deviation" and not applies(net):
        arithmetic = "float64"
    net = net.to(ARITHMETICS[arithmetic], device)
    X = X.to(dtype=net.dtype, device=net.device)
    real = real_tokens(X.shape[:-1], padding, X.device)
    kind = "float" if arithmetic != "deviation" else "confirm" if confirm else "deviation"
    asked = _asked(net, readers, kind)
    by_rows = X.ndim == 3 and kind == "deviation" and asked is not None and _large(net, X[:batch], kind)
    held = "rows" if by_rows else kind
    if X.ndim == 3 and (kind != "float" or asked is None):
        check_memory(
            net.arch, len(X), X.shape[1], batch, held, net.device,
            streams=asked is not None, heads="heads" in needs,
        )  # fmt: skip
    layers, starts = net.arch.layers, range(0, len(X), batch)
    without: dict[str, Any] = dict.fromkeys({"attention", "heads", "routing"} - needs)

    def steps_of(start: int) -> Iterator[LayerStep]:
        part, kept = X[start : start + batch], real[start : start + batch]
        here = net.for_samples(start, start + batch)
        rows = asked if _large(net, part, kind) else None
        return _steps(here, part, kept, start, arithmetic, check, confirm, compile, rows)

    # Batches go through layers that are read from files side by side, so that each is read once for all.
    together = net.streamed and X.ndim == 3
    beside = batches_beside(net.arch, X.shape[1], batch, held, net.device) if together else 1
    beside = max(1, beside // sharing)
    for first in range(0, len(starts), beside):
        several = starts[first : first + beside]
        for steps in zip(*map(steps_of, several), strict=True):
            for number, step in enumerate(steps):
                taken = step.step._replace(**without)
                if isinstance(taken, DeviationStep) and "attention" in without:
                    taken = taken._replace(rows=None)
                step = replace(step, step=taken)
                for reader in readers:
                    reader.read(step)
                if progress is not None:
                    done = (step.layer - 1) * len(several) + number + 1 if step.layer else 0
                    progress(first * layers + done, len(starts) * layers)
            del steps, step, taken  # while others go on
            yield
    return Ran(arithmetic, str(net.device))


def _steps(
    net: Transformer,
    X: Tensor,
    real: Tensor,
    start: int,
    arithmetic: str,
    check: bool,
    confirm: bool,
    compile: bool,
    asked: AttentionRequest | None,
) -> Iterator[LayerStep]:
    """The layers of one batch, with what a second pass says of each where one was asked for."""
    if asked is not None and arithmetic != "deviation":
        for step, rows in streamed(net, X, ~real, asked):
            yield LayerStep(net, start, real, step, rows=rows)
    elif arithmetic != "deviation":
        yield from (LayerStep(net, start, real, each) for each in net.steps(X, ~real))
    elif confirm and X.shape[1]:
        for here in confirmations(net, X, ~real):
            yield LayerStep(net, start, real, here.doubled, confirmation=here)
    else:
        given = PassInputs.of(net, X, ~real, by_rows=asked is not None)
        if check and X.shape[1]:
            steps = (LayerStep(net, start, real, *each) for each in with_second_pass(given, asked, compile))
        else:
            steps = (LayerStep(net, start, real, each) for each in layers(given, compile))
        if net.device.type != "cpu" and at_once(given, compile):
            held = list(steps)
            together = Together(held)
            steps = (replace(step, among=together.readings) for step in held)
        yield from steps


def _large(net: Transformer, X: Tensor, kind: str) -> bool:
    """Whether P is read by rows, where it can be. Off the CPU deviation arithmetic holds what fits: there it
    is many times as fast."""
    size = size_of_attention(net.arch, len(X), X.shape[1])
    if kind == "deviation" and net.device.type != "cpu":
        free = free_memory(net.device)
        return free is not None and MATRICES[kind] * size > free
    return kind != "confirm" and size > WHOLE


def _asked(net: Transformer, readers: Sequence[Reader], kind: str) -> AttentionRequest | None:
    """What is to be taken of attention where P is too large; None where it must be whole."""
    metrics = [getattr(reader, "by_row", None) for reader in readers if "attention" in reader.needs]
    if not streams(net.arch) or any(each is None for each in metrics):
        return None
    chosen = {each.name: each for some in metrics for each in some or ()}.values()
    kernel = kernel_of(net.arch.kernel)
    if kind == "deviation" and (not kernel.deviation_by_row or not all(map(reads_rows, chosen))):
        return None
    by_row = {each.name: each.by_row for each in chosen if each.by_row is not None}
    by_head = {each.name: each.by_head for each in chosen if each.by_row is None and each.by_head is not None}
    # The sum of a row costs nothing beside another number of it; alone it is worth the rows where it may not
    # be one.
    if chosen or not kernel.averages:
        by_row = {DEFECT: defect_of_rows, **by_row}
    return AttentionRequest(by_row, by_head)
