"""Parity is taken with the model as it runs: beyond what its config names, padded on either side, with the
attention function that it has."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from rankscope.errors import ParityError
from rankscope.nets import Transformer
from rankscope.sources import FAMILIES, lifted, load
from rankscope.sources.families import rotary
from rankscope.sources.families.llama import Llama
from rankscope.sources.parity import Parity, ParityInputs
from tests.raising import raises
from tests.sources.models import model_of

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60,
    "max_position_embeddings": 32, "intermediate_size": 24, "pad_token_id": 0,
}  # fmt: skip
FULL, SLIDES = ["full_attention"] * 3, ["sliding_attention"] * 3


def model(kind: Any, **fields: Any) -> Any:
    """A small random model in float64."""
    torch.manual_seed(0)
    made = kind(kind.config_class(**SIZES | fields)).double().eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight += 0.3 * torch.randn_like(weight)
    return made


def loaded(made: Any) -> tuple[Transformer, Parity]:
    net: Any = load(made)
    return net, net.origin.parity


def miss(made: Any, net: Transformer, n: int) -> float:
    """How far the network is from the original on n tokens, its float32 parts lifted."""
    ids = torch.randint(1, 60, (2, n), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), lifted():
        theirs = made(ids, use_cache=False).last_hidden_state
    return float((net.run(*net.encode(ids, n)).output - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    ("kind", "fields", "mask"),
    [
        (hf.LlamaModel, {"sliding_window": 40}, "causal"),
        (hf.LlamaModel, {"sliding_window": 40, "layer_types": SLIDES}, "causal"),
        (hf.MistralModel, {"sliding_window": 40, "layer_types": FULL}, "causal&window:39"),
        (hf.MistralModel, {"sliding_window": None, "layer_types": SLIDES}, "causal"),
        (hf.Qwen2Model, {"use_sliding_window": True, "sliding_window": 40, "layer_types": FULL}, "causal"),
        (hf.LlamaModel, {"partial_rotary_factor": 0.5}, "causal"),
    ],
)
def test_fields_that_the_original_ignores_are_ignored(kind: Any, fields: dict[str, Any], mask: str) -> None:
    made = model(kind, **fields)
    net, parity = loaded(made)
    assert net.arch.mask == mask and miss(made, net, 60) < 1e-12
    assert parity.tokens > (fields.get("sliding_window") or 0) + 15 and parity.named is None


class Windowed(Llama):
    """A family that takes Llama's stray window for its mask."""

    reads: ClassVar = {**Llama.reads, "mask": rotary.sliding}


