"""The networks of figure 2, and what they read."""

import torch

from rankscope.nets import Architecture, Transformer
from rankscope_studies.dong2021 import networks
from rankscope_studies.dong2021.networks import Subject


def subject(family: str) -> Subject:
    arch = Architecture(layers=3, width=16, heads=2, shared=family == "albert", mlp_width=32)
    X = torch.randn(2, 6, 16, dtype=torch.float64)
    return Subject("small", family, False, Transformer.random(arch), X, torch.zeros(2, 6).bool(), "noise")


def test_no_mlp_in_albert_leaves_the_activation_alone() -> None:
    """norm(gelu(a) + a), a = norm(X + attention), as the published code computes it."""
    albert = subject("albert")
    net = networks.published_variant(albert, "san+skip")
    X = albert.X
    layer = albert.net.weights.layers[0]
    state = albert.net.variant(mlp=False, layers=1).run(X).output  # norm(X + attention)
    expected = torch.nn.functional.layer_norm(
        torch.nn.functional.gelu(state) + state, (16,), layer.mlp_norm.gain, layer.mlp_norm.bias, 1e-12
    )
    torch.testing.assert_close(net.run(X).states[1], expected)
    bare = networks.published_variant(albert, "san")
    assert bare.arch.attention_skip == 0.0 and bare.arch.mlp_skip == 1.0


def test_words_become_ids_that_repeat_where_words_do() -> None:
    (ids,) = networks.hashed(["the whale and the sea and the whale"], 30000, 128)
    assert ids[0] == 101 and ids[-1] == 102
    words = ids[1:-1].tolist()
    assert words[0] == words[3] == words[6] and words[1] == words[7] and len(set(words)) == 4
    assert min(words) >= 1000 and max(words) < 30000
