"""NeuTRENO as a skip, by algebra and in bare stacks; and what a GPT without skips learns of letters."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from study_tests.rederived.kept_data import ROOT, rows


def drawn(rows: int, columns: int, draw: torch.Generator, std: float) -> Tensor:
    return std * torch.randn(rows, columns, generator=draw, dtype=torch.float64)


def left(X: Tensor) -> float:
    """What tokens differ by, as a share of their size."""
    return float((X - X.mean(-2, keepdim=True)).norm() / X.norm())


def bare(layers: int, seed: int, own: float = 0.0) -> float:
    """What a stack of one head without skips, norms and MLPs leaves of differences; of the values of layer 1, `own` are
    added again in every later layer, in place of the layer's own (NeuTRENO)."""
    draw = torch.Generator().manual_seed(seed)
    X, width, first = drawn(12, 16, draw, 1.0), 16, None
    for _ in range(layers):
        W = [drawn(width, width, draw, 1 / math.sqrt(width)) for _ in range(4)]
        P, V = ((X @ W[0]) @ (X @ W[1]).T / math.sqrt(width)).softmax(-1), X @ W[2]
        first = V if first is None else first
        X = (P @ V + own * (first - V)) @ W[3]
    return left(X)


def test_neutreno_adds_the_first_values_of_the_same_token_whatever_attention_does() -> None:
    """With P even, differences that attention leaves are none; NeuTRENO's are those of `lambda (V_1 - V_l)` alone."""
    draw = torch.Generator().manual_seed(0)
    first, values, strength = drawn(9, 8, draw, 1.0), drawn(9, 8, draw, 1.0), 0.4
    even = torch.full((9, 9), 1 / 9, dtype=torch.float64)
    out = even @ values + strength * (first - values)
    apart = out - out.mean(0)
    wanted = strength * ((first - first.mean(0)) - (values - values.mean(0)))
    assert torch.allclose(apart, wanted, atol=1e-14)
    moved = first.clone()
    moved[3] += 1.0  # token 3 of layer 1 moves token 3 of this layer, and no other
    change = (even @ values + strength * (moved - values)) - out
    assert torch.allclose(change[3], torch.full((8,), strength, dtype=torch.float64)) and float(change[:3].norm()) == 0


def test_in_bare_stacks_neutreno_keeps_tokens_apart_as_a_skip_does() -> None:
    for seed in range(5):
        assert bare(12, seed) < 1e-12 and bare(12, seed, own=0.4) > 0.05


def letters() -> tuple[Tensor, int, float]:
    """Moby Dick as numbers of its characters, how many there are, and the loss of guessing by their frequency."""
    text = (ROOT / "src/rankscope/data/moby_dick.txt").read_text(encoding="utf-8")[:300_000]
    names = sorted({*text})
    codes = torch.tensor([names.index(name) for name in text])
    share = torch.bincount(codes).double() / len(codes)
    return codes, len(names), float(-(share * share.log()).sum())


def learned(skip: float, steps: int, seed: int) -> tuple[float, float, float]:
    """(loss, what tokens differ by after the last layer, the loss of guessing by frequency) of a GPT of 6 layers."""
    torch.manual_seed(seed)
    codes, symbols, blind = letters()
    width, heads, length = 64, 4, 64
    embed, place = torch.nn.Embedding(symbols, width), torch.nn.Parameter(torch.randn(length, width) / 8)
    torch.nn.init.normal_(embed.weight, std=1 / 8)
    head = torch.nn.Linear(width, symbols)

    def linear(inputs: int, outputs: int) -> torch.nn.Linear:
        layer = torch.nn.Linear(inputs, outputs)
        torch.nn.init.xavier_normal_(layer.weight, gain=1 / math.sqrt(6) if skip else 1.0)
        torch.nn.init.zeros_(layer.bias)
        return layer

    layers: list[list[torch.nn.Module]] = [
        [torch.nn.LayerNorm(width), linear(width, 3 * width), linear(width, width),
         torch.nn.LayerNorm(width), linear(width, 4 * width), linear(4 * width, width)]
        for _ in range(6)
    ]  # fmt: skip
    last = torch.nn.LayerNorm(width)
    everything = [*embed.parameters(), place, *head.parameters(), *last.parameters()]
    everything += [weight for layer in layers for part in layer for weight in part.parameters()]
    optimizer = torch.optim.AdamW(everything, lr=1e-3, weight_decay=0.01)
    losses, X = [], torch.empty(0)
    for _ in range(steps):
        starts = torch.randint(len(codes) - length - 1, (16,))
        batch = torch.stack([codes[start : start + length + 1] for start in starts])
        X = embed(batch[:, :-1]) + place
        for norm, qkv, out, second, up, down in layers:
            Q, K, V = (M.view(16, length, heads, -1).transpose(1, 2) for M in qkv(norm(X)).chunk(3, -1))
            read = F.scaled_dot_product_attention(Q, K, V, is_causal=True).transpose(1, 2).reshape(16, length, width)
            X = skip * X + out(read)
            X = skip * X + down(F.gelu(up(second(X))))
        losses.append(F.cross_entropy(head(last(X)).flatten(0, 1), batch[:, 1:].flatten()))
        optimizer.zero_grad()
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(everything, 1.0)
        optimizer.step()
    return float(torch.stack(losses[-10:]).detach().mean()), left(X.detach()[0]), blind


@pytest.mark.slow
def test_without_skips_a_small_gpt_is_no_better_than_the_frequencies_of_letters() -> None:
    """At this rate and in these steps: other seeds, weights and a loop of our own."""
    for seed in range(2):
        without, apart, blind = learned(0.0, 200, seed)
        assert abs(without - blind) < 0.12 and apart < 1e-3
        assert learned(1.0, 200, seed)[0] < blind - 0.4


def test_some_of_25_networks_without_skips_learn_more_than_frequencies_and_their_tokens_are_apart() -> None:
    table = rows("what-skips-pay", "networks").filter(
        task="text", series="size", skip=0.0, share=1.0, part="network", width=64
    )
    numbers = {
        quantity: {
            (m, seed): v for m, seed, v in table.filter(quantity=quantity).select("multiple", "seed", "value").rows()
        }
        for quantity in ("accuracy", "chance", "residual")
    }
    assert len(numbers["accuracy"]) == 25
    more = {key for key, accuracy in numbers["accuracy"].items() if accuracy > numbers["chance"][key] + 0.015}
    assert len(more) == 5 and max(numbers["accuracy"].values()) < 0.225
    assert min(10 ** numbers["residual"][key] for key in more) > 0.5
