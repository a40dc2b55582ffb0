"""What `measure`, `decompose` and `certify` take: networks, models of transformers, texts, ids and tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BatchEncoding,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)

from rankscope import certify, decompose, load, measure
from rankscope.errors import SourceError, TokensError
from rankscope.nets import Architecture, Transformer
from rankscope.sources import inputs_of, network_on_batch
from rankscope.sources.inputs import network_of
from tests.raising import raises

IDS = torch.tensor([[5, 3, 9, 2], [7, 1, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


@pytest.fixture(scope="module")
def bert() -> Any:
    config = BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    return BertModel(config)


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=16))


@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_a_model_in_memory_is_measured_as_the_network_that_load_makes(
    model: str, request: pytest.FixtureRequest
) -> None:
    original = request.getfixturevalue(model)
    net = load(original)
    X, padding = net.encode(IDS, padding=MASK == 0)
    expected = measure(net, X, padding, ["mu", "entropy"]).table
    assert measure(original, IDS, attention_mask=MASK, metrics=["mu", "entropy"]).table.equals(expected)
    assert measure(net, X, attention_mask=MASK, metrics=["mu", "entropy"]).table.equals(expected)


def test_arrays_lists_and_what_a_tokenizer_gives_are_taken(bert: Any) -> None:
    net, expected = load(bert), measure(bert, IDS, attention_mask=MASK, metrics="mu").table
    encoded = BatchEncoding({"input_ids": IDS, "attention_mask": MASK})
    lists = {name: rows.tolist() for name, rows in encoded.items()}
    for given in (encoded, lists, BatchEncoding({name: rows.numpy() for name, rows in encoded.items()})):
        assert measure(net, given, metrics="mu").table.equals(expected)
    pairs: list[tuple[Any, Any]] = [(IDS.numpy(), MASK.numpy()), (IDS.tolist(), MASK)]
    for ids, mask in pairs:
        assert measure(net, ids, attention_mask=mask, metrics="mu").table.equals(expected)
    X, padding = net.encode(IDS, padding=MASK == 0)
    arrays: list[Any] = [X.numpy(), padding.numpy()]
    assert measure(net, *arrays, metrics="mu").table.equals(expected)


def test_decompose_and_certify_take_a_model_in_memory(bert: Any) -> None:
    net = load(bert)
    X, padding = net.encode(IDS, padding=MASK == 0)
    parts = decompose(bert, IDS, attention_mask=MASK).by_length().table
    assert parts.equals(decompose(net, X, padding).by_length().table)
    chosen = ["exact-factors", "dobrushin"]
    proved = certify(bert, IDS, theorems=chosen, attention_mask=MASK).table
    assert proved.equals(certify(net, X, padding, chosen).table)


def test_the_original_is_not_changed(gpt2: Any) -> None:
    before = {name: weight.clone() for name, weight in gpt2.state_dict().items()}
    network_of("measure", gpt2)
    assert gpt2.training and all(torch.equal(before[name], now) for name, now in gpt2.state_dict().items())


def test_what_is_neither_is_a_sentence(bert: Any) -> None:
    net, X = Transformer.random(Architecture(layers=1, width=4, heads=1)), torch.randn(2, 4, 4)
    with raises(SourceError, subject="net"):
        network_of("measure", "gpt2")  # type: ignore[arg-type]
    with raises(TokensError, subject="X"):
        inputs_of("measure", net, IDS)
    for other in ([[5, 3], [7]], object(), {"ids": [1]}, IDS[0]):
        with raises(TokensError, subject="X"):
            inputs_of("measure", load(bert), other)  # type: ignore[arg-type]
    with raises(TokensError, subject="attention_mask"):
        measure(net, X, MASK == 0, attention_mask=MASK)
    with raises(TokensError, subject="attention_mask"):
        measure(net, X, attention_mask=MASK[:, :3])
    with raises(TokensError, subject="padding"):
        decompose(net, "a whale", attention_mask=MASK)


SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24, "vocab_size": 30, "max_position_embeddings": 12}


def batch() -> dict[str, Tensor]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": torch.arange(16).view(2, 8), "attention_mask": mask}


def models() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    torch.manual_seed(0)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]] * 2)
    vit = ViTConfig(**{**SIZES, "image_size": 8, "patch_size": 4})
    return {
        "two segments": (BertModel(BertConfig(**SIZES)), {**batch(), "token_type_ids": segments}),
        "labels": (LlamaForCausalLM(LlamaConfig(**SIZES)), {**batch(), "labels": batch()["input_ids"]}),
        "images": (ViTModel(ViTConfig(**vit.to_dict())), {"pixel_values": torch.randn(2, 3, 8, 8)}),
    }


@pytest.mark.parametrize("kind", ["two segments", "labels", "images"])
def test_it_computes_what_the_model_does_on_the_batch(kind: str) -> None:
    model, given = models()[kind]
    before = [each.clone() for each in model.parameters()]
    net, X, padding = network_on_batch(model.train(), given)
    assert all(map(torch.equal, before, model.parameters())) and model.training
    with torch.no_grad():
        theirs = model.eval()(**given, output_hidden_states=True).hidden_states
    assert padding is not None
    mine, real = net.run(X, padding), ~padding
    assert int(padding.sum()) == (0 if kind == "images" else 3)
    for layer in (0, 1):  # the last may have gone through a norm already
        assert torch.allclose(mine.states[layer][real].float(), theirs[layer][real], atol=1e-5)


def test_a_mask_of_another_shape_is_one_sentence() -> None:
    model, given = models()["labels"]
    square = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    with raises(TokensError, "attention_mask"):
        network_on_batch(model, {**given, "attention_mask": square})
