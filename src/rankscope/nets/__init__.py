"""Networks: a frozen description, one readable reference transformer, and its variants."""

from rankscope.nets.architecture import Architecture
from rankscope.nets.devices import check_device
from rankscope.nets.dropout import Dropout, training_states
from rankscope.nets.graphs import MaskGraph, graph, matrix_graph
from rankscope.nets.kernels import Kernel
from rankscope.nets.masks import Mask
from rankscope.nets.masks import matrix as mask_matrix
from rankscope.nets.mlp import ACTIVATIONS, Experts
from rankscope.nets.norms import Norm, NormWeights, norm_of
from rankscope.nets.order import active_heads
from rankscope.nets.origin import Encoded, Inputs, Origin
from rankscope.nets.parts import Part
from rankscope.nets.plain import affine
from rankscope.nets.steps import ForwardPass, Step
from rankscope.nets.tensors import shapes
from rankscope.nets.transformer import Transformer
from rankscope.nets.variants import DEFINED, PUBLISHED
from rankscope.nets.weights import Layer, Linear, MLPWeights

__all__ = [
    "ACTIVATIONS", "Architecture", "DEFINED", "Dropout", "Encoded", "Experts", "ForwardPass", "Inputs", "Kernel",
    "Layer", "Linear", "MLPWeights", "Mask", "MaskGraph", "Norm", "NormWeights", "Origin", "PUBLISHED", "Part", "Step",
    "Transformer", "active_heads", "affine", "check_device", "graph", "mask_matrix", "matrix_graph", "norm_of",
    "shapes", "training_states",
]  # fmt: skip
