"""Every metric is explained, and what is said of its range holds."""

import math
from typing import Any

import pytest
import torch

from rankscope.errors import MetricError
from rankscope.metrics import METRICS, Metric, metric, outliers
from tests.metrics.test_catalogue import energy
from tests.raising import raises

N, D, EXPERTS, CHOSEN = 6, 4, 5, 2
ENDS = {
    "0 and above": (0.0, math.inf),
    "0 to 1": (0.0, 1.0),
    "0 to 2": (0.0, 2.0),
    "-1 to 1": (-1.0, 1.0),
    "-1/(n - 1) to 1": (-1 / (N - 1), 1.0),
    "0 to n/(n - 1)": (0.0, N / (N - 1)),
    "0 to min(n, d)": (0.0, 4.0),
    "1 to min(n, d)": (1.0, 4.0),
    "0 to min(n - 1, d)": (0.0, 4.0),
    "1 to min(n - 1, d)": (1.0, 4.0),
    "0 to log n": (0.0, math.log(N)),
    "1 to n": (1.0, float(N)),
    "0 to n": (0.0, float(N)),
    "0 to n d": (0.0, float(N * D)),
    "1 and above": (1.0, math.inf),
    "any number": (-math.inf, math.inf),
    "0 to sqrt(n)": (0.0, N**0.5),
    "0 to sqrt(n/2)": (0.0, (N / 2) ** 0.5),
    "k/E to 1": (CHOSEN / EXPERTS, 1.0),
    "log k to log E": (math.log(CHOSEN), math.log(EXPERTS)),
}


def inputs(of: str) -> torch.Tensor:
    """Many samples: plain, nearly the same, and with a few entries that outweigh all others."""
    draw = torch.Generator().manual_seed(7)
    spread = torch.logspace(-3, 2, 40).double()[:, None, None]
    if of == "tokens":
        X = torch.randn(40, N, D, dtype=torch.float64, generator=draw)
        lonely = torch.zeros(40, N, D, dtype=torch.float64)
        lonely[torch.arange(40), torch.arange(40) % N, torch.arange(40) % D] = 1.0
        return torch.cat([X, X * spread + 1, lonely, (X * spread).exp().clamp(max=1e9)])
    if of in ("attention", "scores"):
        scores = torch.randn(40, 1, N, N, dtype=torch.float64, generator=draw) * spread[..., None]
        return scores if of == "scores" else scores.softmax(-1)
    weights = torch.rand(40, N, EXPERTS, dtype=torch.float64, generator=draw)
    return weights * (weights >= weights.topk(CHOSEN).values[..., -1:])


@pytest.mark.parametrize("name", [*METRICS, "relative_residual@argmin", "relative_mu@argmin"])
def test_the_range_that_is_said_is_kept(name: str) -> None:
    known = metric(name)
    assert known.meaning is not None and known.meaning.small and known.meaning.large
    low, high = ENDS[known.meaning.range]
    value = known.read(inputs(known.of)).value
    if name in {known.name for known in outliers.METRICS}:
        value = value[~value.isnan()]  # where most entries are zero there is nothing to compare with
    assert bool((value >= low - 1e-9).all()) and bool((value <= high + 1e-9).all()), value


def test_a_relative_residual_is_above_one_where_one_token_stands_alone() -> None:
    """One token 1, three 0: columns sum to 3/2 and rows to 3/4 after the mean is taken, so sqrt(9/8)."""
    X = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    assert float(metric("relative_residual").read(X).value) == pytest.approx((9 / 8) ** 0.5)
    assert float(metric("relative_mu").read(X).value) == pytest.approx(0.75**0.5)


@pytest.mark.parametrize("name", [name for name, known in METRICS.items() if known.of == "tokens"])
def test_what_equal_tokens_give_is_said(name: str) -> None:
    meaning = metric(name).meaning
    assert meaning is not None and meaning.equal
    if meaning.equal.isdigit():
        x = torch.tensor([[3.0, -1.0, 2.0]], dtype=torch.float64)
        value = float(metric(name).read(x.expand(4, 3)).value)
        assert value == pytest.approx(float(meaning.equal), abs=1e-12)


@pytest.mark.parametrize("name", [name for name, known in METRICS.items() if known.of == "tokens"])
def test_the_direction_of_collapse_is_that_of_the_value(name: str) -> None:
    """Tokens that come closer by half: what is large where tokens differ falls, what is large where they are
    the same rises."""
    draw = torch.Generator().manual_seed(3)
    apart = torch.randn(20, N, D, dtype=torch.float64, generator=draw)
    mean = apart.mean(-2, keepdim=True) + 1
    far, near = (metric(name).read(mean + size * (apart - mean)).value for size in (1.0, 0.1))
    if metric(name).direction:
        assert bool((metric(name).direction * (far - near) > 0).all())


@pytest.mark.parametrize(
    ("change", "subject"), [({"scale": None}, "scale"), ({"of": "attention"}, "degree"), ({"count": True}, "degree")]
)
def test_a_metric_that_does_not_say_what_it_is_is_refused(change: dict[str, Any], subject: str) -> None:
    with raises(MetricError, subject):
        Metric(**{"name": "mine", "compute": energy, "degree": 2, "scale": energy, **change})


@pytest.mark.parametrize(
    ("mine", "subject"),
    [
        (Metric("mine", lambda x, _: x.X), "value"),
        (Metric("mine", lambda x, _: x.unit), "value"),
        (Metric("mine", energy, degree=2, scale=lambda x, _: x.X), "scale"),
    ],
)
def test_a_metric_must_give_a_number_for_each_sample(mine: Metric, subject: str) -> None:
    with raises(MetricError, subject):
        mine.read(torch.ones(3, 2))
