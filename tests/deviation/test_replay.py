"""A computation that is replayed gives the numbers of the function, whatever tensors it gets."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.deviation import DeviationSecondPass, DeviationStep, FloatSecondPass, PassInputs, State, can_skip
from rankscope.deviation.decisions import Presuming, answering, terms_needed
from rankscope.deviation.propagate import _all_blocks, run_block
from rankscope.deviation.replay import MOST_COMPUTATIONS, PATIENCE, ReplayCache, can_replay, weights_key
from rankscope.deviation.second_pass import with_second_pass
from rankscope.nets import Architecture, Experts, Transformer
from tests.builders import normal
from tests.strategies import architectures


def padded(n: int, before: int, after: int) -> Tensor:
    padding = torch.zeros(2, before + n + after, dtype=torch.bool)
    padding[1, :before], padding[1, before + n :] = True, True
    return padding


def with_rule(arch: Architecture) -> Architecture:
    """The architecture with a kernel that deviation arithmetic has a rule for."""
    return arch.replace(kernel="softmax") if arch.kernel == "sigmoid" else arch


def tokens_apart(close: float, n: int, seed: int, shared: int) -> Tensor:
    """Two samples of n tokens whose differences are `close` times those of independent ones."""
    return close * normal(2, n, 8, seed=seed) + (1 - close) * normal(1, 1, 8, seed=shared)


def cached_states(cache: ReplayCache, net: Transformer, X: Tensor, padding: Tensor) -> list[State]:
    inputs = PassInputs.of(net, X, padding)
    steps = cache.run(weights_key(inputs.net), partial(_all_blocks, inputs.net), inputs.tensors)
    return [step.state for step in steps]


def states(net: Transformer, X: Tensor, padding: Tensor) -> list[State]:
    inputs = PassInputs.of(net, X, padding)
    state, found = inputs.state, []
    for block in inputs.net.blocks:
        state = run_block(block, inputs.rules, state).state
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
@settings(max_examples=8)
@given(architectures(), st.integers(1, 5), st.integers(0, 2), st.integers(0, 2), st.integers(0, 999))
def test_what_is_replayed_is_what_the_rules_give(
    arch: Architecture, n: int, before: int, after: int, seed: int
) -> None:
    """Recorded, presumed, with tokens for which other shortcuts are allowed, and presumed again."""
    net, padding = Transformer.random(with_rule(arch), seed=seed, init="xavier"), padded(n, before, after)
    cache, length = ReplayCache(), padding.shape[1]
    assert can_replay(net, torch.Size((2, length)), net.arch.layers)
    for number, close in enumerate((1.0, 1.0, 1e-9, 1.0)):
        X = tokens_apart(close, length, seed + number, seed + 7)
        for found, expected in zip(cached_states(cache, net, X, padding), states(net, X, padding), strict=True):
            assert_same(found, expected, 1e-9)
    assert len(cache.computations) == 1


@pytest.mark.slow
@settings(max_examples=8)
@given(architectures(), st.integers(1, 5), st.integers(0, 999), st.sampled_from((1.0, 1e-3, 1e-9, 1e-200)))
def test_the_general_way_is_right_always(arch: Architecture, n: int, seed: int, close: float) -> None:
    """No shortcut at all: nothing is rested on, and the numbers are those of the rules."""
    net, padding = Transformer.random(with_rule(arch), seed=seed, init="xavier"), padded(n, 1, 0)
    X = tokens_apart(close, n + 1, seed, seed + 7)
    expected = states(net, X, padding)
    with answering(Presuming({})) as asking:
        found = states(net, X, padding)
    assert not len(asking.violations(X))
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other, 1e-9)


def unchanged(t: Tensor) -> None:
    """Leave the weight as it is."""


def multiply(t: Tensor) -> None:
    """Change the weight in its place."""
    t.mul_(1.5)


def move(t: Tensor) -> None:
    """Change the weight, which lies elsewhere then."""
    t.data = t * 0.5


def test_changed_weights_are_seen() -> None:
    arch, padding = Architecture(layers=2, width=8, heads=2), padded(4, 0, 0)
    net, X, cache = Transformer.random(arch, seed=1), normal(2, 4, 8, seed=2), ReplayCache()
    last: list[Tensor] = []
    for change in (unchanged, multiply, move):
        change(net.weights.layers[1].attention.value.weight)
        for _ in range(3):
            found = cached_states(cache, net, X, padding)
            for state, expected in zip(found, states(net, X, padding), strict=True):
                assert_same(state, expected, 1e-12)
        last.append(found[-1].tokens())
    assert not torch.allclose(last[0], last[1]) and not torch.allclose(last[1], last[2])
    assert len(cache.computations) == 2  # by where the weights lie


COUNT = 12


def of_signs(t: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """|t| by entries, by a shortcut that holds for those that are not negative."""
    entries = [entry if can_skip("positive", entry >= 0) else entry.abs() for entry in t]
    return torch.stack(entries), {"sum": torch.stack(entries).sum()}


def test_what_was_presumed_falsely_is_computed_again_until_patience_ends() -> None:
    """Each call another entry is negative, and the shortcut of that entry is not taken any more; after `PATIENCE` such
    calls none is."""
    cache, t = ReplayCache(), torch.arange(1.0, COUNT + 1)
    presumed = []
    for index in range(COUNT):
        for _ in range(2):
            u = t * (1 - 2 * (torch.arange(COUNT) == index))
            entries, sums = cache.run("signs", of_signs, (u if index else t))
            assert torch.equal(entries, t) and sums["sum"] == t.sum()
        (cached,) = cache.computations.values()
        presumed.append(sum(cached.answers.values()))
    counts = [COUNT - index for index in range(PATIENCE + 1)]
    assert presumed == counts + [0] * (COUNT - len(counts))
    assert cached.changes == PATIENCE + 1


def test_calls_are_recorded_once_then_presumed() -> None:
    """What is presumed wrongly of one tensor is right again of the next; terms are never fewer than are needed."""
    asked: list[int] = []

    def powers(t: Tensor) -> Tensor:
        count = terms_needed("terms", t.max(), 9)
        asked.append(count)
        return (t[:, None] > torch.arange(count)).sum(-1)  # t, where no entry is above the count

    cache = ReplayCache()
    for largest in (4, 3, 4, 7, 5, 4):
        t = torch.tensor([largest, 1, 2])
        assert torch.equal(cache.run("powers", powers, t), t)
    assert asked == [4, 4, 4, 4, 7, 7, 7]  # the second 4 of largest 7 is dropped


def test_errors_of_what_was_presumed_falsely_reach_nobody() -> None:
    """Where no graph is captured, a wrong shortcut may end in NaN, and that in an error; others are raised."""

    def largest(t: Tensor) -> Tensor:
        return torch.linalg.svdvals(t.log().exp() if can_skip("positive", t > 0) else t)[0]

    cache, t = ReplayCache(), normal(3, 3)
    for _ in range(2):
        for matrix in (t.abs(), t.abs(), t):
            torch.testing.assert_close(cache.run("largest", largest, matrix), torch.linalg.svdvals(matrix)[0])
    with pytest.raises(RuntimeError, match="non-finite"):
        cache.run("largest", largest, t * torch.nan)


def test_computations_are_told_apart_by_key_and_form_and_the_latest_are_kept() -> None:
    cache, t = ReplayCache(), torch.ones(2, 3)

    def added(inputs: dict[str, Any]) -> Tensor:
        return inputs["t"].double().sum() + inputs["number"]

    forms: list[dict[str, Any]] = [
        {"t": t, "number": 1},
        {"t": t, "number": 2},
        {"t": t.double(), "number": 1},
        {"t": t[:, :2], "number": 1},
        {"t": t.T.contiguous().T, "number": 1},
    ]
    for _ in range(3):
        for inputs in forms:
            assert cache.run("a", added, inputs) == added(inputs)
    assert len(cache.computations) == len(forms)
    assert cache.run("b", lambda inputs: inputs["t"] * 2, forms[0]).sum() == 12
    for size in range(MOST_COMPUTATIONS):
        assert cache.run("a", added, {"t": torch.ones(size), "number": 0}) == size
    assert len(cache.computations) == MOST_COMPUTATIONS
    assert "'b'" not in repr(list(cache.computations))
    cache.clear()
    assert not cache.computations


def test_layers_that_are_not_the_same_each_time_are_not_replayed() -> None:
    arch = Architecture(layers=2, width=8, heads=2)
    assert can_replay(Transformer.random(arch), torch.Size((2, 5)), 2)
    assert not can_replay(Transformer.random(arch), torch.Size((2, 0)), 2)
    mixture = arch.replace(mlp="experts", experts=Experts(number=4, chosen=2, width=12), activation="silu")
    assert not can_replay(Transformer.random(mixture), torch.Size((2, 5)), 2)


def assert_same_step(found: DeviationStep, expected: DeviationStep, share: float) -> None:
    """Tokens, attention and the outputs of heads are those of the other step."""
    assert found.layer == expected.layer
    assert_same(found.state, expected.state, share)
    valid = found.state.valid
    assert torch.equal(valid.mask, expected.state.valid.mask)
    for name in ("attention", "cross"):
        P, Q = getattr(found, name), getattr(expected, name)
        assert (P is None) == (Q is None)
        if P is not None:
            torch.testing.assert_close(P.matrix(), Q.matrix(), rtol=share, atol=share)
    assert (found.heads is None) == (expected.heads is None)
    if found.heads is not None and expected.heads is not None:
        assert_same(found.heads.contributions(valid), expected.heads.contributions(valid), share)


NARROW = Architecture(
    layers=2, width=8, heads=1, head_width=4, positions="absolute", length=16, mlp="gated", mlp_width=12, norm="none",
    attention_skip=0.0, mlp_skip=0.0,
)  # fmt: skip
"""Its tokens become short."""


def assert_together_as_apart(net: Transformer, X: Tensor, padding: Tensor, floats: bool, share: float) -> None:
    """Every layer of both passes is the same, and what is lost of them: as one batch, what norms meet in the first pass
    is looked at as well, which may lose more."""
    inputs = PassInputs.of(net, X, padding)
    apart, together = (with_second_pass(inputs, floats=floats, together=both) for both in (False, True))
    for (first, second), (same_first, same_second) in zip(apart, together, strict=True):
        if isinstance(second, FloatSecondPass):
            assert isinstance(same_second, FloatSecondPass)
            for step, same in (
                (second.layer.step, same_second.layer.step),
                (second.layer.narrow, same_second.layer.narrow),
            ):
                assert torch.equal(step.state, same.state)
            if second.block is None:
                continue
            (first, second), (same_first, same_second) = second.block_by_deviation, same_second.block_by_deviation
        assert isinstance(first, DeviationStep) and isinstance(same_first, DeviationStep)
        assert isinstance(same_second, DeviationSecondPass)
        assert_same_step(same_first, first, share)
        assert_same_step(same_second.step, second.step, share)
        assert (same_second.lost >= second.lost).all()
        heads = [part.lost_heads for part in (second, same_second) if part.lost_heads is not None]
        assert len(heads) != 1 and (not heads or (heads[1] >= heads[0]).all())


@pytest.mark.slow
@settings(max_examples=10)
@given(
    architectures(),
    st.booleans(),
    st.integers(1, 5),
    st.integers(0, 2),
    st.integers(0, 999),
    st.sampled_from((1.0, 1e-3, 1e-9, 1e-200)),
)
@example(NARROW, False, 1, 0, 0, 1.0)
@example(NARROW, True, 4, 1, 0, 1e-9)
def test_both_passes_as_one_batch_are_those_one_after_the_other(
    arch: Architecture, reads_memory: bool, n: int, before: int, seed: int, close: float
) -> None:
    arch = with_rule(arch)
    if reads_memory:
        positions = "none" if arch.positions == "relative" else arch.positions
        arch = arch.replace(cross_attention=True, parallel=False, positions=positions)
    net = Transformer.random(arch, seed=seed, init="xavier")
    if reads_memory:
        net = net.with_memory(normal(1 + seed % 2, 3, 8, seed=seed + 1))
    X, padding = tokens_apart(close, before + n + 1, seed, seed + 7), padded(n, before, 1)
    for floats in (False, True):
        assert_together_as_apart(net, X, padding, floats, 1e-11)


def test_both_passes_of_a_decoder_as_one_batch() -> None:
    arch = Architecture(layers=2, width=8, heads=2, mlp_width=12, mask="causal", cross_attention=True)
    memory = normal(2, 3, 8, seed=9)
    net = Transformer.random(arch, seed=1).with_memory(memory, torch.tensor([[False] * 3, [False, False, True]]))
    assert_together_as_apart(net, normal(2, 5, 8, seed=2), padded(3, 1, 1), False, 1e-12)


class Refusing(ReplayCache):
    """Where no computation can be captured."""

    def captures(self, inputs: Any) -> bool:
        return True

    def _captured(self, run: Any, inputs: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_pass_that_cannot_be_captured_runs_without_a_graph() -> None:
    """And a warning says so, once."""
    arch, padding = Architecture(layers=2, width=8, heads=2), padded(4, 0, 0)
    net, X, refusing = Transformer.random(arch, seed=1), normal(2, 4, 8, seed=2), Refusing()
    cached_states(refusing, net, X, padding)
    with pytest.warns(UserWarning, match="not permitted when stream is capturing"):
        again = [cached_states(refusing, net, X, padding)]
    again.append(cached_states(refusing, net, X, padding))  # any warning is an error here
    for found, expected in zip(again[0] + again[1], 2 * states(net, X, padding), strict=True):
        assert_same(found, expected, 1e-12)
