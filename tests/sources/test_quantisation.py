"""Quantised weights: dequantised on a copy, or refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rankscope.errors import SourceError
from rankscope.sources import load
from tests.raising import raises
from tests.sources.models import model_of

QUERY = "layers.0.self_attn.q_proj.weight"


@pytest.fixture
def eight_bits(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A small Llama on disk with matrices in float8 and a scale each, as DeepSeek's are."""
    model_of("llama", "llama").float().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if "proj" in name]:
        scale = weights[name].abs().max() / 448
        weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configure(tmp_path, quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic")
    return tmp_path, weights


def configure(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))


def test_eight_bit_floats_are_dequantised_and_it_is_said(eight_bits: Any) -> None:
    pytest.importorskip("accelerate")
    folder, weights = eight_bits
    net: Any = load(folder)
    mine = net.weights.layers[0].attention.query.weight.flatten(1).T
    assert torch.equal(mine, (weights[QUERY].float() * weights[f"{QUERY}_scale_inv"]).double())
    assert "quantised weights (fp8) dequantised" in repr(net.origin)


def test_scales_that_nothing_reads_are_not_left_out_in_silence(eight_bits: Any) -> None:
    """transformers passes over a method that it does not know, and takes the bare float8 numbers."""
    folder, _ = eight_bits
    configure(folder, quant_method="of my own")
    with raises(SourceError, "quantization_config"):
        load(folder)


def test_a_package_that_is_not_here(eight_bits: Any) -> None:
    folder, _ = eight_bits
    configure(folder, quant_method="awq", bits=4)
    with raises(SourceError, "package"):
        load(folder)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_layers_of_torch_ao_are_dequantised_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # The default engine may be one for another processor.
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    model = model_of("llama", "qwen 2").float()
    small: Any = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    net: Any = load(small)
    mine, stored = net.weights.layers[1].attention.key, small.layers[1].self_attn.k_proj
    assert torch.equal(mine.weight.flatten(1).T, stored.weight().dequantize().double())
    assert torch.equal(mine.bias.flatten(), stored.bias().double())
    assert "21 quantised layers dequantised, their activations not rounded" in repr(net.origin)
    assert not torch.equal(mine.weight, load(model).weights.layers[1].attention.key.weight)


def test_weights_in_a_form_of_their_own_are_refused() -> None:
    model = model_of("llama", "llama")
    place = model.layers[0].mlp.up_proj
    place.weight = torch.nn.Parameter(place.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with raises(SourceError, "quantised weights"):
        load(model)
