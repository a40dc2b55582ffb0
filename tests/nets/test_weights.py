"""Variants of a network share its tensors, whichever layers they take."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankscope.nets import Architecture, Transformer
from tests.strategies import architectures


@given(architectures(), st.integers(0, 9))
def test_variants_share_every_tensor(arch: Architecture, seed: int) -> None:
    net = Transformer.random(arch, seed=seed)
    mine = {tensor.data_ptr() for tensor in net.state_dict().values()}
    for each in (
        net.variant(skip=False, mlp=False, norm=False),
        net.variant(mask="window:1", divisor=2.0, heads=[0]),
        net.variant(layers=7),
    ):
        assert {tensor.data_ptr() for tensor in each.state_dict().values()} <= mine


def test_layers_repeat_and_reorder(net: Transformer, X: Tensor) -> None:
    deep = net.variant(layers=8)
    assert [id(layer) for layer in deep.weights.layers] == [id(net.weights.layers[k % 3]) for k in range(8)]
    first = net.variant(layers=[1])
    state = X
    for _ in range(4):
        state = first.run(state).output
    assert torch.allclose(net.variant(layers=[1] * 4).run(X).output, state, atol=1e-12)
    assert net.variant(layers=2).arch.layers == 2
