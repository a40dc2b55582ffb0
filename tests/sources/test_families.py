"""Every family against the original: states, output, attention and head outputs, padded and not."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DebertaV2Config, DebertaV2Model

from rankscope.errors import ParityError, SourceError, TokensError
from rankscope.nets import Transformer, shapes
from rankscope.profiles import measure
from rankscope.sources import FAMILIES, lifted, load
from rankscope.sources.families.llama import Llama
from tests.raising import raises
from tests.sources.models import CASES, FIRST_QUICK, model_of
from tests.sources.originals import agrees

OUTPUT = {
    "bert": "attention.output.dense",
    "roberta": "attention.output.dense",
    "distilbert": "attention.out_lin",
    "albert": "attention.dense",
    "gpt2": "attn.c_proj",
    "opt": "self_attn.out_proj",
    "gpt_neox": "attention.dense",
    "llama": "self_attn.o_proj",
    "mixtral": "self_attn.o_proj",
    "qwen3_next": "self_attn.o_proj",
    "deepseek": "self_attn.o_proj",
    "phi3": "self_attn.o_proj",
    "gemma2": "self_attn.o_proj",
    "gemma3": "self_attn.o_proj",
    "t5": "layer.0.SelfAttention.o",
    "vit": "attention.o_proj",
    "dinov2": "attention.o_proj",
    "modernbert": "attn.Wo",
    "bart": "self_attn.out_proj",
    "whisper": "self_attn.out_proj",
    "marian": "self_attn.out_proj",
    "electra": "attention.output.dense",
    "esm": "attention.output.dense",
    "mpnet": "attention.attn.o",
    "deberta_v2": "attention.output.dense",
    "phi": "self_attn.dense",
    "mt5": "layer.0.SelfAttention.o",
    "wav2vec2": "attention.out_proj",
    "dinov3": "attention.o_proj",
    "nomic_bert": "self_attn.o_proj",
    "deberta": "attention.output.dense",
    "bloom": "self_attention.dense",
    "deit": "attention.o_proj",
    "ast": "attention.o_proj",
    "dinov2_with_registers": "attention.o_proj",
    "smollm3": "self_attn.o_proj",
    "gpt_neo": "attn.attention.out_proj",
    "gptj": "attn.out_proj",
    "falcon": "self_attention.dense",
    **dict.fromkeys(("mbart", "pegasus", "m2m_100"), "self_attn.out_proj"),
    **dict.fromkeys(("gemma", "olmo2", "qwen2_vl", "gpt_oss"), "self_attn.o_proj"),
    **dict.fromkeys(("clip_text", "clip_vision", "siglip_text", "siglip_vision"), "self_attn.out_proj"),
}
"""Where each original projects its heads; XLNet does it without a module."""
LENGTHS = (15, 11, 4)


@functools.cache
def loaded(name: str, label: str) -> tuple[Any, Transformer]:
    model = model_of(name, label)
    return model, load(model)


def inputs_of(name: str, model: Any, net: Any) -> tuple[dict[str, Tensor], Tensor]:
    """What the original takes, and its padding: other numbers and lengths than the loader's own probe."""
    generator = torch.Generator().manual_seed(11)
    if FAMILIES[name].continuous_inputs:
        embedding = net.origin.embedding
        seen = torch.randn(3, *embedding.shape, generator=generator, dtype=torch.float64)
        return {FAMILIES[name].input_name: seen}, embedding.embed(seen).padding
    ids = torch.randint(3, 60, (3, max(LENGTHS)), generator=generator)
    padding = torch.arange(max(LENGTHS))[None] >= torch.tensor(LENGTHS)[:, None]
    ids = ids.masked_fill(padding, getattr(model.config, "pad_token_id", None) or 0)
    return {"input_ids": ids, "attention_mask": (~padding).long()}, padding


def encoded(name: str, net: Transformer, inputs: dict[str, Tensor], padding: Tensor) -> Any:
    if FAMILIES[name].continuous_inputs:
        return net.encode(inputs[FAMILIES[name].input_name])
    return net.encode(inputs["input_ids"], padding=padding)


def case(name: str, label: str) -> tuple[Any, Transformer, dict[str, Tensor], Tensor]:
    """(the original's own stack, its network, what it takes, padding)."""
    model, net = loaded(name, label)
    core = FAMILIES[name].core(model)
    return core, net, *inputs_of(name, core, net)


