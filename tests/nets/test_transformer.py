from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankscope.errors import MaskError, TokensError
from rankscope.metrics import METRICS, mu
from rankscope.nets import Architecture, Transformer, mask_matrix
from rankscope.nets.masks import from_matrix
from tests.builders import normal, one_head
from tests.raising import raises
from tests.strategies import architectures

BASE: dict[str, Any] = {"layers": 3, "width": 8, "heads": 2}


def tokens(n: int = 5, width: int = 8, batch: int = 2, seed: int = 0) -> Tensor:
    return normal(batch, n, width, seed=seed)


def averaging(mask: str, width: int, layers: int) -> Transformer:
    """W_Q = W_K = 0 and W_V W_O = I: every layer multiplies by the mask's own averaging matrix."""
    arch = Architecture(layers=layers, width=width, heads=1, mask=mask, mlp="none", norm="none",
                        attention_skip=0.0, biases=False)  # fmt: skip
    zero = torch.zeros(width, width, dtype=torch.float64)
    return one_head(arch, query=zero, key=zero)


@pytest.mark.parametrize(
    "mask",
    ["complete", "causal", "window:1", "unidirectional", "dilated:1:2", "strided", "prefix:2",
     "longformer:1:1", "bigbird:1:1:1:3", "edges:0>1,1>2,2>0", "causal&window:2"],
)  # fmt: skip
def test_uniform_attention_is_powers_of_the_averaging_matrix(mask: str) -> None:
    n = 8  # sums of at most 8 equal weights: exact but for the rounding of each product
    X = tokens(n, width=4)
    A = mask_matrix(mask, n).double()
    A /= A.sum(-1, keepdim=True)
    for layer, state in enumerate(averaging(mask, 4, 6).run(X).states):
        assert torch.allclose(state, torch.linalg.matrix_power(A, layer) @ X, rtol=0, atol=1e-15)


def test_complete_uniform_attention_is_uniform_after_one_layer() -> None:
    X = tokens(7, width=4)
    states = averaging("complete", 4, 2).run(X).states
    assert bool((mu(states[0]) > 1).all())
    assert bool(METRICS["mu"].read(states[1]).below_floor.all())


def test_the_uniform_kernel_is_the_same_as_zero_queries() -> None:
    net = Transformer.random(Architecture(**BASE, mask="causal", biases=False), init="xavier")
    zero = {
        name: torch.zeros_like(tensor) if ".query." in name else tensor for name, tensor in net.state_dict().items()
    }
    other = Transformer.from_weights(net.arch, zero)
    assert torch.allclose(net.variant(kernel="uniform").run(tokens()).output, other.run(tokens()).output)


@given(architectures(), st.integers(1, 4), st.integers(0, 3), st.integers(0, 99))
def test_a_padded_batch_runs_as_each_sequence_alone(arch: Architecture, n: int, after: int, seed: int) -> None:
    """Whatever the block: junk in padded tokens reaches no real one."""
    net = Transformer.random(arch, seed=seed, init="xavier")
    full, short = tokens(n + after, batch=1, seed=seed), tokens(n, batch=1, seed=seed + 1)
    junk = torch.full((1, after, 8), torch.nan, dtype=torch.float64)
    padding = torch.zeros(2, n + after, dtype=torch.bool)
    padding[1, n:] = True
    together = net.run(torch.cat([full, torch.cat([short, junk], 1)]), padding, attention=True)
    alone = net.run(full, attention=True), net.run(short, attention=True)
    for layer in range(arch.layers + 1):
        assert torch.allclose(together.states[layer][:1], alone[0].states[layer], rtol=1e-10, atol=1e-12)
        assert torch.allclose(together.states[layer][1:, :n], alone[1].states[layer], rtol=1e-10, atol=1e-12)
    for P, Q in zip(together.attention, alone[1].attention, strict=True):
        assert torch.allclose(P[1:, :, :n, :n], Q, atol=1e-12)
        assert not P[1, :, :n, n:].any()


