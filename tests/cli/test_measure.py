"""`rankscope measure`: the table, the numbers and the run folder."""

from pathlib import Path

from tests.cli.conftest import WrittenRuns
from tests.cli.running import answered, printed, rankscope

SMALL = ["bert-tiny", "--tokens", "16", "--samples", "2"]


def test_measure_prints_a_table_that_fits_and_writes_a_run(runs: WrittenRuns) -> None:
    for variant in ("san", "transformer"):
        assert f" {variant} " in runs.outputs["measure"]
    assert "Report: measure/report.html" in runs.outputs["measure"]
    names = {path.name for path in (runs.folder / "measure").iterdir()}
    assert {"report.html", "profile.parquet", "cloud.parquet", "spectrum.parquet"} <= names


def test_measure_json_is_the_table_and_the_manifest() -> None:
    answer = answered("measure", *SMALL, "--variants", "san", "--metrics", "mu,entropy", "--seed", "3",
                      "--arithmetic", "float64,float32", "--mask", "causal", "--layers", "4")  # fmt: skip
    assert answer["manifest"]["seed"] == 3
    assert answer["manifest"]["networks"][0]["architecture"]["mask"] == "causal"
    assert {row["layer"] for row in answer["table"]} == set(range(5))
    assert {row["arithmetic"] for row in answer["table"]} == {"float64", "float32"}


def test_the_same_command_gives_the_same_numbers() -> None:
    first, second = (answered("measure", *SMALL)["table"] for _ in range(2))
    assert first == second


def test_measure_takes_an_architecture_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"layers": 2, "width": 8, "heads": 2, "norm": "rms"}')
    line = ["measure", "mine.json", "--variants", "transformer", "--samples", "1", "--tokens", "8"]
    answer = answered(*line, cwd=tmp_path)
    assert answer["manifest"]["networks"][0]["architecture"]["norm"] == "rms"


def test_odd_folder_names_are_printed_as_they_are(tmp_path: Path) -> None:
    line = ["measure", *SMALL, "--variants", "san", "--metrics", "mu", "-o", "out[a]" + "x" * 90]
    done = rankscope(*line, cwd=tmp_path)
    assert done.code == 0, done.err
    path = done.out.splitlines()[-1].removeprefix("Report: ")
    assert (tmp_path / path).is_file()


def test_all_arithmetics_side_by_side(tmp_path: Path) -> None:
    out = printed("measure", *SMALL, "--variants", "san,san+norm+mlp+mlp_skip", "--arithmetic", "all",
                  "--metrics", "relative_residual", "-o", "out", cwd=tmp_path)  # fmt: skip
    for arithmetic in ("deviation", "float64", "float32", "bfloat16"):
        assert arithmetic in out
    assert (tmp_path / "out" / "arithmetics_san.png").is_file()


def test_the_first_metric_asked_for_is_the_one_printed() -> None:
    out = printed("measure", *SMALL, "--variants", "san", "--metrics", "dobrushin,mu")
    assert out.startswith("dobrushin:") and "layers 1 →" in out


def test_a_kernel_without_a_rule_falls_back_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"layers": 2, "width": 8, "heads": 2, "kernel": "sigmoid"}')
    here = ["measure", "s.json", "--samples", "1", "--tokens", "8", "--variants", "san"]
    out = printed(*here, cwd=tmp_path)
    assert "san ran in float64: deviation arithmetic has no rule for kernel sigmoid." in out
    assert "bfloat16" in printed(*here, "--arithmetic", "all", cwd=tmp_path)
