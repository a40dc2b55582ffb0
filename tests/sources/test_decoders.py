"""Decoders of encoder-decoders against their originals, with what the encoder gives as their memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.errors import ArchitectureError, PathError, SourceError, TheoremError, TokensError
from rankscope.nets import Transformer
from rankscope.paths import decompose
from rankscope.profiles import measure
from rankscope.sources import FAMILIES, lifted, load, network_on_batch
from rankscope.theory import certify, critical_skip, transverse_exponent
from tests.raising import raises
from tests.sources.models import DECODERS, model_of
from tests.sources.originals import WITHIN, padded

SIDES = {f"{name}_decoder": name for name in ("t5", "mt5", "bart", "marian", "whisper")}


def given(model: Any, name: str, length: int, side: str, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """What the original decoder takes, and the padding of its tokens; the memory is padded on the other side,
    where the original can be told."""
    generator = torch.Generator().manual_seed(seed)
    words, padding = padded(length, side, seed)
    aside = padded(6, "left" if side == "right" else "right", seed)[1]
    memory = torch.randn(3, 6, model.config.hidden_size, generator=generator, dtype=torch.float64)
    found = words | {"encoder_hidden_states": memory}
    if model.config.pad_token_id is not None:  # M2M-100 counts positions by it
        found["input_ids"] = found["input_ids"].masked_fill(padding, model.config.pad_token_id)
    if name != "whisper_decoder":
        del found["position_ids"]
        found["encoder_attention_mask"] = (~aside).long()
    return found, padding


def reading(net: Transformer, inputs: dict[str, Tensor]) -> Transformer:
    mask = inputs.get("encoder_attention_mask")
    return net.with_memory(inputs["encoder_hidden_states"], None if mask is None else mask == 0)


def off(mine: Tensor, theirs: Tensor, real: Tensor) -> float:
    return float((mine - theirs)[real].detach().abs().max() / theirs[real].detach().abs().max())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "label"), DECODERS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_states_attention_and_gradients_are_the_originals(name: str, label: str, seed: int) -> None:
    """Gradients in the tokens of layer 0 and in the memory, of a random linear function of the output."""
    model: Any = model_of(name, label, seed)
    core, net = FAMILIES[name].core(model), load(model, family=name)
    for length, side in ((1, "right"), (5, "left"), (9, "right"), (17, "left")):
        inputs, padding = given(core, name, length, side, seed)
        real, memory = ~padding, inputs["encoder_hidden_states"].requires_grad_()
        entered: list[Tensor] = []

        def leaf(module: Any, args: Any, kept: list[Tensor] = entered) -> Any:
            kept.append(args[0].detach().requires_grad_())
            return (kept[0], *args[1:])

        handle = FAMILIES[name].blocks(core)[0].register_forward_pre_hook(leaf)
        with lifted():
            theirs = core(**inputs, output_hidden_states=True, output_attentions=True, use_cache=False)
        handle.remove()
        X = net.encode(inputs["input_ids"], padding=padding).X.requires_grad_()
        run = reading(net, inputs).run(X, padding, attention=True)
        for mine, state in zip(run.states[1:-1], theirs.hidden_states[1:-1], strict=True):
            assert off(mine, state, real) <= WITHIN
        assert off(X, entered[0], real) <= WITHIN and off(run.output, theirs.last_hidden_state, real) <= WITHIN
        pairs = [*zip(run.attention, theirs.attentions, strict=True)]
        pairs += [*zip(run.cross, theirs.cross_attentions, strict=True)]
        assert len(pairs) == 2 * net.arch.layers
        for P, Q in pairs:
            assert float(((P - Q) * real[:, None, :, None]).detach().abs().max()) <= WITHIN
        weigh = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed), dtype=X.dtype)
        weigh = weigh * real[..., None]
        found = torch.autograd.grad((run.output * weigh).sum(), (X, memory))
        expected = torch.autograd.grad((theirs.last_hidden_state * weigh).sum(), (entered[0], memory))
        assert off(found[0], expected[0], real) <= WITHIN
        assert off(found[1], expected[1], torch.ones(memory.shape[:2], dtype=torch.bool)) <= WITHIN


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "label"), DECODERS)
def test_deviation_and_float64_agree(name: str, label: str) -> None:
    model: Any = model_of(name, label)
    net = load(model, family=name)
    inputs, padding = given(model, name, 7, "left", 2)
    net = reading(net, inputs)
    X = net.encode(inputs["input_ids"], padding=padding).X
    curves = [measure(net, X, padding, "mu", kind).curve("mu") for kind in ("deviation", "float64")]
    torch.testing.assert_close(*curves, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", SIDES)
@torch.no_grad()
def test_both_sides_are_the_whole(name: str) -> None:
    """The decoder reading the encoder's output is the model of both."""
    model: Any = model_of(name, next(iter(FAMILIES[name].tiny_configs())))
    encoder, decoder = load(model), load(model, family=name)
    inner: Any = encoder.origin
    assert inner.family == SIDES[name]
    there, padding = padded(6, "right", 4)
    if name == "whisper_decoder":
        sound = torch.randn(3, *inner.embedding.shape, dtype=torch.float64)
        given = {"input_features": sound}
        M, aside = encoder.encode(sound)
    else:
        M, aside = encoder.encode(there["input_ids"], padding=padding)
        given = {name: there[name] for name in ("input_ids", "attention_mask")}
    words = padded(5, "right", 5)[0]["input_ids"]
    with lifted():
        theirs = model(**given, decoder_input_ids=words).last_hidden_state
    mine = decoder.with_memory(encoder.run(M, aside).output, aside).run(decoder.encode(words).X).output
    assert off(mine, theirs, torch.ones(words.shape, dtype=torch.bool)) <= WITHIN


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SIDES)
def test_each_side_by_itself_is_known_for_what_it_is(name: str, tmp_path: Path) -> None:
    """Taken out of the model, and read from its files."""
    model: Any = model_of(name, next(iter(FAMILIES[name].tiny_configs())))
    decoder = load(model, family=name)
    assert load(FAMILIES[name].core(model)).fingerprint == decoder.fingerprint
    if name != "t5_decoder":  # whose encoder alone has a class of its own
        assert load(model.encoder).fingerprint == load(model).fingerprint
    model.save_pretrained(tmp_path)
    assert load(tmp_path, family=name).fingerprint == decoder.fingerprint
    with raises(SourceError, "family"):
        load(model, family="bert")


