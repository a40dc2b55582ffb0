"""Figures and tables of trainings with a smaller learning rate."""

from dataclasses import replace

import polars as pl
import pytest

from rankscope_studies.remedies import training_results as results
from rankscope_studies.remedies.figures import price_figure
from rankscope_studies.remedies.measurements import RemedyMeasurements
from rankscope_studies.remedies.tables import page_tables
from study_tests.remedies.builders import of_trainings


@pytest.mark.slow
def test_trainings_with_a_smaller_rate_have_a_table_and_a_ring(tables: RemedyMeasurements) -> None:
    losses = {"none": {6: (2.0, 2.0), 12: (3.1, 3.1)}, "gate": {6: (2.0, 2.0), 12: (3.1, 3.0)}}
    both = of_trainings(tables, "loss", losses)
    again = of_trainings(tables, "loss", {"none": {12: (3.1, 3.1)}, "gate": {12: (2.2, 2.1)}}).trained
    priced = replace(both, costs=results.priced(pl.DataFrame(
        [{"remedy": remedy, "setting": "post", "depth": 6, "ratio": 1.0} for remedy in losses]
    )))  # fmt: skip

    def rings(which: RemedyMeasurements) -> int:
        marks = price_figure(which).axes[0].get_lines()
        return sum(mark.get_markerfacecolor() == "none" for mark in marks)

    assert (rings(priced), rings(replace(priced, slower=again))) == (0, 1)
    titles = [table.title for table in page_tables(replace(priced, slower=again))]
    assert "Trained from scratch, post, learning rate 0.0003" in titles
