"""The transverse exponent: against the Jacobian of the whole network, against what is measured near collapse,
and by hand."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.errors import ArchitectureError, TokensError
from rankscope.nets import Architecture, Transformer, masks
from rankscope.profiles import measure
from rankscope.theory import slope, transverse_exponent, transverse_modes
from rankscope.theory.transverse import exponent
from tests.builders import normal, one_head
from tests.raising import raises
from tests.strategies import architectures

CYCLE = "edges:0>1,1>2,2>3,3>0"  # each token sees itself and the one before: modes (1 + i^k) / 2
MASKS = ["complete", "causal", "window:1", CYCLE]
KINDS: list[dict[str, Any]] = [
    {"norm_place": "post", "norm": "layer", "mlp": "plain"},
    {"norm_place": "post", "norm": "scale", "mlp": "gated", "attention_skip": 0.6, "mlp_skip": 0.7},
    {"norm_place": "pre", "norm": "layer", "mlp": "gated", "activation": "silu"},
    {"norm_place": "pre", "norm": "scale", "mlp": "none", "attention_skip": 0.5},
    {"norm_place": "pre", "norm": "rms", "mlp": "plain", "parallel": True, "query_norm": True},
    {"norm_place": "sandwich", "norm": "rms", "mlp": "plain", "activation": "relu"},
    {"norm_place": "sandwich", "norm": "layer", "mlp": "gated", "parallel": True, "bare_layers": (0,)},
    {"norm": "none", "mlp": "plain", "kernel": "gaussian", "activation": "tanh"},
]


def network(arch: Architecture, seed: int = 0) -> Transformer:
    """Random in every tensor, biases and gains as well."""
    tensors = Transformer.random(arch, seed=seed, init="xavier").state_dict()
    for place, (name, each) in enumerate(tensors.items()):
        tensors[name] = each + 0.2 * normal(*each.shape, seed=seed + place)
    return Transformer.from_weights(arch, tensors)


def averaging(mask: masks.MaskLike, n: int) -> Tensor:
    M = masks.matrix(mask, n).double()
    return M / M.sum(-1, keepdim=True)


def jacobians(net: Transformer, x: Tensor, n: int) -> list[Tensor]:
    """`d out[i, a] / d in[j, b]` of every layer at equal tokens, by autograd through the layer as it is."""
    differentiate: Any = torch.autograd.functional.jacobian
    X, found = x.expand(n, -1).clone(), []
    for index in range(net.arch.layers):
        layer = net.variant(layers=[index + 1])

        def after(X: Tensor, layer: Transformer = layer) -> Tensor:
            return list(layer.steps(X[None]))[-1].state[0]

        found.append(differentiate(after, X))
        X = after(X)[:1].expand(n, -1).clone()
    return found


def agrees(net: Transformer, n: int, seed: int) -> None:
    """Every mode of the whole network's Jacobian keeps to itself, and grows as the exponent says."""
    x = normal(net.arch.width, seed=seed)
    whole = jacobians(net, x, n)
    values, vectors = torch.linalg.eig(averaging(net.arch.mask, n))
    values = torch.where(values.abs() < 1e-12, 0, values)
    own = int((values - 1).abs().argmin())
    rates = []
    for k in set(range(n)) - {own}:
        v, M, logs = vectors[:, k], torch.eye(net.arch.width, dtype=torch.complex128), [0.0]
        for J in whole:
            image = torch.einsum("iajb,j->iab", J.to(v.dtype), v)
            G = torch.einsum("iab,i->ba", image, v.conj())
            parted = image - torch.einsum("i,ba->iab", v, G)
            assert float(parted.abs().max()) <= 1e-9 * float(J.abs().max())
            M = M @ G
            logs.append(math.log(max(float(torch.linalg.vector_norm(M)), 1e-300)))
        expected = float(slope(torch.tensor(logs, dtype=torch.float64)))
        found = exponent(net, x, values[k : k + 1]).rate
        if found == -math.inf:
            assert min(logs) < -25  # nothing but rounding
        else:
            assert found == pytest.approx(expected, abs=1e-7)
        rates.append(found)
    assert transverse_exponent(net, x, n).rate == pytest.approx(max(rates), abs=1e-7)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "mask"),
    [(KINDS[i], MASKS[i % 4]) for i in range(8)]
    + [pytest.param(KINDS[i], MASKS[(i + 1) % 4], marks=pytest.mark.slow) for i in range(8)],
)
def test_equals_the_jacobian_of_the_whole_network(kind: dict[str, Any], mask: str) -> None:
    arch = Architecture(layers=2, width=6, heads=2, mlp_width=8, mask=mask, **kind)
    agrees(network(arch), 4, seed=1)


