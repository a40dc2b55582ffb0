"""`rankscope follow`, on runs whose every number is known."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path

import httpx
import numpy as np
import polars as pl
import pytest
from rich.console import Console

from rankscope import Spikes, TrainingRun, read
from rankscope.cli.follow import shown
from rankscope.monitor.measurement import Alarm, Measurement
from rankscope.runs.tables import JOURNAL
from rankscope.trainings import TRAINING, read_training
from tests.cli.running import COMMAND, answered, printed, rankscope
from tests.made_trainings import SENTENCE, falling, learned, measurement, opened, row, written


def test_it_shows_the_run_once_where_nobody_looks_on(tmp_path: Path) -> None:
    said = printed("follow", str(written(tmp_path / "run")))
    assert "SmallGPT · step 50 · 6 measurements · since 20" in said
    assert re.search(r"loss +4 +3\.5 +█", said)
    for layer in range(4):
        start, now = (f"{falling(step, layer):.3g}" for step in (0, 50))
        assert re.search(rf"\n +{layer} +{start} +{now} ", said)
    assert "1 alarm" in said and " ".join(SENTENCE.split()) in " ".join(said.split())
    assert printed("follow", str(tmp_path / "run"), "--once") == said


def test_path_shares_are_shown(tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    for step in (0, 10, 20):
        run_writer.write(measurement(step, more=[] if step == 10 else learned(step)))
    run_writer.close()
    said = printed("follow", str(tmp_path))
    assert "path shares: what paths of each length carry of the output" in said
    assert re.search(r"\n +length 3 +50\.0% +50\.0% ", said)
    shares = answered("follow", str(tmp_path))["paths"]
    assert shares["length 2"] == [{"step": step, "value": 2 / 6} for step in (0, 20)]


def test_machines_are_given_all_of_it(tmp_path: Path) -> None:
    found = answered("follow", str(written(tmp_path / "run")))
    assert found["steps"] == list(range(0, 60, 10)) and found["model"] == "SmallGPT"
    assert found["layers"]["relative_residual"][2]["values"] == [falling(k, 2) for k in range(0, 60, 10)]
    assert found["scalars"]["loss"][-1] == {"step": 50, "value": 3.5}
    assert [each["sentence"] for each in found["alarms"]] == [SENTENCE]


def noisy(folder: Path) -> Path:
    """A run whose layer 2 lies below its floor at the last of two steps."""
    run_writer = opened(folder, ("relative_mu",))
    for step, value in ((0, 0.5), (10, 6e-8)):
        rows = [row(step, layer, "relative_mu", x, floor=9.5e-7) for layer, x in ((1, 0.5), (2, value))]
        run_writer.write(Measurement(step, pl.DataFrame(rows, schema=TRAINING)))
    run_writer.close()
    return folder


def test_what_lies_below_its_floor_is_marked(tmp_path: Path) -> None:
    said = printed("follow", str(noisy(tmp_path)))
    assert re.search(r"\n +1 +0\.5 +0\.5 +█", said) and re.search(r"\n +2 +0\.5 +6e-08 ○ ", said)
    lines = answered("follow", str(tmp_path))["layers"]["relative_mu"]
    assert [line["below_floor"] for line in lines] == [[False, False], [False, True]]
    printed("report", ".", "-o", "page.html", cwd=tmp_path)
    compared = printed("compare", str(tmp_path), str(noisy(tmp_path / "other")))
    assert re.search(r"layer 2 +6e-08 ○ +6e-08 ○ +– ", compared)


def test_several_runs_are_shown_one_below_another(tmp_path: Path) -> None:
    a, b = str(written(tmp_path / "a")), str(written(tmp_path / "b", [0, 10]))
    said = printed("follow", a, b)
    assert said == f"{printed('follow', a)}\n{printed('follow', b)}"
    assert [found["step"] for found in answered("follow", a, b)] == [50, 10]


def test_of_many_alarms_the_first_is_among_those_shown(tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    for step in range(20):
        run_writer.write(measurement(step, alarms=[Alarm(step, step, "rule", None, None, "warn", f"Alarm <{step}>.")]))
    run_writer.close()
    assert re.findall(r"<(\d+)>", printed("follow", str(tmp_path))) == ["0", "15", "16", "17", "18", "19"]


CODES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e[red]a[/red]"
"""Clears a terminal, renames it, colours it, turns its text round; and what rich would take for a colour."""


def test_codes_for_a_terminal_stay_in_the_run(tmp_path: Path) -> None:
    folder = tmp_path / f"run{CODES.replace('/', '')}"
    run_writer = opened(folder, (f"relative_residual{CODES}",), name=f"GPT{CODES}")
    for step in (0, 10):
        alarm = Alarm(step, step, CODES, None, None, "warn", f"It fell. {CODES}")
        more = [row(step, 1, f"relative_residual{CODES}", 0.5), row(step, None, f"lo{CODES}ss", 0.5)]
        run_writer.write(measurement(step, alarms=[alarm], more=more))
    run_writer.close()
    for line in (["follow"], ["follow", "--json"], ["compare", str(written(tmp_path / "whole"))], ["report", "--json"],
                 ["report"], ["measure"], ["bounds"], ["follow", "--metric", CODES]):  # fmt: skip
        _, out, err = rankscope(line[0], str(folder), *line[1:], cwd=tmp_path)
        assert out + err and not CONTROL.search(out) and not CONTROL.search(err), line
    assert "[red]a[/red]" in rankscope("follow", str(folder)).out


CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_it_reads_while_the_training_writes(tmp_path: Path) -> None:
    """A line that is half written is not there yet; what was gathered into chunks is there once."""
    run_writer = opened(tmp_path)
    assert "no measurement yet" in printed("follow", str(tmp_path))
    for step in range(0, 700, 10):
        run_writer.write(measurement(step))
    with (tmp_path / "training" / JOURNAL).open("a") as file:
        file.write('{"step": 700, "rows": {"lay')
    found = answered("follow", str(tmp_path))
    assert found["steps"] == list(range(0, 700, 10))
    run_writer.cut(395)  # it went back to a checkpoint
    assert answered("follow", str(tmp_path))["steps"] == list(range(0, 400, 10))
    run_writer.close()


def test_several_metrics_heads_and_what_is_no_number(tmp_path: Path) -> None:
    run_writer = opened(tmp_path, ("entropy", "relative_residual"))
    for step in (0, 10):
        heads = [row(step, 1, "entropy", value, head=head) for head, value in enumerate((1.0, 2.0))]
        broken = row(step, 2, "entropy", None if step else 3.0, broken=1 if step else 0)
        run_writer.write(measurement(step, more=[*heads, broken, *learned(step)]))
    run_writer.close()
    said = printed("follow", str(tmp_path), "--metric", "entropy,grad_mlp")
    assert re.search(r"\n +1 +1\.5 +1\.5 ", said) and re.search(r"\n +2 +3 +no number ", said)
    assert "Mean over 2 heads." in said and "gradient: MLP" in said
    assert "1 reading was no number: something overflowed." in said


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("follow nowhere", "there is none at nowhere"),
        ("follow empty", "empty must hold a training run, as Monitor(run=...)"),
        ("follow run --metric mu", "a metric of run must be one of relative_residual; got 'mu'"),
    ],
)
def test_mistakes_are_sentences(tmp_path: Path, line: str, sentence: str) -> None:
    written(tmp_path / "run")
    written(tmp_path / "odd", [1, 3])
    (tmp_path / "empty").mkdir()
    code, out, err = rankscope(*line.split(), cwd=tmp_path)
    assert code == 2 and out == "" and sentence in err and len(err.splitlines()) == 1, err


@pytest.mark.slow
def test_it_keeps_up_in_a_terminal_until_ctrl_c(tmp_path: Path) -> None:
    run_writer = opened(tmp_path)
    run_writer.write(measurement(0))
    ours, theirs = pty.openpty()
    command = [*COMMAND, "follow", str(tmp_path)]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    # As from a shell: what runs in the background may have been told to ignore Ctrl-C.
    with subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        os.close(theirs)

        def until(words: str) -> None:
            seen = ""
            while words not in seen:
                seen += os.read(ours, 4096).decode(errors="replace")

        until("1 measurement ")
        run_writer.write(measurement(10))
        until("2 measurements")
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # a terminal that nobody reads fills up, and whoever writes to it waits
            while os.read(ours, 4096):
                pass
        assert process.wait(60) == 0
    os.close(ours)
    run_writer.close()


@pytest.mark.slow
def test_the_page_is_served_until_ctrl_c(tmp_path: Path) -> None:
    written(tmp_path)
    command = [*COMMAND, "follow", str(tmp_path), "--page", "--no-open", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        url = json.loads(process.stdout.readline())["address"]
        assert httpx.get(f"{url}api/training", timeout=60).json()["measurements"] == 6
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130) and process.stderr.read() == ""


def test_a_page_without_its_extra_says_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    code, _, err = rankscope("follow", str(tmp_path), "--page")
    assert code == 2 and err.strip().endswith("pip install 'rankscope[explore]'")


def test_as_many_layers_are_shown_as_the_window_has_lines_for(tmp_path: Path) -> None:
    """Alarms take lines of it too, those of which there may be several for each."""
    for alarms in range(4):
        run_writer = opened(tmp_path / str(alarms))
        given = [Alarm(10, 10, f"rule {k}", None, None, "warn", "It fell.") for k in range(alarms)]
        for step in (0, 10):
            run_writer.write(measurement(step, layers=60, alarms=given if step else ()))
        run_writer.close()
        training = read_training(tmp_path / str(alarms))
        for height in (30, 36, 42):
            drawn = Console(width=100, file=StringIO())
            drawn.print(shown(training, ["relative_residual"], height=height))
            lines = len(drawn.file.getvalue().splitlines())  # type: ignore[attr-defined]
            assert height - 4 * alarms - 2 <= lines <= height


@pytest.fixture
def table(tmp_path: Path) -> Path:
    steps = np.arange(600)
    noise = np.random.default_rng(0).normal(size=(2, 600))
    logit = 10 + noise[1] + 30 * ((steps >= 460) & (steps < 520))
    pl.DataFrame({"step": steps, "loss": 2 + 0.1 * noise[0] + 4 * (steps == 500), "largest_logit": logit}).write_csv(
        tmp_path / "history.csv"
    )
    return tmp_path / "history.csv"


def test_it_says_what_came_before(table: Path, tmp_path: Path) -> None:
    said = printed("spikes", table.name, "-o", "found", cwd=tmp_path)
    assert "At step 500" in said and "largest_logit rose 40 steps earlier" in " ".join(said.split())
    events = pl.read_csv(tmp_path / "found" / "events.csv")
    assert events.select("signal", "step", "lead").rows() == [("largest_logit", 460, 40)]
    assert pl.read_csv(tmp_path / "found" / "spikes.csv")["first"].to_list() == [500]
    again = read(tmp_path / "found")
    assert isinstance(again, Spikes) and again.spikes[0].first == 500 and again.events.height == 1
    assert again.manifest.command == "rankscope spikes history.csv -o found"


def test_a_run_folder_that_is_read_stays_a_training(tmp_path: Path) -> None:
    written(tmp_path)
    printed("spikes", ".", "-o", ".", cwd=tmp_path)
    assert isinstance(read(tmp_path), TrainingRun) and (tmp_path / "spikes.csv").is_file()


def test_json_has_everything(table: Path) -> None:
    found = answered("spikes", str(table))
    assert [spike["first"] for spike in found["spikes"]] == [500] and found["events"][0]["lead"] == 40


def test_without_a_spike_there_is_a_sentence(table: Path) -> None:
    assert "no spike" in printed("spikes", str(table), "--deviations", "100")
    assert answered("spikes", str(table), "--deviations", "100")["spikes"] == []


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = rankscope("spikes", str(tmp_path / "gone.csv"))
    assert done.code == 2 and "gone.csv" in done.err


def test_a_table_that_is_read_is_not_written_over(table: Path, tmp_path: Path) -> None:
    table = table.rename(tmp_path / "events.csv")
    before = table.read_bytes()
    done = rankscope("spikes", "events.csv", "-o", ".", cwd=tmp_path)
    assert done.code == 2 and "give -o another folder" in " ".join(done.err.split()) and table.read_bytes() == before
