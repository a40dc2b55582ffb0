"""`rankscope cut`: what it says, and models that it writes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope.cli.inputs import random_weights_of
from rankscope.sources import load
from tests.cli.running import answered, printed, rankscope

FEW = ("--samples", "2", "--tokens", "12")


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
    assert torch.equal(load(small).state()["layers.1.mlp.up.weight"], net.state()[f"layers.{left[1]}.mlp.up.weight"])


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
