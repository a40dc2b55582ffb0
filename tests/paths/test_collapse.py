"""How fast single paths collapse, against hundreds of digits."""

import mpmath as mp
import pytest
import torch

from rankscope.nets import Architecture, Transformer
from rankscope.paths import decompose, rate
from rankscope.paths.single_paths import path_residuals
from tests.deviation.reference import Network, composite, exact, log10_residual, times
from tests.paths.enumeration import CASES, network, tokens

SMALL = Architecture(layers=3, width=6, heads=2, head_width=4, mlp="none", norm="none", biases=False)


@pytest.mark.parametrize("skip", [0.0, 0.5])
def test_single_paths_against_400_digits(skip: float) -> None:
    """Residuals of P_path X W_path down to 1e-300 and below, with attention from the full network."""
    arch = SMALL.replace(layers=5, attention_skip=skip, divisor=40.0)
    net = Transformer.random(arch, seed=3, init="xavier")
    X = tokens()
    d = decompose(net, X)
    paths = [(0, 1, 0, 1, 1), (1, 1, 1, 1, 1)] + ([(None, 0, None, 1, 1)] if skip else [])
    table = path_residuals(d.frozen, list(paths))
    with mp.workdps(400):
        reference, start = Network(net), exact(X[0])
        states = reference.states(X[0])
        attention = [reference.matrices(layer, layer, states[layer]) for layer in range(5)]
        for path, row in zip(paths, table.iter_rows(named=True), strict=True):
            Y = start
            for layer, head in enumerate(path):
                if head is None:
                    Y = [[mp.mpf(skip) * u for u in each] for each in Y]
                else:
                    output = reference.tensors[f"layers.{layer}.attention.output.weight"][head]
                    V = reference.heads(layer, "value", Y)[head]
                    Y = times(times(attention[layer][head], V), output)
            residual, size = log10_residual(Y), mp.log10(composite(Y))
            assert row["log10"] == pytest.approx(float(residual - size), abs=1e-9 * abs(float(residual)) + 1e-10)
            assert row["arithmetic"] == "deviation" and not row["below_floor"]
    if not skip:
        assert table["log10"].min() < -20  # type: ignore[operator]


def test_single_paths_lose_digits_at_a_steady_rate() -> None:
    """With attention from a network that keeps its tokens apart, each head in a path averages once more."""
    arch = Architecture(layers=8, width=16, heads=4, mlp="none", norm="none", biases=False)
    d = decompose(Transformer.random(arch, init="xavier"), torch.randn(2, 12, 16, dtype=torch.float64))
    table = d.residuals(count=6)
    assert table.group_by("length").len().sort("length")["len"].to_list() == [2] + [12] * 8
    assert -3 < rate(table) < -0.1
    whole = decompose(network(CASES["post-norm"]), tokens())
    plain = whole.residuals([0, 2], count=3)
    assert set(plain["arithmetic"]) == {"float64"} and set(plain["length"]) == {0, 2}
