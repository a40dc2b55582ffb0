"""`measure`: run a network and read its metrics at every layer, one layer in memory at a time.

What happens when it is called, file by file:

1. `sources/inputs.py` makes a network and tokens of what was given; `metrics/catalogue.py` finds the metrics.
2. `layer_pass` runs one **pass** for all readers at once: what readers need is asked; the network is brought into its
   arithmetic and onto its device; memory is checked (`pass_cost.py`); then each batch runs layer by layer
   (`_layer_steps`): by plain rules; in deviation arithmetic (`deviation/propagate.py`), with a **second pass** of
   different rounding beside the first (`deviation/second_pass.py`) unless `check=False`; or in doubled precision
   (`deviation/confirmation.py`). On a GPU steps 2 to 5 are replayed (`captured.py`). Whoever has readers of their own
   calls `one_pass`.
3. Each layer of each batch becomes a **step** (`readers.py`), which computes readings at most once.
4. Every **reader** (`readers.py`) is shown every step: here one of metrics, one of checks, and the caller's.
5. The reader of metrics asks the step for its **readings** (`readers.py`, `deviation/readings.py`), which
   `agreement.py` compares with those of the second pass: readings that rounding decided are marked.
6. Readings become **rows** of one table (`readers.py`), and the table a `Profile` (`profile.py`).
"""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack, cast, get_args

import torch
from torch import Tensor

from rankscope.deviation import PassInputs, applies, confirmations, layers, reads_rows, with_second_pass
from rankscope.errors import MetricError, TokensError, require, require_one_of
from rankscope.metrics import MetricsLike, Of, chosen_metrics, defect_of_rows, valid_tokens
from rankscope.nets import (
    AttentionRequest,
    Transformer,
    free_memory,
    kernel_of,
    padding_from,
    size_of_attention,
    streamed,
    streams,
    usual_modes,
)
from rankscope.profiles.captured import captured_steps
from rankscope.profiles.pass_cost import MATRICES, batches_beside, check_memory, in_words, seconds
from rankscope.profiles.profile import Profile
from rankscope.profiles.readers import DEFECT, WHOLE, CheckReader, LayerStep, MetricReader, Reader, readings_table
from rankscope.runs import manifest_of
from rankscope.sources import InputsLike, NetworkLike, inputs_of

ARITHMETICS: dict[str, torch.dtype] = {
    "deviation": torch.float64,
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}

Result = TypeVar("Result")
Progress = Callable[[int, int], None]  # called with (done, in all), here after each layer; what it raises ends the work


class PassRecord(NamedTuple):
    """How a pass was run."""

    arithmetic: str
    device: str


class PassOptions(TypedDict, total=False):
    """How a pass is to be run: options of `measure`, `measure_together` and `one_pass`."""

    batch_size: int  # samples that run together at most; 16 if left out
    progress: Progress | None  # called as `progress(done, total)` after each layer
    device: str | torch.device | None  # where to run; where the network is, if left out
    check: bool
    """Whether a second pass with different rounding runs beside the first. Readings of which rounding left less than
    nine digits are marked (`docs/deviation.md`); without it none are but those at a floor. True if left out, but for
    `one_pass`."""
    confirm: bool
    """Whether the same runs in doubled precision beside it (about 32 digits, some thirty times the time): its readings
    are shown, and `digits` says how many of their digits float64 has. False if left out."""
    most_held: int | None
    """Bytes of a layer's attention pattern above which it is read by blocks of rows; None chooses by what is read."""
    block_bytes: int | None  # bytes of such a block; None chooses by the device
    sharing: int  # passes that run side by side, and share memory; 1 if left out


class ReadingOptions(PassOptions, total=False):
    """Options of `measure`: those of its pass, and who else reads along."""

    readers: Sequence[Reader]  # what else is taken from the same pass (`profiles/readers.py`)


