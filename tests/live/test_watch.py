"""What watch promises of any model: it comes out as it went in, and says what was done."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

import rankscope
from rankscope.errors import MetricError, TokensError, WatchError
from tests.live import reference
from tests.live.families import FAMILIES, LAYERS
from tests.live.test_modules import WIDTH, Loop, encoder, padded

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
    family = FAMILIES[name]
    model, batch = family.model(), family.batch()
    with torch.no_grad():
        before = model(**batch)[0]
    inside = insides(model)
    with torch.no_grad():
        if fails:
            with pytest.raises(IndexError), rankscope.watch(model, ALL):
                model(**{**batch, "input_ids": batch["input_ids"] + 1000})
        else:
            with rankscope.watch(model, ALL):
                model(**batch)
        assert insides(model) == inside
        assert torch.equal(model(**batch)[0], before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_encoder_comes_out_as_it_went_in() -> None:
    model, (X, padding) = encoder(nested=True), padded()
    inside = insides(model)
    with torch.no_grad():
        before = model(X, src_key_padding_mask=padding)
        with rankscope.watch(model, ALL):
            model(X, src_key_padding_mask=padding)
        assert insides(model) == inside
        assert torch.equal(model(X, src_key_padding_mask=padding), before)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fails = encoder(), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.fails:
            raise ArithmeticError("inside the model")
        return x


def test_a_call_that_failed_is_not_counted_and_the_next_one_is() -> None:
    model, (X, _) = Failing(), padded()
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
    with pytest.raises(RuntimeError, match="shape"), rankscope.watch(model, ALL):
        model(X, mask=torch.zeros(3, 3, dtype=torch.float64))
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
            assert w.profile().manifest.networks[0].checks["mode"] == "train"
        else:
            model(**batch)[0].square().sum().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    plain, seen = gradients(False), gradients(True)
    assert plain and all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


def test_dropout_takes_rows_off_one_and_is_named_as_the_reason() -> None:
    model, batch = FAMILIES["bert"].model().train(), FAMILIES["bert"].batch()
    with rankscope.watch(model, "entropy") as w:
        model(**batch)
    checks = w.profile().manifest.networks[0].checks
    assert checks["rows_sum_to_one"] is False and checks["dropout"] == 0.1
    assert any("as dropout makes them" in note for note in w.notes)


def test_recomputation_for_gradients_is_not_measured_twice() -> None:
    model, batch = FAMILIES["gpt2"].model().train(), FAMILIES["gpt2"].batch()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with rankscope.watch(model, "mu") as w:
        model(**batch, use_cache=False)[0].sum().backward()
    assert w.profile().manifest.networks[0].checks["calls_per_layer"] == {"1": 1, "2": 1, "3": 1}
    assert any("3 calls of blocks outside a call of the model" in note for note in w.notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_upcast_and_keeps_its_floor(dtype: torch.dtype) -> None:
    model, batch = FAMILIES["bert"].model().to(dtype), FAMILIES["bert"].batch()
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
        with rankscope.watch(model, ["mu", "relative_mu", "entropy", "head_mu"]) as w:
            model(**batch)
    profile, real = w.profile(), batch["attention_mask"].bool()
    # Layer 0 is the same tensor; deeper ones ran eagerly, with other roundings.
    assert profile.curve("mu")[:, 0].tolist() == pytest.approx(reference.mu(states[0], real), rel=1e-12)
    assert profile.arithmetics == [str(dtype).removeprefix("torch.")]
    floor = profile.curve("relative_mu", "floor")
    assert float(floor.max()) == float(floor.min()) == 8 * torch.finfo(dtype).eps
    assert profile.manifest.networks[0].checks["rows_sum_to_one"] is True


def test_autocast_is_an_arithmetic_and_does_not_reach_the_metrics() -> None:
    model, (X, _) = encoder().float(), padded()
    watching = rankscope.watch(model, ["mu", "mean_abs_cosine"], keep="states")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), watching as w:
        model(X.float())
    assert w.profile().arithmetics == ["bfloat16"]
    real = torch.ones(2, 6, dtype=torch.bool)
    expected = [reference.mu(states[0], real) for states in w.states.values()]
    torch.testing.assert_close(
        w.profile().curve("mu"), torch.tensor(expected, dtype=torch.float64).T, rtol=1e-12, atol=0
    )


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
    with torch.no_grad(), rankscope.watch(model, ALL) as every:
        model(X)
    for metric in ALL:
        torch.testing.assert_close(w.profile().curve(metric)[:, 2], every.profile().curve(metric)[:, 2])


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
    """The linear map inside would be found, and what the adapter adds be left out without a word."""
    family = FAMILIES["bert"]
    model, batch = family.model(), family.batch()
    for block in model.encoder.layer:
        output = block.attention.output
        output.dense = Adapted(output.dense, output.dense.out_features, in_place).to(output.dense.weight)
    with torch.no_grad():
        with (
            pytest.raises(
                WatchError, match="Adapted adds to what a Linear in it returns, as LoRA does: merge it"
            ),
            rankscope.watch(model, "head_mu"),
        ):
            model(**batch)
        with rankscope.watch(model, ["mu", "entropy"]) as w:
            model(**batch)
        assert len(w.profile().table)


def test_an_adapter_that_adds_nothing_is_no_obstacle() -> None:
    family = FAMILIES["bert"]
    model, batch = family.model(), family.batch()
    with torch.no_grad():
        with rankscope.watch(model, "head_mu") as plain:
            model(**batch)
        for block in model.encoder.layer:
            dense = block.attention.output.dense
            adapted = Adapted(dense, dense.out_features, in_place=True).to(dense.weight)
            adapted.up.weight.zero_()
            block.attention.output.dense = adapted
        with rankscope.watch(model, "head_mu") as w:
            model(**batch)
    expected = plain.profile().curve("head_mu")[:, 1:]
    assert torch.equal(w.profile().curve("head_mu")[:, 1:], expected)


def test_an_interrupted_call_is_said() -> None:
    """torch runs no hooks while KeyboardInterrupt passes."""

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    family = FAMILIES["bert"]
    model = family.model()
    model.encoder.layer[1].register_forward_hook(stop)
    w = rankscope.watch(model)
    with pytest.raises(KeyboardInterrupt), w:
        model(**family.batch())
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


def test_weights_without_numbers_are_refused() -> None:
    with pytest.raises(WatchError, match="its weights are on the meta device"):
        rankscope.watch(FAMILIES["bert"].model().to("meta"))


def test_layer_0_has_no_attention() -> None:
    with pytest.raises(WatchError, match="entropy is of attention, from layer 1 on: name more layers"):
        rankscope.watch(FAMILIES["bert"].model(), ["mu", "entropy"], layers=[0])


def test_tensors_are_kept_when_asked() -> None:
    model, (X, _) = encoder(), padded()
    with torch.no_grad(), rankscope.watch(model, "mu", keep=["states", "attention"]) as w:
        model(X)
        out = model(X[:1])
    assert list(w.states) == [0, 1, 2, 3] and list(w.attention) == [1, 2, 3]
    assert torch.equal(w.states[0][0], X)
    assert torch.equal(w.states[3][1], out)
    assert w.attention[1][0].shape == (2, 4, 6, 6)
    with rankscope.watch(model, "mu") as w:
        model(X)
    with pytest.raises(WatchError, match=r"states are kept when asked for: watch\(model, keep='states'\)"):
        _ = w.states


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
    assert w.profile().manifest.networks[0].checks["first_layer_not_finite"] == 1
    assert "Numbers overflow from layer 1 on: those samples have NaN." in w.notes


def test_padding_can_be_given_or_refused() -> None:
    model, (X, padding) = encoder(), padded()
    with torch.no_grad():
        cases: list[tuple[Any, int]] = [("model", 2), ("none", 0), (padding, 2)]
        for given, expected in cases:
            with rankscope.watch(model, "mu", padding=given) as w:
                model(X, src_key_padding_mask=padding)
            assert w.profile().manifest.networks[0].checks["padded_tokens"] == expected
        watching = rankscope.watch(model, "mu", padding=padding.int())
        with pytest.raises(TokensError, match="padding must be a boolean tensor"), watching:
            model(X)


def test_the_model_is_described() -> None:
    model, batch = FAMILIES["bert"].model(), FAMILIES["bert"].batch()
    with rankscope.watch(model) as w:
        model(**batch)
    (network,) = w.profile().manifest.networks
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

    model, batch = FAMILIES["bert"].model(), FAMILIES["bert"].batch()
    with torch.no_grad(), rankscope.watch(model) as w:
        model(**batch)
    again = rankscope.Profile.read(w.profile().save(tmp_path / "profile.parquet"))
    assert again.table.equals(w.profile().table)
    page = write_run_directory(again, tmp_path / "run", "watched").read_text(encoding="utf-8")
    assert "attention was not looked at" in page
    both = rankscope.Profile.join([again, _other(w, "again")])
    assert both.variants == ["as given", "again"]


def _other(w: Any, variant: str) -> rankscope.Profile:
    w.variant = variant
    return w.profile()


class TestErrors:
    def test_not_a_module(self) -> None:
        code = "import rankscope; rankscope.watch('bert')"
        import subprocess
        import sys

        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "WatchError: watch takes a torch module; received a str" in done.stderr

    def test_compiled(self) -> None:
        model = encoder()
        with pytest.raises(
            WatchError, match="this model is compiled, .* watch the original, model._orig_mod"
        ):
            rankscope.watch(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
        model.layers[1] = torch.compile(model.layers[1], backend="eager")
        with pytest.raises(WatchError, match="its part 'layers.1' is compiled"):
            rankscope.watch(model)
        model = encoder()
        model.compile(backend="eager")
        with pytest.raises(WatchError, match="this model is compiled in place"):
            rankscope.watch(model)

    def test_metrics(self) -> None:
        with pytest.raises(MetricError, match="watch must be given at least one metric"):
            rankscope.watch(encoder(), [])
        with pytest.raises(MetricError, match="did you mean 'mu'"):
            rankscope.watch(encoder(), "muu")

    @pytest.mark.parametrize("layers", [[4], [-1], [], [1, 9]])
    def test_layers(self, layers: list[int]) -> None:
        with pytest.raises(WatchError, match=r"layers must name layers 0\.\.3; got"):
            rankscope.watch(encoder(), layers=layers)

    def test_words(self) -> None:
        with pytest.raises(WatchError, match="keep must be one of states, attention; got 'state'"):
            rankscope.watch(encoder(), keep="state")
        with pytest.raises(WatchError, match="layout must be one of batch first, token first"):
            rankscope.watch(encoder(), layout="first")

    def test_blocks(self) -> None:
        model = Loop()
        with pytest.raises(WatchError, match="it holds none: name them"):
            rankscope.watch(model)
        with pytest.raises(WatchError, match="blocks must be one of first, .*did you mean 'second'"):
            rankscope.watch(model, blocks=["secnd"])
        with pytest.raises(WatchError, match="modules inside Loop"):
            rankscope.watch(model, blocks=[nn.Linear(2, 2)])
        with pytest.raises(WatchError, match="at least one block"):
            rankscope.watch(model, blocks=[])
        with pytest.raises(WatchError, match="it is a Linear with 0"):
            rankscope.watch(model, blocks="first.up")
        with pytest.raises(WatchError, match="a ModuleList is never called itself"):
            rankscope.watch(encoder(), blocks=["layers"])

    def test_attention_that_cannot_be_seen(self) -> None:
        with pytest.raises(WatchError, match="blocks of Loop hold neither: watch metrics of tokens"):
            rankscope.watch(Loop(), "entropy", blocks=["first"]).__enter__()

    @pytest.mark.parametrize("name", ["bert", ""])
    def test_two_watchers_of_attention(self, name: str) -> None:
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

    def test_never_called(self) -> None:
        model, (X, _) = encoder(), padded()
        with rankscope.watch(model) as w:
            model.forward(X)
        with pytest.raises(WatchError, match=r"call model\(...\), not model.forward"):
            w.profile()
        assert any("3 calls of blocks outside" in note for note in w.notes)

    def test_a_mask_of_another_shape(self) -> None:
        model = Loop()
        watching = rankscope.watch(model, "mu", blocks=["first"])
        with (
            pytest.raises(WatchError, match=r"shape of its tokens \(2, 6\); it has \(2, 9\): give padding="),
            watching,
        ):
            model(torch.randn(2, 6, WIDTH), torch.zeros(2, 9, dtype=torch.bool))

    def test_states_that_are_no_tokens(self) -> None:
        model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1)), nn.Sequential(nn.Conv2d(3, 3, 1)))
        watching = rankscope.watch(model)
        with pytest.raises(WatchError, match=r"must be tokens .* it holds \(1, 3, 4, 4\)"), watching:
            model(torch.randn(1, 3, 4, 4))

    def test_another_arithmetic(self) -> None:
        model, (X, _) = encoder(), padded()
        watching = rankscope.watch(model)
        with (
            pytest.raises(WatchError, match="ran in torch.float64 and now in torch.float32: use a second"),
            watching,
        ):
            model(X)
            model.float()(X.float())

    def test_attention_that_did_not_take(self) -> None:
        family = FAMILIES["bert"]
        model, batch = family.model(), family.batch()
        watching = rankscope.watch(model, "entropy")
        with pytest.raises(WatchError, match="was asked for; none came through"), watching:
            model.set_attn_implementation("sdpa")
            model(**batch)
