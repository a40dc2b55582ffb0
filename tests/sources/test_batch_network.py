"""A model on a batch of its own: the tokens that it makes, and the network that it is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

from rankscope.errors import TokensError
from rankscope.sources.batch_network import network_on_batch
from tests.raising import raises

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
    mine, real = net.run(X, padding), ~padding
    assert int(padding.sum()) == (0 if kind == "images" else 3)
    for layer in (0, 1):  # the last may have gone through a norm already
        assert torch.allclose(mine.states[layer][real].float(), theirs[layer][real], atol=1e-5)


def test_a_mask_of_another_shape_is_one_sentence() -> None:
    model, given = models()["labels"]
    square = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    with raises(TokensError, "attention_mask"):
        network_on_batch(model, {**given, "attention_mask": square})
