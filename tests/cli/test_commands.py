"""The command line as a person or a program meets it: real processes, their output and exit codes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope import read
from rankscope.metrics import METRICS
from tests.cli.conftest import WrittenRuns
from tests.cli.running import answered, printed, process, rankscope

SMALL = ["bert-tiny", "--tokens", "16", "--samples", "2"]


def test_help_version_and_what_is_not_there_do_not_import_torch() -> None:
    code = (
        "import sys, rankscope, rankscope.cli\n"
        "from typer.testing import CliRunner\n"
        "for ask in ('--help', '--version', 'measure --help'):\n"
        "    assert CliRunner().invoke(rankscope.cli.app, ask.split()).exit_code == 0\n"
        "for ask in ('measure --text absent.txt', 'paths minilm --text absent.txt', 'bounds nowhere'):\n"
        "    assert CliRunner().invoke(rankscope.cli.app, ask.split()).exit_code == 2\n"
        "heavy = {'torch', 'polars', 'matplotlib', 'scipy', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version() -> None:
    from importlib.metadata import version

    assert printed("--version") == f"rankscope {version('rankscope')}\n"


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


def test_masks_as_a_table_a_picture_and_json() -> None:
    table = printed("masks", "--tokens", "12", "--picture")
    assert "unidirectional" in table and "█" in table
    (answer,) = answered("masks", "window:2", "--tokens", "12")
    assert answer["mask"] == "window:2" and answer["radius"] == 3 and answer["strongly_connected"]


def test_a_bad_option_is_exit_code_two() -> None:
    assert process("measure", "--samples", "-3").returncode == 2
    assert process("mesure").returncode == 2


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


@pytest.mark.slow
def test_demo_ends_by_saying_where_its_report_lies(tmp_path: Path) -> None:
    out = printed("demo", cwd=tmp_path)
    assert out.splitlines()[-1] == "Report: runs/demo/report.html"
    assert "a trained English BERT" in out
    assert (tmp_path / "runs" / "demo" / "report.html").stat().st_size < 8e6


def test_paths_prints_tables_and_writes_a_folder(runs: WrittenRuns) -> None:
    out = runs.outputs["paths"]
    assert "The parts add up to the output within" in out and "heaviest single paths" in out
    names = {path.name for path in (runs.folder / "paths").iterdir()}
    assert {"lengths.parquet", "layers.parquet", "heads.parquet", "single_paths.parquet"} < names
    assert {"lengths.png", "lengths.svg", "heads.png", "single_paths.png", "manifest.json"} < names


def test_commands_into_one_folder_keep_their_manifests(runs: WrittenRuns, tmp_path: Path) -> None:
    shutil.copytree(runs.folder / "paths", tmp_path / "out")
    printed("bounds", *SMALL, "-o", "out", cwd=tmp_path)
    run = read(tmp_path / "out")
    assert list(run.manifests) == ["paths", "bounds"]
    for name, manifest in run.manifests.items():
        assert (manifest.command or "").startswith(f"rankscope {name} ") and manifest.versions
        assert manifest.networks[0].architecture and manifest.networks[0].fingerprint
    html = (tmp_path / "out" / "report.html").read_text()
    assert "Manifest of paths" in html and "Which paths carry the output" in html and "What is proved" in html


def test_paths_as_json_add_up() -> None:
    answer = answered("paths", *SMALL, "--variant", "san+skip")
    shares = [row["share"] for row in answer["lengths"] if row["start"] == "all" and row["sample"] == 0]
    assert sum(shares) == pytest.approx(1.0)
    assert [row["paths"] for row in answer["lengths"] if row["start"] == "embedding"][::2] == ["1", "4", "4"]
    assert answer["manifest"]["closure"] < 1e-12 and len(answer["heads"]) == 2 * 2 * 2


def test_bounds_prints_tables_that_fit_and_writes_a_folder(runs: WrittenRuns) -> None:
    out = runs.outputs["bounds"]
    assert " dobrushin " in out and "hypotheses that fail" in out
    assert "Measured to 1e-06 of the tokens' size: uniform by layer" in out
    names = {path.name for path in (runs.folder / "bounds").iterdir()}
    assert names >= {"certificates.parquet", "bounds.png", "bounds.svg", "manifest.json"}


def test_bounds_as_json_never_shows_a_bound_without_its_hypotheses() -> None:
    answer = answered("bounds", *SMALL, "--layers", "3")
    assert {row["layer"] for row in answer["table"]} == {1, 2, 3}
    met = {row["theorem"] for row in answer["table"] if row["met"]}
    assert {"dobrushin", "aligned-skip", "norm-rank"} <= met
    for row in answer["table"]:
        assert row["met"] == all(each["met"] for each in row["hypotheses"]) == (row["why"] is None)
        assert row["met"] or (row["log10_bound"] is None and row["slack"] is None)
    assert {row["sample"] for row in answer["collapse"]["measured"]} == {0, 1}


def test_reproduce_compares_with_what_was_published(tmp_path: Path) -> None:
    line = ["reproduce", "dong2021", "lengths", "-o", "out"]
    assert printed(*line, cwd=tmp_path).count("agrees") == 8
    page = (tmp_path / "out" / "quick" / "REPRODUCTION.md").read_text()
    assert "11 and 12 (.383 each)" in page and "Not run: dong2021 fig2" in page
    assert (tmp_path / "out" / "quick" / "dong2021" / "lengths" / "lengths.svg").is_file()
    assert all(each["agrees"] for each in answered(*line, cwd=tmp_path)[0]["comparisons"])


def test_models_lists_every_family_with_its_parity() -> None:
    from rankscope.sources.families import FAMILIES

    answer = answered("models")
    assert {row["family"] for row in answer["families"]} == set(FAMILIES)
    assert all(max(row["states"], row["attention"]) < 1e-12 for row in answer["families"])


@pytest.mark.slow
def test_remedies_are_put_side_by_side_and_gone_on_with(tmp_path: Path) -> None:
    line = ["remedies", "bert-tiny", "--remedy", "gate", "--remedy", "lnscale", "--seeds", "1", "-o", "out"]
    out = printed(*line, cwd=tmp_path)
    assert "At initialisation: layers until" in out and "lnscale" in out and "Nothing was trained" in out
    parts = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "parts").iterdir()}
    answer = answered(*line, "--workers", "2", cwd=tmp_path)
    assert [row["remedy"] for row in answer["remedies"]] == ["none", "gate", "lnscale"]
    assert {claim["verdict"] for claim in answer["claims"]} <= {
        "agrees", "does not", "does nothing here", "cannot be told"
    }  # fmt: skip
    assert Path(tmp_path / answer["report"]).is_file()
    assert parts == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "parts").iterdir()}


def test_metrics_are_listed_and_explained() -> None:
    text = printed("metrics")
    assert all(f"\n{name} " in text for name in METRICS)
    assert "they can be above 1, up to 2" in " ".join(text.split())
    one = " ".join(printed("metrics", "relative_residual").split())
    assert "Range: 0 to 2." in one and "2 (1 - 1/n)" in one and "The cloud of a report says relative_mu" in one
    assert [each["range"] for each in answered("metrics", "entropy")] == ["0 to log n"]
    assert "About the argmin." in printed("metrics", "mu@argmin")
    assert "did you mean 'entropy'" in rankscope("metrics", "entropie").err
