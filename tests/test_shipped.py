"""Models that come with rankscope: their names, their snapshots, parity with transformers' own, images held out."""

import json
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch

from rankscope import load, measure
from rankscope.errors import SourceError
from rankscope.nets import Transformer
from rankscope.shipped import held_out_images, shipped_folder, shipped_model, shipped_models
from rankscope.trainings import read_training
from tests.cli.running import answered, inside, printed, rankscope

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parents[1] / "src" / "rankscope" / "data" / "models" / "digit-vit"
RECORD = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
STEPS = [0, 10, 20, 40, 80, 160, 320, 640, 1280, 2560]


@pytest.fixture(scope="module")
def net() -> Transformer:
    return load("digit-vit")


@pytest.fixture(scope="module")
def original() -> Any:
    from transformers import ViTForImageClassification

    model: Any = ViTForImageClassification.from_pretrained(FOLDER / "checkpoint-2560", dtype=torch.float64)
    return model.eval()


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    images = held_out_images("digit-vit")
    assert images is not None
    return images.pixel_values


@torch.no_grad()
def test_the_network_computes_what_transformers_does(net: Transformer, original: Any, pixels: torch.Tensor) -> None:
    hidden = net.run(*net.encode(pixels)).output
    theirs = original.vit(pixel_values=pixels).last_hidden_state
    assert float((hidden - theirs).abs().max() / theirs.abs().max()) < 1e-12


@torch.no_grad()
def test_it_reads_the_digits_that_it_was_not_trained_on_as_well_as_its_training_says(
    net: Transformer, original: Any, pixels: torch.Tensor
) -> None:
    logits = original.classifier(net.run(*net.encode(pixels)).output[:, 0])
    right = logits.argmax(-1) == held_out_images("digit-vit").labels  # type: ignore[union-attr]
    assert float(right.double().mean()) == pytest.approx(RECORD["accuracy_on_shipped_images"], abs=1e-6)
    assert RECORD["accuracy"] >= 0.97 and RECORD["steps"] == STEPS[-1] and not RECORD["ended_early"]


def test_its_images_are_scikit_learns_and_were_held_out(pixels: torch.Tensor) -> None:
    from sklearn.datasets import load_digits

    digits, shipped = load_digits(), RECORD["shipped_images"]
    assert np.array_equal(pixels[:, 0], digits.images[shipped] / 8 - 1)
    assert np.array_equal(held_out_images("digit-vit").labels, digits.target[shipped])  # type: ignore[union-attr]
    assert len(set(shipped)) == 100 and set(shipped) <= set(RECORD["held_out_images"])


def test_its_snapshots_come_in_the_order_of_their_steps(net: Transformer) -> None:
    assert [*shipped_models()["digit-vit"]] == STEPS
    assert load("digit-vit/checkpoint-2560").fingerprint == net.fingerprint
    assert shipped_folder("digit-vit/checkpoint-640/") == shipped_folder("digit-vit/checkpoint-640")
    early: Any = load("Digit_ViT/checkpoint-640")
    assert early.fingerprint != net.fingerprint and early.origin.name == "Digit_ViT/checkpoint-640"
    logged = {row["step"]: row for row in RECORD["losses"]}
    for step in STEPS:
        (*_, last) = json.loads((FOLDER / f"checkpoint-{step}" / "trainer_state.json").read_text())["log_history"]
        assert last["step"] == step and last["loss"] == logged[step]["held_out"]


@torch.no_grad()
def test_its_first_snapshot_has_learnt_nothing(pixels: torch.Tensor) -> None:
    from transformers import ViTForImageClassification

    first: Any = ViTForImageClassification.from_pretrained(FOLDER / "checkpoint-0", dtype=torch.float64)
    labels = held_out_images("digit-vit").labels  # type: ignore[union-attr]
    loss = torch.nn.functional.cross_entropy(first.eval()(pixel_values=pixels).logits, labels)
    assert float(loss) > 2.2  # ln 10 = 2.30: no better than chance


