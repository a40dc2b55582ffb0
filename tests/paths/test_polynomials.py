"""Sums of all paths of a length, against every path walked one at a time by independent code."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.nets import Architecture, Transformer
from rankscope.paths import decompose
from rankscope.paths.polynomials import PIECE
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", ["pre", "post"])
def test_many_samples_have_the_sums_that_each_has_alone(place: Any) -> None:
    """More coefficients than go through a layer together, among them those that start at biases."""
    arch = Architecture(layers=3, width=64, heads=2, mlp_width=32, norm_place=place)
    net = Transformer.random(arch, init="xavier")
    generator = torch.Generator().manual_seed(0)
    shaken = {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / 4
        for name, tensor in net.state().items()
        if name.endswith(".bias")
    }
    net = Transformer.from_weights(arch, net.state() | shaken)
    X = torch.randn(512, 16, 64, generator=generator, dtype=torch.float64)
    assert X.numel() <= PIECE < 3 * X.numel()  # two coefficients together, of up to four
    together, alone = decompose(net, X).by_length(), decompose(net, X[7:9]).by_length()
    torch.testing.assert_close(together.embedding[:, 7:9], alone.embedding, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(together.bias[:, 7:9], alone.bias, rtol=1e-11, atol=1e-12)
    assert together.bias[-1].any() and together.bias[0].any()
