"""`rankscope masks`, `metrics` and `models`."""

import pytest

from rankscope.metrics import METRICS
from tests.cli.running import answered, printed, rankscope


def test_masks_as_a_table_a_picture_and_json() -> None:
    table = printed("masks", "--tokens", "12", "--picture")
    assert "unidirectional" in table and "█" in table
    (answer,) = answered("masks", "window:2", "--tokens", "12")
    assert answer["mask"] == "window:2" and answer["radius"] == 3 and answer["strongly_connected"]


@pytest.mark.slow
def test_models_lists_every_family_with_its_parity() -> None:
    from rankscope.sources.families import FAMILIES

    answer = answered("models")
    assert {row["family"] for row in answer["families"]} == set(FAMILIES)
    assert all(max(row["states"], row["attention"]) < 1e-12 for row in answer["families"])


def test_metrics_are_listed_and_explained() -> None:
    text = printed("metrics")
    assert all(f"\n{name} " in text for name in METRICS)
    assert "they can be above 1, up to 2" in " ".join(text.split())
    one = " ".join(printed("metrics", "relative_residual").split())
    assert "Range: 0 to 2." in one and "2 (1 - 1/n)" in one and "The cloud of a report says relative_mu" in one
    assert [each["range"] for each in answered("metrics", "entropy")] == ["0 to log n"]
    assert "not with their mean" in " ".join(printed("metrics", "mu@argmin").split())
    assert "did you mean 'entropy'" in rankscope("metrics", "entropie").err
