"""Every metric by name, those of plugins among them, and the metrics that a caller asks for.

Called by whatever takes `metrics=` (`chosen_metrics`) and by whatever meets a metric's name in a table (`metric`,
`symbol_of`, `is_share`, `direction_of`). The metrics themselves are made in the files of their families.
"""

from collections.abc import Iterable, Sequence
from functools import cache

from rankscope.errors import MetricError, require_one_of
from rankscope.metrics import attention, cosine, outliers, residuals, routing, spectrum
from rankscope.metrics.base import Metric, tex_of
from rankscope.plugins import Group

SHIPPED = [
    *residuals.METRICS, *spectrum.METRICS, *cosine.METRICS, *outliers.METRICS, *attention.METRICS, *routing.METRICS,
]  # fmt: skip
METRICS: Group[Metric] = Group("metrics", "a Metric", lambda each: isinstance(each, Metric))

RECORDED = {
    "grad_tokens": "probe=, loss=", "grad_": "optimizer=", "update_": "optimizer=", "spectral_norm_": "spectra=True",
    "stable_rank_": "spectra=True", "jacobian_": "jacobians=True", "paths_": "paths_every=",
    **dict.fromkeys(("rankme", "alpha_req", "lidar", "uniformity", "alignment"), "embeddings="),
}  # fmt: skip
"""The beginnings of names that a monitor records without being asked for them by name, and the option that makes it."""


@cache
def metric(name: str) -> Metric:
    """The metric of that name; `residual@argmin` and its like take the residual about another centre,
    `head_residual` and its like a metric of tokens for what each head adds.

    >>> metric("mu").symbol
    '‖res X‖_F'
    """
    if name.startswith("head_"):
        return metric(name.removeprefix("head_")).of_heads()
    base, at, centre = name.partition("@")
    if base not in METRICS:
        option = next((option for start, option in RECORDED.items() if name.startswith(start)), None)
        if option is not None:
            sentence = f"metric must be one that is read at each layer by name; {name!r} comes with Monitor({option})"
            raise MetricError(f"{sentence}: leave the name out, and give that", subject="metric")
        require_one_of("metric", base, METRICS, MetricError)
    return METRICS[base].about(centre) if at else METRICS[base]


MetricsLike = str | Metric | Sequence[str | Metric]  # wherever metrics are asked for: one or several, names or objects


def chosen_metrics(who: str, metrics: MetricsLike) -> list[Metric]:
    """The metrics asked for, each once; at least one, and no two of one name."""
    chosen: dict[str, Metric] = {}
    alone = isinstance(metrics, str) or not isinstance(metrics, Iterable)
    for given in [metrics] if alone else metrics:  # type: ignore[union-attr]
        if not isinstance(given, str | Metric):
            sentence = f"metrics must be names or Metric objects; received {type(given).__name__}"
            raise MetricError(sentence, subject="metrics")
        wanted = metric(given) if isinstance(given, str) else given
        known = METRICS.get(wanted.name, chosen.setdefault(wanted.name, wanted))
        if known != wanted:
            whose = "a known metric" if wanted.name in METRICS else "another in the same call"
            raise MetricError(f"a metric must have a name of its own; {wanted.name!r} is also {whose}", subject="name")
    if not chosen:
        raise MetricError(f"{who} must be given at least one metric; received none", subject="metrics")
    return list(chosen.values())


def _known(name: str) -> Metric | None:
    """The metric of a name in a table, None of one that is not built in."""
    try:
        return metric(name)
    except MetricError:
        return None


def symbol_of(name: str, tex: bool = False) -> str:
    """How a table or a figure writes a metric; one that is not built in, as of a file, is its own name.

    >>> symbol_of("mu"), symbol_of("mine")
    ('‖res X‖_F', 'mine')
    """
    known = _known(name)
    if known is None:
        return tex_of(name) if tex else name
    return known.tex if tex else known.symbol


def is_share(name: str) -> bool:
    """Whether a metric is how far apart tokens are as a share of their size, so that it can have a threshold."""
    known = _known(name)
    return known is not None and known.share


def direction_of(name: str) -> int:
    """1 where a large value means that tokens differ, -1 where it means that they are the same, or 0.

    >>> [direction_of(name) for name in ("relative_mu", "mean_cosine", "entropy", "stable_rank")]
    [1, -1, 0, 0]
    """
    known = _known(name)
    return 0 if known is None else known.direction
