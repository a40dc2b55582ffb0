"""Hugging Face models: what is watched is what the model itself would say."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import rankscope
from rankscope.errors import WatchError
from rankscope.live.modules import stacks
from rankscope.sources import lifted
from tests.live import reference
from tests.live.families import (
    FAMILIES,
    GPT2,
    HEADS,
    LAYERS,
    NAMED,
    T5,
    WIDTH,
    attending,
    checks,
    every,
    made,
    seen,
    tiny,
)
from tests.raising import raises

NARROW = ("llama", "opt", "gpt_neox", "gemma3", "modernbert", "vit")
"""Families whose eager attention takes softmax in float32 whatever their dtype."""
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}


def real_of(batch: dict[str, Tensor], shape: torch.Size) -> Tensor:
    return batch.get("attention_mask", torch.ones(shape)).bool()


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


@pytest.mark.sampled(6)
@every
def test_tokens_are_the_models_own_hidden_states(name: str) -> None:
    model, batch = made(name)
    states = own_states(name, model, batch)
    real = real_of(batch, states[0].shape[:2])
    w = seen(model, ["mu", "relative_residual"], **batch)
    for metric in ("mu", "relative_residual"):
        expected = torch.stack([getattr(reference, metric)(state, real) for state in states], 1)
        torch.testing.assert_close(w.profile().curve(metric), expected, **EXACT)
    assert w.profile().arithmetics == ["float64"]
    assert checks(w)["padded_tokens"] == int((~real).sum())


@pytest.mark.sampled(9)
@attending
@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_attention_is_native_eager_attention(name: str, how: str) -> None:
    """Of a model that runs eagerly its own weights; beside sdpa the same, without float32 inside."""
    family = FAMILIES[name]
    # Native eager Gemma 3 is NaN in float64 where a padded token sees padding alone.
    model, batch = family.model(how), family.batch(padded=name != "gemma3")
    eager = family.model("eager")
    with torch.no_grad():
        with nullcontext() if how == "eager" else lifted():
            native = eager(**batch, output_attentions=True).attentions
        plain = model(**batch)[0]
    assert len(native) == LAYERS
    real = real_of(batch, torch.Size((len(native[0]), native[0].shape[-1])))
    with torch.no_grad(), rankscope.watch(model, ["dobrushin"], keep="attention") as w:
        watched = model(**batch)[0]
    assert torch.equal(watched, plain)
    got = w.profile().curve("dobrushin")
    assert got.shape == (2, LAYERS + 1, HEADS)
    # Angles of rotary positions and RMSNorm stay in float32 where the model itself runs.
    near = EXACT if how == "eager" else {"rtol": 1e-5, "atol": 1e-6}
    for layer, P in enumerate(native, start=1):
        torch.testing.assert_close(got[:, layer], reference.dobrushin(P, real), **near)
        rows = real[:, None, :, None].expand_as(P)
        torch.testing.assert_close(w.attention[layer][0][rows], P[rows], **near)
    assert checks(w)["rows_sum_to_one"] is True
    narrow = any("attention in float32 inside" in note for note in w.notes)
    assert checks(w)["largest_row_sum_defect"] < (1e-6 if narrow else 1e-14)
    assert narrow == (name in NARROW and how == "eager")


@attending
def test_heads_are_slices_of_the_output_projection(name: str) -> None:
    (model, batch), family = made(name), FAMILIES[name]
    called: list[tuple[Any, Tensor]] = []
    for block in family.stack(model):
        block.get_submodule(family.projection).register_forward_hook(
            lambda module, args, output: called.append((module.weight, args[0]))
        )
    got = seen(model, "head_mu", **batch).profile().curve("head_mu")
    assert len(called) == LAYERS
    for layer, (weight, spoken) in enumerate(called, start=1):
        W = weight if name == "gpt2" else weight.T
        spoken = spoken.reshape(*got.shape[:1], -1, spoken.shape[-1])
        real = real_of(batch, spoken.shape[:2])
        size = spoken.shape[-1] // HEADS
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            expected = reference.mu(spoken[..., part] @ W[part], real)
            torch.testing.assert_close(got[:, layer, head], expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", [name for name, each in FAMILIES.items() if each.pads])
def test_padded_and_unpadded_samples_agree(name: str) -> None:
    model, batch = made(name)
    metrics = ["mu", "relative_residual"] + (["entropy", "head_mu"] if FAMILIES[name].projection else [])
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


@pytest.mark.parametrize("metric", ["entropy", "head_mu"])
def test_a_model_without_attention_is_refused_at_once(metric: str) -> None:
    model = hf.RwkvModel(hf.RwkvConfig(vocab_size=40, hidden_size=WIDTH, num_hidden_layers=LAYERS))
    with raises(WatchError, subject="attention"):
        rankscope.watch(model, metric).__enter__()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


OUTSIDE: dict[str, Callable[[], Any]] = {
    "xlnet": FAMILIES["xlnet"].model,
    "bloom": FAMILIES["bloom"].model,
    "gptj": tiny(hf.GPTJModel, **GPT2, rotary_dim=4),
    "mpt": tiny(hf.MptModel, **NAMED, d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS),
    "roformer": tiny(hf.RoFormerModel, embedding_size=WIDTH),
}
"""Models whose attention does not go through the interface, and is written out."""


@pytest.mark.parametrize("name", OUTSIDE)
def test_attention_outside_the_interface_is_what_the_model_hands_out(name: str) -> None:
    model, batch = OUTSIDE[name]().double().eval(), FAMILIES["bert"].batch()
    heads = [] if name == "xlnet" else ["head_mu"]  # whose output projection is no module
    with torch.no_grad():
        own = model(**batch, output_attentions=True).attentions
        plain = model(**batch)[0]
        with rankscope.watch(model, ["entropy", *heads], keep="attention") as w:
            assert torch.equal(model(**batch)[0], plain)
    for layer, P in enumerate(own, start=1):
        assert torch.equal(w.attention[layer][0], P)


ODD: dict[str, Callable[[], Any]] = {
    "mpt": OUTSIDE["mpt"],  # its blocks take True at what is hidden
    "bloom": OUTSIDE["bloom"],
    "falcon": tiny(hf.FalconModel, alibi=True),
    "longformer": tiny(hf.LongformerModel, attention_window=4),  # zeros at tokens, after padding to its windows
    "led": tiny(
        hf.LEDModel, **NAMED, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=1, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=24, decoder_ffn_dim=24, attention_window=4, pad_token_id=0,
    ),
    "big_bird": tiny(hf.BigBirdModel, attention_type="original_full"),
    "big_bird sparse": tiny(hf.BigBirdModel, block_size=2, num_random_blocks=1),  # pads to its blocks
    "xlnet": FAMILIES["xlnet"].model,
    "clip": tiny(hf.CLIPTextModel, max_position_embeddings=32, eos_token_id=2, pad_token_id=0),
    "mpnet": tiny(hf.MPNetModel),
    "reformer": tiny(  # pads to its chunks
        hf.ReformerModel, **NAMED | {"hidden_size": WIDTH, "num_attention_heads": HEADS}, attention_head_size=4,
        feed_forward_size=24, attn_layers=["local"] * LAYERS, axial_pos_embds=False, local_attn_chunk_length=4,
        is_decoder=False,
    ),
}  # fmt: skip
"""Models with masks or hidden states of a convention of their own, or near one."""


@pytest.mark.sampled(9)
@pytest.mark.parametrize("length", [13, 11, None], ids=["padded", "padded further", "no mask"])
@pytest.mark.parametrize("name", ODD)
@torch.no_grad()
def test_padding_is_what_was_given_whatever_masks_mean_inside(name: str, length: int | None) -> None:
    torch.manual_seed(0)
    model = ODD[name]().double().eval()
    ids = torch.randint(3, 40, (2, 13))
    real = torch.ones(2, 13, dtype=torch.bool)
    if length is not None:
        real[0, length:], real[1, 5:] = False, False
    given: dict[str, Any] = {"input_ids": ids} | ({} if length is None else {"attention_mask": real.long()})
    output = model(**given, output_hidden_states=True)
    states = output["encoder_hidden_states" if name == "led" else "hidden_states"]
    with rankscope.watch(model, "mu", blocks="encoder" if name == "led" else None) as w:
        model(**given)
    expected = torch.stack([reference.mu(state[:, :13], real) for state in states[:LAYERS]], 1)
    torch.testing.assert_close(w.profile().curve("mu")[:, :LAYERS], expected, rtol=1e-11, atol=0)
    assert checks(w)["masks_in_doubt"] == []
    if name == "xlnet" and length is not None:
        twin = seen(model, "mu", input_ids=ids, input_mask=(~real).double())  # 1 at padding
        torch.testing.assert_close(twin.profile().curve("mu"), w.profile().curve("mu"))


def test_rows_with_a_sink_do_not_sum_to_one_and_it_is_said() -> None:
    sizes = {"num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = tiny(hf.GptOssModel, **sizes, pad_token_id=0)().eval()
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.ones_(weight)
    w = seen(model, "row_sum_defect", **FAMILIES["bert"].batch(padded=False))
    assert checks(w)["rows_sum_to_one"] is False
    largest = float(w.profile().curve("row_sum_defect").nan_to_num().max())
    assert checks(w)["largest_row_sum_defect"] == pytest.approx(largest)
    assert any("theorems on averaging do not apply" in note for note in w.notes)


class TestEncoderAndDecoder:
    """T5: two stacks, and cross-attention between them."""

    def model(self) -> Any:
        return tiny(hf.T5ForConditionalGeneration, **T5, num_decoder_layers=2)().eval()

    def batch(self) -> dict[str, Tensor]:
        return {**FAMILIES["t5"].batch(), "decoder_input_ids": torch.randint(3, 40, (2, 6))}

    def test_the_encoder(self) -> None:
        model, batch = self.model(), self.batch()
        with torch.no_grad(), rankscope.watch(model, ["mu", "entropy"], blocks="encoder.block") as w:
            model(**batch)
        assert w.profile().curve("entropy").shape == (2, 4, 4)
        assert checks(w)["padded_tokens"] == 2

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
            got, expected = w.profile().curve("dobrushin")[:, layer], reference.dobrushin(P, mask.bool())
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert checks(w)["padded_tokens"] == 1
        assert any("2 later ones (cross-attention) were left out" in note for note in w.notes)
