"""The loss of a language model through its own head, against the loss that transformers computes."""

import pytest
import torch

from rankscope.depths.criteria import next_token_loss
from rankscope.sources import load
from tests.depths.test_cut import headed


@pytest.mark.parametrize(
    ("family", "label", "kind"), [("gpt2", "decoder", "GPT2LMHeadModel"), ("opt", None, "OPTForCausalLM")]
)
def test_it_is_the_loss_that_transformers_computes(family: str, label: str | None, kind: str) -> None:
    model = headed(family, label, kind)
    net = load(model)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    padding = torch.arange(9)[None] >= torch.tensor([9, 6])[:, None]
    loss = next_token_loss(model, ids, padding)
    assert loss is not None
    X, padded = net.encode(ids, padding=padding)
    labels = ids.masked_fill(padding, -100)
    with torch.no_grad():
        theirs = model(input_ids=ids, attention_mask=(~padding).long(), labels=labels).loss
    assert float(loss(net.run(X, padded).output)) == pytest.approx(float(theirs), rel=1e-5)


def test_a_model_whose_logits_are_made_otherwise_has_none() -> None:
    ids = torch.randint(3, 60, (1, 9))
    assert next_token_loss(headed("bert", "encoder", "BertForMaskedLM"), ids) is None
    assert next_token_loss(headed("gpt2", "decoder", "GPT2Model"), ids) is None
    capped = headed("gpt2", "decoder", "GPT2LMHeadModel")
    capped.lm_head.register_forward_hook(lambda module, args, output: output)  # a hook changes nothing
    assert next_token_loss(capped, ids) is not None
    forward = capped.forward

    def halved(*args: object, **kwargs: object) -> object:
        told = forward(*args, **kwargs)
        told.logits = told.logits / 2
        return told

    capped.forward = halved
    assert next_token_loss(capped, ids) is None
