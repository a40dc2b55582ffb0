"""What a watch says it did, in sentences and as checks."""

import pytest
import torch

from rankscope.live.notes import dtype_name
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