@given(architectures(positions="none"), st.sampled_from(MASKS), st.booleans(), st.integers(0, 999))
@settings(max_examples=5)
def test_equals_it_for_any_block(arch: Architecture, mask: str, one_head: bool, seed: int) -> None:
    kernel = "gaussian" if arch.kernel == "sigmoid" else arch.kernel
    net = network(arch.replace(kernel=kernel, mask=mask), seed)
    agrees(net.variant(heads=[0]) if one_head else net, 4, seed)


NEAR: list[tuple[dict[str, Any], str, int]] = [
    ({"norm_place": "post", "norm": "rms", "mlp": "gated"}, "window:1", 4),
    ({"norm_place": "pre", "norm": "scale", "mlp": "gated", "attention_skip": 0.3}, "causal", 2),
    ({"norm_place": "sandwich", "norm": "layer", "mlp": "none", "attention_skip": 0.4}, "complete", 4),
    ({"norm_place": "pre", "norm": "layer", "parallel": True, "attention_skip": 0.3}, CYCLE, 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mask", "n"), [*NEAR[1:3], *(pytest.param(*case, marks=pytest.mark.slow) for case in (NEAR[0], NEAR[3]))]
)
def test_what_is_measured_near_collapse_follows_it(kind: dict[str, Any], mask: str, n: int) -> None:
    """Softmax, as it is, from tokens that differ by 1e-6, over shared layers."""
    arch = Architecture(layers=1, width=6, heads=2, mlp_width=10, mask=mask, shared=True, **kind)
    net = Transformer.random(arch, seed=1, init="xavier").variant(layers=80)
    x = normal(6)
    found = transverse_exponent(net, x, n)
    profile = measure(net, x + 1e-6 * normal(1, n, 6, seed=1), metrics=["mu", "relative_mu"], check=False)
    for metric, expected in {"mu": found.rate, "relative_mu": found.rate - found.common}.items():
        measured = float(slope(profile.curve(metric, "log10") * math.log(10)))
        assert measured == pytest.approx(expected, abs=1e-3)


def identity_attention(w: float, skip: float, mask: str, width: int, layers: int = 12) -> Transformer:
    """One head with W = w I."""
    arch = Architecture(
        layers=layers, width=width, heads=1, mlp="none", norm="none", kernel="uniform", mask=mask,
        shared=True, attention_skip=skip, biases=False,
    )  # fmt: skip
    return one_head(arch, value=w * torch.eye(width, dtype=torch.float64))


@pytest.mark.parametrize("skip", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(2))
def test_a_complete_mask_leaves_the_skip_alone(skip: float, seed: int) -> None:
    """R' = lambda R to first order, whatever the heads."""
    arch = Architecture(layers=3, width=12, heads=3, mlp="none", norm="none", attention_skip=skip)
    found = transverse_exponent(network(arch, seed), normal(12, seed=seed), 5)
    assert found.rate == pytest.approx(math.log(skip), abs=1e-12) and found.mode == 0.0


@pytest.mark.sampled(6)
@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("w", [0.8, -0.8, -3.0])
@pytest.mark.parametrize("skip", [0.5, 1.0])
def test_uniform_causal_attention_by_hand(skip: float, w: float, n: int) -> None:
    """W = w I: mode nu grows by |lambda + nu w|; at w < 0 the widest average need not win. Width 20 is more
    than the probes."""
    found = transverse_exponent(identity_attention(w, skip, "causal", 20), normal(20), n)
    by_mode = {1 / i: abs(skip + w / i) for i in range(2, n + 1)}
    assert found.rate == pytest.approx(math.log(max(by_mode.values())), abs=1e-12)
    assert by_mode[found.mode] == max(by_mode.values())  # type: ignore[index]
    assert found.common == pytest.approx(math.log(abs(skip + w)), abs=1e-12)


def test_complex_modes_by_hand() -> None:
    """On a cycle nu = (1 + e^(2 pi i k / 4)) / 2; of a conjugate pair one is kept."""
    modes = transverse_modes(Architecture(layers=1, width=4, heads=1, mask=CYCLE), 4)
    torch.testing.assert_close(modes, torch.tensor([0.5 + 0.5j, 0j], dtype=torch.complex128))
    found = transverse_exponent(identity_attention(1.5, 0.5, CYCLE, 3), normal(3), 4)
    assert found.rate == pytest.approx(math.log(abs(0.5 + 1.5 * (0.5 + 0.5j))), abs=1e-12)
    assert found.mode == pytest.approx(0.5 + 0.5j)


def test_a_mask_in_two_parts_never_joins_them() -> None:
    """nu = 1 once more: the parts' common tokens differ by what each grows."""
    apart = "edges:0>1,1>0,2>3,3>2"
    found = transverse_exponent(identity_attention(0.7, 1.0, apart, 3), normal(3), 4, relative=True)
    assert found.mode == pytest.approx(1.0) and found.rate == pytest.approx(0.0, abs=1e-12)
    assert transverse_exponent(identity_attention(0.7, 1.0, "window:0", 3), normal(3), 4).mode == 1.0


def test_pure_attention_has_no_first_order() -> None:
    """Dong et al. 2021: the residual is cubed, which no exponent can follow."""
    arch = Architecture(layers=4, width=6, heads=2, mlp="none", norm="none", attention_skip=0.0)
    for relative in (False, True):
        found = transverse_exponent(network(arch), normal(6), 3, relative=relative)
        assert found.rate == -math.inf


def test_tokens_of_any_size() -> None:
    """Tokens grow to 1e360 under norms: what the branch adds is nothing beside them. They shrink to 1e-360,
    and what they differ by less so."""
    arch = Architecture(layers=1, width=4, heads=1, mlp="none", norm_place="pre", attention_skip=1e6)
    found = transverse_exponent(network(arch).variant(layers=60), normal(4), 3)
    assert found.rate == pytest.approx(math.log(1e6), abs=1e-9)
    assert found.common == pytest.approx(math.log(1e6), abs=1e-9)
    shrinking = identity_attention(-0.999999, 1.0, "causal", 2, layers=60)
    found = transverse_exponent(shrinking, normal(2), 2, relative=True)
    assert found.common == pytest.approx(math.log(1e-6), abs=1e-9)
    assert found.rate == pytest.approx(math.log(0.5000005) - math.log(1e-6), abs=1e-9)


@pytest.mark.slow
def test_a_thousand_layers() -> None:
    arch = Architecture(layers=1, width=4, heads=1, norm_place="pre", attention_skip=4.0)
    found = transverse_exponent(network(arch).variant(layers=1000), normal(4), 3)
    assert found.rate == pytest.approx(math.log(4.0), abs=1e-9)


@pytest.mark.slow
def test_few_probes_find_what_all_directions_do() -> None:
    """Width 32, one mode: 8 probes are pushed as they are; 6 modes: by a basis. Both against all of G."""
    arch = Architecture(layers=1, width=32, heads=4, shared=True, norm_place="post")
    net = network(arch).variant(layers=25)
    x = normal(32)
    modes = torch.linspace(0.4, 0.0, 6, dtype=torch.complex128)
    alone, *others = (exponent(net, x, mode[None]) for mode in modes)
    largest = max(each.rate for each in (alone, *others))
    assert exponent(net, x, modes).rate == pytest.approx(largest, abs=1e-9)
    state, M, logs = x.expand(2, -1).clone(), torch.eye(32, dtype=torch.float64), [0.0]
    complete = net.variant(mask="complete", kernel="uniform", layers=1)
    differentiate: Any = torch.func.jacrev

    def token(x: Tensor) -> Tensor:
        return list(complete.steps(x[None, None]))[-1].state[0, 0]

    def apart(r: Tensor) -> Tensor:
        return list(complete.steps(torch.stack([state[0] + r, state[0] - r])[None]))[-1].state[0, 0]

    for _ in range(25):
        G_1, G_0 = differentiate(token)(state[0]).T, differentiate(apart)(torch.zeros_like(x)).T
        M = M @ (G_0 + 0.4 * (G_1 - G_0))
        size = float(torch.linalg.vector_norm(M))
        M, state = M / size, token(state[0]).expand(2, -1)
        logs.append(logs[-1] + math.log(size))
    assert alone.rate == pytest.approx(float(slope(torch.tensor(logs, dtype=torch.float64))), abs=2e-3)


@given(st.integers(2, 7), st.integers(0, 2**31), st.floats(0.2, 0.9))
def test_modes_are_the_eigenvalues_of_the_mask(n: int, seed: int, density: float) -> None:
    """Each of a solver's, but for one 1, is a mode; repeated ones a solver gives to a few digits only."""
    M = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)) < density
    M |= torch.eye(n, dtype=torch.bool)
    arch = Architecture(layers=1, width=4, heads=1, mask=masks.from_matrix(M))
    modes = transverse_modes(arch, n)
    values = torch.linalg.eigvals(averaging(arch.mask, n))
    values = values[torch.arange(n) != (values - 1).abs().argmin()]
    values = torch.complex(values.real, values.imag.abs())
    assert float((values[:, None] - modes).abs().amin(1).max()) < 0.03
    assert bool((modes.imag >= 0).all()) and float(modes.abs().max()) <= 1 + 1e-12


