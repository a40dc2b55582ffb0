"""`Doubled`: a tensor of about 32 digits that goes wherever a float64 one does.

torch sees a float64 tensor; every operation on it is looked up in `table.py` and done on pairs. What is not
there is refused: no operation falls back to float64 silently. Other operands, float64 tensors and Python
numbers, are taken as they are.
"""

from typing import Any

import torch
from torch import Tensor

from rankscope.doubled.functions import parts
from rankscope.doubled.pairs import Pair, no_type_check
from rankscope.doubled.table import TABLE, WRITTEN


class Doubled(Tensor):
    """A torch tensor of about 32 digits, `hi + lo` entry by entry, hi the nearest float64.

    >>> third = Doubled.of(torch.ones(1, dtype=torch.float64)) / 3
    >>> third.hi.item(), third.lo.item()
    (0.3333333333333333, 1.850371707708594e-17)
    >>> abs((3 * third - 1).item()) < 1e-31
    True
    """

    pair: Pair

    @staticmethod
    @no_type_check
    def __new__(cls, pair: Pair) -> "Doubled":
        """A tensor that torch takes for a float64 one of the shape of hi."""
        hi = pair.hi
        made = Tensor._make_wrapper_subclass(cls, hi.shape, strides=hi.stride(), dtype=torch.float64, device=hi.device)
        made.pair = pair
        return made

    @no_type_check
    def __init__(self, pair: Pair) -> None:
        super().__init__()

    @classmethod
    def of(cls, tensor: Tensor) -> "Doubled":
        """The numbers of a tensor of floats as they are; no memory beside it."""
        return tensor if isinstance(tensor, cls) else cls(Pair(tensor.detach().to(torch.float64)))

    @property
    def hi(self) -> Tensor:
        """The float64 tensor nearest to the numbers."""
        return self.pair.hi

    @property
    def lo(self) -> Tensor:
        """The float64 tensor that hi leaves."""
        return self.pair.low

    def to_float64(self) -> Tensor:
        """The numbers rounded to float64, as an ordinary tensor."""
        return self.pair.hi

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Doubled(hi={self.pair.hi}, lo={self.pair.lo})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @no_type_check
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operands, options = [_opened(argument) for argument in args], kwargs or {}
        if operation in WRITTEN:
            args[0]._write(WRITTEN[operation](*operands, **options), operation)
            return args[0]
        if operation not in TABLE:
            result = operation.decompose(*args, **options)  # in inference mode operations come undecomposed
            if result is not NotImplemented:
                return result
            sentence = f"doubled precision has no rule for {operation}: add one to doubled/table.py, or round first"
            raise NotImplementedError(f"{sentence}, to_float64()")
        return _wrapped(TABLE[operation](*operands, **options))

    def _write(self, result: Pair, operation: Any) -> None:
        """Write the result of an in-place operation into this tensor's memory."""
        hi, lo = self.pair
        if lo is None:  # its numbers may be another's, and there is no place for their digits
            raise NotImplementedError(f"{operation} writes into exact float64 numbers: clone() them first")
        hi.copy_(result.hi)
        lo.copy_(result.low)


@no_type_check
def _opened(value: Any) -> Any:
    """An argument of an operation with pairs in place of `Doubled` tensors."""
    if isinstance(value, Doubled):
        return value.pair
    return [_opened(item) for item in value] if isinstance(value, (list, tuple)) else value


@no_type_check
def _wrapped(value: Any) -> Any:
    """A result of a rule with `Doubled` tensors in place of pairs."""
    if isinstance(value, Pair):
        return Doubled(value)
    return [_wrapped(item) for item in value] if isinstance(value, list) else value


def nearest(tensor: Tensor) -> Tensor:
    """An ordinary float64 tensor of a doubled one; others as they are."""
    return tensor.to_float64() if isinstance(tensor, Doubled) else tensor


def constant(name: str, like: Tensor) -> Any:
    """A named constant (`functions.NAMED`) or a number written in decimals, to the digits of a tensor: a
    Python float beside an ordinary one.

    >>> constant("sqrt(1/2)", torch.zeros(1))
    0.7071067811865476
    """
    hi, lo = parts(name)
    if not isinstance(like, Doubled):
        return hi
    return Doubled(Pair(like.hi.new_tensor(hi), like.hi.new_tensor(lo)))


def quotient(above: int | float, below: int | float, like: Tensor) -> Any:
    """`above / below` of two floats, to the digits of a tensor."""
    if not isinstance(like, Doubled):
        return above / below
    return Doubled(Pair(like.hi.new_tensor(float(above)))) / below


def near_log(tensor: Tensor) -> Tensor:
    """A number near log(x), to 16 digits: enough for the log of a scale, which may be chosen freely."""
    return Doubled.of(tensor.hi.log()) if isinstance(tensor, Doubled) else tensor.log()


def precision(like: Tensor) -> float:
    """The relative rounding of one operation on such a tensor: 2^-52, or 2^-104 of a doubled one."""
    return 2.0**-104 if isinstance(like, Doubled) else torch.finfo(torch.float64).eps