def test_names_that_mean_no_shipped_model(tmp_path: Path) -> None:
    for name in ("google/vit", "digit-vit/a/b", "./digit-vit", "", "digitvit-2"):
        assert shipped_model(name) is None and shipped_folder(name) is None
    with pytest.raises(SourceError, match="digit-vit has no snapshot 'checkpoint-641'; it has checkpoint-0, .*-640,"):
        load("digit-vit/checkpoint-641")
    with pytest.raises(SourceError, match="name a snapshot as in digit-vit/checkpoint-640"):
        load("digit-vit", revision="checkpoint-640")
    with pytest.raises(SourceError, match=r"got 'digit-vitt' \(load\('digit-vit'\) comes with rankscope\)"):
        load("digit-vitt")
    (tmp_path / "digit-vit").mkdir()
    with inside(tmp_path):  # a folder of one's own is meant before the shipped model
        assert shipped_model("digit-vit") is None and shipped_model("digit-vit/checkpoint-640") is None


def test_it_is_measured_by_name_on_its_own_images(net: Transformer, pixels: torch.Tensor) -> None:
    answer = answered("measure", "digit-vit", "--variants", "transformer", "--metrics", "relative_mu")
    assert answer["manifest"]["text"]["path"] == "held-out images, bundled" and answer["manifest"]["samples"] == 4
    alone = measure(net, *net.encode(pixels[:4]), ["relative_mu"]).curve("relative_mu")
    rows = sorted(answer["table"], key=lambda row: (row["sample"], row["layer"]))
    found = [row["value"] for row in rows]
    assert found == pytest.approx(alone.flatten().tolist(), rel=1e-12)
    for wrong, sentence in {
        ("measure", "digit-vit", "--samples", "101"): "comes with 100 images; got samples=101",
        ("paths", "digit-vit", "--text", str(ROOT / "README.md")): "digit-vit must read images",
        ("compare", "digit-vit", "bert-tiny"): "must read images, which come with it, and bert-tiny text",
        ("measure", "digit-vit/checkpoint-5"): "digit-vit has no snapshot 'checkpoint-5'",
    }.items():
        code, _, err = rankscope(*wrong)
        assert code == 2 and sentence in err, err


@pytest.mark.slow
def test_every_command_of_a_network_takes_it(tmp_path: Path) -> None:
    for line in (
        "measure digit-vit/checkpoint-0 -o measured",
        "compare digit-vit/checkpoint-0 digit-vit digit-vit:san",
        "paths digit-vit --top 2",
        "bounds digit-vit",
        "depth digit-vit",
        "cut digit-vit --keep 0.7 -o smaller",
    ):
        assert printed(*line.split(), cwd=tmp_path), line
    page = (tmp_path / "measured" / "report.html").read_text(encoding="utf-8")
    assert "The first image of 4." in page and "4 images" in page


@pytest.mark.slow
def test_its_training_is_measured_by_name(tmp_path: Path, net: Transformer, pixels: torch.Tensor) -> None:
    said = printed("checkpoints", "digit-vit", "--metrics", "relative_mu", "--samples", "2", cwd=tmp_path)
    assert "10 checkpoints in digit-vit." in said
    found = read_training(tmp_path / "runs" / "digit-vit")
    assert found.steps == STEPS and not len(found.alarms)
    alone = measure(net, *net.encode(pixels[:2]), ["relative_mu"]).curve("relative_mu").mean(0)
    assert found.grid("relative_mu").value[:, -1].tolist() == pytest.approx(alone.tolist(), rel=1e-12)
    assert found.scalar("loss")[1][-1] == RECORD["losses"][-1]["held_out"]


@pytest.mark.slow
def test_snapshots_of_the_extra_package_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "package"
    copytree(ROOT / "packages" / "rankscope-models", tree, ignore=ignore_patterns("*.safetensors"))
    for name in ("digit-vit/checkpoint-5", "another-vit/checkpoint-1"):
        copytree(FOLDER / "checkpoint-10", tree / "src" / "rankscope_models" / name)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", tmp_path], cwd=tree, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    monkeypatch.syspath_prepend(tmp_path / "unpacked")
    monkeypatch.delitem(sys.modules, "rankscope_models", raising=False)
    assert [*shipped_models()["digit-vit"]] == [0, 5, *STEPS[1:]]
    assert load("digit-vit/checkpoint-5").fingerprint == load("digit-vit/checkpoint-10").fingerprint
    assert load("another-vit").arch.layers == 6
    assert held_out_images("another-vit") is None