def test_a_decoder_is_saved_without_its_memory(tmp_path: Path) -> None:
    net = load(model_of("bart_decoder", "plain"), family="bart_decoder")
    M = torch.randn(1, 4, 16, dtype=torch.float64)
    net.with_memory(M).save(tmp_path)
    again = load(tmp_path)
    assert again.memory is None and again.fingerprint == net.fingerprint != net.with_memory(M).fingerprint
    ids = torch.tensor([[3, 4, 5]])
    outputs = [each.with_memory(M).run(each.encode(ids).X).output for each in (net, again)]
    assert torch.equal(*outputs)
    with raises(SourceError, "family"):
        net.to_hf()


def test_a_batch_of_a_decoder_is_its_own() -> None:
    core: Any = FAMILIES["t5_decoder"].core(model_of("t5_decoder", "gated"))
    inputs, padding = given(core, "t5_decoder", 6, "left", 1)
    net, X, found = network_on_batch(core, inputs)
    assert (
        found is not None
        and torch.equal(found, padding)
        and net.memory is not None
        and len(net.run(X, found).states) == 3
    )
    with raises(TokensError, "encoder_hidden_states"):
        network_on_batch(core, {key: inputs[key] for key in ("input_ids", "attention_mask")})


def test_what_needs_tokens_of_one_kind_is_refused() -> None:
    """Each in a sentence that says why."""
    net = load(model_of("t5_decoder", "plain"), family="t5_decoder")
    X, M = torch.randn(1, 4, 16, dtype=torch.float64), torch.randn(2, 4, 16, dtype=torch.float64)
    with raises(TokensError, "memory"):
        net.run(X)
    with raises(TokensError, "memory"):
        net.with_memory(M).run(X)
    with raises(TokensError, "memory"):
        net.with_memory(M[..., 1:])
    with raises(TokensError, "padding"):
        net.with_memory(M, torch.ones(2, 4, dtype=torch.bool))
    with raises(ArchitectureError, "cross_attention"):
        load(model_of("t5", "plain")).with_memory(M)
    net = net.with_memory(M[:1])
    with raises(PathError, "cross_attention"):
        decompose(net, X)
    with raises(TheoremError, "architecture"):
        certify(net, X)
    with raises(ArchitectureError, "architecture"):
        critical_skip(net, X)
    with raises(ArchitectureError, "architecture"):
        transverse_exponent(net, X[0, 0], 4)
