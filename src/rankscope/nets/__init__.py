"""Networks: a frozen description, one readable reference transformer, and its variants."""

from rankscope.nets.architecture import Architecture
from rankscope.nets.devices import check_device, free_memory, usual_modes
from rankscope.nets.dropout import Dropout, training_states
from rankscope.nets.kernels import Kernel
from rankscope.nets.masks import Mask, MaskGraph, graph, matrix_graph
from rankscope.nets.masks import matrix as mask_matrix
from rankscope.nets.mlp import ACTIVATIONS, Experts
from rankscope.nets.norms import Norm, NormWeights, norm_of
from rankscope.nets.order import Branch, Half, active_heads
from rankscope.nets.origin import Encoded, Inputs, Origin
from rankscope.nets.parts import Part
from rankscope.nets.pass_settings import PassSettings, TokenOrder, padding_from
from rankscope.nets.plain import ForwardPass, Plain, Step, Tokens, affine, contributions
from rankscope.nets.streaming import AttentionRequest
from rankscope.nets.tensors import shapes
from rankscope.nets.transformer import Transformer
from rankscope.nets.traversal import Arithmetic, Block, traverse
from rankscope.nets.variants import DEFINED, PUBLISHED
from rankscope.nets.weights import AttentionWeights, Layer, Linear, MLPWeights, StreamedLayers, release

__all__ = [
    "ACTIVATIONS", "Architecture", "Arithmetic", "AttentionRequest", "AttentionWeights", "Block", "Branch", "DEFINED",
    "Dropout", "Encoded", "Experts", "ForwardPass", "Half", "Inputs", "Kernel", "Layer", "Linear", "MLPWeights", "Mask",
    "MaskGraph", "Norm", "NormWeights", "Origin", "PUBLISHED", "Part", "PassSettings", "Plain", "Step",
    "StreamedLayers", "TokenOrder", "Tokens", "Transformer", "active_heads", "affine", "check_device", "contributions",
    "free_memory", "graph", "mask_matrix", "matrix_graph", "norm_of", "padding_from", "release", "shapes",
    "training_states", "traverse", "usual_modes",
]  # fmt: skip
