"""Checkpoints that do not fit their config, or ask for what they must not have: refused, or read without it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from rankscope import forecast
from rankscope.errors import SourceError
from rankscope.forecasts import Design
from rankscope.nets import devices
from rankscope.sources import CheckpointLocation, checkpoint, load
from rankscope.sources.checkpoint import refuse_too_large
from rankscope.sources.weight_files import write_folder
from tests.raising import raises

SIZES: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 20,
                         "intermediate_size": 12, "max_position_embeddings": 16}  # fmt: skip
HEADED = [
    (hf.LlamaForCausalLM, hf.LlamaConfig(**SIZES)),
    (hf.BertForMaskedLM, hf.BertConfig(**SIZES)),
    (hf.GPT2LMHeadModel, hf.GPT2Config(**SIZES, bos_token_id=None, eos_token_id=None)),
    (hf.MixtralForCausalLM, hf.MixtralConfig(**SIZES, num_local_experts=2, num_key_value_heads=1)),
    (hf.ViTForImageClassification, hf.ViTConfig(**SIZES, image_size=8, patch_size=4)),
    (hf.M2M100ForConditionalGeneration, hf.M2M100Config(
        d_model=8, encoder_layers=3, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=12, decoder_ffn_dim=12, vocab_size=20, max_position_embeddings=16)),
]  # fmt: skip
"""Models with a head, whose files put the name of the base model before each weight, and one without."""


def saved(model: Any, folder: Path, pickled: bool = False, **changed: Any) -> Path:
    """A model's folder; with its weights in a .bin file if asked for, and fields of its config changed."""
    model.save_pretrained(folder)
    weights, path = folder / "model.safetensors", folder / "config.json"
    if pickled:
        torch.save(load_file(weights), folder / "pytorch_model.bin")
        weights.unlink()
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return folder


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(("kind", "config"), HEADED, ids=lambda x: getattr(x, "__name__", ""))
def test_files_of_more_layers_than_their_config_are_refused(
    kind: Any, config: Any, pickled: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, name = kind(config), next(n for n in ("encoder_layers", "n_layer", "num_hidden_layers") if n in vars(config))
    assert load(saved(model, tmp_path / "whole", pickled)).arch.layers == 3  # the head itself may be left out
    with raises(SourceError, "weights"):
        load(saved(model, tmp_path / "fewer", pickled, **{name: 2}, layer_types=None))


@pytest.mark.parametrize("pickled", [False, True])
def test_a_kernel_that_the_config_names_is_not_asked_for(pickled: bool, tmp_path: Path) -> None:
    """transformers would fetch it from the hub with the package `kernels`, and fail without."""
    name = f"nobody/kernel-{pickled}"  # a name that failed once is not tried again
    folder = saved(hf.LlamaForCausalLM(HEADED[0][1]), tmp_path, pickled, _attn_implementation=name)
    with pytest.raises(ImportError, match="kernels"):
        hf.AutoModel.from_config(hf.AutoConfig.from_pretrained(folder))
    hf.modeling_flash_attention_utils._loaded_implementation = None
    origin: Any = load(folder).origin
    assert origin.parity.states < 1e-12


def test_a_config_in_memory_that_names_a_kernel_does_not_ask_for_it(tmp_path: Path) -> None:
    config = hf.GPT2Config(**SIZES, bos_token_id=None, eos_token_id=None)
    net = load(hf.GPT2Model(config))
    config._attn_implementation = "nobody/memory"
    assert net.to_hf(config).config._attn_implementation == "eager"
    config._attn_implementation = "nobody/forecast"
    assert forecast(config, design=Design(tokens=8)).verdict
    torch.save(hf.GPT2Model(hf.GPT2Config(**SIZES)).state_dict(), tmp_path / "weights.pt")
    saved(hf.GPT2Model(hf.GPT2Config(**SIZES)), tmp_path / "config", _attn_implementation="nobody/file")
    write_folder(tmp_path / "weights.pt", tmp_path / "config", tmp_path / "written")
    assert load(tmp_path / "written").arch.layers == 3


def test_a_model_is_refused_from_the_first_byte_that_memory_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of each layer what modules take, and four matrices of its width at least in float64, all or one at a time."""
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3, "hidden_size": 64}))
    location = CheckpointLocation(str(tmp_path), "mine", {})
    beside, matrices = devices.LAYER_OVERHEAD_BYTES, 4 * 64 * 64 * 8
    for whole, needed in ((True, 3 * beside + 3 * matrices), (False, 3 * beside + matrices)):
        monkeypatch.setattr(checkpoint, "machine_memory", lambda needed=needed: needed)
        refuse_too_large(location, whole)
        monkeypatch.setattr(checkpoint, "machine_memory", lambda needed=needed: needed - 1)
        with raises(SourceError, "memory"):
            refuse_too_large(location, whole)
