"""One pass, many readers: each sees the layers of the network, and of them what it said it needs."""

from typing import Any

import pytest
import torch

from rankscope.errors import MetricError
from rankscope.metrics import Metric, Tokens, centred
from rankscope.metrics.base import tokens
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import ARITHMETICS, MetricReader, Reader, ShapeReader, SpectrumReader, measure, one_pass
from rankscope.profiles.readers import CheckReader, LayerStep
from tests.raising import raises

NET = Transformer.random(Architecture(layers=3, width=8, heads=2, mask="causal"), init="xavier")
X = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PADDING = torch.arange(6)[None] >= torch.tensor([[6], [4], [1], [3], [5]])


class Seen:
    """Keeps everything that it is shown."""

    cost = "all tokens, and attention"

    def __init__(self, *needs: Any) -> None:
        self.needs = frozenset(needs)
        self.found: list[tuple[int, int, torch.Tensor, torch.Tensor | None]] = []

    def read(self, step: LayerStep) -> None:
        self.found.append((step.start, step.layer, step.tokens, step.attention))

    def result(self) -> list[int]:
        return [layer for _, layer, _, _ in self.found]


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_readers_see_what_the_network_gives_and_what_they_need(arithmetic: str) -> None:
    every, tokens_alone = Seen("tokens", "attention"), Seen("tokens")
    one_pass(NET, X, PADDING, [every], arithmetic, batch_size=3)
    one_pass(NET, X, PADDING, [tokens_alone], arithmetic, batch_size=3)
    assert every.result() == tokens_alone.result() == [0, 1, 2, 3] * 2
    assert all(P is None for *_, P in tokens_alone.found)
    net = NET.to(ARITHMETICS[arithmetic])
    plain = list(net.steps(X.to(net.dtype), PADDING))
    for start, layer, state, P in every.found:
        part, tolerance = slice(start, start + 3), 0.1 if arithmetic == "bfloat16" else 1e-5
        real = ~PADDING[part][..., None]
        torch.testing.assert_close(state * real, plain[layer].state[part] * real, rtol=0, atol=tolerance)
        expected = plain[layer].attention
        assert (P is None) == (expected is None) == (layer == 0)
        if P is not None and expected is not None:
            rows = real[:, None]
            torch.testing.assert_close(P * rows, expected[part] * rows, rtol=0, atol=tolerance)


def test_a_reader_that_needs_what_there_is_not_is_a_sentence() -> None:
    with raises(MetricError, subject="needs"):
        one_pass(NET, X, readers=[Seen("logits")])


def test_readers_say_what_they_need_and_cost() -> None:
    asked = [Metric("mine", lambda P, _: P.sum((-2, -1)), of="attention")]
    readers: list[Reader] = [MetricReader(asked), CheckReader(), ShapeReader(), SpectrumReader("v")]
    needs = [" ".join(sorted(each.needs)) for each in readers]
    assert needs == ["attention", "attention tokens", "tokens", "tokens"]
    assert all("keeps" in each.cost for each in readers)


def test_the_first_layer_that_overflows_is_the_first_of_all_batches() -> None:
    arch = Architecture(layers=40, width=8, heads=2, norm="none", mlp="none")
    tensors = {name: 50 * tensor for name, tensor in Transformer.random(arch, init="xavier").state_dict().items()}
    net, rising = Transformer.from_weights(arch, tensors), torch.stack([X[0], 1e10 * X[0]])
    found = [measure(net, part, arithmetic="float32", batch_size=1) for part in (rising[:1], rising[1:], rising)]
    slow, fast, both = (each.manifest.networks[0].checks["first_layer_not_finite"] for each in found)
    assert slow > fast == both


def energy(x: Tokens, padding: torch.Tensor | None = None) -> torch.Tensor:
    """Of what tokens differ by."""
    return centred(tokens(x, padding)).square().sum((-2, -1))


def whole(x: Tokens, padding: torch.Tensor | None = None) -> torch.Tensor:
    return tokens(x, padding).X.square().sum((-2, -1))


ENERGY = Metric("energy", energy, degree=2, scale=whole, power=2)


def test_a_metric_of_ones_own_is_scaled_by_its_degree_beyond_floating_point() -> None:
    """Uniform attention is linear: values and outputs c times as large give tokens c^2 times as large a
    layer, so the log is that of the network in float64 and 2 * 2 log c a layer more."""
    arch = Architecture(layers=8, width=8, heads=2, kernel="uniform", mask="causal", norm="none", mlp="none",
                        attention_skip=0.0, biases=False)  # fmt: skip
    net, c = Transformer.random(arch, init="xavier"), 2.0**250
    outward = {k: c * v if ".value." in k or ".output." in k else v for k, v in net.state_dict().items()}
    found = measure(Transformer.from_weights(arch, outward), X, PADDING, [ENERGY, "mu"])
    states = net.run(X, PADDING).states
    expected = torch.stack([energy(tokens(state, PADDING)) for state in states], 1).log10()
    expected = expected + 4 * torch.arange(9) * torch.tensor(c, dtype=torch.float64).log10()
    log10 = found.curve("energy", "log10")
    assert float(log10[0, -1]) > 2300
    there = expected.isfinite() & ~found.curve("energy", "below_floor").bool()
    assert bool(there[0].all())
    torch.testing.assert_close(log10[there], expected[there], rtol=1e-12, atol=1e-6)
    assert bool(found.curve("energy")[0, -1].isinf())


def test_a_metric_may_bring_its_own_rule_for_any_scale() -> None:
    """The same number read off R and its log-scale: it has no floor where tokens collapse."""
    from rankscope.metrics import Reading
    from rankscope.metrics.log_readings import ScaledTokens

    def rule(tokens: ScaledTokens) -> Reading:
        R = tokens.residual
        log10 = R.value.square().sum((1, 2)).log10() + 2 * R.log / torch.tensor(10.0).double().log()
        return Reading(10.0**log10, log10, torch.zeros_like(log10))

    fine = Metric("fine", energy, degree=2, scale=whole, power=2, rule=rule)
    san = NET.variant("san").variant(layers=9, mask="complete")
    profile = measure(san, X, metrics=[ENERGY, fine, "mu"])
    expected = 2 * profile.curve("mu", "log10")
    assert float(expected[0, -1]) < -1000
    torch.testing.assert_close(profile.curve("fine", "log10"), expected, rtol=1e-12, atol=1e-9)
    floor = profile.curve("energy", "below_floor").bool()
    assert bool(floor[:, -1].all()) and not bool(floor[:, 0].any())


def test_a_metric_of_ones_own_is_read_off_heads_and_in_floating_point() -> None:
    heads = Metric("head_energy", energy, of="heads", degree=2, scale=whole, power=2)
    for arithmetic in ("deviation", "float64"):
        profile = measure(NET, X, PADDING, [heads, "head_mu", ENERGY, "mu"], arithmetic)
        for mine, known in (("head_energy", "head_mu"), ("energy", "mu")):
            expected = profile.curve(known).square()
            torch.testing.assert_close(profile.curve(mine), expected, rtol=1e-9, atol=1e-13, equal_nan=True)
