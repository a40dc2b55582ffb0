"""Networks: a frozen description, one readable reference transformer, and its variants."""

from rankscope.nets.architecture import Architecture
from rankscope.nets.graphs import MaskGraph, graph
from rankscope.nets.kernels import Kernel
from rankscope.nets.masks import Mask
from rankscope.nets.masks import matrix as mask_matrix
from rankscope.nets.mlp import Experts
from rankscope.nets.norms import Norm
from rankscope.nets.origin import Encoded, Inputs, Origin
from rankscope.nets.parts import Part
from rankscope.nets.steps import ForwardPass, Step
from rankscope.nets.tensors import shapes
from rankscope.nets.transformer import Transformer
from rankscope.nets.variants import DEFINED, PUBLISHED

__all__ = [
    "DEFINED",
    "PUBLISHED",
    "Architecture",
    "Encoded",
    "Experts",
    "Inputs",
    "Kernel",
    "Mask",
    "MaskGraph",
    "Norm",
    "Origin",
    "Part",
    "ForwardPass",
    "Step",
    "Transformer",
    "graph",
    "mask_matrix",
    "shapes",
]
