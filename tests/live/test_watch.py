"""What watch promises of any model: it comes out as it went in, and says what was done."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

import rankscope
from rankscope.errors import MetricError, TokensError, WatchError
from rankscope.profiles import DEFAULT_METRICS
from tests.live import reference
from tests.live.families import FAMILIES, LAYERS, WIDTH, checks, made, seen
from tests.live.test_modules import Loop, encoder, padded

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


class FailedHypothesis(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fails = encoder(), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.fails:
            raise ArithmeticError("inside the model")
        return x


def test_a_call_that_failed_is_not_counted_and_the_next_one_is() -> None:
    model, (X, _) = FailedHypothesis(), padded()
    with torch.no_grad(), rankscope.watch(model, ALL) as w:
        model(X)
        model.fails = True
        with pytest.raises(ArithmeticError, match="inside the model"):
            model(X)
        model.fails = False
        model(X)
    assert w.profile().curve("mu").shape == (4, LAYERS + 1)
    assert "1 call was left out: it failed." in w.notes


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


def test_dropout_takes_rows_off_one_and_is_named_as_the_reason() -> None:
    family = FAMILIES["bert"]
    w = seen(family.model("eager").train(), "entropy", **family.batch())
    assert checks(w)["rows_sum_to_one"] is False and checks(w)["dropout"] == 0.1
    assert any("as dropout makes them" in note for note in w.notes)


def test_recomputation_for_gradients_is_not_measured_twice() -> None:
    model, batch = made("gpt2")
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with rankscope.watch(model, "mu") as w:
        model(**batch, use_cache=False)[0].sum().backward()
    assert checks(w)["calls_per_layer"] == {"1": 1, "2": 1, "3": 1}
    assert any("3 calls of blocks outside a call of the model" in note for note in w.notes)


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


def test_samples_are_numbered_on_from_call_to_call_and_watch_to_watch() -> None:
    model, (X, _) = encoder(), padded()
    w = rankscope.watch(model, "mu", variant="mine")
    with torch.no_grad():
        with w:
            model(X)
            model(X[:1])
        model(X)
        with w:
            model(X[:1])
    profile = w.profile()
    assert profile.table["sample"].unique().sort().to_list() == [0, 1, 2, 3]
    assert profile.variants == ["mine"]
    curve = profile.curve("mu")
    torch.testing.assert_close(curve[0], curve[2])
    torch.testing.assert_close(curve[0], curve[3])
    assert "The model was called 3 times; 4 samples were measured." in w.notes


def test_layers_can_be_chosen() -> None:
    model, (X, _) = encoder(), padded()
    with torch.no_grad(), rankscope.watch(model, ALL, layers=[2]) as w:
        model(X)
    assert w.profile().table["layer"].unique().to_list() == [2]
    every = seen(model, ALL, X).profile()
    for metric in ALL:
        torch.testing.assert_close(w.profile().curve(metric)[:, 2], every.curve(metric)[:, 2])


class Adapted(nn.Module):
    """A linear map with a low-rank addition, as LoRA wraps it."""

    def __init__(self, base: nn.Module, width: int, in_place: bool) -> None:
        super().__init__()
        self.base, self.in_place = base, in_place
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            y = self.base(x)
            return y.add_(self.up(self.down(x)))
        return self.up(self.down(x)) + self.base(x)


@pytest.mark.parametrize("in_place", [False, True])
def test_heads_are_refused_where_an_adapter_adds_to_their_projection(in_place: bool) -> None:
    """The linear map inside would be found, and what the adapter adds be left out without a word; one that
    adds nothing is no obstacle."""
    model, batch = made("bert")
    expected = seen(model, "head_mu", **batch).profile().curve("head_mu")[:, 1:]
    for block in model.encoder.layer:
        output = block.attention.output
        output.dense = Adapted(output.dense, output.dense.out_features, in_place).to(output.dense.weight)
    sentence = "Adapted adds to what a Linear in it returns, as LoRA does: merge it"
    with pytest.raises(WatchError, match=sentence):
        seen(model, "head_mu", **batch)
    assert len(seen(model, ["mu", "entropy"], **batch).profile().table)
    if in_place:  # else the adapter's own map is the first to be called
        for block in model.encoder.layer:
            nn.init.zeros_(block.attention.output.dense.up.weight)
        assert torch.equal(seen(model, "head_mu", **batch).profile().curve("head_mu")[:, 1:], expected)


def test_an_interrupted_call_is_said() -> None:
    """torch runs no hooks while KeyboardInterrupt passes."""

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    model, batch = made("bert")
    model.encoder.layer[1].register_forward_hook(stop)
    w = rankscope.watch(model)
    with pytest.raises(KeyboardInterrupt), w:
        model(**batch)
    assert "1 call was left out: it was interrupted." in w.notes
    with pytest.raises(WatchError, match="none was measured: 1 left out: it was interrupted"):
        w.profile()


def test_nothing_is_said_of_what_did_not_run() -> None:
    model = encoder()
    w = rankscope.watch(model)
    assert not any("ran in" in note for note in w.notes)
    with torch.no_grad(), w:
        model(torch.zeros(0, 5, WIDTH, dtype=torch.float64))
    with pytest.raises(WatchError, match="none was measured: 1 left out: it had no samples"):
        w.profile()


def test_tensors_are_kept_when_asked() -> None:
    model, (X, _) = encoder(), padded()
    with torch.no_grad(), rankscope.watch(model, "mu", keep=["states", "attention"]) as w:
        model(X)
        out = model(X[:1])
    assert list(w.states) == [0, 1, 2, 3] and list(w.attention) == [1, 2, 3]
    assert torch.equal(w.states[0][0], X)
    assert torch.equal(w.states[3][1], out)
    assert w.attention[1][0].shape == (2, 4, 6, 6)
    with pytest.raises(WatchError, match=r"states are kept when asked for: watch\(model, keep='states'\)"):
        _ = seen(model, "mu", X).states


def test_a_sample_that_overflows_is_nan_from_there_on() -> None:
    model = Loop()
    X = torch.randn(2, 6, WIDTH)
    X[0] *= 1e38
    with torch.no_grad():
        model.first.down.weight *= 1e6
        with rankscope.watch(model, ["mu", "stable_rank"], blocks=["first", "second", "second"]) as w:
            model(X)
    curve = w.profile().curve("mu")
    assert curve[0].isnan().tolist() == [False, True, True, True]
    assert not curve[1].isnan().any()
    assert checks(w)["first_layer_not_finite"] == 1
    assert "Numbers overflow from layer 1 on: those samples have NaN." in w.notes


def test_padding_can_be_given_or_refused() -> None:
    model, (X, padding) = encoder(), padded()
    with torch.no_grad():
        cases: list[tuple[Any, int]] = [("model", 2), ("none", 0), (padding, 2)]
        for given, expected in cases:
            with rankscope.watch(model, "mu", padding=given) as w:
                model(X, src_key_padding_mask=padding)
            assert checks(w)["padded_tokens"] == expected
        watching = rankscope.watch(model, "mu", padding=padding.int())
        with pytest.raises(TokensError, match="padding must be a boolean tensor"), watching:
            model(X)


def test_the_model_is_described() -> None:
    model, batch = made("bert")
    (network,) = seen(model, "mu", **batch).profile().manifest.networks
    assert network.architecture is None and network.fingerprint is None
    assert network.model == {
        "class": "transformers.models.bert.modeling_bert.BertModel",
        "model_type": "bert",
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtypes": ["float64"],
        "devices": ["cpu"],
    }
    assert network.checks["rows_sum_to_one"] is None


def test_a_profile_can_be_saved_plotted_and_reported(tmp_path: Any) -> None:
    from rankscope.report import write_run_directory

    model, batch = made("bert")
    w = seen(model, DEFAULT_METRICS, **batch)
    again = rankscope.Profile.read(w.profile().save(tmp_path / "profile.parquet"))
    assert again.table.equals(w.profile().table)
    page = write_run_directory(again, tmp_path / "run", "watched").read_text(encoding="utf-8")
    assert "attention was not looked at" in page
    w.variant = "again"
    assert rankscope.Profile.join([again, w.profile()]).variants == ["as given", "again"]


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (encoder().to("meta"), {}, WatchError, "its weights are on the meta device"),
    (encoder(), {"metrics": []}, MetricError, "watch must be given at least one metric"),
    (encoder(), {"metrics": "muu"}, MetricError, "did you mean 'mu'"),
    *(
        (encoder(), {"layers": layers}, WatchError, r"layers must name layers 0\.\.3; got")
        for layers in ([4], [-1], [], [1, 9])
    ),
    (
        encoder(), {"metrics": ["mu", "entropy"], "layers": [0]}, WatchError,
        "entropy is of attention, from layer 1 on: name more layers",
    ),
    (encoder(), {"keep": "state"}, WatchError, "keep must be one of states, attention; got 'state'"),
    (encoder(), {"layout": "first"}, WatchError, "layout must be one of batch first, token first"),
    (Loop(), {}, WatchError, r"first, second, spare \(3 blocks of Mixer\) could be: name them, as in bl"),
    (Loop(), {"blocks": ["secnd"]}, WatchError, "blocks must be one of first, .*did you mean 'second'"),
    (Loop(), {"blocks": [nn.Linear(2, 2)]}, WatchError, "modules inside Loop"),
    (Loop(), {"blocks": []}, WatchError, "at least one block"),
    (Loop(), {"blocks": "first.up"}, WatchError, "it is a Linear with none"),
    (encoder(), {"blocks": ["layers"]}, WatchError, "a ModuleList is never called itself"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "asked", "error", "sentence"), REFUSED)
def test_what_cannot_be_watched(
    model: Any, asked: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        rankscope.watch(model, **asked)


def test_attention_that_cannot_be_seen() -> None:
    sentence = "none came through: it is seen in .* torch's own functions, not in kernels of other packages"
    model = Loop()
    with pytest.raises(WatchError, match=sentence), rankscope.watch(model, "entropy", blocks=["first"]):
        model(torch.randn(2, 6, WIDTH))


@pytest.mark.parametrize("name", ["bert", ""])
def test_two_watchers_of_attention(name: str) -> None:
    model = FAMILIES[name].model() if name else encoder()
    with rankscope.watch(model, "entropy") as w:
        with rankscope.watch(model, "mu"):
            pass
        with pytest.raises(WatchError, match="already being watched"), rankscope.watch(model, "entropy"):
            pass
        with pytest.raises(WatchError, match="already inside its with"), w:
            pass
    with rankscope.watch(model, "entropy"):
        pass


def test_never_called() -> None:
    model, (X, _) = encoder(), padded()
    with rankscope.watch(model) as w:
        model.forward(X)
    with pytest.raises(WatchError, match=r"call model\(...\), not model.forward"):
        w.profile()
    assert any("3 calls of blocks outside" in note for note in w.notes)


def test_a_mask_of_another_shape() -> None:
    model, sentence = Loop(), r"shape of its tokens \(2, 6\); padding_mask has \(2, 9\): give padding="
    with pytest.raises(WatchError, match=sentence), rankscope.watch(model, "mu", blocks=["first"]):
        model(torch.randn(2, 6, WIDTH), torch.zeros(2, 9, dtype=torch.bool))


def test_states_that_are_no_tokens() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1)), nn.Sequential(nn.Conv2d(3, 3, 1)))
    with pytest.raises(WatchError, match=r"must be tokens .* it holds \(1, 3, 4, 4\)"):
        seen(model, "mu", torch.randn(1, 3, 4, 4))


def test_another_arithmetic() -> None:
    model, (X, _) = encoder(), padded()
    sentence = "ran in torch.float64 and now in torch.float32: use a second"
    with pytest.raises(WatchError, match=sentence), rankscope.watch(model):
        model(X)
        model.float()(X.float())


def test_attention_that_did_not_take() -> None:
    model, batch = made("bert")
    watching = rankscope.watch(model, "entropy", blocks=["encoder.layer.0.intermediate"])
    with pytest.raises(WatchError, match="was asked for; none came through"), watching:
        model(**batch)
