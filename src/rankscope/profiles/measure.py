"""`measure`: run a network and read its metrics at every layer, one layer in memory at a time."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope.metrics import MetricsLike, chosen_metrics
from rankscope.nets import Transformer
from rankscope.nets.inputs import TokensOf, tokens_of
from rankscope.profiles.profile import Profile
from rankscope.profiles.propagation import Progress, passing, side_by_side
from rankscope.profiles.readers import CheckReader, MetricReader, Reader
from rankscope.profiles.rows import table
from rankscope.runs import manifest_of

DEFAULT_METRICS = ("relative_residual", "residual", "relative_mu", "mu")


def measure(
    net: Transformer,
    X: TokensOf,
    padding: Tensor | None = None,
    metrics: MetricsLike = DEFAULT_METRICS,
    arithmetic: str = "deviation",
    *,
    variant: str = "as given",
    batch: int = 16,
    progress: Progress | None = None,
    device: str | torch.device | None = None,
    readers: Sequence[Reader] = (),
    estimate: bool = True,
    confirm: bool = False,
    compile: bool = False,
) -> Profile:
    """How uniform the tokens are at every layer.

    X is a text or several, read as `net.encode` reads them (up to 128 tokens of each); what `net.encode`
    gave; or tokens `[batch, token, width]` in any floating dtype, with their padding.

    `arithmetic` is how the network runs: `deviation` resolves any residual, however small; `float64`,
    `float32` and `bfloat16` show their floors. Metrics are computed in float64 from what it gives; each is a
    name, or a `Metric` of your own. `variant` names the network in the table. At most `batch` samples run
    together; `progress(done, total)` hears of each layer; `device` is where to run, where the network is if
    left out. `readers` take what else is wanted of the same pass (`profiles/readers.py`). Layer l is the
    output of block l; a final norm is not applied.

    Beside deviation arithmetic goes a second pass, rounded otherwise, and what the two do not agree on to
    nine digits is marked (`docs/deviation.md`); `estimate=False` leaves it out, and marks nothing.
    `confirm=True` runs the same in doubled precision beside it (about 32 digits, some thirty times the time):
    its readings are shown, and `digits` says how many of their digits float64 has. `compile=True` compiles
    deviation arithmetic: a minute or two, for many batches of one shape on a GPU.

    A kernel without a rule in deviation arithmetic runs in float64, and the table says so. A sample whose
    tokens overflow has NaN from that layer on, and the manifest says from which.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> measure(net, torch.randn(3, 5, 8)).curve("mu").shape
    torch.Size([3, 3])
    """
    tokens, padding = tokens_of("measure", net, X, padding)
    (profile,) = side_by_side([
        _measuring(
            net, tokens, padding, metrics, arithmetic, variant=variant, batch=batch, progress=progress,
            device=device, readers=readers, estimate=estimate, confirm=confirm, compile=compile,
        )
    ])  # fmt: skip
    return profile


def measure_together(
    networks: Mapping[str, tuple[Transformer, Tensor, Tensor | None]],
    metrics: MetricsLike = DEFAULT_METRICS,
    arithmetic: str = "deviation",
    *,
    progress: Progress | None = None,
    readers: Mapping[str, Sequence[Reader]] | None = None,
    **options: Any,
) -> list[Profile]:
    """What `measure` says of each network, by name, on its tokens and padding. They go side by side: variants
    of one network whose layers are read from files (`load(..., stream=True)`) read each layer once for all.
    Other options are those of `measure`.

    >>> from rankscope.nets import Architecture
    >>> net, X = Transformer.random(Architecture(layers=2, width=8, heads=2)), torch.randn(3, 5, 8)
    >>> found = measure_together({"with": (net, X, None), "without": (net.variant(skip=False), X, None)})
    >>> [profile.variants for profile in found]
    [['with'], ['without']]
    """
    done = [0.0] * len(networks)

    def heard(number: int) -> Progress:
        def tell(layers: int, of: int) -> None:
            done[number] = layers / of
            if progress is not None:
                progress(round(1000 * sum(done)), 1000 * len(done))

        return tell

    return side_by_side([
        _measuring(
            *given, metrics, arithmetic, variant=name, readers=(readers or {}).get(name, ()),
            progress=heard(number), sharing=len(networks), **options,
        )
        for number, (name, given) in enumerate(networks.items())
    ])  # fmt: skip


def _measuring(
    net: Transformer,
    X: Tensor,
    padding: Tensor | None,
    metrics: MetricsLike,
    arithmetic: str,
    *,
    variant: str,
    readers: Sequence[Reader],
    estimate: bool = True,
    confirm: bool = False,
    **options: Any,
) -> Generator[None, None, Profile]:
    """`measure` as it goes on, layer by layer."""
    reader, check = MetricReader(chosen_metrics("measure", metrics)), CheckReader()
    every: list[Reader] = [reader, check, *readers]
    ran = yield from passing(
        net, X, padding, every, arithmetic, estimate=estimate, confirm=confirm, **options
    )
    checks: dict[str, Any] = {
        "arithmetic_asked": arithmetic, "dropout": 0.0, "estimate": estimate, "confirm": confirm,
        **check.result(),
    }  # fmt: skip
    described = {"fingerprint": net.fingerprint, "architecture": net.arch.to_dict()}
    names = [each.name for each in reader.chosen]
    return Profile(
        table(reader.result(), variant, ran.arithmetic),
        manifest_of(described, ran.device, variant, ran.arithmetic, names, checks),
    )
