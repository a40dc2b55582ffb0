"""Metrics asked for by name or as objects."""

import pytest
from torch import Tensor

from rankscope.errors import MetricError
from rankscope.metrics import Metric, Tokens, chosen_metrics, metric
from tests.raising import raises


def energy(x: Tokens, padding: Tensor | None = None) -> Tensor:
    return x.X.square().sum((-2, -1))


def test_a_metric_is_asked_for_by_name_or_as_an_object_and_counts_once() -> None:
    mine = Metric("my_energy", energy, degree=2, scale=energy)
    wanted: list[str | Metric] = ["mu@midrange", mine, metric("mu"), "mu", metric("mu@midrange"), mine]
    assert [chosen.name for chosen in chosen_metrics("somebody", wanted)] == ["mu@midrange", "my_energy", "mu"]
    assert chosen_metrics("somebody", mine) == [mine]
    assert mine.symbol == "my_energy" and mine.tex == r"\mathrm{my\_energy}"


def test_two_metrics_of_one_name_and_none_at_all_are_refused() -> None:
    for twice in ([Metric("mine", energy), Metric("mine", metric("mu").compute)], ["mu", Metric("mu", energy)]):
        with raises(MetricError, "name"):
            chosen_metrics("somebody", twice)  # type: ignore[arg-type]
    with raises(MetricError, "metrics"):
        chosen_metrics("somebody", [])


@pytest.mark.parametrize(
    ("name", "subject", "hint"),
    [
        ("residul", "metric", "'residual'"),
        ("residual@middle", "centre", "midrange"),
        ("stable_rank@mean", "centre", ""),
        # Numbers that a monitor records by itself.
        ("rankme", "metric", "Monitor(embeddings=)"),
        ("grad_query_key", "metric", "Monitor(optimizer=)"),
        ("spectral_norm_mlp", "metric", "Monitor(spectra=True)"),
    ],
)
def test_unknown_metrics_and_centres_are_refused_with_a_hint(name: str, subject: str, hint: str) -> None:
    with raises(MetricError, subject) as caught:
        metric(name)
    assert hint in str(caught.value)
