"""What counts as a call, as a layer and as a sample."""

import gc
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import rankscope
from rankscope.errors import WatchError
from rankscope.live import Watch
from tests.live import reference
from tests.live.encoders import Loop, Mixer, encoder, padded
from tests.live.families import FAMILIES, GPT2, LAYERS, WIDTH, checks, made, seen, tiny
from tests.raising import raises

ALL = ["mu", "entropy", "head_mu"]


def test_blocks_can_be_named_and_called_many_times() -> None:
    model = Loop()
    X, padding = torch.randn(2, 6, WIDTH), padded()[1]
    states = [X]
    for block in (model.first, model.second, model.second):
        states.append(block(states[-1])["x"].detach())
    with rankscope.watch(model, "mu", blocks=["first", model.second]) as w:
        model(X, padding)
    expected = torch.stack([reference.mu(state, ~padding) for state in states], 1)
    torch.testing.assert_close(w.profile().curve("mu"), expected)


def test_a_layer_that_never_fired_is_said() -> None:
    model = Loop()
    with rankscope.watch(model, "mu", blocks=["first", "second", "second", "spare"]) as w:
        model(torch.randn(2, 6, WIDTH))
    assert checks(w)["never_fired"] == [4]
    assert checks(w)["calls_per_layer"] == {"1": 1, "2": 1, "3": 1, "4": 0}
    assert "Layers that never fired, and have no values: 4." in w.notes


