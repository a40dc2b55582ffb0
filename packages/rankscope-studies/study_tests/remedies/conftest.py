"""Measurements of shallow networks, taken once for the tests of this folder."""

import polars as pl
import pytest

from rankscope_studies.remedies import at_initialisation, on_trained_model, theory_notes
from rankscope_studies.remedies.measurements import RemedyMeasurements
from study_tests.remedies.builders import FEW, LAYERS, SEEDS


@pytest.fixture(scope="package")
def tables() -> RemedyMeasurements:
    """Of shallow networks, on the smallest model."""
    initial = [
        at_initialisation.measured(remedy, place, LAYERS, seed)
        for remedy in FEW
        for place in at_initialisation.PLACES
        for seed in (SEEDS if remedy == "none" else SEEDS[:1])
    ]
    theorems = pl.concat([theory_notes.refusals(remedy) for remedy in ("none", "attnscale")])
    return RemedyMeasurements(
        pl.concat(initial), theorems, pl.concat([on_trained_model.measured(remedy, "bert-tiny") for remedy in FEW])
    )
