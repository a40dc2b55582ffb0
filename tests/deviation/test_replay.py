"""A pass that is replayed gives the numbers of the rules, whatever tokens it gets."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.deviation import perturbation, replay
from rankscope.deviation.decisions import Presuming, answering
from rankscope.deviation.propagate import DeviationStep, PassInputs, propagate, run_block
from rankscope.deviation.replay import LayerCompiler, PassCache, can_replay, run_layers
from rankscope.deviation.rules import Deviation
from rankscope.deviation.second_pass import SecondPass, SecondPassLayer, second_pass_of_layers
from rankscope.deviation.state import State
from rankscope.nets import Architecture, Transformer
from rankscope.nets.traversal import traverse
from rankscope.nets.weights import converted
from tests.builders import normal
from tests.strategies import architectures


def padded(n: int, before: int, after: int) -> Tensor:
    padding = torch.zeros(2, before + n + after, dtype=torch.bool)
    padding[1, :before], padding[1, before + n :] = True, True
    return padding


def cached_states(cache: PassCache, net: Transformer, X: Tensor, padding: Tensor) -> list[State]:
    start = PassInputs.of(net, X, padding)
    return [passed.state for passed in cache.run(start.net, start.settings, start.state).layers]


def states(net: Transformer, X: Tensor, padding: Tensor) -> list[State]:
    start = PassInputs.of(net, X, padding)
    rules, state, found = Deviation(net.arch, start.settings), start.state, []
    for block in start.net.blocks:
        state = traverse(block, rules, state).state
        found.append(state)
    return found


def assert_same(found: State, expected: State, share: float) -> None:
    """Both parts equal to a share of their size, and so is what they are together."""
    whole = expected.log
    size = expected.tokens(whole).abs().flatten(1).amax(1)[:, None, None] + 1e-300
    assert ((found.tokens(whole) - expected.tokens(whole)).abs() <= share * size).all()
    (_, R), (_, other) = found.centred(), expected.centred()
    log = other.log_size()
    size = other.at(log).abs().flatten(1).amax(1)[:, None, None] + 1e-300
    assert ((R.at(log) - other.at(log)).abs() <= share * size).all()


@pytest.mark.slow
@settings(max_examples=5)
@given(architectures(), st.integers(1, 5), st.integers(0, 2), st.integers(0, 2), st.integers(0, 999))
def test_what_is_replayed_is_what_the_rules_give(
    arch: Architecture, n: int, before: int, after: int, seed: int
) -> None:
    """Asked, replayed, and with tokens for which other shortcuts are allowed."""
    arch = arch.replace(kernel="softmax") if arch.kernel == "sigmoid" else arch
    net, padding = Transformer.random(arch, seed=seed, init="xavier"), padded(n, before, after)
    cache = PassCache()
    for number, close in enumerate((1.0, 1.0, 1e-9, 1.0)):
        shared = normal(1, 1, 8, seed=seed + 7)
        X = close * normal(2, padding.shape[1], 8, seed=seed + number) + (1 - close) * shared
        start = PassInputs.of(net, X, padding)
        assume(can_replay(net, start.state))
        for found, expected in zip(cached_states(cache, net, X, padding), states(net, X, padding), strict=True):
            assert_same(found, expected, 1e-9)


@pytest.mark.slow
@settings(max_examples=8)
@given(architectures(), st.integers(1, 5), st.integers(0, 999), st.sampled_from((1.0, 1e-3, 1e-9, 1e-200)))
def test_the_general_way_is_right_always(arch: Architecture, n: int, seed: int, close: float) -> None:
    """No shortcut at all: nothing is rested on, and the numbers are those of the rules."""
    arch = arch.replace(kernel="softmax") if arch.kernel == "sigmoid" else arch
    net, padding = Transformer.random(arch, seed=seed, init="xavier"), padded(n, 1, 0)
    X = close * normal(2, n + 1, 8, seed=seed) + (1 - close) * normal(1, 1, 8, seed=seed + 7)
    expected = states(net, X, padding)
    with answering(Presuming({})) as asking:
        found = states(net, X, padding)
    assert not len(asking.violations(X))
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other, 1e-9)


@pytest.mark.parametrize(
    ("variant", "activation"),
    [
        pytest.param("san+skip", "relu", marks=pytest.mark.slow),
        *(pytest.param(name, "gelu", marks=pytest.mark.slow) for name in ("transformer", "san", "san+mlp")),
        *(pytest.param(name, "relu", marks=pytest.mark.slow) for name in ("transformer", "san+norm+skip")),
    ],
)
def test_a_traced_layer_gives_the_same_bits(variant: str, activation: str) -> None:
    """Layers as graphs of tensors, which is what a compiler is given; equal layers share one."""
    arch = Architecture(layers=2, width=16, heads=2, mlp_width=32, norm="layer", mask="causal")
    net = Transformer.random(arch.replace(activation=activation), seed=1).variant(variant)
    compiler, padding = LayerCompiler(lambda graph: graph), padded(6, 0, 0)
    cache = PassCache(compiler)
    for _ in range(5):
        X = normal(2, 6, 16, seed=3)
        for state, expected in zip(cached_states(cache, net, X, padding), states(net, X, padding), strict=True):
            assert torch.equal(state.R.value, expected.R.value) and torch.equal(state.R.log, expected.R.log)
            assert torch.equal(state.x.value, expected.x.value) and torch.equal(state.x.log, expected.x.log)
    assert 1 <= len(compiler.functions) <= 2
    (cached,) = cache.passes.values()
    assert cached.changes == 0 and cached.runs_since_change == 4


@pytest.mark.slow
def test_changed_weights_are_seen() -> None:
    """In their place, or in another."""
    arch, padding = Architecture(layers=2, width=8, heads=2), padded(4, 0, 0)
    net, X, cache = Transformer.random(arch, seed=1), normal(2, 4, 8, seed=2), PassCache()
    for change in (lambda t: None, lambda t: t.mul_(1.5), lambda t: setattr(t, "data", t * 0.5)):
        change(net.weights.layers[1].attention.value.weight)
        for _ in range(3):
            for found, expected in zip(cached_states(cache, net, X, padding), states(net, X, padding), strict=True):
                assert_same(found, expected, 1e-12)


def cached_second_pass(cache: PassCache, net: Transformer, X: Tensor, padding: Tensor) -> list[SecondPassLayer]:
    start = PassInputs.of(net, X, padding)
    return layers_of(start, cache.run(start.net, start.settings, start.state, second_pass_of_layers))


def layers_of(start: PassInputs, result: replay.PassResult) -> list[SecondPassLayer]:
    """The layers of the second pass, from the tensors that a graph writes."""
    return [SecondPassLayer(SecondPass(start), None, *tensors) for tensors in result.second_pass]


def second_pass_layers(net: Transformer, X: Tensor, padding: Tensor) -> list[SecondPassLayer]:
    start = PassInputs.of(net, X, padding)
    second_pass = SecondPass(replace(start, order=None))
    steps = [DeviationStep(0, start.state, None)]
    for block in start.net.blocks:
        steps.append(run_block(block, start.rules, steps[-1].state))
    return [second_pass.run_layer(step) for step in steps]


NARROW = Architecture(
    layers=2, width=8, heads=1, head_width=4, positions="absolute", length=16, mlp="gated", mlp_width=12, norm="none",
    attention_skip=0.0, mlp_skip=0.0,
)  # fmt: skip
"""Its tokens become short, and a replayed pass keeps them at another scale."""


@pytest.mark.slow
@settings(max_examples=4)
@given(architectures(), st.integers(1, 5), st.integers(0, 2), st.integers(0, 999))
@example(NARROW, 1, 0, 0)
def test_a_second_pass_is_replayed_with_the_first(arch: Architecture, n: int, before: int, seed: int) -> None:
    """Its tokens, whether float64 resolves them, and what is lost are those of a second pass that asks, also
    with tokens for which other shortcuts are allowed."""
    arch = arch.replace(kernel="softmax") if arch.kernel == "sigmoid" else arch
    net, padding = Transformer.random(arch, seed=seed, init="xavier"), padded(n, before, 1)
    cache = PassCache()
    for number, close in enumerate((1.0, 1.0, 1e-9, 1.0)):
        X = close * normal(2, padding.shape[1], 8, seed=seed + number) + (1 - close) * normal(1, 1, 8, seed=seed + 7)
        start = PassInputs.of(net, X, padding)
        assume(can_replay(net, start.state, passes=2))
        pairs = zip(cached_second_pass(cache, net, X, padding), second_pass_layers(net, X, padding), strict=True)
        for found, expected in pairs:
            assert_same(found.before, expected.before, 1e-9)
            assert torch.equal(found.resolved, expected.resolved) and torch.equal(found.lost, expected.lost)
            assert (found.plain_step is None) <= (expected.plain_step is None)
            if found.plain_step is not None and expected.plain_step is not None:
                torch.testing.assert_close(found.plain_step.state, expected.plain_step.state, rtol=1e-9, atol=1e-9)


SLOWER = [pytest.param(name, marks=pytest.mark.slow) for name in ("san", "san+mlp", "san+norm+skip")]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["transformer", *SLOWER])
def test_nothing_that_is_replayed_waits_for_a_number(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without numbers (torch's "meta") both passes go through once they were asked: no question
    reaches the host, nothing comes from it. A CUDA graph allows neither."""
    arch = Architecture(layers=3, width=16, heads=2, mlp_width=32, norm="layer", mask="causal")
    arch = arch.replace(kept_heads=((0,),) * 3) if variant == "transformer" else arch
    net, padding, X = (Transformer.random(arch, seed=1).variant(variant), padded(6, 0, 2), normal(2, 8, 16))
    cache = PassCache()
    expected = cached_second_pass(cache, net, X, padding)
    (cached,) = cache.passes.values()
    start = PassInputs.of(net, X, padding)

    def on_meta(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    meta_net = replace(start.net, weights=converted(start.net.weights, on_meta))
    settings, state = converted((start.settings, start.state), on_meta)
    given = replay.ReplayInputs(tuple(block.weights for block in meta_net.blocks), settings, state)
    monkeypatch.setattr(perturbation, "_row", lambda seed, length, device: torch.empty(length, device=device).double())
    with answering(Presuming(cached.answers)) as asking:
        result = run_layers(meta_net, given, second_pass_of_layers)
    violations = asking.violations(state.x.log)
    assert violations.is_meta and len(violations) > 10
    for on_meta_device, layer in zip(layers_of(start, result), expected, strict=True):
        assert (on_meta_device.plain_step is None) == (layer.plain_step is None)
        assert (on_meta_device.perturbed_step is None) == (layer.perturbed_step is None)


class Refusing(PassCache):
    """Where a pass cannot be captured."""

    def captures(self, given: replay.ReplayInputs) -> bool:
        return True

    def _captured(self, whole: replay.PassFunction, given: replay.ReplayInputs) -> tuple[replay.PassFunction, int]:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_second_pass_that_cannot_be_captured_is_gone_through() -> None:
    """And it is said; of the first pass alone it is an error."""
    arch, padding = Architecture(layers=2, width=8, heads=2), padded(4, 0, 0)
    net, X, refusing = Transformer.random(arch, seed=1), normal(2, 4, 8, seed=2), Refusing()
    cached_second_pass(refusing, net, X, padding)
    with pytest.warns(UserWarning):
        again = cached_second_pass(refusing, net, X, padding)
    for found, expected in zip(again, second_pass_layers(net, X, padding), strict=True):
        assert_same(found.before, expected.before, 1e-12)
        assert torch.equal(found.lost, expected.lost)
    cached_second_pass(refusing, net, X, padding)  # said once
    cached_states(refusing, net, X, padding)
    with pytest.raises(RuntimeError, match="not permitted"):
        cached_states(refusing, net, X, padding)


@pytest.mark.slow
def test_compiled_by_torch() -> None:
    """Through torch's own compiler."""
    net = Transformer.random(Architecture(layers=2, width=8, heads=2, mlp_width=16, norm="layer"), seed=1)
    X = normal(2, 4, 8, seed=2)
    expected = [step.state for step in propagate(net, X)]
    for _ in range(5):
        found = [step.state for step in propagate(net, X, compile=True)]
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other, 1e-12)