class Orders(nn.Module):
    """Blocks that are called in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixer() for _ in range(3))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        self.states = [x]
        for k in order:
            self.states.append(self.blocks[k](self.states[-1])["x"])
        return self.states[-1]


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 0, 2], [2, 0, 1], [2, 2, 0], [0, 1, 2], [0, 1, 0]])
def test_layers_are_numbered_in_the_order_of_the_calls(order: list[int]) -> None:
    model, X = Orders(), torch.randn(2, 6, WIDTH)
    with torch.no_grad(), rankscope.watch(model, "mu", keep="states") as w:
        model(X, order)
    every = torch.ones(2, 6, dtype=torch.bool)
    expected = torch.stack([reference.mu(state, every) for state in model.states], 1)
    torch.testing.assert_close(w.profile().curve("mu"), expected)
    assert [torch.equal(kept[0], state) for kept, state in zip(w.states.values(), model.states, strict=True)] == [
        True
    ] * 4
    assert checks(w)["calls_per_layer"] == {"1": 1, "2": 1, "3": 1} and checks(w)["never_fired"] == []
    disorder = [[k + 1 for k in order]] if order[0] else []
    assert checks(w)["orders_of_blocks"] == disorder
    assert any("in another order" in note for note in w.notes) == bool(disorder)


def test_layers_to_measure_are_asked_for_in_the_order_of_the_calls() -> None:
    model, X = Orders(), torch.randn(2, 6, WIDTH)
    with raises(WatchError, subject="layers"), torch.no_grad(), rankscope.watch(model, "mu", layers=[1, 3]):
        model(X, [2, 1, 0])
    reverse = [f"blocks.{k}" for k in (2, 1, 0)]
    with torch.no_grad(), rankscope.watch(model, "mu", layers=[1, 3], blocks=reverse) as w:
        model(X, [2, 1, 0])
    every = torch.ones(2, 6, dtype=torch.bool)
    for k in (1, 3):
        torch.testing.assert_close(w.profile().curve("mu")[:, k], reference.mu(model.states[k], every))


def test_a_block_that_is_passed_over_keeps_its_number() -> None:
    """As LayerDrop does, in some calls of a training: a layer is the same block in all."""
    model, X = Orders(), torch.randn(2, 6, WIDTH)
    with torch.no_grad(), rankscope.watch(model, "mu") as w:
        model(X, [0, 2])
    assert checks(w)["never_fired"] == [2] and checks(w)["orders_of_blocks"] == []
    assert w.profile().table["layer"].unique().to_list() == [0, 1, 3]


def test_no_block_called_is_an_error() -> None:
    model = Loop()
    with rankscope.watch(model, "mu", blocks=["spare"]) as w:
        model(torch.randn(2, 6, WIDTH))
    with raises(WatchError, subject="model"):
        w.profile()


def test_a_shared_layer_is_as_many_layers_as_it_is_called() -> None:
    model, batch = made("albert")
    with torch.no_grad(), rankscope.watch(model, ["mu"], layers=[0, LAYERS]) as w:
        model(**batch)
    assert w.profile().table["layer"].unique().to_list() == [0, LAYERS]
    assert checks(w)["calls_per_layer"] == {"1": 1, "2": 1, "3": 1}


def test_generation_measures_the_prompt_and_leaves_out_what_the_cache_goes_on_from() -> None:
    model = tiny(hf.GPT2LMHeadModel, **GPT2, bos_token_id=1, eos_token_id=2)().eval()
    ids = torch.randint(3, 40, (2, 5))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}
    with rankscope.watch(model, ["mu", "entropy"]) as w:
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert checks(w)["calls"] == 4
    assert checks(w)["calls_left_out"] == {"it went on from a cache": 3}
    assert w.profile().curve("mu").shape == (2, LAYERS + 1)
    assert "3 calls were left out: it went on from a cache." in w.notes


def test_a_single_token_is_left_out() -> None:
    w = seen(FAMILIES["bert"].model(), "mu", torch.tensor([[5]]))
    with raises(WatchError, subject="model"):
        w.profile()
    assert "1 call was left out: it had a single token." in w.notes


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


def test_a_call_is_left_out_for_one_reason_alone() -> None:
    model = FAMILIES["bert"].model()
    single = torch.tensor([[5]])

    def fail(*args: Any) -> None:
        raise ArithmeticError

    with rankscope.watch(model, "mu") as w:
        handle = model.encoder.layer[-1].register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            model(single)
        handle.remove()
    assert any(note.startswith("1 call was left out: it had a single token") for note in w.notes)
    assert not any("it failed" in note for note in w.notes)


def test_recomputation_for_gradients_is_not_measured_twice() -> None:
    model, batch = made("gpt2")
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls: list[Any] = []
    for block in model.h:
        block.register_forward_pre_hook(lambda *call: calls.append(call))  # checkpoints stop before a block ends
    with rankscope.watch(model, "mu") as w:
        model(**batch, use_cache=False)[0].sum().backward()
    assert checks(w)["calls_per_layer"] == {"1": 1, "2": 1, "3": 1}
    again = len(calls) - 3  # 3 with transformers 5.22; with 5.23 hooks of blocks are called once
    said = [note for note in w.notes if "calls of blocks outside a call of the model" in note]
    assert len(said) == (again > 0) and all(f"{again} calls" in note for note in said)


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
    with raises(WatchError, subject="model"):
        w.profile()


def test_calls_after_an_interrupted_one_are_measured() -> None:
    interrupted = iter([False, True, False])

    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if next(interrupted):
                raise KeyboardInterrupt
            return x

    layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)]
    model, x = nn.Sequential(layers[0], Interrupted(), layers[1]), torch.randn(2, 5, 8)
    with rankscope.watch(model, blocks=layers) as w:
        model(x)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model(x)
    assert w.notes[0] == "The model was called 3 times; 4 samples were measured."
    assert "1 call was left out: it was interrupted." in w.notes


def test_nothing_is_said_of_what_did_not_run() -> None:
    model = encoder()
    w = rankscope.watch(model)
    assert not any("ran in" in note for note in w.notes)
    with torch.no_grad(), w:
        model(torch.zeros(0, 5, WIDTH, dtype=torch.float64))
    with raises(WatchError, subject="model"):
        w.profile()
    assert "1 call was left out: it had no samples." in w.notes


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


def test_never_called() -> None:
    model, (X, _) = encoder(), padded()
    with rankscope.watch(model) as w:
        model.forward(X)
    with raises(WatchError, subject="model"):
        w.profile()
    assert any("3 calls of blocks outside" in note for note in w.notes)


def test_another_arithmetic() -> None:
    model, (X, _) = encoder(), padded()
    with raises(WatchError, subject="model"), rankscope.watch(model):
        model(X)
        model.float()(X.float())


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fails = encoder(), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.fails:
            raise ArithmeticError("inside the model")
        return x


def curves(w: Watch) -> torch.Tensor:
    return w.profile().curve("mu")


def test_reading_between_calls_changes_nothing() -> None:
    """States that wait are read when they are asked for, or all at the end."""
    model, (X, padding) = encoder(), padded()
    with torch.no_grad(), rankscope.watch(model, "mu") as often, rankscope.watch(model, "mu") as once:
        for k in range(3):
            model(X + k, src_key_padding_mask=padding)
            assert curves(often).shape == (2 * (k + 1), 4)
            assert often.notes
    assert torch.equal(curves(often), curves(once))


def test_many_calls_are_kept_as_their_numbers() -> None:
    """No tensor or object for each number, and the numbers are those of every call by itself."""
    model, inputs = Loop(), [torch.randn(2, 3 + k % 4, WIDTH) for k in range(9)]
    options: dict[str, Any] = {"blocks": ["first", "second", "second"]}
    alone = []
    for x in inputs:
        with torch.no_grad(), rankscope.watch(model, ALL[:1], **options) as w:
            model(x)
        alone.append(w.profile().curve("mu"))

    def tensors() -> int:
        gc.collect()
        return sum(type(x) is Tensor for x in gc.get_objects())

    with torch.no_grad(), rankscope.watch(model, ALL[:1], **options) as w:
        before = tensors()
        for k in range(900):
            model(inputs[k % 9])
        assert w.stacks[""].totals.readings
        assert tensors() - before < 3 * 900, "a mean of less than three for the twelve numbers of a call"
    assert torch.equal(w.profile().curve("mu"), torch.cat([alone[k % 9] for k in range(900)]))
