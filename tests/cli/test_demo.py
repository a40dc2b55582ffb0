"""`rankscope demo`: its report; with `--train`, both runs and what is said of them; with `--decoder`, another model."""

import json
import lzma
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from benchmarks import shipped_models

from rankscope import __file__ as rankscope_package
from rankscope import read
from rankscope.cli.inputs import bundled_text
from rankscope.sources import bundled_excerpts
from tests.cli.running import answered, printed, process, rankscope
from tests.test_light import without


def test_the_training_demo_trains_with_skips_and_without(tmp_path: Path) -> None:
    answer = answered("demo", "--train", "--steps", "1", "-o", "out", cwd=tmp_path)
    assert (tmp_path / answer["report"]).is_file()
    for name in ("whole", "no-skips"):
        assert {row["step"] for row in answer["runs"][name]["training"]} == {0}  # the next is due at step 20


@pytest.mark.slow
def test_the_training_demo_trains_shows_and_goes_on(tmp_path: Path) -> None:
    line = ["demo", "--train", "--steps", "20", "-o", "out"]
    answer = answered(*line, cwd=tmp_path)
    assert (tmp_path / answer["report"]).is_file()
    assert [*answer["runs"]] == ["whole", "no-skips"]
    for name, found in answer["runs"].items():
        assert {row["step"] for row in found["training"]} == {0, 20}
        assert found["training"] == read(tmp_path / "out" / name).table("training").to_dicts()
    out = printed(*line, cwd=tmp_path)  # what is done already is not done again
    assert "whole: 0 alarms" in out and "no-skips: 0 alarms" in out and "Report: out/report.html" in out
    for name, found in answer["runs"].items():
        assert found["training"] == read(tmp_path / "out" / name).table("training").to_dicts()


@pytest.mark.slow
def test_demo_ends_by_saying_where_its_report_lies(tmp_path: Path) -> None:
    out = printed("demo", cwd=tmp_path)
    assert out.splitlines()[-1] == "Report: runs/demo/report.html"
    assert "a trained English BERT" in out
    assert (tmp_path / "runs" / "demo" / "report.html").stat().st_size < 8e6


@pytest.fixture(scope="module")
def with_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package into which a decoder was dropped: the shipped one's script, stopped after two steps."""
    folder = tmp_path_factory.mktemp("decoder")
    prose = "\n\n".join(bundled_excerpts())
    pieces = [{"name": str(k), "text": prose[4000 * k : 4000 * (k + 1)]} for k in range(22)]
    text = folder / "text.json.xz"
    text.write_bytes(lzma.compress(json.dumps(dict.fromkeys(shipped_models.CORPORA, pieces)).encode()))
    plan = replace(shipped_models.smoke(shipped_models.GPT_PLAN), steps=2, evaluation_windows=2)
    shipped_models.train_gpt(text, plan, True, "cpu", folder / "moby-gpt")
    site = folder / "site" / "rankscope"
    copytree(Path(rankscope_package).parent, site, ignore=ignore_patterns("__pycache__"))
    copytree(folder / "moby-gpt" / "checkpoint-2", site / "data" / "models" / "moby-gpt" / "checkpoint-2")
    return site.parent


def test_the_demo_of_a_decoder_says_that_it_has_none() -> None:
    assert "--decoder" not in printed("demo", "--help")
    code, _, err = rankscope("demo", "--decoder")
    assert code == 2 and "--decoder needs moby-gpt, which is not in this version" in err
    code, _, err = rankscope("demo", "--decoder", "--train")
    assert code == 2 and "leave one out" in err


@pytest.mark.slow
def test_the_demo_of_a_decoder_that_was_dropped_in(with_decoder: Path, tmp_path: Path) -> None:
    done = process("demo", "--decoder", cwd=tmp_path, PYTHONPATH=str(with_decoder))
    assert done.returncode == 0, done.stderr
    assert "moby-gpt, a trained Llama of 8 layers, reads 4 excerpts of Moby Dick, held out of its" in " ".join(
        done.stdout.split()
    )
    assert done.stdout.splitlines()[-1] == "Report: runs/demo-decoder/report.html"
    manifest = read(tmp_path / "runs" / "demo-decoder").entries["demo"].manifest
    assert manifest.model == "moby-gpt" and manifest.origin is not None and manifest.origin["family"] == "llama"
    # What it reads lies in the first chapter, which the script holds out.
    assert shipped_models.is_held_out("moby-dick", 0)
    prose = files("rankscope").joinpath("data/moby_dick.txt").read_text(encoding="utf-8")
    first_chapter = prose.partition("like a snow hill in the air.")[0]
    assert all(excerpt in first_chapter for excerpt in bundled_text(4, 128))

    listed = process("models", cwd=tmp_path, PYTHONPATH=str(with_decoder)).stdout
    assert "By name, trained: minilm (the demo extra), digit-vit, moby-gpt." in listed
    code = f"import sys; sys.path.insert(0, {str(with_decoder)!r}); sys.argv[1:] = ['checkpoints', 'moby-gpt']; "
    alone = without(("rankscope_models",), code + "from rankscope.cli import main; main()", cwd=tmp_path)
    assert alone.returncode == 2 and "needs rankscope_models, which is not installed" in alone.stderr
