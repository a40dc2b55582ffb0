"""Remedies put cold on a trained model."""

import pytest

from rankscope_studies.remedies import on_trained_model
from rankscope_studies.remedies.measurements import RemedyMeasurements


@pytest.mark.slow
def test_put_cold_says_how_far_tokens_move(tables: RemedyMeasurements) -> None:
    assert on_trained_model.mean(tables.cold, "attnscale", "moved") == 0.0
    net, X, padding = on_trained_model.subject("bert-tiny")
    before, after = (network.run(X, padding).states[-1] for network in (net, net.with_remedy("gate")))
    moved = []
    for sample, hidden in enumerate(padding):
        a, b = before[sample][~hidden], after[sample][~hidden]
        moved.append(float((((a - b) ** 2).sum() / (a**2).sum()).sqrt()))
    assert on_trained_model.mean(tables.cold, "gate", "moved") == pytest.approx(sum(moved) / len(moved))
    assert on_trained_model.mean(tables.cold, "lnscale", "moved") is None
    assert "lnscale" in tables.cold.filter(remedy="lnscale")["refused"][0]
