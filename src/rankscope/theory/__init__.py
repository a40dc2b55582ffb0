"""What is proved about token uniformity, next to what is measured."""

from rankscope.theory.equilibria import anisotropy_bound, equilibrium

__all__ = ["anisotropy_bound", "equilibrium"]
