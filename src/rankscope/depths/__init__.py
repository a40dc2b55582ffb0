"""What each layer, head and path of a model contributes to its output, and smaller models made from that."""

from rankscope.depths.cut import Cut, Fidelity, cut, fidelity

__all__ = ["Cut", "Fidelity", "cut", "fidelity"]
