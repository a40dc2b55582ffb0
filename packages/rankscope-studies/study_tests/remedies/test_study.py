"""The study of remedies: its jobs, its options and its page."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rankscope.errors import ArchitectureError, FileError, StudyError
from rankscope.report import read_run, write_report
from rankscope_studies import Setup, write_study
from rankscope_studies.remedies import on_trained_model, theory_notes
from rankscope_studies.remedies.measurements import RemedyMeasurements
from rankscope_studies.remedies.study import RemedyJob, RemedyOptions, do_job, do_jobs, plan, remedies_study, result_of
from study_tests.remedies.builders import FEW
from tests.raising import raises


@pytest.mark.slow
def test_the_page_has_every_part_and_a_damaged_one_is_refused(tables: RemedyMeasurements, tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    options = RemedyOptions(FEW[1:])
    result = result_of(setup, options, tables)
    write_study(remedies_study(options), setup, result)
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    titles = ["Remedies side by side", "To choose by, before training", "At initialisation, whole",
              "At initialisation, no skips",
              "Put cold on a model", "Laws, predicted and measured", "Theory",
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


def test_a_job_is_done_once_and_gives_what_its_function_measures(tmp_path: Path) -> None:
    said: list[str] = []
    cold: dict[str, Any] = {"remedy": "none", "model": "bert-tiny"}
    variance: dict[str, Any] = {"remedy": "lnscale", "depth": 2, "seed": 0}
    expected = [
        ("cold", cold, on_trained_model.measured(**cold)),
        ("variance", variance, theory_notes.variances(**variance)),
    ]
    for model in ("bert-tiny", "another"):
        setup = Setup(tmp_path, models=(model,), say=said.append)
        for kind, settings, table in expected:
            assert do_job(setup, RemedyJob(kind, settings, 0.1)).equals(table)
    assert said == [
        "cold-none",
        "variance-lnscale-2-0",
        "cold-none",
    ]  # which alone is of the model that a run is asked for


@pytest.mark.slow  # each process imports torch
def test_workers_compute_the_same_and_their_mistakes_are_sentences(tmp_path: Path) -> None:
    small = [RemedyJob("variance", {"remedy": name, "depth": 2, "seed": 0}, 0.1) for name in ("none", "lnscale")]
    alone, beside = Setup(tmp_path / "alone"), Setup(tmp_path / "beside")
    tables = {str(job): table for job, table in do_jobs(beside, small, 2)}
    assert all(tables[str(job)].equals(do_job(alone, job)) for job in small)
    with raises(StudyError, subject="cold") as error:
        list(do_jobs(beside, [RemedyJob("cold", {"remedy": "none", "model": "nowhere"}, 0.1)], 2))
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
