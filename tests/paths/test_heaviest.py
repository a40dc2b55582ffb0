"""The bound that proves paths to be the heaviest: no way on is heavier than it says."""

import math
from itertools import product
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import PathError
from rankscope.nets import Architecture, Transformer
from rankscope.paths import Decomposition, Path, PathRules, decompose
from rankscope.paths.heaviest import _ahead, _bound
from tests.paths.enumeration import CASES, both, network, tokens
from tests.raising import raises


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
        net = Transformer.from_weights(net.arch, {name: _rank_one(t) for name, t in net.state_dict().items()})
    elif shape == "one unit":
        state = net.state_dict()
        state |= {name: t * torch.eye(6, dtype=t.dtype)[0] for name, t in state.items() if name.endswith("gain")}
        net = Transformer.from_weights(net.arch, state)
    elif shape == "one token":
        X[:, 1:] *= 1e-4
    padding = torch.tensor([[False, False, False, True], [False] * 4])
    d = decompose(net, X, padding)
    ahead, after_layer = _ahead(d.frozen), PathRules(d.frozen).after_layer
    for path in product(*d.frozen.ways):
        weight = float(d.path(path).term.norm())
        Y = d.frozen.X
        for index, head in enumerate(path):
            assert weight <= _bound(Y, ahead[index]) * (1 + 1e-9)
            Y = after_layer(index, Y, head)


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
    # In half precision rounding could exchange them.
    assert narrow.proved + narrow.tied == 3 and (narrow.proved == 3 or dtype != torch.float32)
    torch.testing.assert_close(torch.tensor(narrow.weights), torch.tensor(wide.weights), rtol=0.05, atol=0)


def test_no_tokens_no_weights() -> None:
    with raises(PathError, "X"):
        decompose(network({}), torch.zeros(1, 0, 6)).top(3)


def attention_alone(layers: int, seed: int = 0) -> Transformer:
    arch = Architecture(
        layers=layers, width=8, heads=2, norm="none", mlp="none", attention_skip=0.0, biases=()
    )  # fmt: skip
    return Transformer.random(arch, seed, init="xavier")


def true_residual(d: Decomposition, path: Path) -> float:
    """Of a path's term in attention alone, `P_h Y V_h O_h` layer by layer, with 60 digits."""

    def wide(x: torch.Tensor) -> np.ndarray:
        return np.vectorize(mpmath.mpf, otypes=[object])(x.numpy())

    with mpmath.workdps(60):
        Y = wide(d.frozen.X[0])
        for layer, head in zip(d.frozen.layers, path, strict=True):
            assert head is not None
            w = layer.block.weights.attention
            Y = wide(layer.P[0, head]) @ Y @ wide(w.value.weight[:, head]) @ wide(w.output.weight[head])
        return float(mpmath.sqrt(((Y - Y.mean(0)) ** 2).sum()))


def size(d: Decomposition, path: Path) -> float:
    """`||X|| prod ||P_h|| ||V_h|| ||O_h||`, in Frobenius norms."""
    found = float(d.frozen.X[0].norm())
    for layer, head in zip(d.frozen.layers, path, strict=True):
        w = layer.block.weights.attention
        factors = (layer.P[0, head], w.value.weight[:, head], w.output.weight[head])
        found *= math.prod(float(each.norm()) for each in factors)
    return found


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("kind", ["as they are", "equal", "without their mean"])
def test_rounding_proves_nothing(layers: int, kind: str) -> None:
    """Paths that have collapsed, tokens that are equal, and values that take out all that tokens share: every
    weight is right within its noise, and what is proved is true."""
    net, X = attention_alone(layers), torch.randn(1, 6, 8, dtype=torch.float64)
    if kind == "equal":
        X = X[:, :1].expand(1, 6, 8).contiguous()
    elif kind == "without their mean":
        X = 1e-9 * X + torch.randn(8, dtype=torch.float64)
        x = X.mean(1)[0]
        state = net.state_dict()
        value = state["layers.0.attention.value.weight"]
        state["layers.0.attention.value.weight"] = value - torch.einsum("i,j,jhk->ihk", x, x, value) / (x @ x)
        net = Transformer.from_weights(net.arch, state)
    d = decompose(net, X)
    found = d.top(4, by="residual")
    true: dict[Path, float] = {path: true_residual(d, path) for path in product(range(2), repeat=layers)}
    for path, weight, noise in zip(found.paths, found.weights, found.noise, strict=True):
        # Rounding of a product is small beside the product of its factors' sizes.
        assert abs(weight - true[path]) <= noise <= 1e-13 * size(d, path)
    heaviest = sorted(true.values())[::-1]
    assert all(true[path] >= heaviest[found.proved - 1] for path in found.paths[: found.proved])
    if kind == "equal":
        assert found.proved == 0 and all(w <= n for w, n in zip(found.weights, found.noise, strict=True))
        assert repr(found).count("rounding can make as much") == len(found.paths)
    if layers == 1 and kind == "as they are":
        assert found.proved == 2 and found.tied == 0