@pytest.mark.parametrize("window", [40, 4000])
def test_a_window_beyond_any_fixed_probe_is_found(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run whole where that can be afforded, else by the masks that the model's own code builds."""
    monkeypatch.setitem(FAMILIES.shipped, "llama", Windowed())
    with raises(ParityError, "masks" if window == 4000 else "states"):
        load(model(hf.LlamaModel, sliding_window=window))


def test_the_record_says_how_far_parity_was_seen() -> None:
    _, parity = loaded(model(hf.MistralModel, sliding_window=4096))
    assert (parity.tokens, parity.named) == (24, None) and parity.reach > 4096
    _, parity = loaded(model(hf.MistralModel, sliding_window=32768))
    assert (parity.tokens, parity.reach, parity.named) == (24, 24, 32768)
    _, parity = loaded(model_of("t5", "plain"))
    assert parity.tokens > 10 + 15
    assert loaded(model_of("vit", "image"))[1].tokens == 0


@pytest.mark.slow
def test_where_blocks_make_their_own_masks_nothing_is_claimed() -> None:
    """T5's bias by distance is made inside its blocks; GPT-2 hands its mask over without a name."""
    config = FAMILIES["t5"].tiny_configs()["plain"]
    config.relative_attention_max_distance = 5000
    _, parity = loaded(hf.T5EncoderModel(config).double().eval())
    assert parity.named == 5000 and parity.reach == parity.tokens < 5000
    config = FAMILIES["gpt2"].tiny_configs()["decoder"]
    config.n_positions, config.sliding_window = 3000, 2500
    assert loaded(hf.GPT2Model(config).double().eval())[1].named == 2500
    config = FAMILIES["modernbert"].tiny_configs()["no biases"]
    config.local_attention = 5000
    _, parity = loaded(hf.ModernBertModel(config).double().eval())
    assert parity.named is None and parity.reach > 5000
    config = FAMILIES["gpt_neox"].tiny_configs()["parallel"]
    config.sliding_window = 3000
    assert loaded(hf.GPTNeoXModel(config).double().eval())[1].reach > 3000


def test_angles_at_a_length_too_long_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles that are off by 1e-9 a position are the same at 24 tokens, within parity, and not at 4,000."""
    rope: Any = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": 4000}  # fmt: skip
    made = model(hf.LlamaModel, rope_parameters=rope)
    assert loaded(made)[1].reach > 4000

    class Off(Llama):
        def architecture(self, config: Any) -> Any:
            arch = super().architecture(config)
            off = tuple(tuple(a + 1e-12 for a in layer) for layer in arch.rotary_frequencies)
            return arch.replace(rotary_frequencies=off)

    monkeypatch.setitem(FAMILIES.shipped, "llama", Off())
    with raises(ParityError, "masks"):
        load(made)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "opt", "llama", "t5", "modernbert", "xlnet"])
def test_padding_on_the_left_against_the_original(name: str) -> None:
    """The original is told which token is which where it would count padding."""
    made = model_of(name, next(iter(FAMILIES[name].tiny_configs())))
    net: Any = load(made)
    core, pad = FAMILIES[name].core(made), getattr(made.config, "pad_token_id", None) or 0
    ids = torch.randint(2, 60, (1, 9), generator=torch.Generator().manual_seed(2))
    left = torch.cat([torch.full((1, 5), pad), ids], 1)
    padding = torch.arange(14)[None] < 5
    counted = ((~padding).cumsum(1) - 1).clamp(min=0)
    places = {"position_ids": counted} if name in ("bert", "gpt2") else {}
    with torch.no_grad(), lifted():
        theirs = core(input_ids=left, attention_mask=(~padding).long(), **places).last_hidden_state
    mine = net.run(*net.encode(left, padding=padding)).output
    torch.testing.assert_close(mine[:, 5:], theirs[:, 5:], rtol=1e-10, atol=1e-10)


@contextmanager
def registered(name: str, function: Any) -> Iterator[None]:
    before = AttentionInterface._global_mapping.get(name)
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, eager_mask)
    try:
        yield
    finally:
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]
        if before is not None:
            AttentionInterface.register(name, before)


def sharper(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
    return eager_attention_forward(module, 3.0 * query, *args, **kwargs)


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a kernel that needs another machine")


def test_an_attention_function_of_ones_own_is_the_model_that_runs() -> None:
    with registered("mine", sharper), raises(ParityError, "attn_implementation"):
        load(model(hf.LlamaModel, attn_implementation="mine"))
    with registered("mine", broken), raises(ParityError, "attn_implementation"):
        load(model(hf.LlamaModel, attn_implementation="mine"))
    with registered("mine", eager_attention_forward):
        assert loaded(model(hf.LlamaModel, attn_implementation="mine"))[1].states < 1e-12


def test_a_usual_name_with_another_function_behind_it() -> None:
    """sdpa runs as it is, whatever it is."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    assert loaded(model(hf.LlamaModel, attn_implementation="sdpa"))[1].states < 1e-12
    made = model(hf.LlamaModel, attn_implementation="sdpa")
    AttentionInterface.register("sdpa", lambda module, q, *a, **k: sdpa_attention_forward(module, 3 * q, *a, **k))
    try:
        with raises(ParityError, "states"):
            load(made)
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


@pytest.mark.parametrize("n", [24, 31, 60])
def test_samples_are_padded_at_the_end_and_at_the_beginning(n: int) -> None:
    """7 tokens of the second, 15 of the third; padding has its own id, and positions count the tokens."""
    made = model(hf.LlamaModel, max_position_embeddings=64)
    net, family = loaded(made)[0], FAMILIES["llama"]
    probe = ParityInputs.long(family, made, net.origin.embedding, n)  # type: ignore[union-attr]
    assert probe.padding is not None and probe.tokens == n
    rows = [[False] * n, [False] * (n - 7) + [True] * 7, [True] * 15 + [False] * (n - 15)]
    assert probe.padding.tolist() == rows
    assert torch.equal(probe.inputs == 0, probe.padding)
