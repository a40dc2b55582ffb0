"""What the page of a training run is told, and who may ask."""

from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from rankscope.explorer.follow import app
from rankscope.live.monitor.measurement import Alarm
from rankscope.runs.figures import STEPS
from rankscope.runs.training import title_of
from tests.trainings import ALARM, SENTENCE, falling, learned, measurement, opened, row, written


def asked(folder: Path, **query: str) -> Any:
    client = TestClient(app([folder], 80), base_url="http://127.0.0.1")
    answer = client.get("/api/training", params=query)
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


def test_an_answer_stays_small_and_has_the_looks_with_alarms(tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    for step in range(0, 4 * STEPS):
        run_writer.write(measurement(step, alarms=[ALARM] if step == ALARM.step else ()))
    run_writer.close()
    found = asked(tmp_path)
    (cells, *_) = found["figures"]["map"]["data"]
    assert found["measurements"] == 4 * STEPS and found["drawn"] == STEPS
    assert len(cells["x"]) <= STEPS + 1 and {0, ALARM.step, 4 * STEPS - 1} <= set(cells["x"])


def test_it_answers_its_own_page_alone(tmp_path: Path) -> None:
    client = TestClient(app([written(tmp_path)], 80), base_url="http://evil.example")
    refused = client.get("/api/training")
    assert refused.status_code == 421 and "default-src 'none'" in refused.headers["content-security-policy"]
    assert TestClient(app([tmp_path], 80), base_url="http://localhost").get("/static/../x").status_code == 404


def test_a_folder_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    client = TestClient(app([tmp_path / "none"], 80), base_url="http://127.0.0.1")
    answer = client.get("/api/training")
    assert answer.status_code == 422 and "there is none at" in answer.json()["error"]
