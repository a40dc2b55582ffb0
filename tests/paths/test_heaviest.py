"""The bound that proves paths to be the heaviest: no way on is heavier than it says."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import PathError
from rankscope.nets import Transformer
from rankscope.paths import decompose
from rankscope.paths.heaviest import _ahead, _bound
from rankscope.paths.walk import shared_step
from tests.paths.test_enumeration import CASES, network, tokens


@given(
    st.fixed_dictionaries({
        "norm": st.sampled_from(["layer", "rms", "scale", "none"]),
        "norm_place": st.sampled_from(["pre", "post", "sandwich"]),
        "mlp": st.sampled_from(["plain", "gated", "none"]),
        "activation": st.sampled_from(["gelu", "relu", "tanh"]),
        "kernel": st.sampled_from(["softmax", "sigmoid", "linear"]),
        "mask": st.sampled_from(["complete", "causal"]),
        "key_heads": st.sampled_from([1, 2]),
        "attention_skip": st.sampled_from([0.0, 1.0, -0.3]),
        "parallel": st.booleans(),
        "final_norm": st.booleans(),
    }),
    st.integers(0, 10**6),
    st.sampled_from(["as it is", "one direction", "one unit", "one token"]),
)  # fmt: skip
def test_no_way_on_is_heavier_than_the_bound(fields: dict[str, Any], seed: int, shape: str) -> None:
    """For every beginning of every path, also where weights, gates and tokens are lopsided: then products of
    norms are attained, or nearly."""
    net, X = network(fields, seed), tokens(seed + 1, samples=2)
    if shape == "one direction":
        net = Transformer.from_weights(net.arch, {name: _rank_one(t) for name, t in net.state().items()})
    elif shape == "one unit":
        state = net.state()
        state |= {
            name: t * torch.eye(6, dtype=t.dtype)[0] for name, t in state.items() if name.endswith("gain")
        }
        net = Transformer.from_weights(net.arch, state)
    elif shape == "one token":
        X[:, 1:] *= 1e-4
    padding = torch.tensor([[False, False, False, True], [False] * 4])
    d = decompose(net, X, padding)
    ahead, step = _ahead(d.frozen), shared_step(d.frozen)
    for path in product(*d.frozen.ways):
        weight = float(d.path(path).term.norm())
        Y = d.frozen.X
        for index, head in enumerate(path):
            assert weight <= _bound(Y, ahead[index]) * (1 + 1e-9)
            Y = step(index, Y, head)


def _rank_one(weight: torch.Tensor) -> torch.Tensor:
    if weight.ndim < 2:
        return weight
    flat = weight.flatten(1)
    return (flat.sum(1, keepdim=True) * flat.sum(0)).view(weight.shape) / flat.numel() ** 0.5


@pytest.mark.parametrize("case", CASES)
def test_padding_does_not_loosen_the_bound(case: str) -> None:
    """What a padded token's norms and gates were bounds nothing: as if it were not there."""
    net, X = network(CASES[case]), tokens()
    with_padding = torch.cat([X, torch.zeros(1, 3, 6, dtype=X.dtype)], 1)
    padded = decompose(net, with_padding, torch.tensor([[False] * 4 + [True] * 3]))
    for mine, alone in zip(_ahead(padded.frozen), _ahead(decompose(net, X).frozen), strict=True):
        torch.testing.assert_close(mine, alone, rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_narrow_arithmetic_the_same_paths_are_the_heaviest(dtype: torch.dtype) -> None:
    net, X = network({}), tokens()
    narrow, wide = decompose(net.to(dtype), X).top(3), decompose(net, X).top(3)
    assert narrow.proved == 3
    torch.testing.assert_close(torch.tensor(narrow.weights), torch.tensor(wide.weights), rtol=0.05, atol=0)


def test_no_tokens_no_weights() -> None:
    with pytest.raises(PathError, match="top needs tokens to weigh paths by"):
        decompose(network({}), torch.zeros(1, 0, 6)).top(3)
