"""moby-gpt, the decoder that comes with rankscope: parity with transformers' own, its losses, its snapshots."""

import json
import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shipped_models import is_held_out, snapshot_steps
from rankscope import load, measure
from rankscope.nets import Transformer
from rankscope.shipped import shipped_folder, shipped_models
from rankscope.sources import bundled_excerpts, lifted
from rankscope.trainings import read_training
from tests.cli.running import printed
from tests.test_light import without

FOLDER = Path(str(files("rankscope"))) / "data" / "models" / "moby-gpt"
RECORD = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
STEPS = sorted(snapshot_steps(RECORD["plan"]["steps"]))


@pytest.fixture(scope="module")
def net() -> Transformer:
    return load("moby-gpt")


def theirs_at(step: int) -> Any:
    from transformers import LlamaForCausalLM

    folder = shipped_models()["moby-gpt"][step]
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER / "checkpoint-5120")


@torch.no_grad()
def nats_a_token(model: Any, tokenizer: Any, texts: list[str]) -> float:
    """The mean loss of a model on texts cut into windows of 256 tokens."""
    windows = [ids for text in texts for ids in tokenizer(text, return_tensors="pt").input_ids[0].split(256)]
    whole = torch.stack([ids for ids in windows if len(ids) == 256])
    return float(model(input_ids=whole, labels=whole).loss)


@torch.no_grad()
def test_the_network_computes_what_transformers_does(net: Transformer, tokenizer: Any) -> None:
    texts = [excerpt[:400] for excerpt in bundled_excerpts()[:3]]
    states, padding = net.encode(texts, 64)
    ids = torch.stack([tokenizer(text, return_tensors="pt").input_ids[0, :64] for text in texts])
    assert not bool(padding.any()) and bool((ids[:, 0] == 0).all())  # every text begins with the start token
    model = theirs_at(STEPS[-1]).model
    with lifted():  # rotary angles and norms are float32 there, whatever the model's dtype
        theirs = model(input_ids=ids).last_hidden_state
    ours = net.run(states, padding).output
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-12


def chapters(held_out: bool) -> list[str]:
    """Chapters of the bundled text that the training held out, or that it saw."""
    prose = files("rankscope").joinpath("data/moby_dick.txt").read_text(encoding="utf-8")
    pieces = re.split(r"\n\n(?=CHAPTER \d+)", prose)
    return [piece for index, piece in enumerate(pieces) if is_held_out("moby-dick", index) == held_out]


def test_its_loss_on_chapters_that_it_was_not_trained_on_is_what_its_training_says(tokenizer: Any) -> None:
    logged = {row["step"]: row["held_out_moby-dick"] for row in RECORD["losses"]}
    assert nats_a_token(theirs_at(STEPS[-1]), tokenizer, chapters(True)) == pytest.approx(logged[STEPS[-1]], abs=0.15)
    assert logged[0] == pytest.approx(math.log(1536), abs=0.1)  # as a guess among all words
    assert not RECORD["ended_early"] and RECORD["held_out"] == pytest.approx(RECORD["losses"][-1]["held_out"], abs=1e-3)
    assert min(row["held_out"] for row in RECORD["losses"]) == RECORD["losses"][-1]["held_out"]


def test_what_it_wrote_is_english_and_more_so_along_its_training(tokenizer: Any) -> None:
    words = set(re.findall(r"[a-z]+", " ".join(chapters(True) + chapters(False)).lower()))
    shares = {}
    for row in RECORD["samples"]:
        written = re.findall(r"[a-z]+", " ".join(row["texts"]).lower())
        shares[row["step"]] = sum(word in words for word in written) / len(written)
    assert shares[STEPS[-1]] > 0.85 and shares[0] < 0.5


def test_its_snapshots_are_those_of_one_training(net: Transformer, tokenizer: Any) -> None:
    assert [*shipped_models()["moby-gpt"]] == STEPS
    assert load("moby-gpt/checkpoint-5120").fingerprint == net.fingerprint
    held_out = chapters(True)[:1]
    losses = [nats_a_token(theirs_at(step), tokenizer, held_out) for step in (0, 160, 640, 5120)]
    assert losses == sorted(losses, reverse=True) and losses[0] > 7 and losses[-1] < 3.8
    logged = {row["step"]: row["held_out"] for row in RECORD["losses"]}
    for step in STEPS:
        folder = shipped_folder(f"moby-gpt/checkpoint-{step}")
        assert folder is not None
        (*_, last) = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        assert last["step"] == step and last["loss"] == logged[step]


def test_without_their_package_there_is_the_trained_model_alone(tmp_path: Path) -> None:
    for code, sentence in {
        "from rankscope.cli import main; sys.argv[1:] = ['checkpoints', 'moby-gpt']; main()": "needs rankscope_models",
        "from rankscope.cli import main; sys.argv[1:] = ['measure', 'moby-gpt/checkpoint-0']; main()": (
            "moby-gpt has no snapshot 'checkpoint-0'; it has checkpoint-5120; more come with a package of their own"
        ),
    }.items():
        done = without(("rankscope_models",), f"import sys; {code}", cwd=tmp_path)
        said = " ".join(done.stderr.split())
        assert done.returncode == 2 and sentence in said and "pip install ./packages/rankscope-models" in said, said


@pytest.mark.slow
def test_its_training_is_measured_by_name(tmp_path: Path, net: Transformer) -> None:
    line = ["checkpoints", "moby-gpt", "--metrics", "relative_mu", "--samples", "1", "--max-length", "32"]
    assert f"{len(STEPS)} checkpoints in moby-gpt." in printed(*line, cwd=tmp_path)
    found = read_training(tmp_path / "runs" / "moby-gpt")
    assert found.steps == STEPS
    assert found.scalar("loss")[1] == [row["held_out"] for row in RECORD["losses"] if row["step"] in STEPS]
    alone = measure(net, *net.encode(bundled_excerpts()[:1], 32), ["relative_mu"]).curve("relative_mu")[0]
    assert found.grid("relative_mu").value[:, -1].tolist() == pytest.approx(alone.tolist(), rel=1e-12)
