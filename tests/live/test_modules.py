"""Modules that are no Hugging Face models: torch's own encoders, and plain loops of blocks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankscope
from rankscope.errors import WatchError
from tests.live import reference
from tests.live.families import HEADS, LAYERS, WIDTH, checks, seen


def encoder(
    *, batch_first: bool = True, norm_first: bool = False, nested: bool = False
) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 24, dropout=0.1, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=nested).eval()
    for weight in model.parameters():  # torch's layers are copies of one another
        nn.init.normal_(weight, std=0.4)
    return model


def padded() -> tuple[Tensor, Tensor]:
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    return torch.randn(2, 6, WIDTH, dtype=torch.float64), padding


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


class Mixer(nn.Module):
    """A block of no known kind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"length": torch.tensor(x.shape[1]), "x": x + self.down(self.up(x).relu())}


class Loop(nn.Module):
    """Blocks that are plain attributes, the second called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mixer(), Mixer()
        self.spare = Mixer()

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        for block in (self.first, self.second, self.second):
            x = block(x)["x"]
        return x


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


def test_no_block_called_is_an_error() -> None:
    model = Loop()
    with rankscope.watch(model, "mu", blocks=["spare"]) as w:
        model(torch.randn(2, 6, WIDTH))
    with pytest.raises(WatchError, match="none of its blocks was called"):
        w.profile()


def test_layout_can_be_forced() -> None:
    model = Loop()
    X = torch.randn(2, 6, WIDTH)
    with rankscope.watch(model, "mu", blocks=["first", "second"], layout="token first") as w:
        model(X.transpose(0, 1))
    expected = reference.mu(X, torch.ones(2, 6, dtype=torch.bool))
    torch.testing.assert_close(w.profile().curve("mu")[:, 0], expected, rtol=1e-6, atol=0)


class Inside(nn.Module):
    """An encoder in a model that makes its forward pass again for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.encoder, x, use_reentrant=False)


def test_a_part_called_by_itself_is_a_call_and_one_made_again_is_not() -> None:
    model, (X, padding) = Inside().train(), padded()
    with rankscope.watch(model, "mu") as w:
        model(X).sum().backward()
        model.encoder(X, src_key_padding_mask=padding)
    assert checks(w)["calls"] == 2
    assert checks(w)["padded_tokens"] == 2
    assert w.profile().curve("mu").shape == (4, LAYERS + 1)
