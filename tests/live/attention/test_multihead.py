"""Attention of `nn.MultiheadAttention`, in torch's own encoders and decoders."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankscope
from tests.live import reference
from tests.live.encoders import encoder, padded
from tests.live.families import HEADS, LAYERS, WIDTH, seen


def by_hand(layer: nn.TransformerEncoderLayer, X: Tensor, padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One post-norm layer with its matrices: (state, attention, what each head adds)."""
    attention = layer.self_attn
    Wq, Wk, Wv = attention.in_proj_weight.chunk(3)
    bq, bk, bv = attention.in_proj_bias.chunk(3)
    size = WIDTH // HEADS

    def split(Y: Tensor) -> Tensor:
        return Y.unflatten(-1, (HEADS, size)).transpose(1, 2)

    q, k, v = split(X @ Wq.T + bq), split(X @ Wk.T + bk), split(X @ Wv.T + bv)
    scores = (q @ k.mT / math.sqrt(size)).masked_fill(padding[:, None, None], -torch.inf)
    P = scores.softmax(-1)
    W = attention.out_proj.weight.T.unflatten(0, (HEADS, size))
    added = torch.stack([P[:, h] @ v[:, h] @ W[h] for h in range(HEADS)], 1)
    X = layer.norm1(X + added.sum(1) + attention.out_proj.bias)
    return layer.norm2(X + layer.linear2(layer.linear1(X).relu())), P, added


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
def test_an_encoder_is_what_its_matrices_say(batch_first: bool, nested: bool) -> None:
    model = encoder(batch_first=batch_first, nested=nested)
    X, padding = padded()
    given = X if batch_first else X.transpose(0, 1)
    with torch.no_grad():
        plain = model(given, src_key_padding_mask=padding)
        with rankscope.watch(model, ["mu", "dobrushin", "head_mu"]) as w:
            watched = model(given, src_key_padding_mask=padding)
        kept = ~padding if batch_first else ~padding.T
        torch.testing.assert_close(watched[kept], plain[kept], rtol=1e-10, atol=1e-10)
        profile, state, real = w.profile(), X, ~padding
        for number, layer in enumerate(model.layers, start=1):
            assert isinstance(layer, nn.TransformerEncoderLayer)
            state, P, added = by_hand(layer, state, padding)
            for name, expected in {
                "mu": reference.mu(state, real),
                "dobrushin": reference.dobrushin(P, real),
                "head_mu": torch.stack([reference.mu(added[:, h], real) for h in range(HEADS)], 1),
            }.items():
                got = profile.curve(name)[:, number]
                torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(profile.curve("mu")[:, 0], reference.mu(X, real), rtol=1e-12, atol=0)
    assert model.use_nested_tensor == (nested and batch_first)


@pytest.mark.parametrize("grad", [False, True])
def test_tokens_alone_on_the_path_that_torch_would_fuse(grad: bool) -> None:
    model, (X, padding) = encoder(nested=True), padded()
    with torch.set_grad_enabled(grad), rankscope.watch(model) as w:
        model(X, src_key_padding_mask=padding)
    assert w.profile().curve("mu").shape == (2, LAYERS + 1)
    assert "While watched, torch's fused encoder and its nested tensors were off." in w.notes
    assert "Attention was not looked at." in w.notes


def test_padded_and_unpadded_samples_agree_and_a_single_sequence_is_a_batch_of_one() -> None:
    (X, padding), metrics = padded(), ("mu", "entropy", "head_relative_mu")
    batches, tokens = encoder(), encoder(batch_first=False, norm_first=True)
    with torch.no_grad(), rankscope.watch(batches, metrics) as w, rankscope.watch(tokens, metrics) as v:
        batches(X, src_key_padding_mask=padding)
        batches(X[1:, :4])
        tokens(X[0])
        tokens(X[:1].transpose(0, 1))
    for metric in metrics:
        curve, single = w.profile().curve(metric), v.profile().curve(metric)
        torch.testing.assert_close(curve[1], curve[2], rtol=1e-9, atol=1e-9, equal_nan=True)
        torch.testing.assert_close(single[0], single[1], equal_nan=True)


@pytest.mark.parametrize("need", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_a_caller_of_multihead_attention_gets_what_it_asked_for(need: bool, average: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.said: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            y, weights = self.attention(x, x, x, None, need, average_attn_weights=average)
            self.said.append(weights)
            return x + y

    model = nn.Sequential(Block(), Block())
    X = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        model(X)
        with rankscope.watch(model, "entropy"):
            model(X)
    for block in model:
        assert isinstance(block, Block)
        before, watched = block.said
        if need:
            torch.testing.assert_close(before, watched)
        else:
            assert before is None and watched is None


def test_a_decoder_has_its_self_attention_watched() -> None:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 24, batch_first=True, dtype=torch.float64)
    model = nn.TransformerDecoder(layer, 2).eval()
    X, padding = padded()
    memory = torch.randn_like(X)
    w = seen(model, "dobrushin", X, memory, tgt_key_padding_mask=padding)
    Wq, Wk, _ = layer.self_attn.in_proj_weight.unflatten(0, (3, HEADS, -1))
    q, k = (torch.einsum("btw,hdw->bhtd", X, W.detach()) for W in (Wq, Wk))  # its biases are zero
    scores = (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(padding[:, None, None], -torch.inf)
    expected = reference.dobrushin(scores.softmax(-1), ~padding)
    torch.testing.assert_close(w.profile().curve("dobrushin")[:, 1], expected, rtol=1e-10, atol=1e-12)
    assert any("2 later ones (cross-attention)" in note for note in w.notes)
