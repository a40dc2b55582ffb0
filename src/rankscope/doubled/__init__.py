"""Doubled precision: torch tensors of about 32 digits.

`Doubled` (`tensor.py`) is a torch tensor of pairs of float64, `hi + lo`. torch hands every operation on one
to `Doubled.__torch_dispatch__`, which looks it up in `table.py`: operations that move, choose or make
entries, and those that compute, by the arithmetic of pairs in `pairs.py`, the elementary functions of
`functions.py`, the sums of `reductions.py` and the matrix products of `matmul.py`. `deviation` runs its rules
on such tensors to confirm what float64 said.
"""

from rankscope.doubled.pairs import two_sum
from rankscope.doubled.tensor import Doubled, constant, near_log, nearest, precision, quotient

__all__ = ["Doubled", "constant", "near_log", "nearest", "precision", "quotient", "two_sum"]
