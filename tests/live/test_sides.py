"""Encoder-decoders, either side: self-attention as the model hands it out, padding, training, generation."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import rankscope
from rankscope.errors import WatchError
from rankscope.monitor import Monitor
from tests.live import reference
from tests.live.families import HEADS, T5, WIDTH, WORDS, checks, seen, tiny
from tests.live.gpt import words
from tests.raising import raises

IDS = words()
REAL = torch.ones(2, 6, dtype=torch.bool)
REAL[1, 4:] = False
ALL = torch.ones(2, 6, dtype=torch.bool)


def bart() -> Any:
    sizes: dict[str, Any] = {f"{side}_{name}": size for side in ("encoder", "decoder")
             for name, size in {"layers": 2, "attention_heads": HEADS, "ffn_dim": 24}.items()}  # fmt: skip
    special: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = hf.BartConfig(vocab_size=WORDS, d_model=WIDTH, max_position_embeddings=32, **sizes, **special)
    return hf.BartForConditionalGeneration(config)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize(
    "build", [bart, tiny(hf.T5ForConditionalGeneration, **T5, decoder_start_token_id=0)], ids=["bart", "t5"]
)
def test_both_sides_of_an_encoder_decoder(build: Any, side: str) -> None:
    torch.manual_seed(0)
    model = build().double().eval()
    model.set_attn_implementation("eager")
    given = {"input_ids": IDS, "attention_mask": REAL.long(), "decoder_input_ids": IDS}
    with torch.no_grad():
        own = model(**given, output_attentions=True)[f"{side}_attentions"]
    found = [name for name, _ in model.named_modules() if name.endswith(side)]
    with torch.no_grad(), rankscope.watch(model, ["mu", "dobrushin", "head_mu"], blocks=found[0]) as w:
        model(**given)
    real = REAL if side == "encoder" else ALL
    for layer, P in enumerate(own, start=1):
        got = w.profile().curve("dobrushin")[:, layer]
        torch.testing.assert_close(got, reference.dobrushin(P, real), rtol=1e-12, atol=1e-12)
    assert checks(w)["padded_tokens"] == int((~real).sum())


def test_generation_of_an_encoder_decoder() -> None:
    """The encoder is called by itself, on the whole; the decoder token by token."""
    model = tiny(hf.T5ForConditionalGeneration, **T5, decoder_start_token_id=0, eos_token_id=None)().eval()
    given = {"attention_mask": REAL.long(), "max_new_tokens": 4}
    with rankscope.watch(model, ["mu", "entropy"], blocks="encoder") as w:
        model.generate(IDS, **given)
    expected = seen(model.encoder, ["mu", "entropy"], IDS, attention_mask=REAL.long())
    for each in ("mu", "entropy"):
        torch.testing.assert_close(
            w.profile().curve(each), expected.profile().curve(each), equal_nan=True, rtol=1e-5, atol=1e-6
        )
    assert checks(w)["padded_tokens"] == 2
    with rankscope.watch(model, "mu", blocks="decoder") as w:
        model.generate(IDS, **given)
    with raises(WatchError, subject="model"):
        w.profile()
    assert "1 call was left out: it had a single token." in w.notes
    assert "3 calls were left out: it went on from a cache." in w.notes


def whisper() -> Any:
    sizes: dict[str, Any] = {f"{side}_{name}": size for side in ("encoder", "decoder")
             for name, size in {"layers": 2, "attention_heads": HEADS, "ffn_dim": 24}.items()}  # fmt: skip
    special: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = hf.WhisperConfig(
        vocab_size=WORDS, d_model=WIDTH, num_mel_bins=8, max_source_positions=10, max_target_positions=16,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None, **sizes, **special,
    )  # fmt: skip
    torch.manual_seed(0)
    return hf.WhisperForConditionalGeneration(config).double().eval()


@pytest.mark.parametrize(("side", "tokens"), [("encoder", 10), ("decoder", 6)])
def test_both_sides_of_whisper(side: str, tokens: int) -> None:
    """Sound on one side, words on the other."""
    model = whisper()
    model.set_attn_implementation("eager")
    given = {"input_features": torch.randn(2, 8, 20, dtype=torch.float64), "decoder_input_ids": IDS}
    metrics = ["mu", "dobrushin", "head_mu"]
    with torch.no_grad():
        own = model(**given, output_attentions=True, output_hidden_states=True)
        with rankscope.watch(model, metrics, blocks=f"model.{side}") as w:
            assert torch.equal(model(**given).logits, own.logits)
    real, profile = torch.ones(2, tokens, dtype=torch.bool), w.profile()
    for layer, P in enumerate(own[f"{side}_attentions"], start=1):
        got = profile.curve("dobrushin")[:, layer]
        torch.testing.assert_close(got, reference.dobrushin(P, real), rtol=1e-12, atol=1e-12)
    for layer, x in enumerate(own[f"{side}_hidden_states"][:-1]):
        torch.testing.assert_close(profile.curve("mu")[:, layer], reference.mu(x, real))
    later = any("2 later ones (cross-attention) were left out" in note for note in w.notes)
    assert later is (side == "decoder")


def both_of_torch() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, 2, 2, 24, dropout=0.0, batch_first=True)
    return model, (torch.randn(2, 6, WIDTH), torch.randn(2, 6, WIDTH))


def both_of_t5() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    model = tiny(hf.T5ForConditionalGeneration, **T5, decoder_start_token_id=0, dropout_rate=0.0)()
    return model, (IDS, None, IDS)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("build", [both_of_torch, both_of_t5])
def test_a_monitor_sees_either_side(build: Any, side: str, tmp_path: Path) -> None:
    """What a watch sees before the first step, of tokens and of attention."""
    model, given = build()
    metrics = ["mu", "entropy"]
    with torch.no_grad(), rankscope.watch(model.train(), metrics, blocks=side) as w:
        model(*given)
    with Monitor(model, metrics, every=1, blocks=side, run=tmp_path / "run", alarms=()) as monitor:
        output = model(*given)
        (output if isinstance(output, torch.Tensor) else output[0]).square().mean().backward()
        monitor.step()
    rows = rankscope.read(tmp_path / "run").tables["training"].filter(step=1)
    for metric in metrics:
        found = rows.filter(metric=metric).sort("layer", "head")["value"].to_list()
        expected = w.profile().curve(metric).nanmean(0).flatten()
        assert found == pytest.approx(expected[~expected.isnan()].tolist(), rel=1e-5)
