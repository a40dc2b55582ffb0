"""The table of remedies: what its numbers are, what theory predicts of them, what is said where there are
none, and that trainings of the lab join it whether or not all of them are there."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
import torch

from rankscope.errors import ArchitectureError, FileError, StudyError
from rankscope.lab import Recipe, Training
from rankscope.lab.tasks import Copying
from rankscope.metrics import METRICS
from rankscope.remedies import REMEDIES
from rankscope.report import read_run, write_report
from rankscope.sources.random_embedding import bundled_excerpts, word_tokens
from rankscope.studies import Setup, write_study
from rankscope.studies.remedies import at_initialisation, on_trained_model, theory_notes
from rankscope.studies.remedies import training_results as results
from rankscope.studies.remedies.depth_reached import DepthReached, depth_reached, over_seeds
from rankscope.studies.remedies.figures import price_figure
from rankscope.studies.remedies.measurements import RemedyMeasurements, rows
from rankscope.studies.remedies.study import Job, RemedyOptions, do_job, do_jobs, plan, remedies_study, result_of
from rankscope.studies.remedies.tables import page_tables
from rankscope.studies.remedies.verdicts import (
    AGREES,
    NOT,
    NOTHING,
    TESTS,
    UNTOLD,
    claims,
    comparisons,
    lasting,
    learns,
    spread_out,
    weighed,
)
from tests.raising import raises

ByDepth = Mapping[int, tuple[float, ...]]
FEW = ("none", "rezero", "attnscale", "lnscale", "gate")
LAYERS, SEEDS = 5, (0, 1)


@pytest.fixture(scope="module")
def tables() -> RemedyMeasurements:
    """Of shallow networks, on the smallest model."""
    found = [
        at_initialisation.measured(remedy, place, LAYERS, seed)
        for remedy in FEW for place in at_initialisation.PLACES for seed in SEEDS
    ]  # fmt: skip
    theorems = pl.DataFrame(
        [row for remedy in ("none", "attnscale") for row in theory_notes._refusals(remedy)],
        schema=theory_notes.REFUSALS,
    )
    return RemedyMeasurements(
        pl.concat(found), theorems, pl.concat([on_trained_model.measured(each, "bert-tiny") for each in FEW])
    )


def test_depth_reached_is_the_last_layer_before_the_first_fall() -> None:
    assert depth_reached([0.0, -0.9, -1.1, 0.0]) == DepthReached(1, False)
    assert depth_reached([-5.0, 0.0, 0.0]) == DepthReached(2, True)  # of the input nothing is asked
    assert depth_reached([0.0, 0.0, math.nan, 0.0]) == DepthReached(1, False)  # known no further
    assert depth_reached([0.0, -3.0], threshold=1e-4) == DepthReached(1, True)
    assert str(over_seeds([DepthReached(3, False), DepthReached(9, True), DepthReached(9, True)])) == "all 9"


def test_residuals_at_the_start_are_those_of_a_plain_pass() -> None:
    found = at_initialisation.measured("gate", "pre", 2, 0).filter(variant="whole").sort("layer")["log10"]
    X, _ = word_tokens(
        bundled_excerpts(at_initialisation.TOKENS)[: at_initialisation.SAMPLES],
        at_initialisation.WIDTH,
        at_initialisation.TOKENS,
    )
    states = at_initialisation.network("pre", 2, 0).with_remedy("gate").run(X.double()).states
    metric = METRICS["relative_residual"]
    plain = [sum(math.log10(float(_relative(one))) for one in state) / len(state) for state in states]
    assert metric.name == "relative_residual"
    assert found.to_list() == pytest.approx(plain, abs=1e-10)


def _relative(X: torch.Tensor) -> torch.Tensor:
    """||X - 1 m^T|| / ||X|| in the norm sqrt(||.||_1 ||.||_inf), m the mean."""

    def size(M: torch.Tensor) -> torch.Tensor:
        return (M.abs().sum(0).max() * M.abs().sum(1).max()).sqrt()

    return size(X - X.mean(0)) / size(X)


def test_what_does_not_go_is_said_and_what_leaves_nothing_too(tables: RemedyMeasurements) -> None:
    assert "norm_place must be 'pre'" in str(tables.refused("lnscale", "post"))
    assert tables.refused("lnscale", "pre") is None and tables.curves("lnscale", "post") == []
    assert tables.curves("rezero", "no skips") == []
    assert at_initialisation.ZERO in tables.initial.filter(remedy="rezero", variant="no skips")["note"].to_list()
    for curve in tables.curves("rezero", "post"):
        assert max(curve) - min(curve) < 1e-12  # the identity
    for mine, plain in zip(tables.curves("attnscale", "post"), tables.curves("none", "post"), strict=True):
        assert mine == pytest.approx(plain)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_order_of_a_law_is_found_whatever_its_factor(order: int) -> None:
    curve = [-0.1, -2.5]
    while len(curve) < 9:
        curve.append(order * curve[-1] - 0.7)
    assert theory_notes.order_of(curve) == pytest.approx(order)
    assert theory_notes.order_of([0.0, -0.1, -0.2, -0.15]) is None


@pytest.mark.parametrize(("remedy", "order"), [("none", 3), ("sinkhorn", 3), ("valueresidual", 2), ("gate", 1)])
def test_derived_orders_are_measured(remedy: str, order: int) -> None:
    note = theory_notes.note_of(remedy)
    assert note is not None and note.order == order
    table = at_initialisation.measured(remedy, "post", 9, 0)
    (curve,) = at_initialisation.curves(table)[remedy, "post", at_initialisation.BARE, 9]
    found = theory_notes.order_of(curve)
    assert found == pytest.approx(order, abs=0.15)


def test_theory_knows_every_remedy_and_asks_the_theorems_themselves(tables: RemedyMeasurements) -> None:
    assert all(theory_notes.note_of(name) for name in ("none", *REMEDIES))
    assert [*claims()] == ["none", *REMEDIES, "sigmareparam"]
    assert {claim.test for published in claims().values() for claim in published} == {*TESTS}
    lost, reason = theory_notes.taken_out(tables.theorems, "attnscale")
    assert "dong2021-2.3" in lost and "(attnscale)" in reason
    assert theory_notes.taken_out(tables.theorems, "none") == ([], "")
    growing = pl.DataFrame([*theory_notes._refusals("logn")], schema=theory_notes.REFUSALS)
    _, why = theory_notes.taken_out(pl.concat([tables.theorems, growing]), "logn")
    assert why == "scores that grow with the log of the number of tokens"


def test_put_cold_says_how_far_tokens_move(tables: RemedyMeasurements) -> None:
    assert on_trained_model.mean(tables.cold, "attnscale", "moved") == 0.0
    net, X, padding = on_trained_model.subject("bert-tiny")
    before, after = (each.run(X, padding).states[-1] for each in (net, net.with_remedy("gate")))
    moved = []
    for sample, hidden in enumerate(padding):
        a, b = before[sample][~hidden], after[sample][~hidden]
        moved.append(float((((a - b) ** 2).sum() / (a**2).sum()).sqrt()))
    assert on_trained_model.mean(tables.cold, "gate", "moved") == pytest.approx(sum(moved) / len(moved))
    assert on_trained_model.mean(tables.cold, "lnscale", "moved") is None
    assert "lnscale" in tables.cold.filter(remedy="lnscale")["refused"][0]


@pytest.fixture(scope="module")
def trained() -> tuple[pl.DataFrame, pl.DataFrame]:
    """Two seeds of a real, tiny training, with and without a remedy: (trainings, costs)."""
    task = Copying(symbols=4, length=3)
    found, times = [], []
    for remedy in ("none", "attnscale"):
        start = time.perf_counter()
        training = Training(
            task, task.architecture(2, 8, 2), Recipe(steps=3), seeds=SEEDS,
            remedies=[] if remedy == "none" else [remedy],
        ).finish()  # fmt: skip
        times.append({"remedy": remedy, "setting": "pre", "depth": 2, "seed": None,
                      "quantity": results.PRICE, "value": (time.perf_counter() - start) / 3})  # fmt: skip
        for seed, tried in zip(SEEDS, training.evaluate(32), strict=True):
            numbers = {"loss": tried.loss, "accuracy": tried.accuracy, "relative_residual_at_0": -0.1,
                       "relative_residual_at_1": -0.2, "relative_residual_at_2": -1.5 - seed,
                       "path_share_0": 0.25, "path_share_2": 0.75}  # fmt: skip
            found += [{"remedy": remedy, "setting": "pre", "depth": 2, "seed": seed, "quantity": quantity,
                       "value": value} for quantity, value in numbers.items()]  # fmt: skip
    return pl.DataFrame(found), pl.DataFrame(times)


def test_trainings_join_where_they_are_there(
    tables: RemedyMeasurements, trained: tuple[pl.DataFrame, pl.DataFrame]
) -> None:
    both = replace(tables, trained=results.whole(trained[0]), costs=results.priced(trained[1]))
    found = rows(both)
    assert found["remedy"].to_list() == list(FEW)
    losses = trained[0].filter(remedy="attnscale", quantity="loss")["value"]
    by_name = {row["remedy"]: row for row in found.iter_rows(named=True)}
    assert by_name["attnscale"]["trained_pre_loss"] == pytest.approx(losses.median())
    assert max(losses.to_list()) < 2.5 and by_name["attnscale"]["learns_pre"] == 2.0
    assert by_name["gate"]["trained_pre_loss"] is None
    assert by_name["none"]["time_ratio"] == pytest.approx(1.0) and by_name["attnscale"]["time_ratio"] > 0
    assert results.path_length(both.trained, "none", "pre", 2, 0) == pytest.approx(1.5)
    came = result_of(Setup(Path("unused")), RemedyOptions(("attnscale", "gate")), both)
    assert "price" in came.figures and "Not trained: rezero, lnscale, gate." in came.notes
    without = result_of(Setup(Path("unused")), RemedyOptions(("attnscale", "gate")), tables)
    assert "price" not in without.figures
    assert any("Nothing was trained: rankscope remedies --train" in note for note in without.notes)
    verdicts = {one.what: one.verdict for one in comparisons(tables)}
    assert verdicts["gate: a lower loss"] == UNTOLD
    assert verdicts["none: without skips collapse is doubly exponential"] == AGREES


def of_trainings(
    tables: RemedyMeasurements, quantity: str, values: Mapping[str, ByDepth], setting: str = "post"
) -> RemedyMeasurements:
    """By remedy and depth, a number a seed."""
    found = [
        {"remedy": remedy, "setting": setting, "depth": depth, "seed": seed, "quantity": quantity, "value": x}
        for remedy, by_depth in values.items()
        for depth, each in by_depth.items()
        for seed, x in enumerate(each)
    ]
    return replace(tables, trained=results.whole(pl.DataFrame(found)))


def test_that_deep_networks_learn_is_judged_by_the_depth_at_which_they_do(tables: RemedyMeasurements) -> None:
    plain = {6: (2.0, 2.0), 12: (3.1, 3.1)}
    both = of_trainings(tables, "loss", {"none": plain, "gate": {6: (2.1, 2.1), 12: (2.2, 2.2)}})
    came = learns(both, "gate", "post")
    assert came.word == AGREES and came.ours == "the deepest that learn, post: 12 layers, 6 without"
    worse = of_trainings(tables, "loss", {"none": plain, "gate": {6: (2.1, 2.1), 12: (2.2, 3.0)}})
    assert learns(worse, "gate", "post").word == NOT
    assert learns(both, "gate", "no skips").word == UNTOLD


def test_a_fall_with_depth_that_is_not_there_without_a_remedy_is_nothing_to_prevent(tables: RemedyMeasurements) -> None:
    falling, level = {6: (0.0, 0.1), 48: (-5.0, -4.0)}, {6: (0.2, 0.1), 48: (-0.2, 0.1)}

    def word(**values: ByDepth) -> str:
        measured = of_trainings(tables, "gradient_first_end", values)
        return lasting(measured, "gate", "gradient_first_end", "post").word

    assert word(none=falling, gate=level) == AGREES
    assert word(none=falling, gate=falling) == NOT
    assert word(none=level, gate=level) == word(none=level, gate=falling) == word(none=falling) == UNTOLD


def test_entropy_that_stays_without_a_remedy_says_nothing_of_it(tables: RemedyMeasurements) -> None:
    def word(mine: float, plain: float) -> str:
        given = {"none": {6: (plain, 2.0)}, "gate": {6: (mine, 2.0)}}
        return spread_out(of_trainings(tables, "entropy", given), "gate", "post").word

    # Attention that is even has the mean of log 1 ... log 64, 3.2 nats: a tenth is where it has collapsed.
    assert (word(1.0, 0.1), word(0.1, 0.1), word(1.0, 1.0), word(0.1, 1.0)) == (AGREES, NOT, UNTOLD, UNTOLD)


def test_trainings_with_a_smaller_rate_have_a_table_and_a_ring(tables: RemedyMeasurements) -> None:
    losses = {"none": {6: (2.0, 2.0), 12: (3.1, 3.1)}, "gate": {6: (2.0, 2.0), 12: (3.1, 3.0)}}
    both = of_trainings(tables, "loss", losses)
    again = of_trainings(tables, "loss", {"none": {12: (3.1, 3.1)}, "gate": {12: (2.2, 2.1)}}).trained
    priced = replace(both, costs=results.priced(pl.DataFrame(
        [{"remedy": each, "setting": "post", "depth": 6, "ratio": 1.0} for each in losses]
    )))  # fmt: skip

    def rings(which: RemedyMeasurements) -> int:
        marks = price_figure(which).axes[0].get_lines()
        return sum(each.get_markerfacecolor() == "none" for each in marks)

    assert (rings(priced), rings(replace(priced, slower=again))) == (0, 1)
    titles = [each.title for each in page_tables(replace(priced, slower=again))]
    assert "Trained from scratch, post, learning rate 0.0003" in titles


def test_networks_learn_that_are_better_than_frequencies_with_every_seed_at_every_lesser_depth() -> None:
    assert results.blind("images") == pytest.approx(math.log(10), abs=0.01)  # digits are as frequent
    assert 2.8 < results.blind("pre") < 3.2  # the entropy of English letters, spaces and signs, in nats
    good, bad = results.blind("pre") - 0.6, results.blind("pre") - 0.4

    def learns(losses: dict[int, tuple[float, ...]], other: int | None = None) -> DepthReached | None:
        rows: list[dict[str, object]] = [
            {"remedy": "gate", "setting": "pre", "quantity": "loss", "depth": depth, "seed": seed,
             "value": loss}
            for depth, each in losses.items()
            for seed, loss in enumerate(each)
        ]  # fmt: skip
        more: dict[str, object] = {
            "remedy": "none",
            "setting": "pre",
            "quantity": "loss",
            "depth": other,
            "seed": 0,
            "value": good,
        }
        rows += [] if other is None else [more]
        return results.learns(results.whole(pl.DataFrame(rows)), "gate", "pre")

    assert learns({6: (good, good), 12: (good, good)}) == DepthReached(12, True)
    assert learns({6: (good, good), 12: (good, bad), 24: (good, good)}) == DepthReached(6, False)
    assert learns({6: (bad, bad)}) == DepthReached(0, False)
    assert results.learns(results.whole(None), "gate", "pre") is None
    assert learns({6: (), 12: (good, good)}, other=6) is None
    assert learns({6: (good, good), 12: ()}, other=12) == DepthReached(6, True)


def test_words_for_what_seeds_say() -> None:
    noise = {"pre 2": 0.1, "pre 4": 0.1}
    low, high = {0: -0.2, 1: -0.3}, {0: 0.2, 1: 0.3}
    mixed = {0: -0.01, 1: 0.02}
    assert weighed({"pre 2": low, "pre 4": mixed}, noise, -1, "loss").word == AGREES
    assert weighed({"pre 2": high}, noise, -1, "loss").word == NOT
    assert weighed({"pre 2": mixed, "pre 4": mixed}, noise, -1, "loss").word == NOTHING
    assert weighed({"pre 2": {0: -0.02, 1: -0.03}}, noise, -1, "loss").word == NOTHING  # all, and too little
    assert weighed({"pre 2": low, "pre 4": high}, noise, -1, "loss").word == UNTOLD
    assert weighed({"pre 2": {0: -9.0}}, noise, -1, "loss").word == UNTOLD
    assert weighed({}, noise, -1, "loss", "it is too deep").because == "it is too deep"
    said = weighed({"pre 2": low}, noise, -1, "loss").ours
    assert said == "loss pre 2: -0.250 (-0.300 to -0.200)"


def test_the_page_has_every_part_and_a_damaged_one_is_refused(tables: RemedyMeasurements, tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    options = RemedyOptions(FEW[1:])
    result = result_of(setup, options, tables)
    write_study(remedies_study(options), setup, result)
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    titles = ["Remedies side by side", "To choose by, before training", "At initialisation, whole",
              "At initialisation, no skips",
              "Put cold on the trained model", "Laws, predicted and measured", "Theory",
              "Where a remedy does not go", "What was published"]  # fmt: skip
    places = [page.index(f">{title}<", page.index("</nav>")) for title in titles]
    assert all(a < b for a, b in pairwise(places))
    assert result.tables["remedies"]["remedy"].to_list() == list(FEW)
    assert (tmp_path / "residual_values.svg").is_file() and (tmp_path / "initial.parquet").is_file()
    text = (tmp_path / "outcome.json").read_text()
    (tmp_path / "outcome.json").write_text(text.replace('"rows"', '"row"'))
    (tmp_path / "manifest.json").unlink()
    with raises(FileError):
        read_run(tmp_path)


def test_jobs_are_all_there(tmp_path: Path) -> None:
    options = RemedyOptions(("gate", "lnscale"), "bert-tiny", 2)
    kinds = [job.kind for job in plan(Setup(tmp_path, full=True), options)]
    assert kinds.count("initial") == 3 * 2 * 2 * 3 and kinds.count("cold") == kinds.count("theorems") == 3


@pytest.mark.slow  # each process imports torch
def test_workers_compute_the_same_and_their_mistakes_are_sentences(tmp_path: Path) -> None:
    small = [Job("variance", {"remedy": name, "depth": 2, "seed": 0}, 0.1) for name in ("none", "lnscale")]
    alone, beside = Setup(tmp_path / "alone"), Setup(tmp_path / "beside")
    tables = {str(job): table for job, table in do_jobs(beside, small, 2)}
    assert all(tables[str(job)].equals(do_job(alone, job)) for job in small)
    with raises(StudyError, subject="cold") as error:
        list(do_jobs(beside, [Job("cold", {"remedy": "none", "model": "nowhere"}, 0.1)], 2))
    assert "nowhere" in str(error.value)


def test_what_is_asked_must_make_sense() -> None:
    for given, subject in (
        ({"remedies": ("gate", "gate")}, "remedies"),
        ({"seeds": 0}, "seeds"),
        ({"depths": (0, 2)}, "depths"),
    ):
        with raises(StudyError, subject=subject):
            RemedyOptions(**given)
    with raises(ArchitectureError):
        RemedyOptions(("gates",))
    assert RemedyOptions().trained[0] == "none" and "sigmareparam" in RemedyOptions().trained
    assert RemedyOptions(("gate",)).trained == ("none", "gate")
