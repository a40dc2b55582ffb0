"""A pass that is made again without asking: the numbers of the rules, whatever it is given."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.deviation import perturbation, replay
from rankscope.deviation.decisions import presumed, recorded
from rankscope.deviation.propagate import DeviationStep, PassInputs, propagate, stepped
from rankscope.deviation.replay import Compiled, Replays, Ruled, RuledBeside, repeats
from rankscope.deviation.rules import Deviation
from rankscope.deviation.second_pass import (
    SecondPass,
    SecondPassLayer,
    SecondPassTensors,
    second_pass_of_layers,
)
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


def states(replays: Replays, net: Transformer, X: Tensor, padding: Tensor) -> list[State]:
    start = PassInputs.of(net, X, padding)
    return [passed.state for passed in replays.run(start.net, start.settings, start.state).layers]


def asked(net: Transformer, X: Tensor, padding: Tensor) -> list[State]:
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


@settings(max_examples=8)
@given(architectures(), st.integers(1, 5), st.integers(0, 2), st.integers(0, 2), st.integers(0, 999))
def test_what_is_replayed_is_what_the_rules_give(
    arch: Architecture, n: int, before: int, after: int, seed: int
) -> None:
    """Asked, replayed, and with tokens for which other shortcuts are allowed."""
    arch = arch.replace(kernel="softmax") if arch.kernel == "sigmoid" else arch
    net, padding = Transformer.random(arch, seed=seed, init="xavier"), padded(n, before, after)
    replays = Replays()
    for number, close in enumerate((1.0, 1.0, 1e-9, 1.0)):
        shared = normal(1, 1, 8, seed=seed + 7)
        X = close * normal(2, padding.shape[1], 8, seed=seed + number) + (1 - close) * shared
        start = PassInputs.of(net, X, padding)
        if not repeats(net, start.settings, start.state):
            return
        for found, expected in zip(states(replays, net, X, padding), asked(net, X, padding), strict=True):
            assert_same(found, expected, 1e-9)


@settings(max_examples=8)
@given(architectures(), st.integers(1, 5), st.integers(0, 999), st.sampled_from((1.0, 1e-3, 1e-9, 1e-200)))
def test_the_general_way_is_right_always(arch: Architecture, n: int, seed: int, close: float) -> None:
    """No shortcut at all: nothing is rested on, and the numbers are those of the rules."""
    arch = arch.replace(kernel="softmax") if arch.kernel == "sigmoid" else arch
    net, padding = Transformer.random(arch, seed=seed, init="xavier"), padded(n, 1, 0)
    X = close * normal(2, n + 1, 8, seed=seed) + (1 - close) * normal(1, 1, 8, seed=seed + 7)
    expected = asked(net, X, padding)
    with presumed({}) as asking:
        found = asked(net, X, padding)
    assert not asking.rests_on
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other, 1e-9)


@pytest.mark.parametrize(
    "variant",
    [
        "transformer",
        "san",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("san+mlp", "san+norm+skip")),
    ],
)
def test_a_traced_layer_gives_the_same_bits(variant: str) -> None:
    """Layers as graphs of tensors, which is what a compiler is given; equal layers share one."""
    arch = Architecture(layers=3, width=16, heads=2, mlp_width=32, norm="layer", mask="causal")
    net, padding = Transformer.random(arch, seed=1).variant(variant), padded(6, 0, 0)
    fuse = Compiled(lambda graph: graph)
    replays = Replays(fuse)
    for _ in range(5):
        X = normal(2, 6, 16, seed=3)
        for found, expected in zip(states(replays, net, X, padding), asked(net, X, padding), strict=True):
            assert torch.equal(found.R.value, expected.R.value) and torch.equal(found.R.log, expected.R.log)
            assert torch.equal(found.x.value, expected.x.value) and torch.equal(found.x.log, expected.x.log)
    assert 1 <= len(fuse.functions) <= 3
    (known,) = replays.known.values()
    assert known.changes == 0 and known.since == 4


def test_changed_weights_are_seen() -> None:
    """In their place, or in another."""
    arch, padding = Architecture(layers=2, width=8, heads=2), padded(4, 0, 0)
    net, X, replays = Transformer.random(arch, seed=1), normal(2, 4, 8, seed=2), Replays()
    for change in (lambda t: None, lambda t: t.mul_(1.5), lambda t: setattr(t, "data", t * 0.5)):
        change(net.weights.layers[1].attention.value.weight)
        for _ in range(3):
            for found, expected in zip(states(replays, net, X, padding), asked(net, X, padding), strict=True):
                assert_same(found, expected, 1e-12)


def test_a_question_is_known_by_where_it_is_asked() -> None:
    """The same pass asks the same questions; answers that are not so are found."""
    net = Transformer.random(Architecture(layers=1, width=8, heads=2), seed=1)
    padding = padded(4, 0, 0)

    def through(X: Tensor) -> Callable[[], object]:
        start = PassInputs.of(net, X, padding)
        rules = Deviation(net.arch, start.settings)
        return lambda: traverse(start.net.blocks[0], rules, start.state)

    def answers(X: Tensor) -> dict[tuple[int, ...], int]:
        block = through(X)
        with recorded() as asking:
            block()
        return asking.answers

    X = normal(2, 4, 8, seed=2)
    first = answers(X)
    assert first == answers(X) and len(first) > 20
    close = through(X * 1e-9 + normal(1, 1, 8, seed=5))
    with presumed(first) as asking:
        close()
    violations = asking.violations(X)
    assert len(violations) == len(asking.rests_on) and violations.any()


def witnesses(replays: Replays, net: Transformer, X: Tensor, padding: Tensor) -> list[SecondPassTensors]:
    start = PassInputs.of(net, X, padding)
    found: list[SecondPassTensors] = list(
        replays.run(start.net, start.settings, start.state, second_pass_of_layers).second_pass
    )
    return found


def followed(net: Transformer, X: Tensor, padding: Tensor) -> list[SecondPassLayer]:
    start = PassInputs.of(net, X, padding)
    second_pass = SecondPass(replace(start, order=None))
    steps = [DeviationStep(0, start.state, None)]
    for block in start.net.blocks:
        steps.append(stepped(block, start.rules, steps[-1].state))
    return [second_pass.run_layer(step) for step in steps]


@settings(max_examples=8)
@given(architectures(), st.integers(1, 5), st.integers(0, 2), st.integers(0, 999))
def test_a_second_pass_is_replayed_with_the_first(arch: Architecture, n: int, before: int, seed: int) -> None:
    """Its tokens, whether it sees them, and what is lost to it are those of a witness that asks, also with
    tokens for which other shortcuts are allowed."""
    arch = arch.replace(kernel="softmax") if arch.kernel == "sigmoid" else arch
    net, padding = Transformer.random(arch, seed=seed, init="xavier"), padded(n, before, 1)
    replays = Replays()
    for number, close in enumerate((1.0, 1.0, 1e-9, 1.0)):
        X = close * normal(2, padding.shape[1], 8, seed=seed + number) + (1 - close) * normal(
            1, 1, 8, seed=seed + 7
        )
        start = PassInputs.of(net, X, padding)
        if not repeats(net, start.settings, start.state, passes=2):
            return
        pairs = zip(witnesses(replays, net, X, padding), followed(net, X, padding), strict=True)
        for found, expected in pairs:
            assert_same(found.before, expected.before, 1e-9)
            assert torch.equal(found.resolved, expected.resolved) and torch.equal(found.lost, expected.lost)
            assert (found.plain_step is None) <= (expected.plain_step is None)
            if found.plain_step is not None and expected.plain_step is not None:
                torch.testing.assert_close(
                    found.plain_step.state, expected.plain_step.state, rtol=1e-9, atol=1e-9
                )


@pytest.mark.parametrize("variant", ["transformer", "san", "san+mlp", "san+norm+skip"])
def test_nothing_that_is_replayed_waits_for_a_number(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without numbers (torch's "meta") both passes go through once they were asked: no question
    reaches the host, nothing comes from it. A CUDA graph allows neither."""
    arch = Architecture(layers=3, width=16, heads=2, mlp_width=32, norm="layer", mask="causal")
    arch = arch.replace(kept_heads=((0,),) * 3) if variant == "transformer" else arch
    net, padding, X = (
        Transformer.random(arch, seed=1).variant(variant),
        padded(6, 0, 2),
        normal(2, 8, 16),
    )
    replays = Replays()
    expected = witnesses(replays, net, X, padding)
    (known,) = replays.known.values()
    start = PassInputs.of(net, X, padding)

    def nowhere(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    there = replace(start.net, weights=converted(start.net.weights, nowhere))
    settings, state = converted((start.settings, start.state), nowhere)
    given = replay.ReplayInputs(tuple(block.weights for block in there.blocks), settings, state)
    monkeypatch.setattr(
        perturbation, "_row", lambda seed, length, device: torch.empty(length, device=device).double()
    )
    found = []
    for block in there.blocks:
        passed, _ = Ruled(block, known.answers)(replay.ReplayInputs(block.weights, settings, state))
        found.append(passed)
        state = passed.state
    made, violations = RuledBeside(second_pass_of_layers, there, known.answers)(given, found)
    assert violations.is_meta and len(violations) > 10
    for one, other in zip(made, expected, strict=True):
        assert (one.plain_step is None, one.perturbed_step is None) == (
            other.plain_step is None,
            other.perturbed_step is None,
        )


class Refusing(Replays):
    """Where a pass cannot be captured."""

    def captures(self, given: replay.ReplayInputs) -> bool:
        return True

    def _captured(self, whole: replay.Whole, given: replay.ReplayInputs) -> tuple[replay.Whole, int]:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_second_pass_that_cannot_be_captured_is_gone_through() -> None:
    """And it is said; of the first pass alone it is an error."""
    arch, padding = Architecture(layers=2, width=8, heads=2), padded(4, 0, 0)
    net, X, refusing = Transformer.random(arch, seed=1), normal(2, 4, 8, seed=2), Refusing()
    witnesses(refusing, net, X, padding)
    with pytest.warns(UserWarning, match="could not be captured, and is slower: operation not permitted"):
        again = witnesses(refusing, net, X, padding)
    for found, expected in zip(again, followed(net, X, padding), strict=True):
        assert_same(found.before, expected.before, 1e-12)
        assert torch.equal(found.lost, expected.lost)
    witnesses(refusing, net, X, padding)  # said once
    states(refusing, net, X, padding)
    with pytest.raises(RuntimeError, match="not permitted"):
        states(refusing, net, X, padding)


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
