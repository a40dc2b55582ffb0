"""Models of transformers with layers taken out: written, and read again by transformers and sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.depths import cut
from rankscope.errors import FileError, SourceError
from rankscope.sources import FAMILIES, load
from rankscope.sources.loading import random_model
from rankscope.sources.shortened import original, write_shortened
from tests.raising import raises
from tests.sources.models import CASES

REFUSED = {
    ("albert", "groups", 2): "blocks are shared by groups",
    ("gpt2", "scores by layer", 2): "scores are divided by the number of the layer",
    ("mixtral", "qwen 3", 2): "no layer with experts is left, in a model of experts",
}
"""Models that no config describes without a layer, and why."""
FIRST_OUT = [("deepseek", "v2"), ("mixtral", "qwen 2"), ("mixtral", "qwen 3"), ("qwen3_next", "with biases"),
             ("gpt_neo", "local and global"), ("dinov2", "gated"), ("esm", "rotary"), ("smollm3", "text")]  # fmt: skip
"""Models whose config says something of each layer, which moves up when the first goes."""


def inputs(family: Any, net: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if family.continuous_inputs:
        shape = (2, *net.origin.embedding.shape)
        return {family.input_name: torch.randn(shape, generator=generator, dtype=torch.float64)}
    return {"input_ids": torch.randint(5, len(net.origin.embedding.words), (2, 9), generator=generator)}


def passing_by(blocks: list[nn.Module], index: int) -> None:
    """Hooks by which a block gives what it was given."""
    calls: list[Any] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        calls.append(args[0] if args else kwargs["hidden_states"])

    def after(module: Any, args: Any, output: Any) -> Any:
        if (len(calls) - 1) % len(blocks) != index:
            return None
        return (calls[-1], *output[1:]) if isinstance(output, tuple) else calls[-1]

    for block in dict.fromkeys(blocks):
        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "label", "layer"), [*((*case, 2) for case in CASES), *((*case, 1) for case in FIRST_OUT)]
)
def test_every_family_loses_a_layer_and_transformers_reads_the_rest(
    name: str, label: str, layer: int, tmp_path: Path
) -> None:
    """The whole model with hooks that pass the layer by gives the same output as what was written."""
    family, model = FAMILIES[name], random_model(name, label)
    net = load(model, family=name if family.side else None)
    if (name, label, layer) in REFUSED:
        with raises(SourceError, "layers"):
            write_shortened(model, net, [layer], tmp_path / "small")
        return
    write_shortened(model, net, [layer], tmp_path / "small")
    again = type(model).from_pretrained(tmp_path / "small", dtype=torch.float64).eval()
    if name == "xlnet":  # its positions are made in float32
        whole, short = family.core(model.float()), family.core(again.float())
    else:
        whole, short = (family.prepare_for_float64(family.core(one)) for one in (model, again))
    passing_by(family.blocks(whole), layer - 1)
    with torch.no_grad():
        expected, got = (core(**inputs(family, net)).last_hidden_state for core in (whole, short))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def sentence_folder(folder: Path, mode: str) -> Path:
    """A small BERT as sentence-transformers writes one: pooled, through a matrix, of norm one, with a prompt."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    config = FAMILIES["bert"].tiny_configs()["encoder"]
    config.vocab_size = 30522
    torch.manual_seed(0)
    from transformers import BertModel

    BertModel(config).save_pretrained(folder / "plain")
    minilm: Any = load("minilm").origin
    minilm.tokenizer.save_pretrained(folder / "plain")
    first = Transformer(str(folder / "plain"), max_seq_length=24)
    width = config.hidden_size
    modules = [first, Pooling(width, pooling_mode=mode), Dense(width, 6), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "search: "})
    model.save(str(folder / "whole"))
    return folder / "whole"


@pytest.mark.parametrize("mode", ["cls", "mean"])
def test_sentence_embeddings_stay_what_they_were(mode: str, tmp_path: Path) -> None:
    """Nothing taken out gives the same embeddings; a layer taken out, those of the whole without that layer."""
    from sentence_transformers import SentenceTransformer

    whole, texts = sentence_folder(tmp_path, mode), ["Call me Ishmael.", "The sea is calm and we sail on."]
    net = load(whole)
    whole_sentences: Any = SentenceTransformer(str(whole), device="cpu")
    cut(net, texts, 1.0).save_model(tmp_path / "all")
    cut_made = cut(net, texts, 0.6)
    cut_made.save_model(tmp_path / "small")
    for folder in ("all", "small"):
        again = SentenceTransformer(str(tmp_path / folder), device="cpu")
        if folder == "small":
            (layer,) = cut_made.layers
            passing_by(list(whole_sentences[0].auto_model.encoder.layer), layer - 1)
        expected, got = (model.encode(texts, prompt_name="query") for model in (whole_sentences, again))
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-4, atol=1e-5)
        assert got.shape == (2, 6) and again.prompts["query"] == "search: " and again.max_seq_length == 24
        torch.testing.assert_close(torch.tensor(got).norm(dim=1), torch.ones(2), rtol=1e-5, atol=1e-5)


def test_image_processors_go_along(tmp_path: Path) -> None:
    model = random_model("vit", "image")
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole/preprocessor_config.json").write_text('{"image_processor_type": "ViTImageProcessor"}')
    net: Any = load(tmp_path / "whole")
    cut(net, net.encode(torch.randn(1, *net.origin.embedding.shape)), 0.6).save_model(tmp_path / "small")
    assert (tmp_path / "small/preprocessor_config.json").read_text() == '{"image_processor_type": "ViTImageProcessor"}'


@pytest.mark.parametrize("listed", ['[{"path": "../other"}]', '[{"path": "/etc"}]', '[{"path": 3}]', "[1]", "{"])
def test_a_list_of_modules_that_cannot_be_followed_is_a_sentence(listed: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/secret").write_text("mine")
    random_model("gpt2", "decoder").save_pretrained(tmp_path / "whole")
    (tmp_path / "whole/modules.json").write_text(listed)
    found = cut(load(tmp_path / "whole"), torch.randint(3, 60, (1, 6)), 0.6)
    with raises(FileError, "modules.json"):
        found.save_model(tmp_path / "small")
    assert not list((tmp_path / "small").iterdir())


def test_a_kernel_that_the_config_names_is_not_asked_for(tmp_path: Path) -> None:
    random_model("gpt2", "decoder").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "_attn_implementation": "nobody/cut"}))
    assert original(str(tmp_path)).config._attn_implementation == "eager"
