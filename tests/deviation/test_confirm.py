"""`measure(confirm=True)`: readings of doubled precision, and how many of their digits float64 has."""

from typing import Any

import mpmath as mp
import pytest
import torch

from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from tests.builders import awake, normal, one_head
from tests.deviation.reference import Network, log10_residual

SMALL: dict[str, Any] = {"layers": 3, "width": 4, "heads": 2, "head_width": 2, "mlp_width": 8}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("norm", "skip"), [("layer", 0.0), ("layer", 1.0), ("none", 0.0)])
def test_what_is_confirmed_is_exact(norm: Any, skip: float) -> None:
    arch = Architecture(**SMALL, norm=norm, attention_skip=skip)
    net, X = awake(arch, 5), normal(1, 4, 4, seed=6)
    found = measure(net, X, metrics="residual", confirm=True)
    with mp.workdps(200):
        exact = [float(log10_residual(state)) for state in Network(net).states(X[0])]
    assert found.curve("residual", "log10")[0].tolist() == pytest.approx(exact, abs=1e-12)
    float64 = measure(net, X, metrics="residual").curve("residual", "log10")[0].tolist()
    assert float64 == pytest.approx(exact, abs=1e-11)
    assert float(found.curve("residual", "digits").min()) > 11  # and is said to be so
    assert found.manifest.networks[0].checks["confirm"] is True


@pytest.mark.slow
def test_differences_within_clusters_are_resolved() -> None:
    """Groups of tokens whose members differ by 1e-19 of the distance between groups, and attention that looks
    at one group alone: 16 digits have lost what 32 still hold."""
    arch = Architecture(layers=3, width=4, heads=1, norm="none", mlp="none", attention_skip=0.0)
    resolved = 0
    for seed in range(3):
        net = Transformer.random(arch, seed=seed, init="xavier")
        X = 10 * normal(1, 4, 4, seed=seed)
        with mp.workdps(400):
            exact = [log10_residual(state) for state in Network(net).states(X[0])]
        ours, sure = measure(net, X, metrics="residual"), measure(net, X, metrics="residual", confirm=True)
        marks, left = (each.curve("residual", "below_floor")[0] for each in (ours, sure))
        logs = sure.curve("residual", "log10")[0]
        for layer in range(4):
            if not left[layer] and exact[layer] is not None and exact[layer] > -300:
                assert abs(float(logs[layer]) - float(exact[layer])) < 1e-6
                resolved += int(marks[layer])
    assert resolved > 0


def test_what_neither_precision_holds_stays_marked() -> None:
    """Tokens that each see themselves differ by 1e-70 in one column: it is added to a column of ones, of which the next
    layer takes the ones off. Both precisions are left with the 1e-100 of another column, and agree."""
    X = torch.tensor([[[1.0, 1e-70, 1e-100], [1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]], dtype=torch.float64)
    arch = Architecture(layers=2, width=3, heads=1, norm="none", mlp="none", attention_skip=0.0, mask="window:0")
    arch = arch.replace(biases=False)
    tensors = one_head(arch).state_dict()
    added, taken = [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], [[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0, 0, 1.0]]
    for layer, value in enumerate((added, taken)):
        tensors[f"layers.{layer}.attention.value.weight"] = torch.tensor(value, dtype=torch.float64)[:, None]
    net = Transformer.from_weights(arch, tensors)
    for confirm in (False, True):
        marks = measure(net, X, metrics=["mu", "head_mu"], confirm=confirm).table.filter(layer=2)["below_floor"]
        assert marks.all()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["transformer", "san"])
def test_a_whole_bert_base_is_confirmed(variant: str) -> None:
    net = Transformer.random(Architecture(layers=12, width=768, heads=12), seed=0).variant(variant)
    once, twice = (measure(net, normal(1, 16, 768), confirm=sure) for sure in (False, True))
    assert not twice.table["below_floor"].any()
    logs = (each.curve("relative_residual", "log10") for each in (once, twice))
    torch.testing.assert_close(*logs, rtol=0, atol=1e-9)
