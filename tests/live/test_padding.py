"""Padding is read off whatever the model is called with."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankscope
from rankscope.errors import WatchError
from rankscope.live.padding import arguments_of, continues_from_cache, find_padding, is_decoder
from tests.raising import raises

REAL = torch.tensor([[1, 1, 1], [1, 0, 0]])


def padding_in(arguments: dict[str, Any], decoder: bool = False) -> Tensor | None:
    """What a call with these says of 2 x 3 tokens."""
    found = find_padding([arguments], {}, (2, 3), decoder)
    return None if found is None else found.padding


class Named(nn.Module):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **rest: Any) -> Tensor:
        return x


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


@pytest.mark.parametrize("model", [Named(), Wrapper(Named()), Wrapper(Wrapper(Named()))])
@pytest.mark.parametrize("by_name", [True, False])
def test_positional_and_named_masks_are_found_also_behind_wrappers(model: nn.Module, by_name: bool) -> None:
    x = torch.zeros(2, 3, 4)
    found = arguments_of(model, (x,), {"attention_mask": REAL}) if by_name else arguments_of(model, (x, REAL), {})
    padding = padding_in(found)
    assert padding is not None and torch.equal(padding, REAL == 0)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("attention_mask", REAL),
        ("attention_mask", REAL.bool()),
        ("attention_mask", REAL.float()),
        ("src_key_padding_mask", REAL == 0),
        ("key_padding_mask", torch.zeros(2, 3).masked_fill(REAL == 0, -torch.inf)),
        ("padding_mask", REAL == 0),
    ],
)
def test_every_way_of_saying_padding(name: str, mask: Tensor) -> None:
    padding = padding_in({name: mask})
    assert padding is not None and torch.equal(padding, REAL == 0)


def test_masks_that_say_who_sees_whom_are_no_padding() -> None:
    assert padding_in({"attention_mask": torch.ones(2, 1, 3, 3)}) is None
    assert padding_in({"attention_mask": None}) is None
    assert padding_in({"attention_mask": {"full_attention": REAL}}) is None
    assert padding_in({}) is None


def test_a_decoder_beside_an_encoder_has_its_own() -> None:
    both = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
    assert is_decoder(both, "decoder.layers") and not is_decoder(both, "encoder.layers")
    assert not is_decoder(Named(), "decoder.layers")
    assert padding_in({"src_key_padding_mask": REAL == 0}, decoder=True) is None
    padding = padding_in({"tgt_key_padding_mask": REAL == 0}, decoder=True)
    assert padding is not None and torch.equal(padding, REAL == 0)


class Deep(nn.Module):
    """Real layers, called in the ways that models are."""

    def __init__(self, how: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.how, self.body = how, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.gains = nn.Parameter(torch.linspace(0.5, 2, 8, dtype=torch.float64))

    def forward(self, batch: Any = None, mask: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        if self.how in ("dictionary", "nested"):
            inside = batch if self.how == "dictionary" else batch["features"][0]
            x, padding = inside["x"], inside["attention_mask"] == 0
        elif self.how == "inside":  # the wrapper makes its mask by itself
            x, padding = batch, (batch == 0).all(-1)
        else:
            x, given = batch, mask if pad is None else pad
            assert given is not None
            padding = given == 0 if self.how == "mask, 1 is real" else given.bool()
        return self.body(x * self.gains, src_key_padding_mask=padding)


def called(how: str, x: Tensor, real: Tensor) -> dict[str, Any]:
    inside = {"x": x, "attention_mask": real.long()}
    ways: dict[str, dict[str, Any]] = {
        "dictionary": {"batch": inside},
        "nested": {"batch": {"features": [inside]}},
        "inside": {"batch": x},
        "mask, 1 is real": {"batch": x, "mask": real},
        "mask, 1 is padding": {"batch": x, "mask": ~real},
        "a name of its own": {"batch": x, "pad": ~real},
    }
    return ways[how]


WAYS = ["dictionary", "nested", "inside", "mask, 1 is real", "mask, 1 is padding", "a name of its own"]


@pytest.mark.parametrize("how", WAYS)
def test_a_short_text_reads_as_it_does_alone(how: str) -> None:
    """Wherever its mask is kept."""
    torch.manual_seed(0)
    model, x = Deep(how).double().eval(), torch.randn(2, 6, 8, dtype=torch.float64)
    real = torch.ones(2, 6, dtype=torch.bool)
    real[1, 3:] = False
    x = x * real[..., None]
    with torch.no_grad(), rankscope.watch(model, "relative_mu") as w:
        model(**called(how, x, real))
        model(**called(how, x[1:, :3], real[1:, :3]))
    together, alone = w.profile().curve("relative_mu")[1:]
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=0)
    assert any(note.startswith("3 padded tokens were left out, by ") for note in w.notes)


def test_a_mask_that_may_mean_either_carries_both_readings() -> None:
    either = torch.tensor([[1, 1, 0], [1, 0, 0]])
    for name in ("mask", "attention_mask", "padding_mask"):
        found = find_padding([{name: either}], {}, (2, 3))
        assert found is not None and found.opposite is not None and torch.equal(found.opposite, ~found.padding)
        for hidden in (either == 0, either == 1):
            settled = found.settled_by(hidden)
            assert settled is not None and torch.equal(settled.padding, hidden)
        assert found.settled_by(torch.zeros(2, 3, dtype=torch.bool)) is None
    added = torch.zeros(2, 3).masked_fill(REAL == 0, -torch.inf)
    found = find_padding([{"mask": added}], {}, (2, 3))
    assert found is not None and torch.equal(found.padding, REAL == 0)


@pytest.mark.parametrize("name", ["mask", "attention_mask"])
def test_a_causal_mask_of_as_many_samples_as_tokens_is_no_padding(name: str) -> None:
    triangle = torch.ones(3, 3).tril()
    for mask in (
        triangle,
        1 - triangle,
        triangle.mT,
        triangle.bool(),
        torch.zeros(3, 3).masked_fill(triangle == 0, -1e9),
    ):
        assert find_padding([{name: mask}], {}, (3, 3)) is None
    # torch's own say with it who sees whom.
    body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    assert "mask" not in arguments_of(body, (torch.zeros(3, 3, 8),), {"mask": triangle})


def test_a_batch_is_not_all_padding() -> None:
    """Zeros alone are a mask that is added, or one with True at padding."""
    for mask in (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)):
        padding = padding_in({"attention_mask": mask})
        assert padding is not None and not padding.any()


@pytest.mark.slow
def test_a_library_says_what_its_masks_mean() -> None:
    """Also where both readings are possible: no sample is as long as the batch."""
    import transformers as hf

    both = torch.tensor([[1, 1, 0], [1, 0, 0]])
    bert = hf.BertModel(hf.BertConfig(num_hidden_layers=0))
    xlnet = hf.XLNetModel(hf.XLNetConfig(n_layer=0))
    torchs = nn.MultiheadAttention(8, 2)
    x = torch.zeros(2, 3, 8)
    for module, arguments, padding in (
        (bert, {"attention_mask": both}, both == 0),
        (xlnet, {"attention_mask": both}, both == 0),
        (xlnet, {"input_mask": both.float()}, both == 1),
        (torchs, {"query": x, "key": x, "value": x, "key_padding_mask": both.bool()}, both == 1),
    ):
        found = find_padding([arguments_of(module, (), arguments)], {}, (2, 3))
        assert found is not None and found.opposite is None and torch.equal(found.padding, padding)


@pytest.mark.slow
def test_a_documented_mask_goes_before_that_of_a_wrapper() -> None:
    import transformers as hf

    bert = hf.BertModel(hf.BertConfig(num_hidden_layers=0))
    inner = arguments_of(bert, (), {"attention_mask": REAL})
    found = find_padding([{"attention_mask": 1 - REAL}, inner], {}, (2, 3))
    assert found is not None and torch.equal(found.padding, REAL == 0)


def test_the_mask_of_a_text_says_nothing_of_images() -> None:
    """A vision tower of as many patches as the text has tokens."""
    import transformers as hf

    text = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    images = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 4, "patch_size": 4}
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=images, projection_dim=4)).eval()
    given = {"input_ids": torch.tensor([[3, 4], [3, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}
    for blocks, padded in (("text_model", 1), ("vision_model", 0)):
        with torch.no_grad(), rankscope.watch(model, "mu", blocks=blocks) as w:
            model(**given, pixel_values=torch.randn(2, 3, 4, 4))
        assert w.profile().manifest.networks[0].checks["padded_tokens"] == padded


CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("valid", [REAL.bool(), torch.ones(2, 3, dtype=torch.bool)])
@pytest.mark.parametrize("causal", [True, False])
def test_four_axes_say_what_is_seen_or_what_is_hidden(hidden: bool, valid: Tensor, causal: bool) -> None:
    """A token sees itself: so a boolean mask shows which way round it is."""
    visible = valid[:, None, None] & (CAUSAL if causal else torch.ones_like(CAUSAL))
    found = find_padding([], {"attention_mask": ~visible if hidden else visible}, (2, 3))
    assert found is not None and found.opposite is None and torch.equal(found.padding, ~valid)


def test_four_axes_that_may_mean_either() -> None:
    valid = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    found = find_padding([], {"attention_mask": valid[:, None, None]}, (2, 3))
    assert found is not None and torch.equal(found.padding, ~valid)
    assert found.opposite is not None and torch.equal(found.opposite, valid)
    added = torch.zeros(2, 1, 3, 3).masked_fill(~valid[:, None, None], torch.finfo(torch.float32).min)
    found = find_padding([], {"attention_mask": added}, (2, 3))
    assert found is not None and found.opposite is None and torch.equal(found.padding, ~valid)


class Secret(nn.Module):
    """Blocks that are given padding under a name that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SecretLayer() for _ in range(2))

    def forward(self, x: Tensor, ghosts: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, ghosts)
        return x


class SecretLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, ghosts: Tensor | None) -> Tensor:
        found: Tensor = x + self.inner(x, x, x, key_padding_mask=ghosts)[0]
        return found


def test_where_no_mask_is_found_it_is_said() -> None:
    model, x = Secret().eval(), torch.randn(2, 3, 8)
    with torch.no_grad(), rankscope.watch(model, "mu") as w:
        model(x)
    assert "No mask was found: every token counts as real; padding= says which are not." in w.notes
    with raises(WatchError, subject="padding"), torch.no_grad(), rankscope.watch(model, "mu"):
        model(x, REAL == 0)
    with torch.no_grad(), rankscope.watch(model, "mu", padding=REAL == 0) as w:
        model(x, REAL == 0)
    assert "2 padded tokens were left out, as padding= said." in w.notes


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_the_mask_that_reaches_a_block(how: str) -> None:
    """A model that makes its own attention_mask from ids: padding is what no token may look at."""
    from tests.live.families import FAMILIES

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = FAMILIES["llama"].model(how)

        def forward(self, ids: Tensor) -> Any:
            layers, real = self.inner.model, (ids > 0).long()
            return layers(inputs_embeds=layers.embed_tokens(ids), attention_mask=real, use_cache=False)

    ids = torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0]])
    model = Outer()
    for blocks in ("inner.model.layers", ["inner.model.layers.0", "inner.model.layers.1"]):
        with torch.no_grad(), rankscope.watch(model, "mu", blocks=blocks) as w:
            model(ids)
        assert any(note.startswith("2 padded tokens were left out, by attention_mask") for note in w.notes)
    seen: list[dict[str, Any]] = []
    hook = model.inner.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(arguments_of(module, args, kwargs)), with_kwargs=True
    )
    model(ids)
    hook.remove()
    found = find_padding([], seen[0], (2, 4))
    assert found is not None and torch.equal(found.padding, ids == 0)


def test_a_cache_with_something_in_it_is_gone_on_from() -> None:
    from transformers import DynamicCache

    cache = DynamicCache()
    assert not continues_from_cache({"past_key_values": cache}) and not continues_from_cache({"past_key_values": None})
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert continues_from_cache({"past_key_values": cache})


def test_a_mask_of_another_shape_is_refused_where_a_module_around_the_blocks_took_it() -> None:
    wrong = {"attention_mask": torch.tensor([[1, 1], [1, 0]])}
    assert find_padding([], wrong, (2, 3)) is None
    for calls in ([wrong], [wrong, {}]):
        with raises(WatchError, subject="attention_mask"):
            find_padding(calls, wrong, (2, 3))
    assert find_padding([{"mask": wrong["attention_mask"]}], {}, (2, 3)) is None
