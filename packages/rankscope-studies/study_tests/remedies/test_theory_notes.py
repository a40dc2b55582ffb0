"""Laws and theorems: what theory predicts of each remedy."""

import polars as pl
import pytest

from rankscope.remedies import REMEDIES
from rankscope_studies.remedies import at_initialisation, theory_notes
from rankscope_studies.remedies.measurements import RemedyMeasurements
from rankscope_studies.remedies.verdicts import TESTS, claims
from tests.theory.features import BASES


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_order_of_a_law_is_found_whatever_its_factor(order: int) -> None:
    curve = [-0.1, -2.5]
    while len(curve) < 9:
        curve.append(order * curve[-1] - 0.7)
    assert theory_notes.order_of(curve) == pytest.approx(order)
    assert theory_notes.order_of([0.0, -0.1, -0.2, -0.15]) is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("remedy", "order"), [("none", 3), ("sinkhorn", 3), ("valueresidual", 2), ("gate", 1)])
def test_derived_orders_are_measured(remedy: str, order: int) -> None:
    note = theory_notes.note_of(remedy)
    assert note is not None and note.order == order
    table = at_initialisation.measured(remedy, "post", 9, 0)
    (curve,) = at_initialisation.curves(table)[remedy, "post", at_initialisation.BARE, 9]
    assert theory_notes.order_of(curve) == pytest.approx(order, abs=0.15)


def test_theory_knows_every_remedy_and_asks_the_theorems_themselves(tables: RemedyMeasurements) -> None:
    assert all(theory_notes.note_of(name) for name in ("none", *REMEDIES))
    assert [*claims()] == ["none", *REMEDIES, "sigmareparam"]
    assert {claim.test for published in claims().values() for claim in published} == {*TESTS}
    lost, reason = theory_notes.taken_out(tables.theorems, "attnscale")
    assert "dong2021-2.3" in lost and "(attnscale)" in reason
    assert theory_notes.taken_out(tables.theorems, "none") == ([], "")
    growing = theory_notes.refusals("logn")
    _, why = theory_notes.taken_out(pl.concat([tables.theorems, growing]), "logn")
    assert why == "scores that grow with the log of the number of tokens"


@pytest.mark.parametrize("place", ["pre", "post"])
def test_theorems_of_heads_alone_hold_on_tokens_so_small_that_scores_are(
    tables: RemedyMeasurements, place: str
) -> None:
    """All of them but that of one head: that gamma is one asks for scores that differ by 1.2564 at most."""
    held = tables.theorems.filter("held", remedy="none", network=f"{place}, pure attention")["theorem"]
    assert {*held} == {*BASES["heads alone"][1]} - {"dong2021-2.2"}