@given(architectures(), st.integers(1, 4), st.integers(0, 99), st.data())
def test_padding_may_stand_anywhere(arch: Architecture, n: int, seed: int, data: st.DataObject) -> None:
    """Left, right or between: real tokens are counted from the first real one."""
    net = Transformer.random(arch, seed=seed, init="xavier")
    short = tokens(n, batch=1, seed=seed)
    places = sorted(data.draw(st.permutations(range(n + 3)))[:n])
    X = torch.full((1, n + 3, 8), torch.nan, dtype=torch.float64)
    X[:, places] = short
    padding = torch.ones(1, n + 3, dtype=torch.bool)
    padding[:, places] = False
    run, alone = net.run(X, padding, attention=True), net.run(short, attention=True)
    assert torch.allclose(run.output[:, places], alone.output, rtol=1e-10, atol=1e-12)
    for P, Q in zip(run.attention, alone.attention, strict=True):
        assert torch.allclose(P[:, :, places][..., places], Q, atol=1e-12)


@pytest.mark.parametrize(
    ("norm", "dtype"), [("scale", torch.float64), ("layer", torch.float64), ("layer", torch.float16)]
)
@pytest.mark.parametrize("place", ["pre", "post"])
def test_norms_without_eps_leave_padding_harmless(norm: Any, dtype: torch.dtype, place: Any) -> None:
    arch = Architecture(**BASE, norm=norm, norm_eps=0.0, norm_place=place, biases=False)
    net = Transformer.random(arch, init="xavier", dtype=dtype)
    X, padding = tokens(6).to(dtype), torch.arange(6)[None].expand(2, 6) >= 4
    run, alone = net.run(X, padding).output[:, :4], net.run(X[:, :4]).output
    assert bool(run.isfinite().all())
    assert torch.allclose(run, alone, atol=100 * torch.finfo(dtype).eps)


def test_a_token_left_with_nothing_to_see_is_a_sentence() -> None:
    ring = torch.roll(torch.eye(4, dtype=torch.bool), 1, 0)
    net = Transformer.random(Architecture(**BASE).replace(mask=from_matrix(ring)))
    net.run(tokens(4))
    with raises(MaskError, subject="mask"):
        net.run(tokens(4), torch.tensor([[False, False, True, True]] * 2))


def test_networks_show_themselves_shortly_and_are_themselves() -> None:
    net = Transformer.random(Architecture(**BASE))
    assert repr(net) == "Transformer(3 layers, width 8, 2 heads, torch.float64 on cpu)"
    bare = repr(net.variant(skip=False, mlp=False, norm=False, mask="window:2"))
    assert "2 heads, no skip, no MLP, no norm, mask window:2, " in bare
    assert "2 heads, skip 0.5, " in repr(net.variant(skip=0.5))
    assert "2 heads, no attention skip, " in repr(net.variant(attention_skip=0.0))
    assert net == net and net != Transformer.random(Architecture(**BASE))


@pytest.mark.parametrize("kernel", ["linear", "linformer:3"])
def test_padding_under_the_remaining_kernels(kernel: str) -> None:
    net = Transformer.random(Architecture(**BASE, kernel=kernel, length=9), init="xavier")
    short = tokens(4, batch=1)
    X = torch.cat([short, torch.full((1, 2, 8), torch.inf, dtype=torch.float64)], 1)
    padding = torch.arange(6)[None] >= 4
    assert torch.allclose(net.run(X, padding).output[:, :4], net.run(short).output, atol=1e-12)


@given(architectures(mask="causal"), st.integers(0, 99))
def test_causal_networks_do_not_look_ahead(arch: Architecture, seed: int) -> None:
    net = Transformer.random(arch, seed=seed, init="xavier")
    X = tokens(5, seed=seed)
    Y = X.clone()
    Y[:, 3:] += 1.0
    assert torch.allclose(net.run(X).output[:, :3], net.run(Y).output[:, :3], atol=1e-12)


