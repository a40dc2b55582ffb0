"""What a watch says it did, in sentences and as checks."""

from typing import Any

import pytest
import torch
import transformers as hf

import rankscope
from rankscope.live import Watch
from rankscope.live.modules import dtype_name
from tests.live.families import FAMILIES, checks, made, seen


def test_dropout_takes_rows_off_one_and_is_named_as_the_reason() -> None:
    family = FAMILIES["bert"]
    w = seen(family.model("eager").train(), "dobrushin", **family.batch())
    assert checks(w)["rows_sum_to_one"] is False and checks(w)["dropout"] == 0.1
    assert any("as dropout makes them" in note for note in w.notes)


@pytest.mark.slow
def test_the_model_is_described() -> None:
    model, batch = made("bert")
    (network,) = seen(model, "mu", **batch).profile().manifest.networks
    assert network.architecture is None and network.fingerprint is None
    assert network.model == {
        "class": "transformers.models.bert.modeling_bert.BertModel",
        "model_type": "bert",
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtypes": ["float64"],
        "devices": ["cpu"],
    }
    assert network.checks["rows_sum_to_one"] is None


def test_a_dtype_is_named_as_torch_names_it() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"


def tokens_beside(w: Watch) -> list[str]:
    return [note for note in w.notes if "stand for no part of its input" in note]


def test_tokens_beside_those_of_the_input_are_said() -> None:
    """Class and register tokens, by the names of their parameters, in the stack that is nearest to them."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 8}
    sizes |= {"patch_size": 4, "intermediate_size": 16}
    images = torch.randn(2, 3, 8, 8)
    model = hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**sizes, num_register_tokens=3)).eval()
    (note,) = tokens_beside(seen(model, "mu", images))
    assert "(1 of cls_token, 3 of register_tokens)" in note
    text = {key: value for key, value in sizes.items() if key not in ("image_size", "patch_size")}
    both = hf.CLIPConfig(text_config=text | {"vocab_size": 9}, vision_config=sizes)
    ids = torch.randint(0, 9, (2, 5))
    with torch.no_grad(), rankscope.watch(clip := hf.CLIPModel(both).eval(), "mu") as w:
        clip(input_ids=ids, pixel_values=images)
    assert len(tokens_beside(w)) == 1 and tokens_beside(w)[0].startswith("vision_model: ")
    bert = hf.BertModel(hf.BertConfig(**text, vocab_size=9)).eval()
    assert not tokens_beside(seen(bert, "mu", ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_checks_name_the_arithmetic_that_the_model_ran_in(dtype: torch.dtype) -> None:
    family = FAMILIES["bert"]
    w = seen(family.model("eager").to(dtype).eval(), "mu", **family.batch())
    assert checks(w)["arithmetic_asked"] == dtype_name(dtype)
