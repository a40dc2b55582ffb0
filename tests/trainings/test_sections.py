"""The chapter of a training run."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rankscope.errors import FileError
from rankscope.monitor.measurement import RunWriter
from rankscope.report import read_run, write_report
from rankscope.report.chapter import chapter, fit
from rankscope.runs import Manifest, Store
from rankscope.trainings import CERTIFICATES
from tests.made_trainings import SENTENCE, falling, learned, measurement, opened, row, spiking, written
from tests.raising import raises
from tests.report.runs import links_within


def figures(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_it_has_the_map_the_curves_and_the_alarms(tmp_path: Path) -> None:
    run_writer = opened(tmp_path / "run")
    for step in (0, 10, 20):
        run_writer.write(measurement(step, more=learned(step)))
    run_writer.close()
    page = write_report([tmp_path / "run"], tmp_path / "page.html").read_text()
    links_within(page)
    assert "SmallGPT: a training run" in page and "No alarms up to step 20." in page
    assert "The loss went from 4 to 3.8." in page and "3 measurements" in page
    drawn = figures(page)
    assert [name.removeprefix("run1-figure-") for name in drawn] == [
        "training", "training-curves", "training-run", "training-gradients", "training-paths",
    ]  # fmt: skip
    (view,) = drawn["run1-figure-training"]
    assert view["figure"]["data"][0]["text"][1] == [
        f"step {step}, layer 1<br><b>{falling(step, 1):.3g}</b>" for step in (0, 10, 20)
    ]
    assert f"<td>{falling(20, 3):.3g}</td>" in re.sub(r"<td[^>]*>", "<td>", page)


def test_what_is_proved_is_a_table(tmp_path: Path) -> None:
    known = {"kind": "lower", "quantity": "mu", "slack": 1.0, "log10_size": 2.0, "broken": 0, "why": None}
    run_writer = RunWriter(tmp_path, Manifest(), certified=True)
    for step, met in ((0, 3), (10, 0)):
        numbers = {"met_to": met, "says_at": met or None, "log10_bound": 0.0, "log10_measured": 1.0}
        rows = [{"step": step, "theorem": name, **known, **numbers} for name in ("kept", "never")]
        rows[1] |= {"met_to": 0, "says_at": None, "why": "skips"}
        proved = pl.DataFrame(rows, schema=CERTIFICATES)
        run_writer.write(replace(measurement(step), certificates=proved))
    run_writer.close()
    (section,) = chapter(run := read_run(tmp_path), 1, run.title).sections
    (table,) = [each for each in section.tables if each.title == "What is proved of the probe"]
    assert table.headings == ["theorem", "of", "step 0", "step 10"]
    assert table.rows == [["kept", "‖res X‖F", "10 ≥ 1, layer 3", "does not hold"]]
    assert table.note.endswith("Hypotheses not met: never.")


def test_alarms_are_said_first_and_stay_text(tmp_path: Path) -> None:
    page = write_report([written(tmp_path / "run")], tmp_path / "page.html").read_text()
    escaped = SENTENCE.replace("<", "&lt;").replace(">", "&gt;")
    assert f"1 alarm up to step 50. The first, at step 30: {escaped}" in page and SENTENCE not in page
    assert "collapse at step 30, since step 20, layer 2" in page


def test_a_value_at_its_floor_is_marked(tmp_path: Path) -> None:
    run_writer = opened(tmp_path, ("mu",))
    run_writer.write(measurement(0, more=[row(0, 1, "mu", 1e-9, floor=1e-8), row(0, 2, "mu", 1.0, floor=1e-8)]))
    run_writer.close()
    run = read_run(tmp_path)
    (section,) = chapter(run, 1, run.title).sections
    assert section.tables[-1].marked == {(0, 1)}


@pytest.mark.slow
def test_what_came_before_a_loss_spike_is_a_section(tmp_path: Path) -> None:
    for name, spike in (("spike", 2400), ("calm", None)):
        run_writer = opened(tmp_path / name)
        for step in range(0, 2500, 10):
            run_writer.write(spiking(step, spike))
        run_writer.close()
    run = read_run(tmp_path / "spike")
    made = chapter(run, 1, run.title)
    assert made.finding.endswith("The loss has 1 spike, at step 2,400.")
    training, spikes = made.sections
    assert (training.key, spikes.key) == ("training", "spikes") and spikes.sentence.startswith("The loss has 1 spike.")
    (table,) = spikes.tables
    assert table.title.startswith("Before step 2,400, where the loss rises to ")
    assert [row[:4] for row in table.rows] == [
        ["largest logit", "layers 2–3", "rose", "300"], ["gradient: MLP", "layer 1", "fell", "100"],
    ]  # fmt: skip
    assert all(0 < float(row[4]) <= 0.05 for row in table.rows)
    assert table.note == "3 of 6 signals left their band before it."
    page = write_report([tmp_path / "spike", tmp_path / "calm"], tmp_path / "page.html").read_text()
    links_within(page)
    assert 'id="run1-spikes"' in page and 'id="run2-spikes"' not in page
    assert "spike" not in chapter(read_run(tmp_path / "calm"), 2, "calm").finding


def test_a_spike_that_nothing_came_before_is_a_sentence(tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    for step in range(0, 2500, 10):
        run_writer.write(spiking(step, step if step in (1200, 2400) else None))
    run_writer.close()
    spikes = chapter(run := read_run(tmp_path), 1, run.title).sections[1]
    assert not spikes.tables and [note.split(",")[0] for note in spikes.notes] == ["Before step 1", "Before step 2"]
    assert all("none of 6 signals left its band for sure" in note for note in spikes.notes)


def test_several_runs_and_a_run_that_has_just_begun(tmp_path: Path) -> None:
    opened(tmp_path / "begun").close()
    folders = [written(tmp_path / "a"), written(tmp_path / "b"), tmp_path / "begun"]
    page = write_report(folders, tmp_path / "page.html").read_text()
    links_within(page)
    assert "Nothing was measured yet." in page and page.count('class="verdict"') == 3
    runs = [read_run(folder) for folder in folders[:2]]
    chapters = [chapter(run, number, run.title) for number, run in enumerate(runs, 1)]
    fit(chapters, budget=1)
    assert chapters[0].figures and not chapters[1].figures and chapters[1].sections[0].tables


def test_a_damaged_table_is_a_sentence(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.write("training", Manifest(), {"training": pl.DataFrame({"step": [1], "metric": ["mu"]})})
    with raises(FileError, subject=str(tmp_path / "training")):
        read_run(tmp_path)
