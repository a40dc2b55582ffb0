"""Adapters: merged on a copy, held against the model that has them beside its matrices."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope.errors import SourceError
from rankscope.sources import FAMILIES, lifted, load, network_on_batch
from tests.raising import raises
from tests.sources.models import model_of

peft = pytest.importorskip("peft")


def adapted(model: Any, seed: int = 0, **settings: Any) -> Any:
    """A model under LoRA whose matrices are random instead of zero."""
    found = peft.get_peft_model(model, peft.LoraConfig(**{"r": 3, "lora_alpha": 5, **settings}))
    awaken(found, seed)
    return found.eval()


def awaken(model: Any, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight += 0.3 * torch.randn(weight.shape, generator=generator).to(weight)


IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def difference(net: Any, model: Any) -> float:
    """Between the network's output and that of the model as the user has it, in float64."""
    with lifted():
        theirs = model.double()(input_ids=IDS, output_hidden_states=True).hidden_states[-1]
    return float((net.run(net.encode(IDS).X).output - theirs).abs().max())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "label", "settings"),
    [
        ("llama", "qwen 2", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
        ("llama", "llama", {"target_modules": "all-linear", "use_dora": True}),
        ("bert", "encoder", {"target_modules": ["query", "word_embeddings"], "modules_to_save": ["LayerNorm"]}),
        ("gpt2", "decoder", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ],
)
def test_the_network_is_the_adapted_model(name: str, label: str, settings: Any) -> None:
    model = adapted(model_of(name, label), **settings)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    net: Any = load(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    bare = load(model_of(name, label))
    with model.disable_adapter():
        assert load(model).fingerprint == bare.fingerprint != net.fingerprint
    assert difference(net, model) < 1e-12
    assert "adapters merged: default, into" in repr(net.origin)
    assert net.origin.described()["notes"] == [str(each) for each in net.origin.details["notes"]]


def test_adapters_that_transformers_put_into_a_model_itself() -> None:
    model = model_of("llama", "llama")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["k_proj"]), adapter_name="mine")
    awaken(model)
    net = load(model)
    assert difference(net, model) < 1e-12 and "adapters merged: mine, into 3 parts" in repr(net.origin)


def test_a_language_models_adapter_is_read_from_its_folder_and_its_base(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(FAMILIES["llama"].tiny_configs()["llama"])
    model.save_pretrained(tmp_path / "base")
    base: Any = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    small = adapted(base, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    small.save_pretrained(tmp_path / "adapter")
    net: Any = load(tmp_path / "adapter")
    assert net.fingerprint == load(small).fingerprint and net.origin.weights == "trained"
    assert difference(net, small) < 1e-12
    path = tmp_path / "adapter" / "adapter_config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"target_modules": ["v_proj", "up_proj"]}))
    with raises(SourceError, "source"):
        load(tmp_path / "adapter")
    path.write_text(json.dumps(fields | {"base_model_name_or_path": None}))
    with raises(SourceError, "base_model_name_or_path"):
        load(tmp_path / "adapter")
    path.write_text(json.dumps(fields | {"base_model_name_or_path": str(tmp_path / "gone")}))
    with raises(SourceError, "source"):
        load(tmp_path / "adapter", local_files_only=True)


def test_adapters_that_add_tokens_are_refused() -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(FAMILIES["llama"].tiny_configs()["llama"])
    made = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with raises(SourceError, "adapter"):
        load(made)


def test_a_running_model_with_adapters() -> None:
    model = adapted(model_of("llama", "llama"), target_modules=["v_proj"])
    net = network_on_batch(model, {"input_ids": IDS}).net
    assert net.fingerprint == load(model).fingerprint
