"""`rankscope checkpoints` on checkpoints of a real model, one of them damaged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

from rankscope import load, measure
from rankscope.cli.checkpoints import CheckpointRow, logged_rows
from rankscope.trainings import read_training
from tests.cli.running import answered, printed, rankscope

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
GIVEN = ("--max-length", "8", "--samples", "2", "--metrics", "relative_mu,entropy")


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Three checkpoints, the tokenizer beside them, and what a trainer has logged; the second is cut off."""
    folder = tmp_path / "trained"
    tokenizer: Any = load("minilm").origin.tokenizer  # type: ignore[union-attr]
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=len(tokenizer), **SMALL))
    for step in (20, 100, 3):
        saved = folder / f"checkpoint-{step}"
        model.save_pretrained(saved)
        history = [{"step": k, "loss": 1 / k, "learning_rate": k / 1000} for k in range(1, step + 1)]
        (saved / "trainer_state.json").write_text(json.dumps({"log_history": history}))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
    (folder / "checkpoint-20" / "model.safetensors").rename(folder / "whole")
    (folder / "checkpoint-20" / "model.safetensors").write_bytes(b"cut off")
    (folder / "checkpoint-best").mkdir()
    return folder


HISTORY: list[Any] = [
    {"step": 1, "loss": 2.0}, [], "step", None, {"loss": 9.0}, {"step": "2", "loss": 9.0}, {"step": 3, "loss": [1.0]},
    {"step": 4, "loss": 10**400}, {"step": 5, "loss": None, "grad_norm": float("inf")}, {"step": 2, "loss": 1.5},
    {"step": 6, "learning_rate": "0.5"}, {"step": 99, "loss": 9.0}, {"step": 10**30, "loss": 9.0},
]  # fmt: skip


def test_what_is_no_line_of_a_trainer_hides_no_other(tmp_path: Path) -> None:
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": HISTORY}))
    rows = logged_rows(CheckpointRow(10, tmp_path)).select("step", "metric", "value", "broken").rows()
    assert rows == [(10, "loss", 1.5, 0), (10, "grad_norm", None, 1), (10, "lr", 0.5, 0)]
    for content in ("", "[]", "7", '{"log_history": 7}', '{"log_history": {"a": 1}}', "[" * 10**5, "\xff"):
        state.write_text(content, encoding="latin-1")
        assert logged_rows(CheckpointRow(10, tmp_path)).is_empty(), content[:20]


@pytest.mark.slow
def test_they_are_measured_in_order_once_and_a_damaged_one_when_it_is_mended(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = printed("checkpoints", "trained", *GIVEN, "-o", "run", cwd=tmp_path)
    assert "3 checkpoints in trained." in said and "step 100 · 2 measurements" in said
    assert "checkpoint-20 cannot be measured: the weights of" in " ".join(said.split())
    assert (run / "report.html").is_file()
    found = read_training(run)
    assert found.steps == [3, 100] and found.metrics == ["relative_mu", "entropy"]
    assert found.scalar("loss") == ([3, 100], [1 / 3, 1 / 100]) and found.scalar("lr")[1] == [0.003, 0.1]

    net = load(str(trained / "checkpoint-100"))
    from rankscope.cli.inputs import bundled_text

    words: Any = load("minilm").origin.tokenizer  # type: ignore[union-attr]
    encoded = load(str(trained / "checkpoint-100"), tokenizer=words).encode(bundled_text(2, 8), 8)
    alone = measure(net, *encoded, ["relative_mu"]).curve("relative_mu").mean(0)
    assert found.grid("relative_mu").value[:, 1].tolist() == pytest.approx(alone.tolist(), rel=1e-12)

    before = found.table.filter(step=100)
    shutil.move(trained / "whole", trained / "checkpoint-20" / "model.safetensors")
    again = answered("checkpoints", str(trained), *GIVEN, "-o", str(run))
    assert again["steps"] == [3, 20, 100] and again["alarms"] == []
    assert read_training(run).table.filter(step=100).equals(before)
    shutil.rmtree(trained / "checkpoint-3")
    (trained / "checkpoint-100" / "model.safetensors").write_bytes(b"gone")
    assert answered("checkpoints", str(trained), *GIVEN, "-o", str(run))["steps"] == [3, 20, 100]


@pytest.mark.slow
def test_a_folder_of_other_work_is_refused(trained: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert rankscope("checkpoints", str(trained), *GIVEN, "-o", run).code == 0
    code, _, err = rankscope("checkpoints", str(trained), *GIVEN, "--max-length", "9", "-o", run)
    assert code == 2 and "measured otherwise, in tokens (8, now 9)" in err
    code, _, err = rankscope("checkpoints", str(tmp_path), "-o", run)
    assert code == 2 and "must hold folders named checkpoint-N" in err
    code, _, err = rankscope("checkpoints", str(tmp_path / "none"), "-o", run)
    assert code == 2 and "there is none at" in err


def test_checkpoints_of_which_none_can_be_measured_are_a_failure(tmp_path: Path) -> None:
    BertConfig(vocab_size=9, **SMALL).save_pretrained(tmp_path / "trained" / "checkpoint-5")
    code, out, err = rankscope("checkpoints", "trained", *GIVEN, "-o", "run", "--quiet", cwd=tmp_path)
    assert code == 2 and out == "" and err.count("\n") == 1 and "checkpoint-5" in err and "--tokenizer" in err


@pytest.mark.slow
def test_files_of_lightning_and_plain_loops_are_measured(tmp_path: Path) -> None:
    """The numbers are those of the models whose weights the files hold."""
    words: Any = load("minilm").origin.tokenizer  # type: ignore[union-attr]
    torch.manual_seed(0)
    models = {step: BertModel(BertConfig(vocab_size=len(words), **SMALL)) for step in (100, 200)}
    shape, files = tmp_path / "shape", tmp_path / "lightning"
    files.mkdir()
    models[100].config.save_pretrained(shape)
    words.save_pretrained(shape)
    for step, model in models.items():
        weights = {f"net.bert.{name}": x for name, x in model.state_dict().items()} | {"head.weight": torch.ones(2, 2)}
        torch.save({"global_step": step, "state_dict": weights}, files / f"epoch=0-step={step}.ckpt")
    torch.save({"global_step": 200, "state_dict": weights}, files / "last.ckpt")
    answer = answered("checkpoints", str(files), *GIVEN, "--config", str(shape), "-o", str(tmp_path / "run"))
    assert answer["steps"] == [100, 200] and answer["alarms"] == []
    found = read_training(tmp_path / "run").grid("relative_mu")
    from rankscope.cli.inputs import bundled_text

    for column, model in enumerate(models.values()):
        net = load(model, tokenizer=words)
        alone = measure(net, *net.encode(bundled_text(2, 8), 8), metrics=["relative_mu"]).curve("relative_mu").mean(0)
        assert found.value[:, column].tolist() == pytest.approx(alone.tolist(), rel=1e-12)
    code, _, err = rankscope("checkpoints", str(files), *GIVEN, "-o", str(tmp_path / "other"))
    assert code == 2 and "give --config, a folder with the config.json" in " ".join(err.split())
