"""Made-up training runs: the rows that a monitor would have of each measurement, without a model."""

from collections.abc import Callable, Mapping, Sequence

import polars as pl

from rankscope.monitor import Alarm, AlarmRule
from rankscope.trainings import TRAINING

LAYERS = 4
Run = Callable[[str, int, int], float | None]
"""The number of a metric, at a layer and a measurement; None where it is no number."""
HEALTHY = {
    "relative_mu": 0.7, "mu": 30.0, "entropy": 2.5, "first_token_mass": 0.1, "head_mu": 2.0,
    "grad_query_key": 0.01, "grad_value_output": 0.1, "grad_mlp": 0.2, "grad_tokens": 1.0, "largest_logit": 5.0,
    "update_query_key": 2e-3, "update_value_output": 2e-3, "update_mlp": 2e-3, "spectral_norm_query_key": 2.0,
    "spectral_norm_value_output": 2.0, "spectral_norm_mlp": 3.0, "stable_rank_query_key": 8.0,
    "stable_rank_value_output": 20.0, "stable_rank_mlp": 20.0,
}  # fmt: skip


def rows(step: int, run: Run, index: int, heads: int = 3) -> pl.DataFrame:
    """A measurement of a made-up run: every metric, at every layer, of every head where it is of heads."""
    found = []
    rate = run("lr", 0, index)
    found.append([step, None, None, "lr", rate, 0.0, rate, rate, 0.0, 1, 0])
    for metric in HEALTHY:
        by_head = metric in ("entropy", "first_token_mass", "head_mu", "largest_logit")
        for layer in range(1, LAYERS + 1):
            for head in range(heads) if by_head else [None]:
                name = f"{metric}/{head}" if metric == "head_mu" else metric
                value = run(name, layer, index)
                found.append([step, layer, head, metric, value, 0.0, value, value, 0.0,
                              4 if value is not None else 0, 0 if value is not None else 4])  # fmt: skip
    return pl.DataFrame(found, schema=TRAINING, orient="row")


def heard(rules: Sequence[AlarmRule], run: Run, measurements: int = 13, every: int = 10) -> list[Alarm]:
    return [
        alarm
        for k in range(measurements)
        for rule in rules
        for alarm in rule.on_measurement(rows(every * k, run, k), every * k)
    ]


def healthy(name: str, layer: int, index: int) -> float:
    return 1e-3 if name == "lr" else HEALTHY[name.split("/")[0]]


def otherwise(changes: Mapping[str, Callable[[int, int], float | None]]) -> Run:
    """A healthy run but for these."""
    return lambda name, layer, index: changes[name](layer, index) if name in changes else healthy(name, layer, index)
