"""What watch promises of any model: it comes out as it went in, and says what was done."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

import rankscope
from rankscope.errors import WatchError
from rankscope.profiles import DEFAULT_METRICS
from tests.live import reference
from tests.live.encoders import Loop, encoder, padded
from tests.live.families import FAMILIES, WIDTH, checks, made, seen
from tests.raising import raises

ALL = ["mu", "entropy", "head_mu"]


def insides(model: nn.Module) -> dict[str, Any]:
    """Everything that watching could have left behind."""
    found: dict[str, Any] = {}
    for name, part in model.named_modules():
        found[name] = {
            key: (dict(value) if isinstance(value, dict) else value)
            for key, value in vars(part).items()
            if key not in ("_parameters", "_modules", "config", "dtype_plan")
        }
        config = getattr(part, "config", None)
        found[f"{name} config"] = copy.deepcopy(vars(config)) if config is not None else None
    found["registries"] = [
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
        torch.backends.mha.get_fastpath_enabled(),
    ]
    return found


@pytest.mark.parametrize("name", ["bert", "t5", "albert", "gemma3"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_model_comes_out_as_it_went_in(name: str, fails: bool) -> None:
    model, batch = made(name)
    with torch.no_grad():
        before, inside = model(**batch)[0], insides(model)
        if fails:
            with pytest.raises(IndexError):
                seen(model, ALL, **{**batch, "input_ids": batch["input_ids"] + 1000})
        else:
            seen(model, ALL, **batch)
        assert insides(model) == inside
        assert torch.equal(model(**batch)[0], before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_encoder_comes_out_as_it_went_in() -> None:
    model, (X, padding) = encoder(nested=True), padded()
    inside = insides(model)
    with torch.no_grad():
        before = model(X, src_key_padding_mask=padding)
        seen(model, ALL, X, src_key_padding_mask=padding)
        assert insides(model) == inside
        assert torch.equal(model(X, src_key_padding_mask=padding), before)


def test_an_error_in_the_middle_of_a_block_is_the_models_own() -> None:
    model, (X, _) = encoder(), padded()
    inside = insides(model)
    with pytest.raises(RuntimeError, match="shape"):
        seen(model, ALL, X, mask=torch.zeros(3, 3, dtype=torch.float64))
    assert insides(model) == inside


@pytest.mark.parametrize("name", ["gpt2", "bert"])
@pytest.mark.parametrize("metrics", [["mu"], ALL])
def test_a_training_step_has_the_same_gradients(name: str, metrics: list[str]) -> None:
    family = FAMILIES[name]
    batch = family.batch()

    def gradients(watched: bool) -> list[Tensor]:
        model = family.model("eager").train()
        torch.manual_seed(7)
        if watched:
            with rankscope.watch(model, metrics) as w:
                model(**batch)[0].square().sum().backward()
            assert any("train mode, with dropout of up to 0.1" in note for note in w.notes)
            assert checks(w)["mode"] == "train"
        else:
            model(**batch)[0].square().sum().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    plain, seen = gradients(False), gradients(True)
    assert plain and all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_upcast_and_keeps_its_floor(dtype: torch.dtype) -> None:
    model, batch = made("bert")
    with torch.no_grad():
        states = model.to(dtype)(**batch, output_hidden_states=True).hidden_states
    w = seen(model, ["mu", "relative_mu", "entropy", "head_mu"], **batch)
    profile, expected = w.profile(), reference.mu(states[0], batch["attention_mask"].bool())
    torch.testing.assert_close(profile.curve("mu")[:, 0], expected, rtol=1e-12, atol=0)
    assert profile.arithmetics == [str(dtype).removeprefix("torch.")]
    floor = profile.curve("relative_mu", "floor")
    assert float(floor.max()) == float(floor.min()) == 8 * torch.finfo(dtype).eps
    assert checks(w)["rows_sum_to_one"] is True


def test_autocast_is_an_arithmetic_and_does_not_reach_the_metrics() -> None:
    model, (X, _) = encoder().float(), padded()
    watching = rankscope.watch(model, ["mu", "mean_abs_cosine"], keep="states")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), watching as w:
        model(X.float())
    assert w.profile().arithmetics == ["bfloat16"]
    real = torch.ones(2, 6, dtype=torch.bool)
    expected = torch.stack([reference.mu(states[0], real) for states in w.states.values()], 1)
    torch.testing.assert_close(w.profile().curve("mu"), expected, rtol=1e-12, atol=0)


def test_tensors_are_kept_when_asked() -> None:
    model, (X, _) = encoder(), padded()
    with torch.no_grad(), rankscope.watch(model, "mu", keep=["states", "attention"]) as w:
        model(X)
        out = model(X[:1])
    assert list(w.states) == [0, 1, 2, 3] and list(w.attention) == [1, 2, 3]
    assert torch.equal(w.states[0][0], X)
    assert torch.equal(w.states[3][1], out)
    assert w.attention[1][0].shape == (2, 4, 6, 6)
    with raises(WatchError, subject="keep"):
        _ = seen(model, "mu", X).states


def test_embeddings_are_the_means_of_valid_tokens_of_all_calls() -> None:
    model, (X, padding) = encoder(), padded()
    filled = X.masked_fill(padding[..., None], torch.nan)  # what stands at padding does not count
    empty, more = torch.ones(1, 6, dtype=torch.bool), torch.randn(3, 6, X.shape[-1], dtype=torch.float64)
    with torch.no_grad(), rankscope.watch(model, "mu", keep=["states", "embeddings"], padding="none") as w:
        model(more)
    for layer, states in w.states.items():
        assert torch.allclose(w.embeddings[layer], states[0].mean(1), rtol=1e-12)
    with torch.no_grad(), rankscope.watch(model, "mu", keep=["states", "embeddings"]) as w:
        model(more)
        model(X, src_key_padding_mask=padding)
        model(X[:1], src_key_padding_mask=empty)  # a sample without a token has no embedding
    assert list(w.embeddings) == [0, 1, 2, 3]
    for layer, states in w.states.items():
        rows = [row.mean(0) for row in states[0]] + [states[1][0].mean(0), states[1][1, :4].mean(0)]
        assert torch.allclose(w.embeddings[layer], torch.stack(rows), rtol=1e-12, atol=0)
    with torch.no_grad(), rankscope.watch(model, "mu", keep="embeddings", padding=padding) as w:
        model(filled)
    assert torch.allclose(w.embeddings[0], torch.stack([X[0].mean(0), X[1, :4].mean(0)]), rtol=1e-12)
    with raises(WatchError, subject="keep"):
        _ = seen(model, "mu", X).embeddings


def test_a_profile_can_be_saved_and_joined(tmp_path: Path) -> None:
    model, batch = made("bert")
    w = seen(model, DEFAULT_METRICS, **batch)
    again = rankscope.Profile.read(w.profile().save(tmp_path / "profile.parquet"))
    assert again.table.equals(w.profile().table)
    w.variant = "again"
    assert rankscope.Profile.join([again, w.profile()]).variants == ["as given", "again"]


@pytest.mark.slow
def test_a_profile_can_be_reported(tmp_path: Path) -> None:
    """Its page is drawn as that of any profile; that attention was not looked at is said."""
    from rankscope.report import write_run_directory

    model, batch = made("bert")
    profile = seen(model, DEFAULT_METRICS, **batch).profile()
    page = write_run_directory(profile, tmp_path / "run", "watched").read_text(encoding="utf-8")
    assert "attention was not looked at" in page


@pytest.mark.parametrize("name", ["bert", ""])
def test_two_watchers_of_attention(name: str) -> None:
    model = FAMILIES[name].model() if name else encoder()
    with rankscope.watch(model, "entropy") as w:
        with rankscope.watch(model, "mu"):
            pass
        with raises(WatchError, subject="attention"), rankscope.watch(model, "entropy"):
            pass
        with raises(WatchError, subject="watch"), w:
            pass
    with rankscope.watch(model, "entropy"):
        pass


def test_a_mask_of_another_shape() -> None:
    model = Loop()
    with raises(WatchError, subject="padding_mask"), rankscope.watch(model, "mu", blocks=["first"]):
        model(torch.randn(2, 6, WIDTH), torch.zeros(2, 9, dtype=torch.bool))
