"""Row statistics against a softmax written out here in float64, whatever makes the scores."""

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.errors import WatchError
from rankscope.live import AttentionScores, row_statistics
from rankscope.live.attention import row_statistics as module
from rankscope.live.attention.scores import WrittenScores
from rankscope.metrics import RowStatistics
from tests.interpreted import needs_interpreter
from tests.raising import raises

EPS = torch.finfo(torch.float32).eps
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def eager(options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Scores in float64, pair by pair as each option is documented, and sinks."""
    q, k = options["query"].double(), options["key"].double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scale = options.get("scale") or q.shape[-1] ** -0.5
    s = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if cap := options.get("softcap"):
        s = cap * torch.tanh(s / cap)
    if "modified" in options:
        s = options["modified"](s, torch.arange(s.shape[-2]))
    queries, keys = s.shape[-2:]
    mask, sequence = options.get("mask"), options.get("sequence")
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask.double()
    before, after = options.get("window", (None, None))
    for i in range(queries):
        for j in range(keys):
            at = i + options.get("offset", 0)
            hidden = options.get("causal", False) and j > at
            hidden |= before is not None and j < at - before
            hidden |= after is not None and j > at + after
            if hidden:
                s[:, :, i, j] = -math.inf
    if mask is not None and mask.dtype == torch.bool:
        s = s.masked_fill(~mask.expand(s.shape), -math.inf)
    if sequence is not None:
        s = s.masked_fill((sequence[:, :, None] != sequence[:, None, :])[:, None], -math.inf)
    return s, options.get("sinks")


def truth(s: Tensor, sinks: Tensor | None, first: Tensor) -> RowStatistics:
    """The numbers of the softmax, from its pattern; NaN of rows without keys."""
    blind = (s == -math.inf).all(-1)
    whole = s if sinks is None else torch.cat([s, sinks.double()[:, None, None].expand(*s.shape[:-1], 1)], -1)
    P = whole.softmax(-1)
    log_sum = whole.logsumexp(-1)
    mean = torch.where(P > 0, P * whole, 0.0).sum(-1)
    at_first = P[..., : s.shape[-1]].gather(-1, first[:, None, :, None].expand(*s.shape[:-1], 1))[..., 0]
    numbers = (log_sum, mean, s.amax(-1), at_first, P.square().sum(-1))
    parts = [x if k == 2 else x.masked_fill(blind, math.nan) for k, x in enumerate(numbers)]
    return RowStatistics(*parts)


def rounding(options: dict[str, Any]) -> float:
    """How far float32 may be off in a score: by eps of the size of each of its d products, its mask and its cap."""
    q, k, mask = options["query"].double().abs(), options["key"].double().abs(), options.get("mask")
    scale = options.get("scale") or q.shape[-1] ** -0.5
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    size = float((q @ k.mT).max()) * scale
    if mask is not None and mask.dtype != torch.bool:
        size += float(mask.double().abs().masked_fill(~mask.isfinite(), 0.0).max())
    return EPS * (q.shape[-1] + 8) * (size + 1)


def close(found: RowStatistics, expected: RowStatistics, off: float, keys: int) -> None:
    """Every number within what scores that are off by `off` can do to it. A weight changes by a factor of at most
    e^(2 off), a mean and an entropy by `off` times the size of what is summed."""
    size = float(expected.log_sum.nan_to_num(0.0).abs().max()) + math.log(keys) + 1
    weight = math.expm1(4 * off) + 4 * EPS * keys
    absolute = {"log_sum": off, "largest": off, "mean": 4 * off * size, "entropy": 4 * off * size}
    for name in (*absolute, "first", "square", "effective_keys"):
        a, b = getattr(found, name).double(), getattr(expected, name)
        relative, least = (0.0, absolute[name] + 8 * EPS * size) if name in absolute else (2 * weight, 1e-37)
        torch.testing.assert_close(a, b, rtol=relative, atol=least, equal_nan=True, msg=name)


@st.composite
def options(draw: st.DrawFn, most: int = 9) -> dict[str, Any]:
    """Every kind of scores, mixed at random, of up to so many queries and keys."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    batch, groups, each, d = (draw(st.integers(1, n)) for n in (2, 2, 3, 9))
    queries, keys = draw(st.integers(1, most)), draw(st.integers(1, most))
    if packed := draw(st.booleans()):
        keys = queries
    heads = groups * each
    dtype, size = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0.1, 1.0, 5.0]))
    drawn: dict[str, Any] = {
        "query": (size * rand(batch, heads, queries, d)).to(dtype),
        "key": (size * rand(batch, groups, keys, d)).to(dtype),
        "causal": draw(st.booleans()), "offset": draw(st.integers(-2, 3)),
        "window": (draw(st.none() | st.integers(0, 4)), draw(st.none() | st.integers(0, 4))),
    }  # fmt: skip
    if draw(st.booleans()):
        drawn["scale"] = draw(st.sampled_from([0.05, 0.7, 2.0]))
    if draw(st.booleans()):
        drawn["softcap"] = draw(st.sampled_from([0.5, 5.0, 50.0]))
    if draw(st.booleans()):
        drawn["sinks"] = rand(heads).to(dtype)
    axes = [draw(st.sampled_from([1, n])) for n in (batch, heads, queries)] + [keys]
    mask = draw(st.sampled_from(["none", "seen", "added", "added infinities"]))
    if mask == "seen":
        drawn["mask"] = rand(*axes) > -0.5
    elif mask != "none":
        drawn["mask"] = rand(*axes)
        if mask == "added infinities":
            drawn["mask"] = drawn["mask"].masked_fill(rand(*axes) > 0.5, -math.inf)
    if packed:
        drawn["sequence"] = (rand(batch, queries) > 0.5).long().cumsum(-1)
    return drawn


