"""What the page says of the registered test is derived again, without the library's scorer."""

from pathlib import Path

import pytest

from rankscope_studies.research.forecast_baselines import baselines

ROOT = Path(__file__).parents[4]
REGISTERED = ROOT / "packages" / "rankscope-studies" / "data"


@pytest.mark.slow  # fits trees to two thousand designs
def test_the_page_has_the_numbers_of_the_registered_test() -> None:
    page = (ROOT / "docs" / "forecast.md").read_text(encoding="utf-8")
    findings = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    told = baselines(REGISTERED / "forecasts.json", REGISTERED / "outcomes.jsonl")
    text, induction = told["next-character"], told["induction"]
    assert (text["designs"], induction["designs"], text["repeated"], induction["repeated"]) == (203, 97, 42, 18)
    (row,) = [line for line in page.splitlines() if line.startswith("| **the forecast**")]
    assert f"**{text['forecast']:.1%}**" in row and f"**{induction['forecast']:.1%}**" in row
    (row,) = [line for line in page.splitlines() if line.startswith("| guessing")]
    assert f"{text['guessing']:.1%}" in row and f"{induction['guessing']:.1%}" in row
    (row,) = [line for line in page.splitlines() if line.startswith("| trees")]
    for task in (text, induction):
        low, high = task["trees"]
        assert f"{low:.0%} to {high:.0%}" in row
        assert high < task["forecast"]
    assert f"{text['without a skip']} of the 203" in page
    count, right = text["between 0.1 and 0.9"]
    assert f"right on {right:.0%} of {count}" in page
    forecast, seeds = (
        " / ".join(f"{value:.2f}" for value in text[name])
        for name in ("forecast of each seed", "seeds with each other")
    )
    assert f"{forecast} (forecast" in page and f"{seeds} (" in page
    low, high = text["trees"]
    assert f"{low:.0%} to {high:.0%}" in findings and f"{text['guessing']:.0%}" in findings
