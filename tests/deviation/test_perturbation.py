"""A token that is zero but for rounding, through a norm of two entries: its sign is not read."""

import math
from itertools import permutations

import mpmath as mp
import pytest
import torch

from rankscope import Architecture, Transformer, certify, measure
from rankscope.deviation import LOWEST, Scaled, perturbation
from rankscope.deviation.perturbation import Perturbation, _row
from tests.deviation.reference import Network, log10_residual


def _cancelling(share: float, eps: float) -> Transformer:
    """Causal attention whose values are minus `share` of the tokens, split over two heads, and a skip: at
    one the first token is cancelled, whatever it is."""
    net = Transformer.random(
        Architecture(layers=1, width=2, heads=2, head_width=2, mask="causal", mlp="none", norm_eps=eps,
                     biases=())
    ).to(torch.float64)  # fmt: skip
    w = net.weights.layers[0].attention
    turn = torch.linalg.qr(torch.randn(2, 2, 2, dtype=torch.float64))[0]
    w.value.weight.copy_(turn.transpose(0, 1))
    parts = torch.tensor([0.3, 0.7], dtype=torch.float64)[:, None, None]
    w.output.weight.copy_(-share * parts * turn.mT)
    return net


def _layer_one(net: Transformer, scale: float) -> list[dict[str, float]]:
    X = torch.randn(1, 1, 2).double() + scale * torch.randn(20, 3, 2).double()
    rows = measure(net, X, metrics=["mu"]).table.iter_rows(named=True)
    return [row for row in rows if row["layer"] == 1]


@pytest.mark.parametrize("scale", [1.0, 1e-14])
def test_a_sign_that_is_roundings_is_marked_every_time(scale: float) -> None:
    torch.manual_seed(0)
    assert all(row["below_floor"] for row in _layer_one(_cancelling(1.0, eps=0.0), scale))


def test_a_sign_that_is_plain_is_read() -> None:
    torch.manual_seed(0)
    apart = [row for row in _layer_one(_cancelling(0.9, eps=0.0), 1.0) if row["log10"] > -10]
    assert len(apart) > 10 and not any(row["below_floor"] for row in apart)


def _narrow(eps: float, **weights: list[float]) -> Transformer:
    """Heads of one entry, whose queries and keys a norm makes signs."""
    arch = Architecture(
        layers=1, width=3, heads=1, head_width=1, value_width=3, query_norm=True, norm="none", mlp="none", biases=(),
        norm_eps=eps,
    )  # fmt: skip
    tensors = Transformer.random(arch, init="xavier").to(torch.float64).state_dict()
    for name, column in weights.items():
        tensors[f"layers.0.attention.{name}.weight"] = torch.tensor(column, dtype=torch.float64)[:, None, None]
    return Transformer.from_weights(arch, tensors)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", ["query", "key"])
@pytest.mark.parametrize("confirm", [False, True])
def test_the_sign_of_a_query_or_key_that_is_rounding_is_marked(part: str, confirm: bool) -> None:
    """0.1 + 0.2 - 0.3 is 2.8e-17 in float64 numbers, and what is summed first decides on what is left of it. In 32
    digits it is what it is, and read."""
    X = torch.tensor([[[1.0, 1.0, 1.0], [2.0, -1.0, 0.5], [0.3, 1.0, -1.0]]], dtype=torch.float64)
    net = _narrow(0.0, **{part: [0.1, 0.2, -0.3]})
    profile = measure(net, X, metrics=["residual", "entropy"], confirm=confirm)
    after = profile.table.filter(profile.table["layer"] == 1)
    if not confirm:
        assert after["below_floor"].all()
        return
    with mp.workdps(60):
        exact = log10_residual(Network(net).states(X[0])[1])
    assert not after["below_floor"].any()
    assert profile.curve("residual", "log10")[0, 1].item() == pytest.approx(float(exact), abs=1e-12)


def test_signs_that_two_passes_share_by_chance_are_marked_too() -> None:
    """Of the sums of these twelve columns that are nothing but rounding, whatever the order of their terms."""
    X = torch.tensor([[[1.0, 1.0, 1.0], [2.0, -1.0, 0.5], [0.3, 1.0, -1.0]]], dtype=torch.float64)
    for factor in (1.0, 3.0):
        for column in permutations([0.1, 0.2, -0.3]):
            net = _narrow(0.0, query=[factor * weight for weight in column])
            table = measure(net, X, metrics=["residual", "entropy"]).table
            assert table.filter(table["layer"] == 1)["below_floor"].all(), column


def test_signs_of_queries_that_are_plain_are_read() -> None:
    """Far from zero, with an eps that rounding does not reach, or of a token that is zero."""
    X = torch.tensor([[[1.0, 1.0, 1.0], [2.0, -1.0, 0.5], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    for net in (_narrow(0.0, query=[0.1, 0.2, 0.3]), _narrow(1e-6, query=[0.1, 0.2, -0.3])):
        assert not measure(net, X, metrics=["residual", "entropy"]).table["below_floor"].any()


def test_random_rows_of_copies_do_not_hang_on_what_ran_before() -> None:
    """Rows are kept for later passes, which may need shorter ones: those begin as the longer ones do."""
    cpu = torch.device("cpu")
    short, long = (_row(4, length, cpu) for length in (50, 5000))
    assert long[:, :50].equal(short) and short.abs().max() < 1
    assert short[0].eq(0).all() and len(short.unique(dim=0)) == 5


def test_certificates_do_not_hang_on_what_ran_before() -> None:
    small, large = (
        Transformer.random(Architecture(layers=2, width=width, heads=2), seed=1) for width in (8, 32)
    )  # fmt: skip
    X = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    perturbation._longest.clear()
    alone = certify(small, X).table
    certify(large, X.repeat(1, 5, 4))
    assert certify(small, X).table.equals(alone)


@pytest.mark.parametrize("copies", [0, 1, 2])
@pytest.mark.parametrize("heads", [None, 1, 5])
def test_logs_are_moved_but_that_of_zero(copies: int, heads: int | None) -> None:
    shape = (4 * (1 + copies),) if heads is None else (4 * (1 + copies), heads)
    log = 1e5 * torch.randn(shape, dtype=torch.float64)
    log[1], log[-1] = LOWEST, math.nan
    found = Perturbation(copies=copies).scaled(Scaled(torch.ones(*shape, 2), log)).log
    torch.testing.assert_close(found, log, rtol=1e-14, atol=0.0, equal_nan=True)
    assert bool((found[1] == LOWEST).all()) and bool((found[-2] != log[-2]).any())
