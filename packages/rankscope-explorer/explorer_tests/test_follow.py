"""What the page of a training run is told, and who may ask."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rankscope.monitor.measurement import Alarm, Measurement
from rankscope.report import read_run
from rankscope.trainings import read_training
from rankscope.trainings.figures import STEPS
from rankscope.trainings.training import title_of
from rankscope_explorer.follow import SPIKES, KnownEvents, app
from tests.cli.running import answered, printed
from tests.made_trainings import ALARM, SENTENCE, falling, learned, measurement, opened, row, spiking, written


def asked(folder: Path, what: str = "training", **query: str) -> Any:
    client = TestClient(app([folder], 80), base_url="http://127.0.0.1")
    answer = client.get(f"/api/{what}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_only_what_is_new_is_sent(tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    run_writer.write(measurement(0))
    first = asked(tmp_path)
    assert first["measurements"] == 1 and asked(tmp_path, mark=first["mark"]) == {"mark": first["mark"]}
    run_writer.write(measurement(10, alarms=[ALARM]))
    second = asked(tmp_path, mark=first["mark"])
    assert second["measurements"] == 2 and second["alarms"][0]["sentence"] == SENTENCE
    run_writer.cut(0)
    assert asked(tmp_path, mark=second["mark"])["measurements"] == 1
    run_writer.close()


def test_the_map_has_every_layer_at_every_look(tmp_path: Path) -> None:
    figures = asked(written(tmp_path))["figures"]
    cells, ring = figures["map"]["data"]
    assert cells["x"] == list(range(0, 60, 10)) and cells["y"] == [0, 1, 2, 3]
    assert cells["text"][2][3] == f"step 30, layer 2<br><b>{falling(30, 2):.3g}</b>"
    assert cells["colorbar"]["ticktext"] and min(map(min, cells["z"])) < -2  # over two decades: powers of ten
    assert (ring["x"], ring["y"]) == ([30], [2]) and "&lt;b>bold" in ring["text"][0]
    assert [line["name"] for line in figures["curves"]["data"]] == [f"layer {k}" for k in range(4)]
    assert {shape["x0"] for shape in figures["run"]["layout"]["shapes"]} == {30}
    assert "gradients" not in figures and "paths" not in figures


def test_gradients_and_updates_stand_side_by_side_and_none_is_left_out(tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    groups = [f"{of}_{group}" for group in ("query_key", "value_output", "mlp") for of in ("grad", "update")]
    run_writer.write(measurement(0, more=[row(0, 1, name, 1.0) for name in ("grad_tokens", *groups)]))
    run_writer.close()
    headings = [part["text"] for part in asked(tmp_path)["figures"]["gradients"]["layout"]["annotations"]]
    assert headings == [f"<b>{title_of(name)}</b>" for name in (*groups, "grad_tokens")]


def test_several_runs_are_on_one_page(tmp_path: Path) -> None:
    folders = [written(tmp_path / "a"), written(tmp_path / "b", [0, 10])]
    client = TestClient(app(folders, 80), base_url="http://127.0.0.1")
    answers = [client.get("/api/training", params={"run": str(k)}).json() for k in (0, 1, 0, 9)]
    assert [answer["step"] for answer in answers] == [50, 10, 50, 10]
    assert answers[0]["runs"] == list(map(str, folders)) and answers[0]["mark"] != answers[1]["mark"]
    again = client.get("/api/training", params={"run": "1", "mark": answers[1]["mark"]}).json()
    assert again == {"mark": answers[1]["mark"]}
    assert answers[0]["names"] == ["a", "b"]
    with closing(opened(folders[0])) as run_writer:  # what is written to the other run is new as well
        run_writer.write(measurement(60))
    grown = client.get("/api/training", params={"run": "1", "mark": answers[1]["mark"]}).json()
    assert grown["step"] == 10 and max(grown["figures"]["together"]["data"][0]["x"]) == 60


def test_the_alarms_of_other_runs_are_told_and_none_before_a_run_was_read(tmp_path: Path) -> None:
    folders = [written(tmp_path / "good", [0, 10]), written(tmp_path / "bad")]
    client = TestClient(app(folders, 80), base_url="http://127.0.0.1")
    assert "None so far" not in client.get("/").text
    good, bad = (client.get("/api/training", params={"run": str(k)}).json() for k in (0, 1))
    assert (good["raised"], bad["raised"], bad["elsewhere"]) == (0, 1, [])
    (told,) = good["elsewhere"]
    assert (told["run"], told["raised"], told["step"], told["sentence"]) == (1, 1, 30, SENTENCE)


@pytest.mark.parametrize("line", ["[]", '{"step": 9, "rows": {"other": [1]}}', "[" * 10**5])
def test_a_line_that_holds_no_rows_is_named_on_the_page_in_the_terminal_and_in_the_report(
    tmp_path: Path, line: str
) -> None:
    run_writer = opened(tmp_path)
    for step in (0, 10, 20):
        run_writer.write(measurement(step))
        with run_writer.measurements.path.open("a") as file:
            file.write(line + "\n")
        run_writer.measurements.size = run_writer.measurements.path.stat().st_size
    run_writer.store.close()  # as killed: nothing is gathered
    note = "line 2 (and 2 more) is no row of the table and left out."
    found = asked(tmp_path)
    assert found["measurements"] == 3 and found["notes"][0].endswith(note)
    assert answered("follow", str(tmp_path))["steps"] == [0, 10, 20]
    assert note in " ".join(printed("follow", str(tmp_path)).split())
    assert read_run(tmp_path).notes == found["notes"]


def test_neither_a_page_nor_its_server_waits_for_torch() -> None:
    code = "import sys, rankscope_explorer.follow, rankscope_explorer.server; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_several_runs_have_one_figure(tmp_path: Path) -> None:
    """A line for each run and panel: its loss, and the metric at its last layer."""
    folders = [written(tmp_path / "runs" / "a", layers=3), written(tmp_path / "runs" / "b", [0, 10], layers=5)]
    client = TestClient(app(folders, 80), base_url="http://127.0.0.1")
    answer = client.get("/api/training").json()
    chart, metric = answer["figures"]["together"], answer["metric"]
    headings = [part["text"] for part in chart["layout"]["annotations"]]
    assert headings == ["<b>loss</b>", f"<b>{title_of(metric)} at the last layer of each</b>"]
    assert [line["name"] for line in chart["data"]] == ["a", "b"] * 2
    for line, folder in zip(chart["data"], folders * 2, strict=True):
        training = read_training(folder)
        steps, values = training.scalar("loss")
        if line in chart["data"][2:]:
            grid = training.grid(metric)
            steps, values = grid.steps, grid.value[grid.layers.index(max(grid.layers))].tolist()
        assert line["x"] == steps[: len(line["x"])] and len(line["x"]) == len(steps)
        assert all(f"{value:.3g}" in text for value, text in zip(values, line["text"], strict=True))
    assert "together" not in asked(folders[0])["figures"]


def test_the_first_alarm_leads_the_list_and_noise_is_told(tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    for step in range(4):
        alarm = Alarm(step, step, "rule", None, None, "warn", f"Alarm {step}.")
        more = [row(step, 9, "relative_residual", 6e-8, floor=9.5e-7)] if step == 3 else []
        run_writer.write(measurement(step, alarms=[alarm], more=more))
        assert asked(tmp_path)["noise"] == (step == 3)
    run_writer.close()
    assert [alarm["sentence"] for alarm in asked(tmp_path)["alarms"]] == [f"Alarm {step}." for step in (0, 3, 2, 1)]


def test_gradients_and_path_shares_where_there_are_any(tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    for step in (0, 10):
        run_writer.write(measurement(step, more=learned(step)))
    run_writer.close()
    found = asked(tmp_path, metric="grad_mlp")
    assert found["metric"] == "grad_mlp" and found["figures"]["map"]["data"][0]["y"] == [1, 2, 3]
    assert [line["name"] for line in found["figures"]["paths"]["data"]] == [f"length {k}" for k in range(4)]
    assert found["figures"]["gradients"]["layout"]["yaxis"]["title"]["text"] == "gradient: MLP"


@pytest.mark.slow
def test_an_answer_stays_small_and_has_the_looks_with_alarms(tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    for step in range(0, 4 * STEPS):
        run_writer.write(measurement(step, alarms=[ALARM] if step == ALARM.step else ()))
    run_writer.close()
    found = asked(tmp_path)
    (cells, *_) = found["figures"]["map"]["data"]
    assert found["measurements"] == 4 * STEPS and found["drawn"] == STEPS
    assert len(cells["x"]) <= STEPS + 1 and {0, ALARM.step, 4 * STEPS - 1} <= set(cells["x"])


def test_the_order_of_events_before_a_spike(tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    for step in range(0, 2500, 10):
        run_writer.write(spiking(step, 2400))
    run_writer.close()
    found = asked(tmp_path, "spikes")
    assert found["count"] == 1
    (spike,) = found["spikes"]
    assert (spike["step"], spike["more"], spike["none"]) == (2400, 0, "") and spike["loss"].startswith("rises to ")
    assert [(event["title"], event["place"], event["lead"], event["rose"]) for event in spike["events"]] == [
        ("largest logit", "layers 2–3", 300, True), ("gradient: MLP", "layer 1", 100, False),
    ]  # fmt: skip
    assert all(0 < event["chance"] <= 0.05 for event in spike["events"])


def test_without_a_spike_or_a_loss_nothing_is_said_of_spikes(tmp_path: Path) -> None:
    run_writer = opened(tmp_path / "calm")
    for step in range(0, 2500, 10):
        run_writer.write(spiking(step))
    run_writer.close()
    opened(tmp_path / "begun").close()
    for name in ("calm", "begun"):
        assert asked(tmp_path / name, "spikes") == {"count": 0, "spikes": []}


def test_the_latest_spikes_are_shown_and_a_loss_that_is_no_number_is_one(tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    spikes = [400 * k for k in range(2, 8)]
    for step in range(0, 3000, 10):
        run_writer.write(spiking(step, step if step in spikes else None))
    broken = spiking(3000).rows.with_columns(broken=1, value=None, most=None)
    run_writer.write(Measurement(3000, broken))
    run_writer.close()
    found = asked(tmp_path, "spikes")
    assert found["count"] == 7 and [spike["step"] for spike in found["spikes"]] == [3000, *spikes[::-1]][:SPIKES]
    assert found["spikes"][0]["loss"] == "is no number"
    assert "signals left its band for sure" in found["spikes"][1]["none"]


def test_what_came_before_spikes_is_looked_for_again_when_there_is_another_or_the_run_is_a_tenth_longer(
    tmp_path: Path,
) -> None:
    run_writer, known = opened(tmp_path), KnownEvents()

    def grown(to: int, spike: int) -> Any:
        """The events of the run when it has come to that step."""
        for step in range(run_writer.measurements.last + 10 if run_writer.measurements.last else 0, to, 10):
            run_writer.write(spiking(step, spike))
        report = known.of(tmp_path, read_training(tmp_path))
        assert report is not None
        return report.events

    first = grown(2000, 1500)
    assert grown(2190, 1500) is first
    longer = grown(2210, 1500)
    assert longer is not first and longer["step"].to_list() == first["step"].to_list()
    assert grown(2300, 2290)["spike"].unique().sort().to_list() == [0, 1]
    run_writer.cut(1400)
    report = known.of(tmp_path, read_training(tmp_path))
    assert report is not None and not report.spikes and not report.events.height
    run_writer.close()


def test_it_answers_its_own_page_alone(tmp_path: Path) -> None:
    client = TestClient(app([written(tmp_path)], 80), base_url="http://evil.example")
    refused = client.get("/api/training")
    assert refused.status_code == 421 and "default-src 'none'" in refused.headers["content-security-policy"]
    assert TestClient(app([tmp_path], 80), base_url="http://localhost").get("/static/../x").status_code == 404


def test_a_folder_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    client = TestClient(app([tmp_path / "none"], 80), base_url="http://127.0.0.1")
    answer = client.get("/api/training")
    assert answer.status_code == 422 and "there is none at" in answer.json()["error"]
