"""`Doubled` behaves as the tensor that torch takes it for."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.doubled import Doubled, nearest, precision, quotient
from tests.builders import normal
from tests.doubled.numbers import drawn, exactly

MOVES: list[Callable[[Tensor], Any]] = [
    lambda x: x.transpose(0, 1), lambda x: x.mT, lambda x: x.flatten(1), lambda x: x.reshape(-1, 2),
    lambda x: x.transpose(0, 2).reshape(4, -1), lambda x: x[:, None].expand(-1, 2, -1, -1), lambda x: x[1],
    lambda x: x[..., 0::2], lambda x: x[torch.tensor([1, 0]), torch.tensor([2, 1])], lambda x: x.flip(0),
    lambda x: torch.cat([x, x[:1]]), lambda x: torch.stack([x, -x], -1), lambda x: x.chunk(2, -1)[1],
    lambda x: x.gather(2, torch.zeros(2, 3, 1, dtype=torch.long)), lambda x: x.repeat_interleave(2, 1),
    lambda x: torch.where(x > 0, x, torch.zeros_like(x)), lambda x: x.masked_fill(x < 0, 1.0),
    lambda x: x.scatter(2, torch.zeros(2, 3, 1, dtype=torch.long), 5.0), lambda x: x.clamp(-0.5, 0.5),
    lambda x: x.clamp(min=0.25), lambda x: torch.maximum(x, -x), lambda x: torch.minimum(x, x.new_zeros(())),
    lambda x: x.abs(), lambda x: torch.relu(x), lambda x: x.amax(-1), lambda x: x.amin((0, 1)),
    lambda x: x.clone(), lambda x: x.squeeze(), lambda x: x.unbind(0)[1], lambda x: x.view_as(x),
]  # fmt: skip


@pytest.mark.parametrize("move", MOVES)
def test_what_moves_entries_keeps_every_digit(move: Any) -> None:
    """Each entry of the result is one of the argument, its negative or a number put there, to the last bit;
    which one, float64 says."""
    x = drawn(2, 3, 4, seed=1)
    found = move(x)
    assert isinstance(found, Doubled)
    assert torch.equal(found.hi, move(x.hi)) and found.shape == found.hi.shape == found.lo.shape
    assert found.stride() == found.hi.stride()
    known = set(exactly(x)) | set(exactly(-x)) | set(exactly(torch.tensor([0.0, 1.0, 5.0, -0.5, 0.5, 0.25])))
    assert set(exactly(found)) <= known


def test_comparisons_see_the_low_part() -> None:
    one = Doubled.of(torch.ones(1, dtype=torch.float64))
    more = one + 2.0**-80
    assert bool(more > 1) and bool(one < more) and bool(more != 1) and bool(more >= one) and not bool(more == one)
    assert bool(torch.maximum(one, more) == more) and bool(torch.minimum(one, more) == one)
    assert int(torch.cat([one, more, one]).argmax()) == 1 and int(torch.cat([more, one]).argmin()) == 1
    assert bool(torch.cat([one, more]).amax() == more)


def test_mantissas_and_exponents() -> None:
    x = drawn(50, seed=9, scale=1e-40)
    mantissa, exponent = torch.frexp(x)
    assert exactly(torch.ldexp(mantissa, exponent)) == exactly(x)
    assert bool((mantissa.abs() >= 0.5).all()) and bool((mantissa.abs() <= 1).all())


def test_other_operands_are_taken_as_they_are() -> None:
    plain = torch.full((1,), 0.1, dtype=torch.float64)
    third = Doubled.of(torch.ones(1, dtype=torch.float64)) / 3
    for a, b in ((third + plain, third + 0.1), (plain * third, 0.1 * third), (plain - third, 0.1 - third)):
        assert exactly(a) == exactly(b)
    assert exactly(Doubled.of(plain) * 3) == [3 * each for each in exactly(plain)]
    assert exactly(plain + third) == exactly(third + plain)


@pytest.mark.parametrize("alpha", [2, -3, 0.1, 0])
def test_sums_and_differences_weigh_their_second_operand(alpha: float) -> None:
    """`alpha` of torch.add, sub and rsub, of pairs, float64 and numbers, and in place; against fractions."""
    a, b, plain = drawn(5, seed=1), drawn(5, seed=3), normal(5, seed=5)
    weight = Fraction(alpha)

    def near(found: Any, true: list[Fraction]) -> bool:
        return all(abs(x - y) <= 2**-95 * (abs(y) + 9) for x, y in zip(exactly(found), true, strict=True))

    for x, y in ((a, b), (a, plain), (plain, b)):
        xs, ys = exactly(x), exactly(y)
        assert near(torch.add(x, y, alpha=alpha), [u + weight * v for u, v in zip(xs, ys, strict=True)])
        assert near(torch.sub(x, y, alpha=alpha), [u - weight * v for u, v in zip(xs, ys, strict=True)])
        assert near(torch.rsub(x, y, alpha=alpha), [v - weight * u for u, v in zip(xs, ys, strict=True)])
    assert near(torch.sub(a, 1.5, alpha=alpha), [u - weight * Fraction(1.5) for u in exactly(a)])
    assert near(torch.rsub(a, 1.5, alpha=alpha), [Fraction(1.5) - weight * u for u in exactly(a)])
    written = a.clone().sub_(b, alpha=alpha)
    assert exactly(written) == exactly(torch.sub(a, b, alpha=alpha))


def test_writing_in_place_reaches_what_shares_memory() -> None:
    x = drawn(3, 4, seed=3)
    before, whole = exactly(x[1:]), x.clone()
    row = whole[0]
    row.mul_(2.0).sub_(x[0])
    assert exactly(whole) == exactly(x)
    whole[0] = 7.0
    assert set(exactly(whole[0])) == {7} and exactly(whole[1:]) == before
    assert exactly(x.clone().masked_fill_(x.hi > -99, 0.0)) == [0] * 12
    with pytest.raises(NotImplementedError, match="clone"):
        Doubled.of(torch.ones(3, dtype=torch.float64)).add_(1.0)


def test_operations_made_of_others_in_inference_mode() -> None:
    x = drawn(2, 3, 4, seed=11)
    with torch.inference_mode():
        found = x.flatten(1) @ x.flatten(1).mT
    assert exactly(found) == exactly(x.flatten(1) @ x.flatten(1).mT)


def test_an_operation_without_a_rule_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"aten\.erfinv"):
        torch.erfinv(drawn(2))
    with pytest.raises(NotImplementedError, match="to_float64"):
        drawn(2).float()
    with pytest.raises(NotImplementedError, match=r"1\.5"):
        drawn(2) ** 1.5


def test_nan_and_infinity() -> None:
    x = Doubled.of(torch.tensor([math.nan, math.inf, -math.inf, 1.0], dtype=torch.float64))
    assert torch.equal(x.isnan(), x.hi.isnan()) and torch.equal(x.isfinite(), x.hi.isfinite())
    assert nearest(x.nan_to_num(nan=2.0, posinf=3.0, neginf=-3.0)).tolist() == [2.0, 3.0, -3.0, 1.0]
    assert torch.equal((x - 1).logsumexp(0).isnan(), torch.tensor(True))
    shut = torch.full((2, 3), -math.inf, dtype=torch.float64)
    assert bool(Doubled.of(shut).log_softmax(-1).isnan().all())
    shut[0, 1] = 0.5
    assert nearest(Doubled.of(shut)[0].log_softmax(-1)).tolist() == [-math.inf, 0.0, -math.inf]


def test_rounding_and_precision() -> None:
    x, plain = drawn(3, seed=5), torch.ones(1, dtype=torch.float64)
    assert type(nearest(x)) is Tensor and torch.equal(nearest(x), x.hi) and nearest(plain) is plain
    assert precision(plain) == 2.0**-52 and precision(x) == 2.0**-104
    assert quotient(1, 3, plain) == 1 / 3 and abs(float(3 * quotient(1, 3, x) - 1)) < 1e-31
    assert "hi=" in repr(x) and float(x[0]) == float(x.hi[0])
