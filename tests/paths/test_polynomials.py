"""Sums of all paths of a length, against every path walked one at a time by independent code."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from rankscope.nets import Architecture, Transformer
from rankscope.paths import decompose, freeze, frozen_pass, length_terms
from rankscope.paths.lengths import PIECE
from tests.paths.enumeration import CASES, both, close, network, sums, tokens


@pytest.mark.parametrize("case", CASES)
def test_lengths_are_the_sums_of_their_paths(case: str) -> None:
    d, reference = both(case)
    found = d.by_length()
    embedding, bias = reference.embedding_terms, reference.bias_terms
    close(found.embedding[:, 0], sums(embedding, 4, reference.output), reference.output)
    close(found.bias[:, 0], sums(bias, 4, reference.output), reference.output)
    assert found.counts == [sum(t.length == k for t in embedding) for k in range(4)]
    assert found.bias_counts == [sum(t.length == k for t in bias) for k in range(4)]
    assert found.closure < 1e-12
    whole = sum(t.value for t in embedding) + sum((t.value for t in bias), np.zeros(1))
    np.testing.assert_allclose(whole, reference.output, rtol=1e-9, atol=1e-11)


@given(
    st.fixed_dictionaries({
        "layers": st.integers(1, 5),
        "heads": st.sampled_from([1, 2, 3]),
        "norm": st.sampled_from(["layer", "rms", "scale", "none"]),
        "norm_place": st.sampled_from(["pre", "post", "sandwich"]),
        "mlp": st.sampled_from(["plain", "gated", "none"]),
        "activation": st.sampled_from(["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "tanh"]),
        "kernel": st.sampled_from(["softmax", "gaussian", "uniform", "sigmoid", "linear"]),
        "mask": st.sampled_from(["complete", "causal", "window:1"]),
        "positions": st.sampled_from(["none", "absolute", "rotary"]),
        "attention_skip": st.sampled_from([0.0, 0.5, 1.0, -0.3]),
        "parallel": st.booleans(),
        "final_norm": st.booleans(),
        "shared": st.booleans(),
    }),
    st.integers(0, 10**6),
    st.integers(0, 3),
)  # fmt: skip
def test_lengths_add_up_to_the_output(fields: dict[str, Any], seed: int, padded: int) -> None:
    """`sum over lengths = output`, for whatever network, padding included."""
    net = network(fields, seed)
    X = tokens(seed + 1, samples=2)
    padding = torch.arange(4)[None] >= torch.tensor([[4], [4 - padded]])
    d = decompose(net, X, padding)
    found = d.by_length()
    expected = net.run(X, padding).output
    total = (found.embedding + found.bias).sum(0)
    torch.testing.assert_close(total[~padding], expected[~padding], rtol=1e-8, atol=1e-9)
    assert found.closure < 1e-9 and not total[padding].any()
    assert d.by_length() is found


def with_random_biases(net: Transformer, spread: float = 0.25) -> Transformer:
    generator = torch.Generator().manual_seed(0)
    biases = {
        name: spread * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in net.state_dict().items()
        if name.endswith(".bias")
    }
    return Transformer.from_weights(net.arch, net.state_dict() | biases)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", ["pre", "post"])
def test_many_samples_have_the_sums_that_each_has_alone(place: Any) -> None:
    """More coefficients than go through a layer together, among them those that start at biases."""
    arch = Architecture(layers=3, width=64, heads=2, mlp_width=32, norm_place=place)
    net = Transformer.random(arch, init="xavier")
    net = with_random_biases(net)
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(512, 16, 64, generator=generator, dtype=torch.float64)
    assert X.numel() <= PIECE < 3 * X.numel()  # two coefficients together, of up to four
    together, alone = decompose(net, X).by_length(), decompose(net, X[7:9]).by_length()
    torch.testing.assert_close(together.embedding[:, 7:9], alone.embedding, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(together.bias[:, 7:9], alone.bias, rtol=1e-11, atol=1e-12)
    assert together.bias[-1].any() and together.bias[0].any()


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_layers_are_applied_as_often_as_the_docs_say(layers: int) -> None:
    """Heads L(L+1)/2 times, MLPs L(L+3)/2 times, and with biases twice as often: counted in multiply-adds."""
    arch = Architecture(layers=layers, width=8, heads=2, mlp_width=24, norm_place="post")
    net = Transformer.random(arch, init="xavier")
    X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    n, width, all_tokens = X.shape[1], 8, X.shape[0] * X.shape[1]
    heads, mlp = all_tokens * (2 * width * width + n * width), all_tokens * 2 * width * 24
    once = layers * (layers + 1) // 2 * heads + layers * (layers + 3) // 2 * mlp
    for case, expected in ((net, once), (with_random_biases(net), 2 * once)):
        frozen = freeze(case, X)
        with FlopCounterMode(display=False) as counter:
            length_terms(frozen)
        assert counter.get_total_flops() == 2 * expected  # a multiplication and an addition


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("place", ["pre", "post"])
def test_sums_from_the_embedding_and_from_biases_are_linearly_independent(layers: int, place: Any) -> None:
    """The docs say so: none of the 2(L + 1) sums that a next layer takes can be had from the others."""
    arch = Architecture(layers=layers, width=16, heads=2, mlp_width=24, norm_place=place, final_norm=False)
    net = with_random_biases(Transformer.random(arch, init="xavier"))
    X = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sums_by_length = torch.cat(length_terms(freeze(net, X))).flatten(1)
    unit = sums_by_length / sums_by_length.norm(dim=1, keepdim=True)
    assert torch.linalg.svdvals(unit).min() > 1e-6


@pytest.mark.parametrize("biased", [False, True])
def test_with_gradients_the_sums_are_those_without(biased: bool) -> None:
    """Networks that train on their paths have rules of their own; both must add up to the output."""
    net = Transformer.random(Architecture(layers=3, width=8, heads=2, mlp_width=12, norm_place="pre"), init="xavier")
    net = with_random_biases(net) if biased else net
    X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        without = freeze(net, X)
        expected = length_terms(without)
    with torch.enable_grad():
        recorded = frozen_pass(net, X)
    assert recorded.gradients and not without.gradients
    for found, sums_by_length in zip(length_terms(recorded), expected, strict=True):
        torch.testing.assert_close(found, sums_by_length, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.cat(length_terms(recorded)).sum(0), net.run(X).output, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(length_terms(recorded, biases=False)[0], expected[0], rtol=1e-11, atol=1e-12)
