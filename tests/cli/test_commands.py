"""The command line as a person or a program meets it: real processes, their output and exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope import read

SMALL = ["bert-tiny", "--tokens", "16", "--samples", "2"]


def rankscope(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from rankscope.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, check=False)


def test_help_version_and_completion_do_not_import_torch() -> None:
    code = (
        "import sys, rankscope, rankscope.cli\n"
        "from typer.testing import CliRunner\n"
        "for ask in ('--help', '--version', 'measure --help'):\n"
        "    assert CliRunner().invoke(rankscope.cli.app, ask.split()).exit_code == 0\n"
        "heavy = {'torch', 'polars', 'matplotlib', 'scipy', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version() -> None:
    from importlib.metadata import version

    assert rankscope("--version").stdout == f"rankscope {version('rankscope')}\n"


def test_measure_prints_a_table_that_fits_and_writes_a_run(tmp_path: Path) -> None:
    done = rankscope("measure", *SMALL, "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for variant in ("san", "san+mlp", "san+skip", "transformer"):
        assert f" {variant} " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Report: out/report.html" in done.stdout
    assert (tmp_path / "out" / "report.html").is_file()


def test_measure_json_is_the_table_and_the_manifest() -> None:
    done = rankscope("measure", *SMALL, "--variants", "san", "--metrics", "mu,entropy", "--json", "--seed",
                     "3", "--arithmetic", "float64,float32", "--mask", "causal", "--layers", "4")  # fmt: skip
    answer = json.loads(done.stdout)
    assert answer["manifest"]["seed"] == 3
    assert answer["manifest"]["networks"][0]["architecture"]["mask"] == "causal"
    assert {row["layer"] for row in answer["table"]} == set(range(5))
    assert {row["arithmetic"] for row in answer["table"]} == {"float64", "float32"}
    assert done.stderr == ""


def test_the_same_command_gives_the_same_numbers() -> None:
    first, second = (json.loads(rankscope("measure", *SMALL, "--json").stdout)["table"] for _ in range(2))
    assert first == second


def test_measure_takes_an_architecture_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"layers": 2, "width": 8, "heads": 2, "norm": "rms"}')
    done = rankscope("measure", "mine.json", "--variants", "transformer", "--samples", "1",
                     "--tokens", "8", "--json", cwd=tmp_path)  # fmt: skip
    assert json.loads(done.stdout)["manifest"]["networks"][0]["architecture"]["norm"] == "rms"


def test_masks_as_a_table_a_picture_and_json() -> None:
    table = rankscope("masks", "--tokens", "12", "--picture")
    assert table.returncode == 0 and "unidirectional" in table.stdout and "█" in table.stdout
    assert max(map(len, table.stdout.splitlines())) <= 80
    (answer,) = json.loads(rankscope("masks", "window:2", "--tokens", "12", "--json").stdout)
    assert answer["mask"] == "window:2" and answer["radius"] == 3 and answer["strongly_connected"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["reproduce", "dong2021", "fig7"], "figure of dong2021 must be one of fig2, fig3, fig4, lengths"),
        (["bounds", "bert-tiny", "--theorems", "dong"], "theorem must be one of"),
        (["bounds", "bert-tiny", "--threshold", "0"], "threshold must be a number > 0"),
        (["measure", "bert-bse"], "fresh('bert-base') builds one with random weights"),
        (["measure", "absent.json"], "there is none at absent.json"),
        (["measure", *SMALL, "--variants", "sam"], "a variant must be 'transformer', or 'san' and parts"),
        (["measure", *SMALL, "--metrics", "mew"], "metric must be one of"),
        (["measure", *SMALL, "--metrics", ","], "--metrics must name at least one"),
        (["measure", *SMALL, "--variants", ","], "--variants must name at least one; got ','"),
        (["measure", *SMALL, "--arithmetic", "float8"], "arithmetic must be one of"),
        (["measure", *SMALL, "--mask", "windw:1"], "did you mean 'window'?"),
        (["measure", *SMALL, "--init", "zero"], "init must be one of"),
        (["measure", "bert-tiny", "--tokens", "100000"], "ask for fewer samples or tokens"),
        (["masks", "edges:0>99"], "edges must join tokens 0..15"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_two(arguments: list[str], sentence: str) -> None:
    done = rankscope(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_a_bad_option_is_exit_code_two() -> None:
    assert rankscope("measure", "--samples", "-3").returncode == 2
    assert rankscope("mesure").returncode == 2


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("")
    done = rankscope("measure", *SMALL, "--variants", "san", "-o", "afile", cwd=tmp_path)
    assert done.returncode == 2 and "must be a place that can be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_odd_folder_names_are_printed_as_they_are(tmp_path: Path) -> None:
    done = rankscope("measure", *SMALL, "--variants", "san", "-o", "out[a]" + "x" * 90, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path = done.stdout.splitlines()[-1].removeprefix("Report: ")
    assert (tmp_path / path).is_file()


def test_all_arithmetics_side_by_side(tmp_path: Path) -> None:
    done = rankscope("measure", *SMALL, "--variants", "san,san+norm+mlp+mlp_skip", "--arithmetic", "all",
                     "--layers", "6", "-o", "out", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    for arithmetic in ("deviation", "float64", "float32", "bfloat16"):
        assert arithmetic in done.stdout
    assert (tmp_path / "out" / "arithmetics_san.png").is_file()


def test_the_first_metric_asked_for_is_the_one_printed() -> None:
    done = rankscope("measure", *SMALL, "--variants", "san", "--metrics", "dobrushin,mu")
    assert done.stdout.startswith("dobrushin:") and "layers 1 →" in done.stdout


def test_a_kernel_without_a_rule_falls_back_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"layers": 2, "width": 8, "heads": 2, "kernel": "sigmoid"}')
    here = ["measure", "s.json", "--samples", "1", "--tokens", "8", "--variants", "san"]
    done = rankscope(*here, cwd=tmp_path)
    assert "san ran in float64: deviation arithmetic has no rule for kernel sigmoid." in done.stdout
    every = rankscope(*here, "--arithmetic", "all", cwd=tmp_path)
    assert every.returncode == 0 and "bfloat16" in every.stdout, every.stderr


@pytest.mark.slow
def test_demo_ends_by_saying_where_its_report_lies(tmp_path: Path) -> None:
    done = rankscope("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Report: runs/demo/report.html"
    assert "a trained English BERT" in done.stdout
    assert (tmp_path / "runs" / "demo" / "report.html").stat().st_size < 8e6


def test_paths_prints_tables_and_writes_a_folder(tmp_path: Path) -> None:
    done = rankscope("paths", *SMALL, "--top", "3", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "The parts add up to the output within" in done.stdout and "heaviest single paths" in done.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"lengths.parquet", "layers.parquet", "heads.parquet", "single_paths.parquet"} < names
    assert {"lengths.png", "lengths.svg", "heads.png", "single_paths.png", "manifest.json"} < names


def test_commands_into_one_folder_keep_their_manifests(tmp_path: Path) -> None:
    for command in ("paths", "bounds", "measure"):
        done = rankscope(command, *SMALL, "-o", "out", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    run = read(tmp_path / "out")
    assert list(run.manifests) == ["paths", "bounds", "measure"]
    for name, manifest in run.manifests.items():
        assert (manifest.command or "").startswith(f"rankscope {name} ") and manifest.versions
        assert manifest.networks[0].architecture and manifest.networks[0].fingerprint
    html = (tmp_path / "out" / "report.html").read_text()
    assert "Manifest of paths" in html and "Which paths carry the output" in html and "What is proved" in html


def test_paths_as_json_add_up() -> None:
    answer = json.loads(rankscope("paths", *SMALL, "--variant", "san+skip", "--json").stdout)
    shares = [row["share"] for row in answer["lengths"] if row["start"] == "all" and row["sample"] == 0]
    assert sum(shares) == pytest.approx(1.0)
    assert [row["paths"] for row in answer["lengths"] if row["start"] == "embedding"][::2] == ["1", "4", "4"]
    assert answer["manifest"]["closure"] < 1e-12 and len(answer["heads"]) == 2 * 2 * 2


def test_bounds_prints_tables_that_fit_and_writes_a_folder(tmp_path: Path) -> None:
    done = rankscope("bounds", *SMALL, "--variant", "san", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert " dobrushin " in done.stdout and "hypotheses that fail" in done.stdout
    assert "Measured to 1e-06 of the tokens' size: uniform by layer" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "certificates.parquet", "bounds.png", "bounds.svg", "manifest.json",
    }  # fmt: skip


def test_bounds_as_json_never_shows_a_bound_without_its_hypotheses() -> None:
    answer = json.loads(rankscope("bounds", *SMALL, "--json", "--layers", "3").stdout)
    assert {row["layer"] for row in answer["table"]} == {1, 2, 3}
    met = {row["theorem"] for row in answer["table"] if row["met"]}
    assert {"dobrushin", "aligned-skip", "norm-rank"} <= met
    for row in answer["table"]:
        assert row["met"] == all(each["met"] for each in row["hypotheses"]) == (row["why"] is None)
        assert row["met"] or (row["log10_bound"] is None and row["slack"] is None)
    assert {row["sample"] for row in answer["collapse"]["measured"]} == {0, 1}


def test_reproduce_compares_with_what_was_published(tmp_path: Path) -> None:
    done = rankscope("reproduce", "dong2021", "lengths", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.count("agrees") == 8
    page = (tmp_path / "out" / "quick" / "REPRODUCTION.md").read_text()
    assert "11 and 12 (.383 each)" in page and "Not run: dong2021 fig2" in page
    assert (tmp_path / "out" / "quick" / "dong2021" / "lengths" / "lengths.svg").is_file()
    answer = json.loads(
        rankscope("reproduce", "dong2021", "lengths", "-o", "out", "--json", cwd=tmp_path).stdout
    )
    assert all(each["agrees"] for each in answer[0]["comparisons"])


def test_models_lists_every_family_with_its_parity() -> None:
    from rankscope.sources.families import FAMILIES

    answer = json.loads(rankscope("models", "--json").stdout)
    assert {row["family"] for row in answer["families"]} == set(FAMILIES)
    assert all(max(row["states"], row["attention"]) < 1e-12 for row in answer["families"])