PASS_OPTIONS: PassOptions = {
    "batch_size": 16, "progress": None, "device": None, "check": True, "confirm": False, "most_held": None,
    "block_bytes": None, "sharing": 1,
}  # fmt: skip
"""What is taken for options that are left out."""


def _chosen(options: PassOptions) -> PassOptions:
    """These options and `PASS_OPTIONS`; one that does not exist is refused."""
    for name in options:
        require_one_of("an option of a pass", name, [*PASS_OPTIONS, "readers"], MetricError, name)
    chosen = PASS_OPTIONS | options
    size = chosen["batch_size"]
    require(size >= 1, f"batch_size must be at least 1 sample; got {size}", TokensError, "batch_size")
    return chosen


WHOLE_ON_CPU = 2**24
"""Bytes of a layer's attention pattern above which blocks of its rows are faster on a CPU than the whole, whatever the
network (benchmarks/RESULTS.md), but for metrics that go over the rows again and again."""


def one_pass(
    net: Transformer,
    X: Tensor,
    padding: Tensor | None = None,
    readers: Sequence[Reader] = (),
    arithmetic: str = "deviation",
    *,
    attention_mask: Tensor | None = None,
    **options: Unpack[PassOptions],
) -> PassRecord:
    """Run a network once, and let every reader take what it needs from each layer.

    A network without a rule in deviation arithmetic runs in float64. Tokens X are `[batch, token, width]`; `readers`
    are objects that are shown every layer of every batch (`readers.py`), `options` those of `PassOptions` (without a
    second pass, if `check` is left out), and other arguments those of `measure`.
    """
    padding, chosen = padding_from(padding, attention_mask), _chosen({"check": False, **options})
    (record,) = run_side_by_side([layer_pass(net, X, padding, readers, arithmetic, chosen)])
    return record


def run_side_by_side(passes: Sequence[Generator[None, None, Result]]) -> list[Result]:
    """The result of each pass; they take turns, so that layers in files which they share are read once for all."""
    results: dict[int, Result] = {}
    with torch.no_grad():
        while len(results) < len(passes):
            for index, generator in enumerate(passes):
                if index not in results:
                    try:
                        next(generator)
                    except StopIteration as end:
                        results[index] = end.value
    return [results[index] for index in range(len(passes))]