@given(given=options(), several=st.sampled_from([1, 40, 1 << 20]), seed=st.integers(0, 99))
def test_every_number_is_that_of_the_softmax(given: dict[str, Any], several: int, seed: int) -> None:
    s, sinks = eager(given)
    batch, _, queries, keys = s.shape
    first = torch.randint(0, keys, (batch, queries), generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HELD", several)
        found = row_statistics(AttentionScores(**given), first)
    close(found, truth(s, sinks, first), rounding(given), keys)


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: rows that see no key are 0 / 0
@given(given=options(most=50), seed=st.integers(0, 99))
def test_the_kernel_for_gpus_gives_the_same(given: dict[str, Any], seed: int) -> None:
    """By Triton's interpreter, which has no bfloat16, in blocks of 16 queries and 16 keys."""
    if given["query"].dtype == torch.bfloat16:
        given = {name: x.float() if getattr(x, "dtype", None) == torch.bfloat16 else x for name, x in given.items()}
    with pytest.MonkeyPatch.context() as patch:
        fused = import_module("rankscope.live.attention.row_statistics_triton")
        small = {"QUERIES": 16, "KEYS": 16, "num_warps": 4, "num_stages": 1}
        patch.setattr(fused, "_blocks", lambda d, dtype: small)
        patch.setattr(module, "_fused", lambda scores, first: fused.fused_row_statistics(scores, first))
        s, sinks = eager(given)
        batch, _, queries, keys = s.shape
        first = torch.randint(0, keys, (batch, queries), generator=torch.Generator().manual_seed(seed))
        found = row_statistics(AttentionScores(**given), first)
    close(found, truth(s, sinks, first), rounding(given), keys)


@given(given=options())
def test_entropy_and_effective_keys_stay_between_their_bounds(given: dict[str, Any]) -> None:
    """0 <= H <= log of the keys seen, 1 <= effective keys <= that number, and `H >= log effective keys` (Jensen)."""
    found = row_statistics(AttentionScores(**given))
    s, sinks = eager(given)
    seen = (s > -math.inf).sum(-1) + (sinks is not None)
    blind = (s == -math.inf).all(-1)
    assert torch.equal(found.blind, blind)
    H, effective, off = found.entropy[~blind], found.effective_keys[~blind], 1e-3
    logs = seen[~blind].double().log()
    assert bool((H >= 0).all()) and bool((logs + off >= H).all())
    assert bool((effective >= 1 - off).all()) and bool((effective.log() <= logs + off).all())
    assert bool((effective.log() <= H + off).all())
    assert bool(((found.first >= 0) & (found.first <= 1 + off) | blind).all())


def test_a_function_of_scores_gets_the_rows_it_is_asked_for() -> None:
    q, k, slope = torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 4), torch.rand(2, 1, 1)

    def alibi(s: Tensor, rows: Tensor) -> Tensor:
        at = rows[:, None]
        return s - slope * (at - torch.arange(s.shape[-1])).abs()

    given: dict[str, Any] = {"query": q, "key": k, "modified": alibi}
    first = torch.zeros(1, 7, dtype=torch.long)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HELD", 30)
        found = row_statistics(AttentionScores(**given))
    close(found, truth(*eager(given), first), rounding(given) + 10 * EPS, 7)


