"""Mixtures of experts against their originals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope.errors import PathError, SourceError, TheoremError
from rankscope.paths import decompose
from rankscope.profiles import measure
from rankscope.sources import FAMILIES, lifted, load
from rankscope.theory import certify
from tests.raising import raises
from tests.sources.models import model_of
from tests.sources.originals import WITHIN, agrees, padded

CASES = [(name, label) for name in ("mixtral", "qwen3_next") for label in FAMILIES[name].tiny_configs()]
CUT = [("gpt_oss", "text")]
LATENT = [("deepseek", label) for label in FAMILIES["deepseek"].tiny_configs()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "label"), CASES + LATENT + CUT)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_states_attention_and_gradients_are_the_originals(name: str, label: str, seed: int) -> None:
    model: Any = model_of(name, label, seed)
    net = load(model)
    for length, side in ((1, "right"), (5, "left"), (9, "right"), (17, "left")):
        given, padding = padded(length, side, seed)
        X = net.encode(given["input_ids"], padding=padding).X
        assert max(agrees(FAMILIES[name], model, net, given, X, padding)) <= WITHIN


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "label"), [*CASES, LATENT[0], *LATENT[-3:], *CUT])
@torch.no_grad()
def test_routing_is_the_originals(name: str, label: str) -> None:
    """Loads are counted from what the original's routers chose."""
    model = model_of(name, label)
    net, (given, padding) = load(model), padded(9, "right", 3)
    ids = given["input_ids"]
    chosen: list[torch.Tensor] = []
    mixtures = [block.mlp for block in model.layers if hasattr(block.mlp, "experts")]
    gates = [getattr(mixture, "gate", None) or mixture.router for mixture in mixtures]
    handles = [gate.register_forward_hook(lambda _, args, out: chosen.append(out[2])) for gate in gates]
    with lifted():
        model(**given)
    for handle in handles:
        handle.remove()
    found = measure(net, *net.encode(ids, padding=padding), "expert_load", "float64").curve("expert_load")
    layers = [layer + 1 for layer in range(net.arch.layers) if net.arch.mixes(layer)]
    assert len(layers) == len(chosen) > 0
    for layer, index in zip(layers, chosen, strict=True):
        for sample, real in enumerate(~padding):
            picked = index.view(*ids.shape, -1)[sample, real].flatten().bincount()
            assert float(found[sample, layer]) == pytest.approx(int(picked.max()) / int(real.sum()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "label"), CASES)
def test_paths_add_up_with_routing_frozen(name: str, label: str) -> None:
    net = load(model_of(name, label))
    d = decompose(net, *net.encode(padded(6, "left", 2)[0]["input_ids"]))
    assert d.closure < 1e-12 and d.by_length().closure < 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "label"), [("mixtral", "mixtral"), ("mixtral", "qwen 2"), CASES[-1], *LATENT[:2], LATENT[-1], *CUT]
)
def test_a_checkpoint_on_disk_is_the_model_in_memory(name: str, label: str, tmp_path: Path) -> None:
    model: Any = model_of(name, label)
    model.save_pretrained(tmp_path)
    assert load(tmp_path).fingerprint == load(model).fingerprint


def test_a_mixture_without_experts_is_dense() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeModel

    fields: dict[str, Any] = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "head_dim": 4,
                              "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    for without in ({"num_experts": 0}, {"mlp_only_layers": [0, 1]}, {"decoder_sparse_step": 3}):
        assert load(Qwen3MoeModel(Qwen3MoeConfig(**fields, **without))).arch.mlp == "gated"


def test_layers_without_an_attention_matrix_are_refused() -> None:
    config = FAMILIES["qwen3_next"].tiny_configs()["attention alone"]
    config.layer_types = ["linear_attention", "full_attention", "full_attention"]
    with raises(SourceError, "layer_types"):
        FAMILIES["qwen3_next"].architecture(config)


def test_experts_with_biases_or_chosen_in_a_way_of_ones_own_are_refused() -> None:
    from transformers import DeepseekV2Model

    for field, value in (("mlp_bias", True), ("topk_method", "noaux_tc")):
        config = FAMILIES["deepseek"].tiny_configs()["v2"]
        setattr(config, field, value)
        with raises(SourceError, "experts"):
            load(DeepseekV2Model(config))


def test_what_needs_values_linear_in_tokens_is_refused_of_latents() -> None:
    net = load(model_of("deepseek", "v3"))
    X = net.encode(torch.tensor([[3, 4, 5]])).X
    with raises(PathError, "key_latent"):
        decompose(net, X)
    with raises(TheoremError, "architecture"):
        certify(net, X)
