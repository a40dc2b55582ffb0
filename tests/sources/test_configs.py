"""Every switch of every config: the network is the original's, or the load is refused in a sentence.

Generated from the fields of the config classes, so that a new version of transformers shows what is new.
"""

import copy
from typing import Any

import pytest
import torch
import transformers

from rankscope.errors import RankscopeError
from rankscope.sources import FAMILIES, Family, lifted, load
from rankscope.sources.checkpoint import quiet
from rankscope.sources.families import MODULES
from rankscope.sources.loading import built
from rankscope.sources.parity import ParityInputs, relative
from tests.sources import page
from tests.sources.configs import INERT, RECURRENT, REFUSED, VALUES, altered, fields, runs

TINY = {(name, label): config for name, family in FAMILIES.items() for label, config in family.tiny_configs().items()}
CONFIGS = list(TINY)
FIRST = list({(type(TINY[case]), FAMILIES[case[0]].side): case for case in reversed(CONFIGS)}.values())[::-1]
"""One config of every class, on each side of an encoder-decoder."""


def loaded(family: Family, model: Any) -> Any:
    """The network that the family makes of a model."""
    return load(model, family=family.name if family.side == "decoder" else None)


@pytest.mark.parametrize(("name", "label"), FIRST)
def test_every_field_is_known(name: str, label: str) -> None:
    known = {*VALUES, *(field for group in INERT.values() for field in group)}
    new = sorted(fields(TINY[name, label]).keys() - known)
    assert not new, f"fields of {label} that nobody has looked at: {new}"


def outcome(name: str, label: str, field: str, value: Any) -> str:
    """mapped, refused, or impossible: transformers itself cannot build or run it."""
    family = FAMILIES[name]
    with quiet():
        try:
            model = built(family, altered(TINY[name, label], field, value), seed=7)
        except Exception:
            return "impossible"
        if model._can_set_experts_implementation():  # the usual one has no float64
            model.set_experts_implementation("eager")
        try:
            net: Any = loaded(family, model)
        except RankscopeError as error:
            assert "\n" not in str(error) and len(str(error)) < 700, error
            return "refused" if runs(family, model) else "impossible"
        model.set_attn_implementation("eager")
        compare(net, family, family.prepare_for_float64(family.core(model)), 31)
    return "mapped"


@torch.no_grad()
def compare(net: Any, family: Any, core: Any, n: int) -> None:
    """States and attention on inputs of another length than the load's own probe, padded on either side."""
    n = min(n, net.arch.rotary_reach or n)
    probe = ParityInputs.long(family, core, net.origin.embedding, n)
    X, padding = net.origin.embedding.embed(probe.inputs, probe.padding)
    given = probe.arguments(family)
    with lifted():
        theirs = core(**given, output_attentions=True, return_dict=True)
    mine, real = probe.attach_memory(net).run(X, padding, attention=True), ~padding
    if family.output(core):
        assert relative(mine.output, theirs.last_hidden_state, real) < 1e-9
    for P, Q in zip(mine.attention, theirs.attentions, strict=True):
        assert float(((P - Q) * real[:, None, :, None]).abs().max()) < 1e-9


def every(configs: list[tuple[str, str]]) -> list[tuple[str, str, str, Any]]:
    """Every field of these configs set to everything else that it may be."""
    return [
        (name, label, field, value)
        for name, label in configs
        for field, now in fields(TINY[name, label]).items()
        for value in VALUES.get(field, ())
        if value != now
    ]


def told(case: Any) -> str:
    return "-".join(map(str, case)).replace(" ", "")[:90]


ONCE = list({field: (name, label, field, value) for name, label, field, value in reversed(every(FIRST))}.values())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", ONCE, ids=told)
def test_each_switch_once(case: Any) -> None:
    found = outcome(*case)
    assert found == "mapped" or case[2] in REFUSED


@pytest.mark.slow
@pytest.mark.parametrize("case", every(CONFIGS), ids=told)
def test_every_switch_of_every_config(case: Any) -> None:
    """Where transformers can run it at all."""
    found = outcome(*case)
    known = case[2] in (*REFUSED, "rope_parameters") or case[3] in ("relu2", 8, RECURRENT) or case[2:] in ODD
    # DeepSeek's experts have no biases here, and enough of them are in the groups that are chosen.
    experts = case[0] == "deepseek" and case[2] in ("mlp_bias", "first_k_dense_replace", "topk_group")
    assert found != "refused" or known or experts


ODD = (("kv_lora_rank", 1), ("q_lora_rank", 1), ("num_attention_heads", 2))
"""Values that DeepSeek is refused with: a latent of one entry is but a sign, and its keys have four heads."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "label"), FIRST)
def test_inert_fields_change_nothing(name: str, label: str) -> None:
    """With the same weights, a model whose config has another value there is the same network."""
    family, config = FAMILIES[name], TINY[name, label]
    plain = loaded(family, built(family, config, seed=7))
    own = fields(config)
    for field in (field for group in INERT.values() for field in group if field in own):
        value = other(own[field])
        if value is None or (
            field == "pad_token_id" and name in ("roberta", "mpnet", "m2m_100", "m2m_100_decoder")
        ):  # they count positions from there
            continue
        model = built(family, copy.deepcopy(config), seed=7)
        setattr(model.config, field, value)
        assert loaded(family, model).fingerprint == plain.fingerprint, field


def other(value: Any) -> Any:
    """Another value of the same kind; None where there is none at hand."""
    if isinstance(value, bool):
        return not value
    return value + 0.25 if isinstance(value, float) else value + 1 if isinstance(value, int) else None


@pytest.mark.parametrize(
    ("kind", "sizes", "inner"),
    [("GPT2", {"n_embd": 8, "n_head": 2}, "h.0.mlp.c_fc.bias"),
     ("GPTJ", {"n_embd": 8, "n_head": 2}, "h.0.mlp.fc_in.bias"),
     ("GPTNeo", {"hidden_size": 8, "num_heads": 2}, "h.0.mlp.c_fc.bias")],
)  # fmt: skip
def test_an_inner_width_that_a_config_leaves_out_is_the_models_own(
    kind: str, sizes: dict[str, Any], inner: str
) -> None:
    layers = {"num_layers": 1, "attention_types": [[["global"], 1]]} if kind == "GPTNeo" else {"n_layer": 1}
    if kind == "GPTJ":
        layers["rotary_dim"] = 4
    config = getattr(transformers, f"{kind}Config")(vocab_size=11, **sizes, **layers)
    model = getattr(transformers, f"{kind}Model")(config)
    assert load(model).arch.mlp_width == len(model.state_dict()[inner])


@pytest.mark.slow
def test_the_page_of_families_is_what_the_code_says() -> None:
    """But for what is measured; `make families` writes it again."""
    assert page.masked(page.PAGE.read_text(encoding="utf-8")) == page.masked(page.page({}))
    overview = (page.PAGE.parent / "models.md").read_text(encoding="utf-8")
    assert [name for name in (*FAMILIES, *MODULES) if f"`{name}`" not in overview] == []
