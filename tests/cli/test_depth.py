"""`rankscope depth`: tables that fit, a picture, JSON, and a folder with a report."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from rankscope import Architecture, DepthCard
from rankscope.cli.inputs import random_weights_of
from rankscope.sources import load
from tests.cli.running import SMALL, answered, printed, rankscope


def test_it_prints_layers_heads_and_what_they_come_to() -> None:
    said = printed("depth", *SMALL)  # fits into 80 columns
    assert "Layers" in said and "Means over samples." in said and "Heads, mean over samples" in said
    assert "bert-tiny: 2 layers count as" in said and "Effective depth" in said and "mean path length" in said


@pytest.mark.parametrize(("width", "shown", "left_out"), [(60, "influence", "entropy"), (120, "biases", "…")])
def test_in_little_room_columns_are_left_out_and_none_is_cut(
    width: int, shown: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    said = rankscope("depth", *SMALL, "--no-heads").out
    header = next(line for line in said.splitlines() if line.strip().startswith("layer  lost"))
    assert shown in header and left_out not in header and "…" not in said
    assert max(map(len, said.splitlines())) <= width


def test_a_picture_a_folder_and_a_report(tmp_path: Path) -> None:
    said = printed("depth", *SMALL, "--no-heads", "--svg", "card.svg", "-o", "run", cwd=tmp_path)
    assert "Heads, mean over samples" not in said and "Heads were not taken out" in said
    assert ElementTree.parse(tmp_path / "card.svg").getroot().tag.endswith("svg")
    card = DepthCard.read(tmp_path / "run")
    assert card.layers.height == 2 and card.manifest.model == "bert-tiny" and card.manifest.text is not None
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Which layers and heads the output needs" in page and card.sentence in page
    assert "bert-tiny" in page.partition("</title>")[0] and "layers that count" in page


def test_json_has_everything() -> None:
    told = answered("depth", *SMALL)
    assert len(told["layers"]) == 2 and len(told["heads"]) == 4 and told["norms"]
    assert {found["name"] for found in told["effective_depths"]} >= {"layers_that_count", "mean_path_length"}


def test_a_network_that_paths_do_not_cover_says_so(tmp_path: Path) -> None:
    arch = Architecture(layers=2, width=8, heads=2, norm="rms", key_latent=4, biases=False, positions="rotary")
    path = tmp_path / "latent.json"
    path.write_text(json.dumps(arch.to_dict()))
    said = printed("depth", str(path), "--max-length", "8", "--samples", "1")
    assert "There are no shares of paths" in " ".join(said.split())


@pytest.mark.slow
def test_a_folder_of_another_network_is_refused(tmp_path: Path) -> None:
    printed("depth", *SMALL, "--no-heads", "-o", "run", cwd=tmp_path)
    done = rankscope("measure", "bert-mini", *SMALL[1:], "-o", "run", cwd=tmp_path)
    assert done.code == 2 and "another folder" in done.err


@pytest.mark.parametrize("command", [("depth", "--no-heads"), ("cut",), ("paths",), ("bounds",), ("compare",)])
def test_of_a_longer_text_it_is_said_how_many_excerpts_were_read(command: tuple[str, ...], tmp_path: Path) -> None:
    name, *options = command
    things = ["bert-tiny", "bert-tiny:san"] if name == "compare" else ["bert-tiny"]
    notes = tmp_path / "notes.txt"
    notes.write_text("\n\n".join(f"the whale was in the sea for day {day}" for day in range(6)))
    asked = (name, *things, *options, "--max-length", "8", "--text", str(notes))
    done = rankscope(*asked, "--samples", "3")
    assert done.code == 0 and f"read the first 3 of 6 excerpts of {notes}" in done.err
    assert "excerpts of" not in rankscope(*asked, "--samples", "6").err
    assert "excerpts of" not in rankscope(*asked, "--samples", "3", "--quiet").err


FEW = ("--samples", "2", "--max-length", "12")


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 with its language head and a tokenizer, as a checkpoint."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("gpt")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=4, n_head=2, initializer_range=0.3)
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    words = ["[UNK]", "the", "of", "and", "a", "to", "in", "that", "his", "I", "it", "was", "whale", "but", ".", ","]
    tokenizer = Tokenizer(WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.mark.sampled(1)
@pytest.mark.parametrize("by", ["path_share", "gradient"])
def test_a_model_is_written_with_head_and_tokenizer(gpt: Path, tmp_path: Path, by: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    small = tmp_path / "small"
    told = answered("cut", str(gpt), "--keep", "0.5", "--by", by, *FEW, "-o", str(small))
    assert told["left"] == 2 and len(told["layers"]) == 2 and told["weights"][1] < told["weights"][0]
    assert told["loss"] == ("next token" if by == "gradient" else None)
    whole: Any = AutoModelForCausalLM.from_pretrained(gpt).eval()
    left = [layer for layer in range(4) if layer + 1 not in told["layers"]]
    whole.transformer.h = torch.nn.ModuleList([whole.transformer.h[layer] for layer in left])
    again: Any = AutoModelForCausalLM.from_pretrained(small).eval()
    ids = AutoTokenizer.from_pretrained(small)("the whale was in it .", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(
            again(input_ids=ids).logits, whole(input_ids=ids, use_cache=False).logits, rtol=1e-5, atol=1e-5
        )
        longer = again.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)  # its cache counts layers
    assert longer.shape[1] == ids.shape[1] + 3
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (gpt, small)]
    assert sizes[1] < sizes[0]
    net = load(gpt)
    found, expected = load(small).state_dict(), net.state_dict()
    assert torch.equal(found["layers.1.mlp.up.weight"], expected[f"layers.{left[1]}.mlp.up.weight"])


def test_without_a_folder_it_says_what_would_go(gpt: Path) -> None:
    said = printed("cut", str(gpt), "--keep", "0.5", "--by", "error", "--search", "exact", *FEW)
    assert (
        "How much is needed, by error" in said
        and "sets of layers that could go" in " ".join(said.split())
        and "2 of 4 left" in " ".join(said.split())
    )
    said = printed("cut", str(gpt), "--keep", "0.75", "--by", "influence", *FEW)
    assert "How much is needed, by influence" in said and "cosine" in said
    assert printed("cut", "bert-tiny", "--keep", "1", "-q", *FEW).startswith("bert-tiny nothing taken out")


def test_by_gradients_it_is_said_of_what_they_are(gpt: Path) -> None:
    """Of the next token where the model reads from left to right; else of a random direction of the output."""
    for model, of in ((str(gpt), "next token"), ("bert-tiny", "random direction")):
        assert answered("cut", model, "--keep", "1", "--by", "gradient", *FEW)["loss"] == of


def test_the_same_command_gives_the_same_layers(gpt: Path) -> None:
    line = ("cut", str(gpt), "--keep", "0.5", "--by", "random", "--seed", "3", *FEW)
    assert answered(*line) == answered(*line)


@pytest.mark.slow
def test_mistakes_are_sentences(gpt: Path, tmp_path: Path) -> None:
    """And are made before a model is loaded, where they can be."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    for line, words in {
        ("-o", str(tmp_path / "full")): "new or empty folder",
        ("--keep", "0"): "keep must be a share",
        ("--by", "importance"): "by must be one of",
        ("--search", "beam"): "search must be one of",
        ("--by", "magnitude", "--search", "exact"): "one_shot finds its best set",
    }.items():
        done = rankscope("cut", str(gpt), *FEW, *line)
        assert done.code == 2 and words in done.err and done.err.count("\n") == 1, done.err
    drawn = rankscope("cut", "bert-tiny", *FEW, "-o", str(tmp_path / "new"))
    assert drawn.code == 2 and "random weights" in drawn.err and not (tmp_path / "new").exists()


def test_random_weights_are_said_to_be_random() -> None:
    """`gpt2` on the command line has random weights; of that name there is a trained model on the hub."""
    said = " ".join(printed("cut", "bert-tiny", *FEW).split())
    assert "bert-tiny: random weights (seed 0, init bert)." in said
    assert answered("cut", "bert-tiny", *FEW)["origin"]["weights"] == "random"
    (line,) = random_weights_of("gpt2", {"name": "gpt2", "weights": "random", "seed": 0, "init": "bert"})
    assert line.endswith("the trained model is openai-community/gpt2.") and not random_weights_of("gpt2", {})


def test_of_a_pooled_embedding_it_is_said_that_all_tokens_chose() -> None:
    assert "pooled from them" in " ".join(printed("cut", "minilm", *FEW).split())
    assert "pooled" not in printed("cut", "bert-tiny", *FEW)


def test_a_pooled_embedding_is_written_whole(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    printed("cut", "minilm", "--keep", "0.5", *FEW, "-o", "small", cwd=tmp_path)
    embeddings = SentenceTransformer(str(tmp_path / "small"), device="cpu").encode(["Call me Ishmael."])
    assert abs(float((embeddings**2).sum()) - 1) < 1e-5  # normalised, as by the whole model