def test_a_tie_is_no_proof() -> None:
    """Two heads that are the same: neither outweighs the other."""
    net = attention_alone(1)
    state = net.state_dict()
    for name, tensor in state.items():
        head = 0 if "output" in name else 1
        state[name] = tensor.select(head, 0).unsqueeze(head).expand_as(tensor).contiguous()
    X = torch.randn(1, 6, 8, dtype=torch.float64)
    for by in ("norm", "residual"):
        found = decompose(Transformer.from_weights(net.arch, state), X).top(1, by)
        assert (found.proved, found.tied) == (0, 1) and "1 more within rounding of others" in repr(found)
        assert decompose(Transformer.from_weights(net.arch, state), X).top(2, by).proved == 2


BY_TURNS = [
    pytest.param(case, by, marks=[pytest.mark.slow] if (number + turn) % 2 else [])
    for number, case in enumerate(CASES)
    for turn, by in enumerate(["norm", "residual"])
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "by"), BY_TURNS)
def test_top_is_the_sorted_enumeration(case: str, by: Any) -> None:
    d, reference = both(case)
    terms = reference.embedding_terms

    def weight(value: Any) -> float:
        return float(np.linalg.norm(value - value.mean(0) if by == "residual" else value))

    expected = sorted((weight(t.value) for t in terms), reverse=True)
    found = d.top(len(terms), by=by)
    assert found.proved == len(terms)
    np.testing.assert_allclose(found.weights, expected, rtol=1e-8, atol=1e-11)
    assert len(set(found.paths)) == len(terms)
    by_path = {t.choices: weight(t.value) for t in terms}
    np.testing.assert_allclose([by_path[p] for p in found.paths], found.weights, rtol=1e-8, atol=1e-11)
    few = d.top(3, by=by)
    assert few.proved == min(3, len(terms)) and few.next_bound <= few.weights[-1] * (1 + 1e-8)
    hurried = d.top(3, by=by, budget=4)
    assert hurried.proved < len(hurried.paths) <= 3
    np.testing.assert_allclose([by_path[p] for p in hurried.paths], hurried.weights, rtol=1e-8, atol=1e-11)
    # Whatever is not listed weighs no more than the bound says.
    rest = [by_path[p] for p in by_path if p not in hurried.paths]
    assert max(rest, default=0.0) <= max(hurried.next_bound, *hurried.weights, 0.0) * (1 + 1e-8)


def test_the_bound_of_one_token_is_its_growth_by_hand() -> None:
    """Attention of one token triples it, a MLP of open units adds a tenth of it, its skip twice of it: 3 (2 + 0.1)."""
    arch = Architecture(layers=2, width=4, heads=1, mlp_width=4, norm="none", activation="relu", biases=False,
                        attention_skip=0.5, mlp_skip=-2.0)  # fmt: skip
    sizes = {"value.weight": 1.5, "output.weight": 2.0, "up.weight": 0.5, "down.weight": 0.2}
    tensors = {
        name: torch.eye(4, dtype=torch.float64).reshape(tensor.shape)
        * next((size for ending, size in sizes.items() if name.endswith(ending)), 0.0)
        for name, tensor in Transformer.random(arch).state_dict().items()
    }
    d = decompose(Transformer.from_weights(arch, tensors), torch.ones(1, 1, 4, dtype=torch.float64))
    # A path takes the MLP and its skip together: the bound adds their sizes, of the first layer and of the second,
    # whose tokens are (1/2 + 3) (1/10 - 2) of what they were: negative, so that its units are shut.
    assert [float(each) for each in _ahead(d.frozen)] == pytest.approx([3 * 2.1 * 3 * 2.0, 3 * 2.0, 1.0])
    assert float(d.path((0, 0)).term.norm()) == pytest.approx(2 * 3 * 1.9 * 3 * 2.0)
