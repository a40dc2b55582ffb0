"""`rankscope measure`: the table, the numbers and the run folder."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import BertConfig

from rankscope import Architecture, Transformer, fresh
from rankscope.cli.inputs import MeasureTask
from rankscope.cli.measure import measure_all, raise_if_stopped
from rankscope.cli.output import ReportTables
from rankscope.cli.show import Interruption
from rankscope.profiles import Reader
from rankscope.runs import EarlyStop
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


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    BertConfig().save_pretrained(tmp_path / "model")  # there are no weights: whoever reads them first says so
    for command in ("measure", "paths", "bounds"):
        code, out, err = rankscope(command, "model", cwd=tmp_path)
        assert code == 2 and out == "" and err.count("\n") == 1 and "tokenizer" in err and "load(" not in err


def test_odd_folder_names_are_printed_as_they_are(tmp_path: Path) -> None:
    line = ["measure", *SMALL, "--variants", "san", "--metrics", "mu", "-o", "out[a]" + "x" * 90]
    done = rankscope(*line, cwd=tmp_path)
    assert done.code == 0, done.err
    path = done.out.splitlines()[-1].removeprefix("Report: ")
    assert (tmp_path / path).is_file()


@pytest.mark.slow
def test_all_arithmetics_side_by_side(tmp_path: Path) -> None:
    line = ["measure", *SMALL, "--arithmetic", "all", "--metrics", "relative_residual"]
    out = printed(*line, "--variants", "san,san+norm+mlp+mlp_skip")
    for arithmetic in ("deviation", "float64", "float32", "bfloat16"):
        assert arithmetic in out
    printed(*line, "--variants", "san", "-o", "out", cwd=tmp_path)
    assert (tmp_path / "out" / "arithmetics_san.png").is_file()


def test_the_first_metric_asked_for_is_the_one_printed() -> None:
    out = printed("measure", *SMALL, "--variants", "san", "--metrics", "dobrushin,mu")
    assert out.startswith("dobrushin:") and "layers 1 →" in out


@pytest.mark.slow
def test_a_kernel_without_a_rule_falls_back_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"layers": 2, "width": 8, "heads": 2, "kernel": "sigmoid"}')
    here = ["measure", "s.json", "--samples", "1", "--tokens", "8", "--variants", "san"]
    out = printed(*here, cwd=tmp_path)
    assert "san ran in float64: deviation arithmetic has no rule for kernel sigmoid." in out
    assert "bfloat16" in printed(*here, "--arithmetic", "all", cwd=tmp_path)


class PressesCtrlC(ReportTables):
    """Reads along until the second variant, where Ctrl-C comes."""

    def readers(self, variant: str) -> Sequence[Reader]:
        if variant == "transformer":
            raise KeyboardInterrupt
        return super().readers(variant)


def test_after_ctrl_c_the_variants_that_were_finished_are_kept(tmp_path: Path) -> None:
    net = fresh("bert-tiny")
    X, padding = net.encode(["Call me Ishmael."], 8)
    variants = ["san", "transformer"]
    jobs = {name: (net.variant(name), X, padding) for name in variants}
    tables = PressesCtrlC(net, variants, X, padding, net.words(["Call me Ishmael."], 8))
    profile = measure_all(jobs, MeasureTask(["mu"]), quiet=True, tables=tables)
    assert profile.variants == ["san"] and profile.manifest.stopped == EarlyStop(finished=("san",), asked=2)
    with pytest.raises(Interruption) as stop:
        raise_if_stopped(profile, tmp_path)
    assert str(stop.value) == f"after 1 of 2 (san); these are written to {tmp_path}"


@pytest.mark.parametrize("quiet", [False, True])
def test_what_takes_long_is_announced_before_it_starts(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rankscope.cli.measure.ANNOUNCED_SECONDS", 0.0)
    net = Transformer.random(Architecture(layers=1, width=8, heads=2))
    X, padding = torch.randn(2, 3, 8), torch.zeros(2, 3, dtype=torch.bool)
    measure_all({"transformer": (net, X, padding)}, MeasureTask(["mu"]), quiet=quiet)
    expected = "" if quiet else "rankscope: this will take about 0 seconds by estimate\n"
    assert capsys.readouterr().err == expected


def test_few_excerpts_of_a_text_can_be_confirmed(tmp_path: Path) -> None:
    lines = tmp_path / "notes.txt"
    lines.write_text("\n\n".join(f"the whale was in the sea for day {day}" for day in range(8)))
    asked = ("measure", "bert-tiny", "--variants", "san", "--tokens", "8", "--text", str(lines), "--confirm")
    done = rankscope(*asked)
    assert done.code == 0, done.err
    assert "read the first 4 of 8 excerpts" in done.err
    told = json.loads(rankscope(*asked, "--samples", "8", "--json").out)
    assert told["manifest"]["samples"] == 8
    refused = rankscope(*asked, "--on", "ray")
    assert refused.code == 2 and "--confirm" in refused.err


def test_a_text_longer_than_the_model_takes_says_the_option(tmp_path: Path) -> None:
    arch = Architecture(layers=1, width=8, heads=2, length=6, positions="absolute")
    (tmp_path / "short.json").write_text(json.dumps(arch.to_dict()))
    refused = rankscope("measure", str(tmp_path / "short.json"), "--samples", "1", "--variants", "san")
    assert refused.code == 2 and "--tokens 6" in refused.err
    assert rankscope("measure", str(tmp_path / "short.json"), "--tokens", "6", "--variants", "san").code == 0
