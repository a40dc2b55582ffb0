"""Hugging Face models: what is watched is what the model itself would say."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankscope
from rankscope.errors import WatchError
from rankscope.live.blocks import stacks
from tests.live import reference
from tests.live.families import FAMILIES, HEADS, LAYERS, SIZES, attending, every

NARROW = ("llama", "opt", "gpt_neox", "gemma3", "modernbert", "vit")
"""Families whose eager attention takes softmax in float32 whatever their dtype."""
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}


def real_of(batch: dict[str, Tensor], shape: torch.Size) -> Tensor:
    return (
        batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones(shape, dtype=torch.bool)
    )


def own_states(name: str, model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """From output_hidden_states; the last one is often taken after the final norm, so off the last block."""
    last: list[Any] = []
    family = FAMILIES[name]
    handle = family.stack(model)[-1].register_forward_hook(lambda module, args, output: last.append(output))
    with torch.no_grad():
        states = list(model(**batch, output_hidden_states=True).hidden_states)
    handle.remove()
    raw = last[-1] if isinstance(last[-1], Tensor) else last[-1][0]
    states[-1] = raw.transpose(0, 1) if family.token_first else raw
    assert len(states) == LAYERS + 1
    return states


@every
def test_tokens_are_the_models_own_hidden_states(name: str) -> None:
    family = FAMILIES[name]
    model, batch = family.model(), family.batch()
    states = own_states(name, model, batch)
    real = real_of(batch, states[0].shape[:2])
    with torch.no_grad(), rankscope.watch(model, ["mu", "relative_residual"]) as w:
        model(**batch)
    profile = w.profile()
    for metric in ("mu", "relative_residual"):
        expected = [getattr(reference, metric)(state, real) for state in states]
        got = profile.curve(metric)
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64).T, **EXACT)
    assert profile.arithmetics == ["float64"]
    assert profile.manifest.networks[0].checks["padded_tokens"] == int((~real).sum())


@attending
def test_attention_is_native_eager_attention(name: str) -> None:
    family = FAMILIES[name]
    # Native eager Gemma 3 is NaN in float64 where a padded token sees padding alone.
    model, batch = family.model(), family.batch(padded=name != "gemma3")
    with torch.no_grad():
        native = family.model("eager")(**batch, output_attentions=True).attentions
        plain = model(**batch)[0]
    assert len(native) == LAYERS
    real = real_of(batch, torch.Size((len(native[0]), native[0].shape[-1])))
    with torch.no_grad(), rankscope.watch(model, ["dobrushin"], keep="attention") as w:
        watched = model(**batch)[0]
    # Eagerly, many families take softmax in float32 whatever their dtype.
    assert float((watched[real] - plain[real]).norm() / plain[real].norm()) < 1e-5
    got = w.profile().curve("dobrushin")
    assert got.shape == (2, LAYERS + 1, HEADS)
    for layer, P in enumerate(native, start=1):
        expected = torch.tensor(reference.dobrushin(P, real), dtype=torch.float64)
        torch.testing.assert_close(got[:, layer], expected, **EXACT)
        torch.testing.assert_close(w.attention[layer][0], P, **EXACT)
    checks = w.profile().manifest.networks[0].checks
    assert checks["rows_sum_to_one"] is True
    narrow = any("attention in float32 inside" in note for note in w.notes)
    assert checks["largest_row_sum_defect"] < (1e-6 if narrow else 1e-14)
    assert narrow == (name in NARROW)


@attending
def test_heads_are_slices_of_the_output_projection(name: str) -> None:
    family = FAMILIES[name]
    model, batch = family.model(), family.batch()
    inputs: list[Tensor] = []
    stack = family.stack(model)
    rounds = LAYERS // len(stack)
    handles = [
        block.get_submodule(family.projection).register_forward_hook(
            lambda module, args, output: inputs.append(args[0])
        )
        for block in stack
    ]
    with torch.no_grad(), rankscope.watch(model, "head_mu") as w:
        model(**batch)
    for handle in handles:
        handle.remove()
    got = w.profile().curve("head_mu")
    for layer, spoken in enumerate(inputs, start=1):
        projection = (stack * rounds)[layer - 1].get_submodule(family.projection)
        assert isinstance(projection.weight, Tensor)
        W = projection.weight if name == "gpt2" else projection.weight.T
        spoken = spoken.reshape(*got.shape[:1], -1, spoken.shape[-1])
        real = real_of(batch, spoken.shape[:2])
        size = spoken.shape[-1] // HEADS
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            expected = reference.mu((spoken[..., part] @ W[part]).detach(), real)
            torch.testing.assert_close(got[:, layer, head].tolist(), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", [name for name, each in FAMILIES.items() if each.pads])
def test_padded_and_unpadded_samples_agree(name: str) -> None:
    family = FAMILIES[name]
    model, batch = family.model(), family.batch()
    metrics = ["mu", "relative_residual"] + (["entropy", "head_mu"] if family.projection else [])
    with torch.no_grad(), rankscope.watch(model, metrics) as w:
        model(**batch)
        model(input_ids=batch["input_ids"][1:, :4])
    for metric in metrics:
        curve = w.profile().curve(metric)
        torch.testing.assert_close(curve[1], curve[2], rtol=1e-9, atol=1e-9, equal_nan=True)


@every
def test_the_stack_is_found(name: str) -> None:
    found = stacks(FAMILIES[name].model())
    assert list(found) == [FAMILIES[name].blocks]


@pytest.mark.parametrize("name", ["xlnet", "bloom"])
@pytest.mark.parametrize("metric", ["entropy", "head_mu"])
def test_attention_outside_the_interface_is_refused_at_once(name: str, metric: str) -> None:
    model = FAMILIES[name].model()
    before = model.config._attn_implementation
    with pytest.raises(
        WatchError, match=f"{name} .* does not: watch metrics of tokens, or .* load and measure"
    ):
        rankscope.watch(model, metric).__enter__()
    assert model.config._attn_implementation == before
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_a_shared_layer_is_as_many_layers_as_it_is_called() -> None:
    model, batch = FAMILIES["albert"].model(), FAMILIES["albert"].batch()
    with torch.no_grad(), rankscope.watch(model, ["mu"], layers=[0, LAYERS]) as w:
        model(**batch)
    assert w.profile().table["layer"].unique().to_list() == [0, LAYERS]
    assert w.profile().manifest.networks[0].checks["calls_per_layer"] == {"1": 1, "2": 1, "3": 1}


def test_rows_with_a_sink_do_not_sum_to_one_and_it_is_said() -> None:
    import transformers as hf

    sizes: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 2}
    model = hf.GptOssModel(hf.GptOssConfig(**SIZES, **sizes, num_experts_per_tok=1, pad_token_id=0)).eval()
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.ones_(weight)
    with torch.no_grad(), rankscope.watch(model, ["row_sum_defect"]) as w:
        model(**FAMILIES["bert"].batch(padded=False))
    checks = w.profile().manifest.networks[0].checks
    assert checks["rows_sum_to_one"] is False
    assert checks["largest_row_sum_defect"] == pytest.approx(
        float(w.profile().curve("row_sum_defect").nan_to_num().max())
    )
    assert any("theorems on averaging do not apply" in note for note in w.notes)


class TestEncoderAndDecoder:
    """T5: two stacks, and cross-attention between them."""

    def model(self) -> Any:
        import transformers as hf

        sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 3, "num_heads": 4}
        return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=40, num_decoder_layers=2, **sizes)).eval()

    def batch(self) -> dict[str, Tensor]:
        ids = torch.randint(3, 40, (2, 6))
        mask = torch.ones_like(ids)
        mask[0, 4:] = 0
        answer = torch.randint(3, 40, (2, 6))
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": answer}

    def test_one_must_be_named(self) -> None:
        with pytest.raises(
            WatchError, match=r"holds 2: encoder.block \(3 blocks\), decoder.block \(2 blocks\)"
        ):
            rankscope.watch(self.model())

    def test_the_encoder(self) -> None:
        model, batch = self.model(), self.batch()
        with torch.no_grad(), rankscope.watch(model, ["mu", "entropy"], blocks="encoder.block") as w:
            model(**batch)
        assert w.profile().curve("entropy").shape == (2, 4, 4)
        assert w.profile().manifest.networks[0].checks["padded_tokens"] == 2

    def test_the_decoder_has_its_own_mask_and_its_self_attention_alone(self) -> None:
        model, batch = self.model(), self.batch()
        mask = torch.ones(2, 6)
        mask[1, 5:] = 0
        with torch.no_grad():
            model.set_attn_implementation("eager")
            native = model(**batch, decoder_attention_mask=mask, output_attentions=True).decoder_attentions
            model.set_attn_implementation("sdpa")
        with torch.no_grad(), rankscope.watch(model, "dobrushin", blocks="decoder") as w:
            model(**batch, decoder_attention_mask=mask)
        for layer, P in enumerate(native, start=1):
            expected = torch.tensor(reference.dobrushin(P, mask.bool()), dtype=torch.float64)
            torch.testing.assert_close(
                w.profile().curve("dobrushin")[:, layer], expected, rtol=1e-5, atol=1e-6
            )
        assert w.profile().manifest.networks[0].checks["padded_tokens"] == 1
        assert any("2 later ones (cross-attention) were left out" in note for note in w.notes)


def test_generation_measures_the_prompt_and_leaves_out_what_the_cache_goes_on_from() -> None:
    import transformers as hf

    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2
        )
    ).eval()
    ids = torch.randint(3, 40, (2, 5))
    with rankscope.watch(model, ["mu", "entropy"]) as w:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4, pad_token_id=0
        )
    checks = w.profile().manifest.networks[0].checks
    assert checks["calls"] == 4
    assert checks["calls_left_out"] == {"it went on from a cache": 3}
    assert w.profile().curve("mu").shape == (2, 3)
    assert "3 calls were left out: it went on from a cache." in w.notes


def test_a_single_token_is_left_out() -> None:
    model = FAMILIES["bert"].model()
    with rankscope.watch(model) as w:
        model(torch.tensor([[5]]))
    with pytest.raises(
        WatchError, match="of 1 calls .* none was measured: 1 left out: it had a single token"
    ):
        w.profile()


class _Sharp(nn.Linear):
    """Not a linear map, whatever its class says."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def test_an_output_projection_that_is_not_linear_is_noticed() -> None:
    model, batch = FAMILIES["distilbert"].model(), FAMILIES["distilbert"].batch()
    block = FAMILIES["distilbert"].stack(model)[0]
    block.get_submodule("attention").out_lin = _Sharp(16, 16).double()
    with pytest.raises(WatchError, match="must sum to its output"), rankscope.watch(model, "head_mu"):
        model(**batch)


def test_an_output_projection_that_is_not_there_is_noticed() -> None:
    model, batch = FAMILIES["distilbert"].model(), FAMILIES["distilbert"].batch()
    block = FAMILIES["distilbert"].stack(model)[0]
    block.get_submodule("attention").out_lin = nn.Sequential(nn.Tanh(), nn.Linear(16, 16)).double()
    with pytest.raises(WatchError, match="needs the output projection"), rankscope.watch(model, "head_mu"):
        model(**batch)
