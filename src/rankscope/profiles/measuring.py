"""`measure`: run a network and read its metrics at every layer, one layer in memory at a time.

What happens when it is called, file by file:

1. `sources/inputs.py` makes a network and tokens of what was given; `metrics/catalogue.py` finds the metrics.
2. `propagation.py` runs one **pass**: batches of samples through the network, in an arithmetic, on a device.
   In deviation arithmetic (`deviation/propagate.py`) a **second pass** with different rounding runs beside the first
   (`deviation/second_pass.py`) unless `check=False`; on a GPU steps 2 to 5 are replayed (`captured.py`).
3. Each layer of each batch becomes a **step** (`readers.py`), which computes readings at most once.
4. Every **reader** (`readers.py`) is shown every step: here one of metrics, one of checks, and the caller's.
5. The reader of metrics asks the step for its **readings** (`readings.py`, `deviation/readings.py`), which
   `agreement.py` compares with those of the second pass: readings that rounding decided are marked.
6. Readings become **rows** of one table (`readings.py`), and the table a `Profile` (`profile.py`).
"""

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation import applies
from rankscope.metrics import MetricsLike, chosen_metrics
from rankscope.nets import Transformer, usual_modes
from rankscope.profiles.pass_cost import in_words, seconds
from rankscope.profiles.profile import Profile
from rankscope.profiles.propagation import ARITHMETICS, PassOptions, Progress, layer_pass, run_side_by_side
from rankscope.profiles.readers import CheckReader, MetricReader, Reader
from rankscope.profiles.readings import readings_table
from rankscope.runs import manifest_of
from rankscope.sources import InputsLike, NetworkLike, inputs_of

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
    batch: int = 16,
    progress: Progress | None = None,
    device: str | torch.device | None = None,
    readers: Sequence[Reader] = (),
    check: bool = True,
    confirm: bool = False,
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
        batch: Samples that run together at most.
        progress: Called as `progress(done, total)` after each layer.
        device: Where to run; where the network is, if left out.
        readers: What else is taken from the same pass (`profiles/readers.py`).
        check: Whether a second pass with different rounding runs beside the first. Readings of which rounding left less
            than nine digits are marked (`docs/deviation.md`); without it none are but those at a floor.
        confirm: Whether the same runs in doubled precision beside it (about 32 digits, some thirty times the time): its
            readings are shown, and `digits` says how many of their digits float64 has.

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
    options = PassOptions(arithmetic, batch, progress, device, check, confirm)
    (profile,) = run_side_by_side([_measuring(net, tokens, padding, metrics, variant, readers, options)])
    return profile


@usual_modes()
def measure_together(
    networks: Mapping[str, tuple[Transformer, Tensor, Tensor | None]],
    metrics: MetricsLike = DEFAULT_METRICS,
    arithmetic: str = "deviation",
    *,
    progress: Progress | None = None,
    readers: Mapping[str, Sequence[Reader]] | None = None,
    **options: Any,
) -> list[Profile]:
    """Measure several networks side by side: variants of one network whose layers are read from files
    (`load(..., stream=True)`) read each layer once for all.

    Args:
        networks: By name: a network, its tokens `[batch, token, width]`, and their padding.
        metrics: As of `measure`.
        arithmetic: As of `measure`.
        progress: Called as `progress(done, total)`, in thousandths of all networks.
        readers: By name of a network, what else is taken from its pass.
        **options: Other options of `measure`, and those of `propagation.PassOptions`.

    >>> from rankscope.nets import Architecture
    >>> net, X = Transformer.random(Architecture(layers=2, width=8, heads=2)), torch.randn(3, 5, 8)
    >>> profiles = measure_together({"with": (net, X, None), "without": (net.variant(skip=False), X, None)})
    >>> [profile.variants for profile in profiles]
    [['with'], ['without']]
    """
    done = [0.0] * len(networks)

    def progress_of(index: int) -> Progress:
        def report(layers: int, total: int) -> None:
            done[index] = layers / total
            if progress is not None:
                progress(round(1000 * sum(done)), 1000 * len(done))

        return report

    shared = PassOptions(arithmetic, sharing=len(networks), **{"check": True, **options})
    passes = []
    for index, (name, inputs) in enumerate(networks.items()):
        of_network = (readers or {}).get(name, ())
        passes.append(_measuring(*inputs, metrics, name, of_network, replace(shared, progress=progress_of(index))))
    return run_side_by_side(passes)


def _measuring(
    net: Transformer,
    X: Tensor,
    padding: Tensor | None,
    metrics: MetricsLike,
    variant: str,
    readers: Sequence[Reader],
    options: PassOptions,
) -> Generator[None, None, Profile]:
    """`measure` as a generator: it yields after each layer, and returns the profile."""
    if LOG.isEnabledFor(logging.INFO) and X.ndim == 3 and options.arithmetic in ARITHMETICS:
        duration = in_words(expected_seconds(net, X, options))
        LOG.info("%d x %d tokens, %s: this will take %s by estimate", *X.shape[:2], variant, duration)
    readings, checks = MetricReader(chosen_metrics("measure", metrics)), CheckReader()
    ran = yield from layer_pass(net, X, padding, [readings, checks, *readers], options)
    how = {"arithmetic_asked": options.arithmetic, "dropout": 0.0, "check": options.check, "confirm": options.confirm}
    notes: dict[str, Any] = how | checks.result()
    described = {"fingerprint": net.fingerprint, "architecture": net.arch.to_dict()}
    names = [metric.name for metric in readings.metrics]
    manifest = manifest_of(described, ran.device, variant, ran.arithmetic, names, notes)
    return Profile(readings_table(readings.result(), variant, ran.arithmetic), manifest)


def expected_seconds(net: Transformer, X: Tensor, options: PassOptions) -> float:
    """The time that a pass over tokens `[batch, token, width]` will take, by estimate (`pass_cost.py`)."""
    arithmetic, kind = options.arithmetic, "float"
    if arithmetic == "deviation" and applies(net):
        kind = "confirm" if options.confirm else "checked" if options.check else "deviation"
    dtype, device = ARITHMETICS[arithmetic], torch.device(options.device or net.device)
    return seconds(net.arch, len(X), X.shape[1], kind, dtype, device, options.batch)
