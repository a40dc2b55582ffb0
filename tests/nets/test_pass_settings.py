"""Cross-attention and latents of networks that are built, not loaded: against the formulas, and refusals."""

from typing import Any

import pytest
import torch

from rankscope.errors import TokensError
from rankscope.nets import Architecture, Dropout, PassSettings, TokenOrder, Transformer, padding_from, training_states
from tests.builders import awake, normal
from tests.raising import raises

CROSS: dict[str, Any] = {"layers": 2, "width": 8, "heads": 2, "cross_attention": True}
LATENT: dict[str, Any] = {"layers": 1, "width": 8, "heads": 2, "head_width": 6, "query_latent": 3,
                          "key_latent": 5, "value_width": 3}  # fmt: skip


def test_cross_attention_is_its_formula() -> None:
    """One bare layer whose own attention adds nothing: X + sum_h softmax(X Q (M K)^T / sqrt c) M V O."""
    arch = Architecture(**{**CROSS, "layers": 1}, mlp="none", norm="none", biases=False)
    tensors = awake(arch, 3).state_dict()
    tensors["layers.0.attention.output.weight"] = torch.zeros(2, 4, 8, dtype=torch.float64)
    X, M = normal(1, 5, 8, seed=1), normal(1, 7, 8, seed=2)
    run = Transformer.from_weights(arch, tensors).with_memory(M).run(X, attention=True)
    Q, K, V, out = (tensors[f"layers.0.cross.{name}.weight"] for name in ("query", "key", "value", "output"))
    added = torch.zeros_like(X)
    for h in range(2):
        P = ((X @ Q[:, h]) @ (M @ K[:, h]).mT / 2.0).softmax(-1)
        torch.testing.assert_close(run.cross[0][:, h], P, rtol=1e-13, atol=1e-15)
        added = added + P @ (M @ V[:, h]) @ out[h]
    torch.testing.assert_close(run.output, X + added, rtol=1e-13, atol=1e-14)


def test_latents_are_their_formula() -> None:
    """Keys see beside the latent what is to be rotated; at one token positions turn nothing, and P is 1."""
    arch = Architecture(**LATENT, mlp="none", norm="none", attention_skip=0.0, positions="rotary",
                        rotary_share=2 / 6)  # fmt: skip
    net, X = awake(arch, 3), normal(1, 1, 8, seed=1)
    w = net.weights.layers[0].attention
    assert w.key_latent is not None and w.key_latent.norm.gain is not None and w.key_latent.bias is not None
    assert w.key_latent.weight.shape == (8, 7) and w.key.weight.shape == (7, 2, 6)
    Y = (X @ w.key_latent.weight + w.key_latent.bias)[..., :5]
    Y = Y / (Y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.key_latent.norm.gain
    said = torch.stack([Y @ w.value.weight[:, h] @ w.output.weight[h] for h in range(2)]).sum(0)
    assert w.output.bias is not None
    torch.testing.assert_close(net.run(X).output, said + w.output.bias, rtol=1e-12, atol=1e-14)


def test_variants_dtypes_and_samples_keep_the_memory() -> None:
    net, M = awake(Architecture(**CROSS), 3), normal(3, 7, 8, seed=2)
    read = net.with_memory(M.float())
    san = read.variant("san")
    assert san.memory is read.memory and san.to(torch.float32).memory is not None
    X = normal(3, 5, 8, seed=1)
    whole = read.run(X).output
    assert torch.equal(read.for_samples(1, 3).run(X[1:]).output, whole[1:])
    torch.testing.assert_close(read.to(torch.float32).run(X.float()).output.double(), whole, rtol=0, atol=1e-4)
    one = net.with_memory(M[:1])
    torch.testing.assert_close(one.run(X).output[0], net.with_memory(M).run(X).output[0], rtol=1e-13, atol=1e-14)
    *_, last = training_states(read, X, Dropout.seeded(0.0, 0, "cpu"))
    assert torch.equal(last, whole)
    silent = read.variant(heads=[])  # of attention among tokens; cross-attention speaks on
    assert not torch.equal(silent.run(X).output, net.with_memory(2 * M).variant(heads=[]).run(X).output)


def test_a_memory_is_checked() -> None:
    net = awake(Architecture(**CROSS), 3)
    for M in (normal(1, 7, 9), torch.ones(1, 7, 8).long()):
        with raises(TokensError, subject="memory"):
            net.with_memory(M)
    assert "1 sample of up to 7 tokens" in repr(net.with_memory(normal(1, 7, 8)).memory)


def test_descriptions_come_back() -> None:
    for fields in (CROSS, LATENT, {**CROSS, "positions": "bias", "bias_ahead": False}):
        arch = Architecture(**fields)
        assert Architecture.from_dict(arch.to_dict()) == arch == eval(repr(arch))
    assert Architecture(**LATENT).replace(head_width=4).value_width == 3
    assert Architecture(layers=1, width=8, heads=2).replace(heads=4).value_width == 2


def test_masks_that_were_made_before_are_taken_and_none_is_made_without_whole_ones() -> None:
    arch = Architecture(layers=1, width=8, heads=2, mask="causal")
    net, X = Transformer.random(arch), normal(1, 4, 8)
    valid = torch.ones(1, 4, dtype=torch.bool)
    before: dict[Any, torch.Tensor] = {"causal": torch.zeros(1, 1, 4, 4, dtype=torch.bool)}
    assert PassSettings.of(arch, net.weights, X, valid, seen=before).visible is before
    assert PassSettings.of(arch, net.weights, X, valid, whole_masks=False).visible == {}
    made = PassSettings.of(arch, net.weights, X, valid).visible
    assert torch.equal(made["causal"].expand(1, 1, 4, 4)[0, 0], torch.ones(4, 4).tril().bool())


MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_an_attention_mask_is_the_complement_of_padding(dtype: torch.dtype) -> None:
    assert torch.equal(padding_from(None, MASK.to(dtype), (2, 4)), MASK == 0)  # type: ignore[arg-type]
    assert padding_from(None, None) is None
    assert padding_from(MASK == 0, None) is not None


def test_attention_masks_that_do_not_fit_are_refused() -> None:
    for padding, mask, shape in (
        (MASK == 0, MASK, (2, 4)),
        (None, MASK, (2, 5)),
        (None, MASK - 1, None),
        (None, MASK.tolist(), None),
    ):
        with raises(TokensError, subject="attention_mask"):
            padding_from(padding, mask, shape)


def test_networks_take_either() -> None:
    net, X = Transformer.random(Architecture(layers=2, width=8, heads=2)), normal(2, 4, 8)
    one, other = net.run(X, MASK == 0), net.run(X, attention_mask=MASK)
    assert torch.equal(one.output, other.output)
    with raises(TokensError, subject="attention_mask"):
        net.run(X, MASK == 0, MASK)


def test_tokens_come_back_where_they_stood() -> None:
    order, X = TokenOrder.of(MASK == 1), normal(2, 4, 8)
    assert order is not None and TokenOrder.of(MASK[:1] == 1) is None
    assert torch.equal(order.restored(order.sorted(X)), X)
    assert torch.equal(order.sorted(X)[1, :3], X[1, 1:])
