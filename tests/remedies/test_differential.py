"""Both differential attentions, written out again, and the first against transformers."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from rankscope.nets import Architecture, Plain, Transformer, traverse
from tests.builders import normal
from tests.remedies.score_networks import MASKS, PADDING, X, first, network, scores, softmax
from tests.remedies.small_networks import check_paths, small


@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_differential_attention(mask: str, norm: int) -> None:
    net = network(mask).with_remedy("differential", norm=norm)
    state, mine = net.state_dict(), "layers.0.parts.differential"
    a, b, c, d = (state[f"{mine}.lambda_{each}"] for each in ("query_1", "key_1", "query_2", "key_2"))
    weight = math.exp(float(a @ b)) - math.exp(float(c @ d)) + 0.2
    P = softmax(scores(net), mask) - weight * softmax(scores(net, mine), mask)
    (step,) = [each for each in net.steps(X, PADDING) if each.layer == 1]
    assert step.attention is not None and torch.allclose(step.attention, P, atol=1e-14)
    outputs = P @ torch.einsum("btd,dhc->bhtc", X, state["layers.0.attention.value.weight"])
    if norm:
        outputs = 0.8 * outputs / (outputs.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert step.heads is not None and torch.allclose(step.heads, outputs.transpose(1, 2), atol=1e-13)


@pytest.mark.parametrize("key_heads", [2, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_the_second_differential_attention(mask: str, key_heads: int) -> None:
    """Each token takes its own share of a second attention to the same keys and values."""
    net = network(mask, key_heads=key_heads).with_remedy("differential2")
    state, actual = net.state_dict(), first(net)
    mine = {name: state[f"layers.0.parts.differential2.{name}"] for name in ("query", "share")}
    k = torch.einsum("btd,dhc->bhtc", X, state["layers.0.attention.key.weight"])
    k = k.repeat_interleave(2 // key_heads, 1)
    both = [
        softmax(torch.einsum("btd,dhc->bhtc", X, query) @ k.mT / math.sqrt(net.arch.head_width), mask)
        for query in (state["layers.0.attention.query.weight"], mine["query"])
    ]
    for sample, head, i in itertools.product(range(2), range(2), range(6)):
        share = 1 / (1 + math.exp(-float(X[sample, i] @ mine["share"][:, head])))
        expected = both[0][sample, head, i] - share * both[1][sample, head, i]
        assert torch.allclose(actual[sample, head, i], expected, rtol=0, atol=1e-14)
    assert mine["share"].abs().max() <= 1 / math.sqrt(8)  # as torch starts a linear layer of 8 inputs


def test_paths_take_the_second_differential_attention_as_it_came_out() -> None:
    check_paths(small(norm_place="pre", mask="causal").with_remedy("differential2"))


@pytest.mark.parametrize(("key_heads", "spread", "within"), [(4, 0.1, 1e-6), (2, 0.0, 1e-12)])
def test_differential_attention_is_that_of_diffllama(key_heads: int, spread: float, within: float) -> None:
    """Heads i and i + H/2 of transformers' are the pair of one head here, and so are halves of its values.
    It takes lambda in float32, which is exact where the four vectors are zero."""
    modeling = pytest.importorskip("transformers.models.diffllama.modeling_diffllama")
    config = modeling.DiffLlamaConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=key_heads, num_hidden_layers=4,
        intermediate_size=16, attn_implementation="sdpa", lambda_std_dev=spread,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs, n, index = modeling.DiffLlamaAttention(config, layer_idx=2).double().eval(), 6, 2
    arch = Architecture(
        layers=4, width=16, heads=2, key_heads=key_heads // 2, head_width=4, value_width=8, mask="causal",
        positions="rotary", norm="none", mlp="none", attention_skip=0.0, biases=False,
    )  # fmt: skip
    net = Transformer.random(arch, seed=0).with_remedy("differential")
    state, prefix = net.state_dict(), f"layers.{index}"

    def split(linear: torch.nn.Linear) -> tuple[Tensor, Tensor]:
        """The two halves of its heads, `[width, head, head_width]`."""
        one, two = linear.weight.detach().T.reshape(16, -1, 4).chunk(2, 1)
        return one.contiguous(), two.contiguous()

    for name, linear in (("query", theirs.q_proj), ("key", theirs.k_proj)):
        state[f"{prefix}.attention.{name}.weight"], state[f"{prefix}.parts.differential.{name}"] = split(linear)
    state[f"{prefix}.attention.value.weight"] = torch.cat(split(theirs.v_proj), -1)
    state[f"{prefix}.attention.output.weight"] = theirs.o_proj.weight.detach().T.reshape(2, 8, 16)
    for ours, name in (("query_1", "q1"), ("key_1", "k1"), ("query_2", "q2"), ("key_2", "k2")):
        state[f"{prefix}.parts.differential.lambda_{ours}"] = getattr(theirs, f"lambda_{name}").detach()
    net = Transformer.from_weights(net.arch, state)
    tokens = normal(1, n, 16, seed=5)
    angles = torch.arange(n).double()[:, None] * 10000.0 ** (-torch.arange(0, 4, 2).double() / 4)
    turned = (torch.cat([angles, angles], -1).cos()[None], torch.cat([angles, angles], -1).sin()[None])
    hidden = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        expected = theirs(tokens, turned, hidden)[0]
    rules = Plain(net.arch, net.settings(tokens, torch.ones(1, n, dtype=torch.bool)))
    actual = traverse(net.blocks[index], rules, tokens).state
    assert torch.allclose(actual, expected, rtol=0, atol=within)
