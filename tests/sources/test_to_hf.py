"""Networks written back as models of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope.errors import ArchitectureError, SourceError
from rankscope.nets import Architecture, Transformer
from rankscope.sources import FAMILIES, load
from tests.raising import raises
from tests.sources.models import FIRST_QUICK, model_of

FOLDED = ("dinov2", "dinov2_with_registers", "dinov3", "wav2vec2", "deberta_v2", "deit", "ast")
"""Families that fold one parameter into another: what came of them cannot be taken apart."""
PLACED = [case for case in FIRST_QUICK if case.values[0] not in FOLDED and not FAMILIES[str(case.values[0])].side]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "label"), PLACED)
def test_every_family_goes_back(name: str, label: str) -> None:
    """The model that comes out is loaded, and so held against itself, as the same network."""
    net: Any = load(model_of(name, label))
    again: Any = load(net.to_hf())
    assert again.arch == net.arch and again.origin.parity.states < 1e-13
    assert again.origin.fingerprint() == net.origin.fingerprint()  # of the embedding
    for key, tensor in net.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], tensor, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize(("name", "label"), [("bert", "encoder"), ("gpt2", "decoder"), ("llama", "mistral")])
def test_a_changed_network_is_a_checkpoint_that_transformers_loads(name: str, label: str, tmp_path: Path) -> None:
    """Fewer layers in another order, and weights that were changed."""
    from transformers import AutoModel

    net = load(model_of(name, label)).variant(layers=[3, 1])
    tensors = {key: tensor * 1.01 for key, tensor in net.state_dict().items()}
    changed = Transformer(net.arch, Transformer.from_weights(net.arch, tensors).weights, net.origin)
    changed.to_hf().save_pretrained(tmp_path)
    model: Any = AutoModel.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager").eval()
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(input_ids=ids).last_hidden_state
    mine = changed.run(changed.encode(ids).X).output
    within = 1e-12 if name != "llama" else 3e-6  # float32 parts
    assert float((mine - theirs).abs().max()) <= within * float(theirs.abs().max())
    assert load(tmp_path).fingerprint == changed.fingerprint


def test_a_saved_network_goes_back_too(tmp_path: Path) -> None:
    net = load(model_of("gpt2", "decoder")).to(torch.float32)
    net.save(tmp_path)
    back = load(tmp_path).to_hf()
    assert back.dtype == torch.float32 and load(back, torch.float32).fingerprint == net.fingerprint


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"skip": 0.5}, "attention_skip"),
        ({"mlp": False}, "mlp"),
        ({"norm": False}, "norm"),
        ({"mask": "causal"}, "mask"),
        ({"heads": [0]}, "kept_heads"),
        ({"activation": "relu"}, "activation"),
    ],
)
def test_variants_that_a_family_has_no_config_for_are_refused(change: dict[str, Any], field: str) -> None:
    with raises(SourceError, field):
        load(model_of("bert", "encoder")).variant(**change).to_hf()


def test_another_config_may_express_a_variant() -> None:
    model = model_of("bert", "encoder")
    net: Any = load(model)
    config = FAMILIES["bert"].tiny_configs()["decoder"]
    config.hidden_act = "relu"
    variant = net.variant(mask="causal", activation="relu")
    assert load(variant.to_hf(config)).fingerprint == variant.fingerprint
    with raises(SourceError, "config"):
        net.to_hf(FAMILIES["gpt2"].tiny_configs()["decoder"])
    config.vocab_size = 61
    with raises(SourceError, "config"):
        variant.to_hf(config)


def test_what_cannot_go_back_is_a_sentence() -> None:
    with raises(ArchitectureError, "origin"):
        Transformer.random(Architecture(layers=1, width=8, heads=2)).to_hf()
    with raises(SourceError, "weights"):
        load(model_of("dinov2", "plain")).to_hf()
