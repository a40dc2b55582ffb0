"""Layer 0 of what is no plain text: sound of any length, masked proteins, images with registers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope.errors import TokensError
from rankscope.sources import FAMILIES, load
from tests.raising import raises
from tests.sources.models import model_of


@pytest.mark.parametrize("label", FAMILIES["wav2vec2"].tiny_configs())
@torch.no_grad()
def test_sound_may_have_any_length(label: str) -> None:
    model = model_of("wav2vec2", label)
    net = load(model)
    for samples in (400, 57, 23):
        sound = torch.randn(2, samples, generator=torch.Generator().manual_seed(samples), dtype=torch.float64)
        theirs = model(sound).last_hidden_state
        mine = net.run(*net.encode(sound)).output
        assert mine.shape == theirs.shape and float((mine - theirs).abs().max()) < 1e-12


def test_sound_that_cannot_be_is_a_sentence() -> None:
    net = load(model_of("wav2vec2", "post-norm"))
    with raises(TokensError, "sound"):
        net.encode(torch.zeros(1, 10))  # of which no token comes
    with raises(TokensError, "sound"):
        net.encode(torch.zeros(1, 400, dtype=torch.long))
    with raises(TokensError, "padding"):
        net.encode(torch.zeros(1, 400), padding=torch.zeros(1, 400, dtype=torch.bool))
    with raises(TokensError, "texts"):
        net.encode("hello")


@pytest.mark.parametrize(("name", "label"), [("wav2vec2", "hubert"), ("dinov3", "plain"), ("esm", "rotary")])
def test_a_saved_network_embeds_as_before(name: str, label: str, tmp_path: Path) -> None:
    net: Any = load(model_of(name, label))
    net.save(tmp_path)
    again: Any = load(tmp_path)
    assert again.origin.fingerprint() == net.origin.fingerprint()
    if FAMILIES[name].continuous_inputs:
        inputs = torch.randn(1, *net.origin.embedding.shape, dtype=torch.float64)
    else:
        inputs = torch.tensor([[5, 32, 7]])
    assert torch.equal(again.encode(inputs).X, net.encode(inputs).X)
    other: Any = load(model_of(name, label, seed=9))
    assert other.origin.fingerprint() != net.origin.fingerprint()


def test_angles_of_a_protein_model_are_those_that_were_saved(tmp_path: Path) -> None:
    """Published ones were rounded to float16 in training, and transformers keeps them so."""
    model = model_of("esm", "rotary")
    angles = model.rotary_embeddings.inv_freq.half().double()
    model.rotary_embeddings.inv_freq.copy_(angles)
    model.save_pretrained(tmp_path)
    for net in (load(model), load(tmp_path)):
        assert net.arch.rotary_frequencies == (tuple(angles.tolist()),)


def test_masked_tokens_of_a_protein_are_zero_and_the_others_larger() -> None:
    """0.88 of the tokens had no mask in training (15% were chosen, 80% of them masked): one of four is 0.88 / 0.75."""
    net: Any = load(model_of("esm", "rotary"))
    words, ids = net.origin.embedding.words, torch.tensor([[5, 32, 7, 9, 32], [5, 6, 7, 9, 8]])
    padding = torch.tensor([[False, False, False, False, True], [False] * 5])
    X = net.encode(ids, padding=padding).X
    torch.testing.assert_close(X[0, [0, 2, 3]], words[[5, 7, 9]] * 0.88 / 0.75, rtol=1e-14, atol=0)
    assert not X[0, [1, 4]].any()
    torch.testing.assert_close(X[1], words[[5, 6, 7, 9, 8]] * 0.88, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("name", "kind"), [("vit", "images"), ("whisper", "sound"), ("ast", "sound")])
def test_what_takes_no_text_says_what_it_takes(name: str, kind: str) -> None:
    net: Any = load(model_of(name, next(iter(FAMILIES[name].tiny_configs()))))
    with raises(TokensError, "texts") as caught:
        net.encode("hello")
    assert f"takes {kind}" in str(caught.value) and str(net.origin.embedding.shape[-1]) in str(caught.value)