def test_modes_of_the_masks_by_name() -> None:
    def modes(mask: str, n: int, valid: int | None = None) -> list[float]:
        found = transverse_modes(Architecture(layers=1, width=4, heads=1, mask=mask), n, valid)
        assert not bool(found.imag.any())
        return found.real.tolist()

    assert modes("complete", 100) == [0.0]
    assert modes("unidirectional", 60) == [0.5]  # 59 times, of one eigenvector
    assert modes("causal", 60) == [1 / i for i in range(2, 61)]
    assert modes("causal", 60, valid=3) == [1 / 2, 1 / 3]
    assert modes("prefix:3", 5) == [1 / 4, 1 / 5, 0.0]
    assert modes("window:0", 3) == [1.0]


def test_absolute_positions_are_in_x_already() -> None:
    arch = Architecture(layers=2, width=6, heads=2, positions="absolute", length=8)
    net = Transformer.random(arch, init="xavier")
    plain = Transformer.from_weights(
        arch.replace(positions="none"), {k: v for k, v in net.state_dict().items() if k != "positions"}
    )
    assert transverse_exponent(net, normal(6), 4) == transverse_exponent(plain, normal(6), 4)


def test_a_slope_lies_between_its_steps() -> None:
    for seed in range(20):
        logs = normal(3, 2 + seed, seed=seed).cumsum(-1)
        steps = logs.diff(dim=-1)[:, seed // 2 :]
        assert bool((slope(logs) >= steps.amin(-1) - 1e-12).all() & (slope(logs) <= steps.amax(-1) + 1e-12).all())
    assert slope(torch.tensor([0.0, -1.0, -math.inf])).item() == -math.inf


def test_what_has_no_exponent() -> None:
    base: dict[str, Any] = {"layers": 2, "width": 4, "heads": 2, "length": 8}
    x = normal(4)
    refused: list[tuple[dict[str, Any], str]] = [
        *(({"kernel": name}, "kernel") for name in ("sigmoid", "linear", "linformer:2")),
        ({"mask": "causal;complete"}, "mask"),
        *(({"positions": name}, "positions") for name in ("relative", "rotary", "bias", "alibi")),
    ]
    for changes, subject in refused:
        net = Transformer.random(Architecture(**base, **changes))
        with raises(ArchitectureError, subject):
            transverse_exponent(net, x, 3)
    net = Transformer.random(Architecture(**base))
    wrong: list[tuple[Tensor, int, str]] = [
        (x[:3], 3, "x"),
        (x.expand(2, 4), 3, "x"),
        (x / 0, 3, "x"),
        (x, 1, "tokens"),
    ]
    for token, tokens, subject in wrong:
        with raises(TokensError, subject):
            transverse_exponent(net, token, tokens)


def test_uniform_attention_has_one_whatever_the_positions() -> None:
    found = []
    for positions, mask in itertools.product(("none", "rotary", "alibi"), ("causal", "causal;prefix:1")):
        arch = Architecture(layers=2, width=4, heads=2, positions=positions, mask=mask, kernel="uniform")  # type: ignore[arg-type]
        tensors = Transformer.random(arch.replace(positions="none"), init="xavier").state_dict()
        found.append(transverse_exponent(Transformer.from_weights(arch, tensors), normal(4), 3))
    assert len(set(found)) == 1