@given(architectures(mask="complete", positions="none"), st.integers(0, 99))
def test_without_positions_or_masks_tokens_are_interchangeable(arch: Architecture, seed: int) -> None:
    net = Transformer.random(arch, seed=seed, init="xavier")
    X, order = tokens(5, seed=seed), torch.tensor([3, 0, 4, 1, 2])
    assert torch.allclose(net.run(X[:, order]).output, net.run(X).output[:, order], atol=1e-10)


def test_a_seed_means_the_same_in_every_dtype() -> None:
    arch = Architecture(**BASE)
    double, single = Transformer.random(arch, 7), Transformer.random(arch, 7, dtype=torch.float32)
    assert single.dtype == torch.float32
    for name, tensor in double.state_dict().items():
        assert torch.equal(tensor.float(), single.state_dict()[name])
    assert Transformer.random(arch, 8).fingerprint != double.fingerprint
    assert double.to(torch.float64) is double is double.to("cpu") is double.to(torch.device("cpu"))
    for single in (double.to("cpu", torch.float32), double.to(torch.float32, "cpu"), double.to(device=torch.float32)):
        assert single.dtype == torch.float32 and single.device == torch.device("cpu")


def test_networks_can_be_differentiated() -> None:
    net = Transformer.random(Architecture(**BASE, mask="causal"), init="xavier")
    X = tokens(4, batch=1).requires_grad_()
    padding = torch.tensor([[False, False, False, True]])
    net.run(X, padding).output[:, :3].square().sum().backward()
    assert X.grad is not None and bool(X.grad[:, :3].abs().min() > 0) and not X.grad[:, 3].any()


def test_one_token_and_no_token_run() -> None:
    net = Transformer.random(Architecture(**BASE), init="xavier")
    assert net.run(tokens(1)).output.shape == (2, 1, 8)
    everything = torch.ones(2, 5, dtype=torch.bool)
    assert bool(net.run(tokens(5), everything).output.isfinite().all())


@pytest.mark.parametrize(
    ("X", "subject"),
    [
        (torch.ones(5, 8, dtype=torch.float64), "X"),
        (torch.ones(1, 5, 7, dtype=torch.float64), "X"),
        (torch.ones(1, 5, 8), "X"),
        (torch.ones(1, 10, 8, dtype=torch.float64), "length"),
    ],
)
def test_tokens_that_do_not_fit_are_a_sentence(X: Tensor, subject: str) -> None:
    net = Transformer.random(Architecture(**BASE, positions="absolute", length=9))
    with raises(TokensError, subject=subject):
        net.run(X)


def test_the_variant_named_transformer_is_the_network_itself() -> None:
    net = Transformer.random(Architecture(**BASE))
    assert net.variant("transformer") is net


def test_a_call_gives_the_output_of_a_run(net: Transformer, X: Tensor) -> None:
    padding = torch.tensor([[False] * X.shape[1], [True, *[False] * (X.shape[1] - 1)]])
    final = Transformer.random(net.arch.replace(norm_place="pre", final_norm=True))
    for each in (net, final):
        assert torch.equal(each(X), each.run(X).output)
        assert torch.equal(each(X, padding), each.run(X, padding).output)
        assert torch.equal(each(X, attention_mask=~padding), each(X, padding))


def test_parameters_are_counted_once_and_only_those_that_are_read() -> None:
    net = Transformer.random(Architecture(layers=3, width=8, heads=2))
    assert net.num_parameters() == sum(tensor.numel() for tensor in net.state_dict().values())
    layer = net.num_parameters() // 3
    assert net.variant(layers=7).num_parameters() == 3 * layer
    assert net.variant(layers=[2, 2]).num_parameters() == layer
    without_mlp = net.variant(mlp=False)
    assert without_mlp.num_parameters() == sum(tensor.numel() for tensor in without_mlp.state_dict().values())
    assert Transformer.random(net.arch.replace(shared=True)).num_parameters() == layer
