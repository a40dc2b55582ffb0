"""Doubled precision: torch tensors of about 32 digits."""

from rankscope.doubled.tensor import Doubled, constant, near_log, nearest, precision, quotient

__all__ = ["Doubled", "constant", "near_log", "nearest", "precision", "quotient"]