def close(mine: Tensor, theirs: Tensor, real: Tensor, within: float = 1e-12) -> None:
    assert float((mine - theirs)[real].abs().max()) <= within * float(theirs[real].abs().max())


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "label"), CASES)
def test_states_attention_and_gradients_are_the_originals(name: str, label: str) -> None:
    model, net, inputs, padding = case(name, label)
    found = agrees(FAMILIES[name], model, net, inputs, encoded(name, net, inputs, padding).X, padding)
    assert found.states <= 1e-12 and found.attention <= 1e-13 and found.gradient <= 1e-11


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "label"), CASES)
@torch.no_grad()
def test_without_lifting_only_float32_parts_differ(name: str, label: str) -> None:
    model, net, inputs, padding = case(name, label)
    # One sample without padding: see `parity.py` on windows and padding in float64.
    inputs, padding = {key: value[:1] for key, value in inputs.items()}, padding[:1]
    theirs = model(**inputs).last_hidden_state
    run = net.run(*encoded(name, net, inputs, padding))
    if FAMILIES[name].output(FAMILIES[name].core(model)):
        parity: Any = net.origin
        close(run.output, theirs, ~padding, 1e-12 if parity.parity.float32_parts is None else 3e-6)


@pytest.mark.parametrize(("name", "label"), [case for case in CASES if case[0] in OUTPUT])
@torch.no_grad()
def test_heads_say_what_the_originals_say(name: str, label: str) -> None:
    """What enters the original's output projection is what our heads mixed."""
    model, net, inputs, padding = case(name, label)
    family = FAMILIES[name]
    said: list[Tensor] = []
    blocks = family.blocks(family.core(model))
    handles = [
        block.get_submodule(OUTPUT[name]).register_forward_pre_hook(lambda _, args: said.append(args[0]))
        for block in dict.fromkeys(blocks)
    ]
    with lifted():
        model(**inputs)
    for handle in handles:
        handle.remove()
    steps = [step for step in net.steps(*encoded(name, net, inputs, padding)) if step.heads is not None]
    for step, theirs in zip(steps, said, strict=True):
        assert step.heads is not None
        close(step.heads.flatten(2), theirs.reshape(step.heads.flatten(2).shape), ~padding)


@pytest.mark.parametrize(("name", "label"), CASES)
@torch.no_grad()
def test_padded_and_unpadded_agree(name: str, label: str) -> None:
    _, net, inputs, padding = case(name, label)
    together = net.run(*encoded(name, net, inputs, padding))
    for sample in range(3):
        real = ~padding[sample]
        alone = {key: value[sample : sample + 1] for key, value in inputs.items()}
        if not FAMILIES[name].continuous_inputs:
            alone = {"input_ids": alone["input_ids"][:, real]}
        run = net.run(*encoded(name, net, alone, padding[sample : sample + 1, real]))
        for mine, state in zip(run.states, together.states, strict=True):
            close(state[sample : sample + 1, real], mine, torch.ones(1, int(real.sum()), dtype=torch.bool))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "label"), FIRST_QUICK)
def test_deviation_and_float64_agree_on_every_family(name: str, label: str) -> None:
    """The rules of deviation arithmetic cover what loaded networks are made of."""
    _, net, inputs, hidden = case(name, label)
    X, padding = encoded(name, net, inputs, hidden)
    curves = [measure(net, X, padding, "mu", kind).curve("mu") for kind in ("deviation", "float64")]
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-9, atol=0)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "label"), FIRST_QUICK)
def test_the_users_model_is_left_as_it_is(name: str, label: str) -> None:
    model = model_of(name, label).float()
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    implementation, flags = model.config._attn_implementation, [p.requires_grad for p in model.parameters()]
    net = load(model)
    assert net.dtype == torch.float64 and not any(part.requires_grad for part in net.state_dict().values())
    assert model.config._attn_implementation == implementation
    assert [p.requires_grad for p in model.parameters()] == flags
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) and value.dtype == before[key].dtype


def test_shared_layers_stay_shared() -> None:
    _, net = loaded("albert", "shared")
    assert net.arch.shared and net.weights.layers[0] is net.weights.layers[3]
    _, groups = loaded("albert", "groups")
    layers = groups.weights.layers
    assert groups.arch.layers == 8 and not groups.arch.shared
    assert layers[0].mlp is not None and layers[2].mlp is not None and layers[4].mlp is not None
    assert layers[0].mlp.up.weight is layers[2].mlp.up.weight is not layers[4].mlp.up.weight
    assert len(shapes(groups.arch)) == len(groups.state_dict())


