"""Doubled precision: torch tensors of about 32 digits."""

from rankscope.doubled.tensor import Doubled, constant, precision, quotient, rounded

__all__ = ["Doubled", "constant", "precision", "quotient", "rounded"]