def test_packed_sequences_are_as_each_alone() -> None:
    lengths = [3, 1, 5]
    q, k = torch.randn(9, 4, 8), torch.randn(9, 2, 8)
    ends = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    for causal in (False, True):
        together = row_statistics(AttentionScores.packed(q, k, ends, causal=causal))
        parts = [
            row_statistics(AttentionScores(query=a.transpose(0, 1)[None], key=b.transpose(0, 1)[None], causal=causal))
            for a, b in zip(q.split(lengths), k.split(lengths), strict=True)
        ]
        for name in vars(together):
            alone = torch.cat([getattr(part, name) for part in parts], -1)
            torch.testing.assert_close(getattr(together, name), alone, rtol=1e-5, atol=1e-5)


def test_scores_that_a_module_made_are_read_as_they_are() -> None:
    s = torch.randn(2, 3, 5, 6, dtype=torch.float64).masked_fill(torch.rand(2, 3, 5, 6) < 0.2, -math.inf)
    first = torch.randint(0, 6, (2, 5))
    found, expected = row_statistics(WrittenScores(s), first), truth(s, None, first)
    for name in vars(found):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-12, equal_nan=True
        )


@given(given=options(), seed=st.integers(0, 99))
def test_keys_that_are_taken_away_are_not_seen(given: dict[str, Any], seed: int) -> None:
    s, sinks = eager(given)
    keys = torch.rand(len(s), s.shape[-1], generator=torch.Generator().manual_seed(seed)) > 0.3
    s = s.masked_fill(~keys[:, None, None], -math.inf)
    first = torch.zeros(s.shape[0], s.shape[2], dtype=torch.long)
    close(
        row_statistics(AttentionScores(**given).of_keys(keys), first),
        truth(s, sinks, first),
        rounding(given),
        s.shape[-1],
    )


class LargestTensor(TorchDispatchMode):
    """Records the largest number of entries of a tensor that any operation gives."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        parts = result if isinstance(result, tuple | list) else (result,)
        self.entries = max([self.entries, *(x.numel() for x in parts if isinstance(x, Tensor))])
        return result


def test_the_pattern_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD", 1 << 14)
    q, k = torch.randn(1, 4, 600, 8), torch.randn(1, 2, 600, 8)
    with LargestTensor() as largest:
        row_statistics(AttentionScores(query=q, key=k, causal=True, window=(50, None)))
    assert largest.entries <= max(1 << 14, q.numel())
    with LargestTensor() as largest:
        k.repeat_interleave(2, 1) @ q.mT
    assert largest.entries == 4 * 600 * 600


@pytest.mark.parametrize(
    ("query", "key", "subject"),
    [((1, 3, 4, 8), (1, 2, 4, 8), "heads"), ((3, 4, 8), (3, 4, 8), "query"), ((1, 2, 4, 8), (1, 2, 4, 6), "query"),
     ((1, 2, 4, 8), (2, 2, 4, 8), "query"), ((1, 2, 4, 8), (1, 2, 0, 8), "query"),
     ((1, 2, 0, 8), (1, 2, 4, 8), "query")],
)  # fmt: skip
def test_queries_and_keys_must_fit(query: tuple[int, ...], key: tuple[int, ...], subject: str) -> None:
    with raises(WatchError, subject=subject):
        row_statistics(AttentionScores(query=torch.zeros(query), key=torch.zeros(key)))


@pytest.mark.parametrize("ends", [[0, 3], [1, 5], [0, 4, 3, 5], [5]])
def test_packed_sequences_must_be_those_of_the_tokens(ends: list[int]) -> None:
    with raises(WatchError, subject="cu_seqlens"):
        AttentionScores.packed(torch.zeros(5, 2, 4), torch.zeros(5, 2, 4), torch.tensor(ends))