def test_a_network_that_is_not_the_original_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that confuses the two halves of a gated MLP gives other states: no such network gets out."""

    class Confused(Llama):
        def layer(self, block: Any, arch: Any) -> Any:
            parts = super().layer(block, arch)
            swapped = {"mlp.up.weight": "mlp.gate.weight", "mlp.gate.weight": "mlp.up.weight"}
            return parts | {name: parts[other] for name, other in swapped.items()}

    monkeypatch.setitem(FAMILIES.shipped, "llama", Confused())
    with raises(ParityError, "states"):
        load(model_of("llama", "llama"))


def test_configs_outside_the_canonical_network_are_refused() -> None:
    from transformers import Gemma3TextModel, LlamaConfig, LlamaModel

    small = FAMILIES["gemma3"].tiny_configs()["text"]
    small.attn_logit_softcapping = 50.0
    with raises(SourceError, "attn_logit_softcapping"):
        load(Gemma3TextModel(small))
    small.attn_logit_softcapping, small.use_bidirectional_attention = None, True
    with raises(SourceError, "use_bidirectional_attention"):
        load(Gemma3TextModel(small))
    fields: Any = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
                   "intermediate_size": 8}  # fmt: skip
    with raises(SourceError, "activation"):
        load(LlamaModel(LlamaConfig(**fields, hidden_act="relu2")))


@pytest.mark.parametrize(("name", "label"), [("llama", "dynamic positions"), ("phi3", "longrope")])
@torch.no_grad()
def test_angles_that_follow_the_length_are_right_up_to_where_they_change(name: str, label: str) -> None:
    """At the last length the network is the original, one token beyond the original is another."""
    model, net = loaded(name, label)
    reach = net.arch.rotary_reach
    assert reach == 32
    for n in (reach, reach + 1):
        ids = torch.randint(3, 60, (1, n), generator=torch.Generator().manual_seed(n))
        with lifted():
            theirs = model(input_ids=ids).last_hidden_state
        unbound = Transformer(net.arch.replace(rotary_reach=0), net.weights)
        mine = unbound.run(net.encode(ids).X).output
        assert (float((mine - theirs).abs().max()) < 1e-12) == (n == reach)
    with raises(TokensError, "rotary_reach"):
        net.run(net.encode(ids).X)


def test_models_with_heads_for_tasks_are_their_stack() -> None:
    """A language model, a classifier or a sequence-to-sequence model is loaded as what carries it."""
    from transformers import BertForMaskedLM, GPT2LMHeadModel, T5ForConditionalGeneration

    kinds: dict[str, Any] = {"bert": BertForMaskedLM, "gpt2": GPT2LMHeadModel, "t5": T5ForConditionalGeneration}
    for name, kind in kinds.items():
        family = FAMILIES[name]
        whole = kind(next(iter(family.tiny_configs().values()))).eval()
        keys = [load(each).weights.layers[1].attention.key.weight for each in (whole, family.core(whole))]
        assert torch.equal(*keys)


def test_lifting_leaves_torch_as_it_was() -> None:
    usual = torch.get_default_dtype()
    with lifted():
        assert torch.ones(2).float().dtype == torch.float64
        assert torch.zeros(2, dtype=torch.float32).softmax(0, dtype=torch.float32).dtype == torch.float64
    with pytest.raises(ZeroDivisionError), lifted():
        raise ZeroDivisionError
    assert torch.get_default_dtype() == usual and torch.ones(2).float().dtype == torch.float32


@pytest.mark.parametrize(("buckets", "reach", "expected"), [(0, 6, (6, 1)), (-1, -1, (16, 1)), (4, 9, (4, 9))])
def test_deberta_without_buckets_has_one_for_each_distance(buckets: int, reach: int, expected: tuple[int, int]) -> None:
    """What transformers computes of such a config, `load` compares with the network."""
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": 16, "relative_attention": True}
    sizes |= {"position_buckets": buckets, "max_relative_positions": reach, "pos_att_type": ["c2p", "p2c"]}
    torch.manual_seed(0)
    arch = load(DebertaV2Model(DebertaV2Config(**sizes))).arch
    assert (arch.bias_buckets, arch.bias_reach) == expected
