"""The kernels for GPUs, by Triton's interpreter, against the formulas that they stand for."""

import math
from importlib import import_module
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankscope.deviation import softmax, state
from rankscope.deviation.decisions import Presuming, Recording, answering
from rankscope.deviation.softmax import ReferenceRow
from rankscope.deviation.state import ValidTokens
from tests.interpreted import needs_interpreter

pytestmark = [
    needs_interpreter,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter: rows of padding see nothing
]
EPS = torch.finfo(torch.float64).eps


@st.composite
def rows(draw: st.DrawFn) -> tuple[ReferenceRow, Tensor, Tensor, ValidTokens]:
    """A reference row, D of any scale, what rows see, and which are tokens."""
    batch, heads, n = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sharpness, scale = draw(st.sampled_from([0.1, 1.0, 8.0])), draw(st.sampled_from([1e-3, 1.0, 4.0, 40.0]))
    ref = sharpness * torch.randn(batch, heads, n, generator=generator, dtype=torch.float64)
    D = scale * torch.randn(batch, heads, n, n, generator=generator, dtype=torch.float64)
    mask = draw(st.sampled_from(["complete", "causal", "window"]))
    valid = torch.ones(batch, n, dtype=torch.bool)
    if draw(st.booleans()):
        valid[0, max(1, n // 2) :] = False
    visible = torch.ones(n, n, dtype=torch.bool)
    visible = visible if mask == "complete" else visible.tril()
    visible = visible.triu(-2) if mask == "window" else visible
    visible = (visible & valid[:, None] & valid[:, :, None])[:, None]
    log = torch.tensor(draw(st.sampled_from([0.0, -1.0, -40.0, -1e5])), dtype=torch.float64).repeat(batch, heads)
    at = 0 if mask == "complete" else -1
    last = valid.sum(1)[:, None].expand(-1, heads) - 1 if at else torch.zeros(batch, heads, dtype=torch.long)
    seen = visible[:, 0].gather(1, last[..., None].expand(-1, -1, n))[:, :, None]
    D = D - D.gather(2, last[..., None, None].expand(-1, -1, 1, n))
    alike = ((visible == seen).all(-1) | ~valid[:, None]).all(-1)
    return ReferenceRow.of(ref, log, seen, visible.any(2), alike), D, visible, ValidTokens(valid)


def fused(shared: ReferenceRow, D: Tensor, visible: Tensor, valid: ValidTokens, by_column: bool) -> Any:
    size, factor = shared.level.clamp(min=-600.0).exp(), (shared.log - shared.level).clamp(max=600.0).exp()
    return shared._fused(D, factor, size, visible, valid, by_column)


@given(given_rows=rows(), by_column=st.booleans(), entries=st.sampled_from([1, 64, 2048]))
def test_where_no_score_is_far_the_kernel_gives_the_formulas(
    given_rows: tuple[ReferenceRow, Tensor, Tensor, ValidTokens], by_column: bool, entries: int
) -> None:
    shared, D, visible, valid = given_rows
    module: Any = import_module("rankscope.deviation.kernels_triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ENTRIES_OF_ROWS", entries)
        change, log, far = fused(shared, D, visible, valid, by_column)
    expected, expected_log = shared.changes(D.clone(), visible, valid, by_column=by_column)
    if bool(far.any()):
        return
    rows_seen = valid.mask[:, None, :, None].expand_as(change)
    assert bool((change.masked_select(~rows_seen) == 0).all())
    # Of padding alone, `changes` takes its other formula, whose units may be others.
    a, b = (x.masked_select(rows_seen) for x in (change * (log - expected_log).exp(), expected))
    size = float(b.abs().max()) if b.numel() else 0.0
    x = (D.abs().amax() * shared.log.exp().amax()).clamp(max=60.0)  # e^x is rounded by x eps, as is x
    assert bool(((a - b).abs() <= EPS * (40 + 8 * float(x)) * (b.abs() + size)).all())


@given(given_rows=rows())
def test_the_kernel_asks_what_the_formulas_ask(given_rows: tuple[ReferenceRow, Tensor, Tensor, ValidTokens]) -> None:
    """Without padding, of which the kernel does not look at rows."""
    shared, D, visible, valid = given_rows
    if not bool(valid.mask.all()):
        return
    size = shared.level.clamp(min=-600.0).exp()[..., None, None]
    U = (D - D.gather(3, shared.top[:, :, None].expand(-1, -1, D.shape[2], 1))) * (
        (shared.log - shared.level).clamp(max=600.0).exp()[..., None, None]
    )
    assert bool(fused(shared, D, visible, valid, False)[2].any()) == shared._far(U, size, visible)


def test_answers_of_the_kernel_are_recorded_and_presumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "has_kernel", lambda D: True)
    n, valid = 5, ValidTokens(torch.ones(1, 5, dtype=torch.bool))
    all_seen = torch.ones(1, 1, n, n, dtype=torch.bool)
    alike = torch.ones(1, 1, dtype=torch.bool)
    ref = torch.randn(1, 1, n, dtype=torch.float64)
    shared = ReferenceRow.of(ref, torch.zeros(1, 1).double(), all_seen[:, :, :1], all_seen.any(2), alike)
    D = torch.randn(1, 1, n, n, dtype=torch.float64)
    D[:, :, 0] = 0.0
    with answering(Recording()) as recording:
        near, _ = shared.changes(D, all_seen, valid)
    assert recording.answers == {(0, "softmax.far_of_kernel", 0): 1}
    P = (ref[:, :, None] + D).softmax(-1)
    expected = (P - P[:, :, :1]).scatter(3, shared.top[:, :, None].expand(-1, -1, n, 1), 0.0)
    reach = shared.log_others.amax()
    torch.testing.assert_close(near * reach.exp(), expected, rtol=1e-12, atol=1e-14)
    with answering(Presuming(recording.answers)) as presuming:
        shared.changes(100 * D, all_seen, valid)
    assert presuming.violations(D).tolist() == [True]
    with answering(Recording()) as recording:
        steep, log = shared.changes(100 * D, all_seen, valid)
    assert recording.answers[0, "softmax.far_of_kernel", 0] == 0
    P = (ref[:, :, None] + 100 * D).softmax(-1)
    expected = (P - P[:, :, :1]).scatter(3, shared.top[:, :, None].expand(-1, -1, n, 1), 0.0)
    torch.testing.assert_close(steep * log.exp(), expected, rtol=1e-9, atol=1e-12)


SIZES = [0.0, 5e-324, 1e-300, 1e-5, 1.0, 3.5, 1e14, 1e300, math.inf, math.nan]


@given(
    st.lists(
        st.tuples(st.sampled_from(SIZES), st.floats(-1.2e300, 1.2e300) | st.floats(-1e3, 1e3) | st.just(math.nan)),
        min_size=1, max_size=300,
    ),
    st.integers(1, 3), st.sampled_from([1, 3, 50]), st.integers(1, 70), st.sampled_from([1, 2**15]),
)  # fmt: skip
def test_the_kernel_of_sizes_gives_the_formulas(
    pairs: list[tuple[float, float]], heads: int, entries: int, at_once: int, long: int
) -> None:
    """Of samples, and of samples and heads, also where all heads of a sample share the memory of one log."""
    pairs = pairs[: len(pairs) // heads * heads] or pairs[:1] * heads
    size, log = torch.tensor(pairs, dtype=torch.float64).view(-1, heads, 2).unbind(2)
    value = torch.rand(*size.shape, entries, dtype=torch.float64).mul(size[..., None]).nan_to_num(posinf=math.inf)
    value[..., -1] = -size
    module: Any = import_module("rankscope.deviation.kernels_triton")
    for part, of in ((value, log), (value, log[:, :1].expand(-1, heads)), (value.flatten(0, 1), log.flatten())):
        numbers = state.Scaled(part, of)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "ENTRIES", 2 ** int(math.log2(at_once)))
            patch.setattr(module, "LONG", long)
            pairs_found = zip(state._by_kernel(numbers), state._rescaling(numbers), strict=True)
        for found, expected in pairs_found:
            torch.testing.assert_close(found(), expected(), rtol=1e-15, atol=1e-15, equal_nan=True)


@given(st.floats(-760.0, 709.0), st.integers(0, 99))
def test_exponentials_to_two_units_in_the_last_place(x: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    X = x * 10.0 ** (-20 * torch.rand(64, generator=generator, dtype=torch.float64))
    X[0] = x
    for value, *both in zip(X.tolist(), *(t.tolist() for t in exponentials(X)), strict=True):
        for found, true in zip(both, (mpmath.expm1(value), mpmath.exp(value)), strict=True):
            assert abs(mpmath.mpf(found) - true) <= 2 * math.ulp(float(true)), (value, found)


def exponentials(X: Tensor) -> tuple[Tensor, Tensor]:
    """(expm1, exp) of the kernel, at 64 numbers; the interpreter looks for names among the globals of this file."""
    import triton
    from triton import language

    module: Any = import_module("rankscope.deviation.kernels_triton")
    globals().update(tl=language, both_of=module._exponentials)
    results = torch.empty_like(X), torch.empty_like(X)
    triton.jit(_run)[(1,)](X, *results)
    return results


def _run(X: Any, Y: Any, Z: Any) -> None:
    at = tl.arange(0, 64)  # noqa: F821
    grown, power = both_of(tl.load(X + at))  # noqa: F821
    tl.store(Y + at, grown)  # noqa: F821
    tl.store(Z + at, power)  # noqa: F821


LOGS = st.floats(-1.2e300, 1.2e300) | st.floats(-600.0, 600.0) | st.sampled_from([0.0, state.LOWEST, math.nan])


@given(st.lists(st.tuples(LOGS, LOGS), min_size=1, max_size=6), st.sampled_from([1, 5, 50]), st.integers(0, 99))
def test_the_kernel_of_sums_gives_the_formula(pairs: list[tuple[float, float]], entries: int, seed: int) -> None:
    """Of logs that are far apart the formula is right only where `normalised` has made the larger one count."""
    generator = torch.Generator().manual_seed(seed)
    logs = torch.tensor(pairs, dtype=torch.float64)
    a, b = torch.randn(2, len(pairs), 3, entries, generator=generator, dtype=torch.float64)
    for split_heads in (False, True):
        of_a, of_b = (log[:, None].expand(-1, 3) if split_heads else log for log in logs.unbind(1))
        expected = state.Scaled(a, of_a) + state.Scaled(b, of_b)
        module: Any = import_module("rankscope.deviation.kernels_triton")
        first, second = state.Scaled(a, of_a), state.Scaled(b, of_b)
        if not bool(((of_a - of_b).abs() <= state.DISTANT).all()):
            first, second = first.normalised(), second.normalised()
        value, log = module.added(first.value, second.value, first.log, second.log)
        torch.testing.assert_close(log, expected.log, rtol=0.0, atol=0.0, equal_nan=True)
        torch.testing.assert_close(value, expected.value, rtol=1e-15, atol=1e-14, equal_nan=True)