def layer_pass(
    net: Transformer,
    X: Tensor,
    padding: Tensor | None,
    readers: Sequence[Reader],
    arithmetic: str,
    options: PassOptions,
) -> Generator[None, None, PassRecord]:
    """`one_pass` as a generator, to be run without gradients: it yields after each layer.

    Args:
        net: As of `measure`; so are X, padding and arithmetic.
        X: Tokens `[batch, token, width]`.
        padding: True at padded tokens.
        readers: Objects that are shown every layer of every batch.
        arithmetic: How the network runs.
        options: All options of `PassOptions`.
    """
    require_one_of("arithmetic", arithmetic, ARITHMETICS, MetricError)
    batch_size, progress = options["batch_size"], options["progress"]
    if not isinstance(X, Tensor) or not X.is_floating_point():
        received = X.dtype if isinstance(X, Tensor) else type(X).__name__
        raise TokensError(f"tokens must be a floating tensor [batch, token, width]; received {received}", subject="X")
    needs = frozenset[Of]().union(*(reader.needs for reader in readers))
    for need in needs:
        require_one_of("what a reader needs", need, get_args(Of), MetricError, "needs")
    sentence = "metrics of scores are read while a model runs, with watch or Monitor; measure keeps no scores"
    require("scores" not in needs, sentence, MetricError, "metrics")
    routes = "routing" not in needs or any(map(net.arch.mixes, range(net.arch.layers)))
    sentence = "metrics of routing need a mixture of experts; this network has none"
    require(routes, sentence, MetricError, "metrics")
    arithmetic = "float64" if arithmetic == "deviation" and not applies(net) else arithmetic
    net = net.to(ARITHMETICS[arithmetic], options["device"])
    X = X.to(dtype=net.dtype, device=net.device)
    valid = valid_tokens(X.shape[:-1], padding, X.device)
    kind = "float" if arithmetic != "deviation" else "confirm" if options["confirm"] else "deviation"
    request = _row_request(net, readers, kind, options["block_bytes"])
    by_rows = X.ndim == 3 and kind == "deviation" and _large(net, X[:batch_size], kind, options, request)
    memory_kind = "rows" if by_rows else kind
    if X.ndim == 3 and (kind != "float" or request is None):
        shape = (len(X), X.shape[1], batch_size)
        check_memory(net.arch, *shape, memory_kind, net.device, streams=request is not None, heads="heads" in needs)
    layers, starts = net.arch.layers, range(0, len(X), batch_size)
    not_needed: dict[str, Any] = dict.fromkeys({"attention", "heads", "routing"} - needs)

    def steps_from(start: int) -> Iterator[LayerStep]:
        samples = slice(start, start + batch_size)
        rows = request if _large(net, X[samples], kind, options, request) else None
        of_batch = net.for_samples(start, start + batch_size)
        return _layer_steps(of_batch, X[samples], valid[samples], start, readers, arithmetic, options, rows)

    # Batches go through layers that are read from files side by side, so that each is read once for all.
    side_by_side = net.streamed and X.ndim == 3
    beside = batches_beside(net.arch, X.shape[1], batch_size, memory_kind, net.device) if side_by_side else 1
    beside = max(1, beside // options["sharing"])
    for first in range(0, len(starts), beside):
        group = starts[first : first + beside]
        batches = [steps_from(first) for first in group]
        for _ in range(layers + 1):  # not by zip, which would hold layers while the next ones run
            for index, batch_steps in enumerate(batches):
                step = next(batch_steps)
                step = replace(step, step=step.step._replace(**not_needed))
                for reader in readers:
                    reader.read(step)
                if progress is not None:
                    done = (step.layer - 1) * len(group) + index + 1 if step.layer else 0
                    progress(first * layers + done, len(starts) * layers)
            del step  # its memory is free while other passes take their turn
            yield
    return PassRecord(arithmetic, str(net.device))


def _layer_steps(
    net: Transformer,
    X: Tensor,
    valid: Tensor,
    start: int,
    readers: Sequence[Reader],
    arithmetic: str,
    options: PassOptions,
    request: AttentionRequest | None,
) -> Iterator[LayerStep]:
    """The layers of one batch, with the second pass of each where one was asked for."""
    padding = ~valid
    if request is not None and arithmetic != "deviation":
        for step, rows in streamed(net, X, padding, request):
            yield LayerStep(net, start, valid, step._replace(attention=cast(Any, rows)))
    elif arithmetic != "deviation":
        yield from (LayerStep(net, start, valid, step) for step in net.steps(X, padding))
    elif options["confirm"] and X.shape[1]:
        for confirmation in confirmations(net, X, padding):
            yield LayerStep(net, start, valid, confirmation.doubled, confirmation=confirmation)
    else:
        inputs = PassInputs.of(net, X, padding, by_rows=request is not None, block_bytes=options["block_bytes"])
        wanted = [reader.metrics for reader in readers if isinstance(reader, MetricReader)]
        steps = None
        if request is None and X.is_cuda and len(wanted) == 1:
            hold = not all(isinstance(reader, MetricReader | CheckReader) for reader in readers)
            steps = captured_steps(inputs, valid, start, wanted[0], check=options["check"], hold=hold)
        if steps is not None:
            yield from steps
        elif options["check"] and X.shape[1]:
            for first, second in with_second_pass(inputs, request):
                yield LayerStep(net, start, valid, first, second)
                del first, second  # their memory is free while the next layer runs
        else:
            yield from (LayerStep(net, start, valid, step) for step in layers(inputs))


def _large(net: Transformer, X: Tensor, kind: str, options: PassOptions, request: AttentionRequest | None) -> bool:
    """True if P can be read by rows and is large enough for it. A GPU holds what fits: that is far faster."""
    if request is None or kind == "confirm":
        return False
    size, on_cpu = size_of_attention(net.arch, len(X), X.shape[1]), net.device.type == "cpu"
    if kind == "deviation" and not on_cpu:
        free = free_memory(net.device)
        return free is not None and MATRICES[kind] * size > free
    if options["most_held"] is not None:
        return size > options["most_held"]
    return size > (WHOLE_ON_CPU if on_cpu and not request.by_head else WHOLE)


def _row_request(
    net: Transformer, readers: Sequence[Reader], kind: str, block_bytes: int | None
) -> AttentionRequest | None:
    """What is to be taken of attention where P is too large; None where it must be whole."""
    wanted = [getattr(reader, "by_row", None) for reader in readers if "attention" in reader.needs]
    if not streams(net.arch) or any(metrics is None for metrics in wanted):
        return None
    chosen = {metric.name: metric for metrics in wanted for metric in metrics or ()}
    kernel = kernel_of(net.arch.kernel)
    if kind == "deviation" and (not kernel.deviation_by_row or not all(map(reads_rows, chosen.values()))):
        return None
    by_row = {name: metric.by_row for name, metric in chosen.items() if metric.by_row}
    by_head = {m.name: m.by_head for m in chosen.values() if m.by_row is None and m.by_head is not None}
    # The sum of a row costs nothing beside another number of it; alone it is worth the rows if it may not be one.
    if chosen or not kernel.averages:
        by_row = {DEFECT: defect_of_rows, **by_row}
    return AttentionRequest(by_row, by_head, block_bytes)


DEFAULT_METRICS = ("relative_residual", "residual", "relative_mu", "mu")
LOG = logging.getLogger("rankscope")
"""At level INFO it says how long a pass will take, before the pass starts."""


@usual_modes()
def measure(
    net: NetworkLike,
    X: InputsLike,
    padding: Tensor | None = None,
    metrics: MetricsLike = DEFAULT_METRICS,
    arithmetic: str = "deviation",
    *,
    attention_mask: Tensor | None = None,
    variant: str = "as given",
    **options: Unpack[ReadingOptions],
) -> Profile:
    """Measure how uniform the tokens are at every layer of a network.

    Layer l is the output of block l, layer 0 the input; a final norm is not applied. Metrics are computed in float64
    from what the arithmetic gives. A kernel without a rule in deviation arithmetic runs in float64, and the table says
    so. A sample whose tokens overflow has NaN from that layer on, and the manifest says from which. The logger
    "rankscope" says at level INFO how long it will take.

    Args:
        net: A network, or a Hugging Face model in memory, which is loaded as one (`rankscope.load`).
        X: A text or several, read as `net.encode` reads them (up to 128 tokens of each); what `net.encode` gave; token
            ids `[batch, token]`; or tokens `[batch, token, width]` in any floating dtype.
        padding: `[batch, token]`, True at padded tokens, which no average counts.
        metrics: Names, or `Metric` objects of your own.
        arithmetic: How the network runs: `deviation` resolves any residual, however small; `float64`, `float32` and
            `bfloat16` show their floors.
        attention_mask: Instead of `padding`, 1 at tokens and 0 at padding (Hugging Face's convention).
        variant: The name of the network in the table.
        **options: Those of `ReadingOptions`, which describes each.

    Returns:
        A `Profile`: a row for each sample, layer, metric (and head), with value, log10 and floor.

    Raises:
        TokensError: if X, its padding or its attention mask do not fit the network.
        MetricError: if a metric or an arithmetic is not known.
        SourceError: if `net` is neither a network nor a model that can be loaded.
        TooLargeError: if the pass would not fit into memory.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> measure(net, torch.randn(3, 5, 8)).curve("mu").shape
    torch.Size([3, 3])
    """
    net, tokens, padding = inputs_of("measure", net, X, padding, attention_mask)
    readers, chosen = options.pop("readers", ()), _chosen(options)
    (profile,) = run_side_by_side([_measuring(net, tokens, padding, metrics, arithmetic, variant, readers, chosen)])
    return profile


@usual_modes()
def measure_together(
    networks: Mapping[str, tuple[Transformer, Tensor, Tensor | None]],
    metrics: MetricsLike = DEFAULT_METRICS,
    arithmetic: str = "deviation",
    *,
    readers: Mapping[str, Sequence[Reader]] | None = None,
    **options: Unpack[PassOptions],
) -> list[Profile]:
    """Measure several networks side by side: variants of one network whose layers are read from files
    (`load(..., stream=True)`) read each layer once for all.

    Args:
        networks: By name: a network, its tokens `[batch, token, width]`, and their padding.
        metrics: As of `measure`.
        arithmetic: As of `measure`.
        readers: By name of a network, what else is taken from its pass.
        **options: Those of `PassOptions`; `progress` is called in thousandths of all networks.

    >>> from rankscope.nets import Architecture
    >>> net, X = Transformer.random(Architecture(layers=2, width=8, heads=2)), torch.randn(3, 5, 8)
    >>> profiles = measure_together({"with": (net, X, None), "without": (net.variant(skip=False), X, None)})
    >>> [profile.variants for profile in profiles]
    [['with'], ['without']]
    """
    done, progress = [0.0] * len(networks), options.get("progress")

    def progress_of(index: int) -> Progress:
        def report(layers: int, total: int) -> None:
            done[index] = layers / total
            if progress is not None:
                progress(round(1000 * sum(done)), 1000 * len(done))

        return report

    shared, passes = _chosen({"sharing": len(networks), **options}), []
    for index, (name, inputs) in enumerate(networks.items()):
        of_network: PassOptions = {**shared, "progress": progress_of(index)}
        passes.append(_measuring(*inputs, metrics, arithmetic, name, (readers or {}).get(name, ()), of_network))
    return run_side_by_side(passes)


def _measuring(
    net: Transformer,
    X: Tensor,
    padding: Tensor | None,
    metrics: MetricsLike,
    arithmetic: str,
    variant: str,
    readers: Sequence[Reader],
    options: PassOptions,
) -> Generator[None, None, Profile]:
    """`measure` as a generator: it yields after each layer, and returns the profile."""
    if LOG.isEnabledFor(logging.INFO) and X.ndim == 3 and arithmetic in ARITHMETICS:
        duration = in_words(expected_seconds(net, X, arithmetic, **options))
        LOG.info("%d x %d tokens, %s: this will take %s by estimate", *X.shape[:2], variant, duration)
    readings, checks = MetricReader(chosen_metrics("measure", metrics)), CheckReader()
    ran = yield from layer_pass(net, X, padding, [readings, checks, *readers], arithmetic, options)
    how = {"arithmetic_asked": arithmetic, "dropout": 0.0} | {name: options[name] for name in ("check", "confirm")}
    notes: dict[str, Any] = how | checks.result()
    described = {"fingerprint": net.fingerprint, "architecture": net.arch.to_dict()}
    names = [metric.name for metric in readings.metrics]
    manifest = manifest_of(described, ran.device, variant, ran.arithmetic, names, notes)
    return Profile(readings_table(readings.result(), variant, ran.arithmetic), manifest)


def expected_seconds(
    net: Transformer, X: Tensor, arithmetic: str = "deviation", **options: Unpack[PassOptions]
) -> float:
    """The time that a pass over tokens `[batch, token, width]` will take, by estimate (`pass_cost.py`)."""
    chosen, kind = _chosen(options), "float"
    if arithmetic == "deviation" and applies(net):
        kind = "confirm" if chosen["confirm"] else "checked" if chosen["check"] else "deviation"
    dtype, device = ARITHMETICS[arithmetic], torch.device(chosen["device"] or net.device)
    return seconds(net.arch, len(X), X.shape[1], kind, dtype, device, chosen["batch_size"])
