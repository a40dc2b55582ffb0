"""Networks: a frozen description, one readable reference transformer, and its variants.

Axes of the tensors of this room, by the names that shapes use (fields of `Architecture` have sizes in brackets):

- `batch`: samples. `token`: positions of a sample, valid ones first. `row`: those tokens whose attention is computed at
  once. `source`: tokens that cross-attention reads, another network's.
- `width`: entries of a token [`width`]. `inner`: entries that queries, keys or values are linear in, a latent's or a
  token's. `mlp_width`: entries between the matrices of an MLP [`mlp_width`].
- `head`: heads of queries [`heads`], `key_head`: of keys and values [`key_heads`]; `head_width`: entries of a query, a
  key or a value of one head [`head_width`, `value_width`]. A pattern is `[batch, head, token, token]`, queries first.
- `expert`: experts of a mixture [`experts.number`].
- `layer`: blocks, from 1 for people, an index from 0 where it says so.
- `length`: rows of a table of positions [`length`], `bucket`: of distances [`bias_buckets`], `offset`: distances n-1 ..
  1-n, `half`: rotated pairs. `rank`: mixed tokens of Linformer.
"""

from rankscope.nets.architecture import Architecture
from rankscope.nets.devices import (
    CPU,
    FLOAT64_BYTES,
    LAYER_OVERHEAD_BYTES,
    check_device,
    check_dtype,
    format_bytes,
    free_memory,
    machine_memory,
    usual_modes,
)
from rankscope.nets.dropout import Dropout, DropoutRules, training_states
from rankscope.nets.fields import BIASES
from rankscope.nets.kernels import KERNELS, Kernel, kernel_of, linear_logs, scores
from rankscope.nets.masks import Mask, MaskGraph, MaskLike, graph, matrix_graph
from rankscope.nets.masks import matrix as mask_matrix
from rankscope.nets.mlp import ACTIVATIONS, Experts, chosen_experts, chosen_weights, log_sigmoid
from rankscope.nets.norms import UNWEIGHTED, Norm, NormWeights, norm_of, normalise
from rankscope.nets.origin import Encoded, Inputs, Origin, titled, weights_of
from rankscope.nets.parts import Part, pieces
from rankscope.nets.pass_settings import Memory, PassSettings, Seen, TokenOrder, average, padding_from, unpadded
from rankscope.nets.plain import (
    ForwardPass,
    HeadOutputs,
    Heads,
    Plain,
    RowOutputs,
    Square,
    Step,
    Tokens,
    affine,
    contributions,
)
from rankscope.nets.positions import by_offset, rotary_tables, rotate, score_bias
from rankscope.nets.storage import digests, is_saved, read, read_tensors, write_tensors
from rankscope.nets.streaming import (
    AttentionRequest,
    PatternNumbers,
    StreamedPlain,
    size_of_attention,
    streamed,
    streams,
)
from rankscope.nets.structures import Structure, converted, form, named, tensors_of
from rankscope.nets.tensors import assemble_layer, assemble_stored, built, layer_shapes, shapes
from rankscope.nets.transformer import Transformer
from rankscope.nets.traversal import Arithmetic, Block, Branch, Branching, Half, active_heads, changed, traverse
from rankscope.nets.traversal import order as block_order
from rankscope.nets.variants import DEFINED, PUBLISHED, chosen_layers, kept_heads, with_layers
from rankscope.nets.weights import (
    LATENT_EPS,
    AttentionWeights,
    ExpertWeights,
    HeldLayers,
    Latent,
    Layer,
    LayerSource,
    Linear,
    MLPWeights,
    StreamedLayers,
)

__all__ = [
    "ACTIVATIONS", "Architecture", "Arithmetic", "AttentionRequest", "AttentionWeights", "BIASES", "Block", "Branch",
    "Branching", "CPU", "DEFINED", "Dropout", "DropoutRules", "Encoded", "ExpertWeights", "Experts", "FLOAT64_BYTES",
    "ForwardPass", "Half", "HeadOutputs", "Heads", "HeldLayers", "Inputs", "KERNELS", "Kernel", "LATENT_EPS",
    "LAYER_OVERHEAD_BYTES", "Latent", "Layer", "LayerSource", "Linear", "MLPWeights", "Mask", "MaskGraph", "MaskLike",
    "Memory", "Norm", "NormWeights", "Origin", "PUBLISHED", "Part", "PassSettings", "PatternNumbers", "Plain",
    "RowOutputs", "Seen", "Square", "Step", "StreamedLayers", "StreamedPlain", "Structure", "TokenOrder", "Tokens",
    "Transformer", "UNWEIGHTED", "active_heads", "affine", "assemble_layer", "assemble_stored", "average",
    "block_order", "built", "by_offset", "changed", "check_device", "check_dtype", "chosen_experts", "chosen_layers",
    "chosen_weights", "contributions", "converted", "digests", "form", "format_bytes", "free_memory", "graph",
    "is_saved", "kept_heads", "kernel_of", "layer_shapes", "linear_logs", "log_sigmoid", "machine_memory",
    "mask_matrix", "matrix_graph", "named", "norm_of", "normalise", "padding_from", "pieces", "read", "read_tensors",
    "rotary_tables", "rotate", "score_bias", "scores", "shapes", "size_of_attention", "streamed", "streams",
    "tensors_of", "titled", "training_states", "traverse", "unpadded", "usual_modes", "weights_of", "with_layers",
    "write_tensors",
]  # fmt: skip
