"""The fields of an `Architecture`, with what each means and its usual value, and what is read off them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rankscope.nets.kernels import Kernel
from rankscope.nets.masks import Mask
from rankscope.nets.mlp import Experts
from rankscope.nets.norms import Norm
from rankscope.nets.parts import Part, Several, pieces

MLP = Literal["plain", "gated", "experts", "none"]
NormPlace = Literal["pre", "post", "sandwich", "output"]
Positions = Literal["none", "absolute", "relative", "rotary", "bias", "alibi", "disentangled"]
BIASES = ("query", "key", "value", "output", "mlp", "norm")


@dataclass(frozen=True, kw_only=True)
class ArchitectureFields:
    """The fields of a transformer, unchecked: `Architecture` is the checked class.

    Heads of keys and values, `key_heads`, for 4 heads of queries:

        key_heads = 4 (0)      key_heads = 2          key_heads = 1
        multi-head             grouped queries        multi-query

        v  v  v  v             v     v                v
        k  k  k  k             k     k                k
        |  |  |  |             |\\    |\\               |\\--\\--\\
        q  q  q  q             q  q  q  q             q  q  q  q
    """

    # ---- size --------------------
    layers: int
    width: int  # Width of a token (d_model, hidden_size)
    heads: int  # Heads of queries in a layer
    key_heads: int = 0  # Heads of keys and values; fewer than `heads` when they are grouped. 0: as many as `heads`
    head_width: int = 0  # Width of a query, key or value. 0: width / heads
    value_width: int = 0  # Width of a value where it differs. 0: head_width
    query_latent: int = 0
    """Queries are linear in a latent of this width, `RMSNorm(x A)` (DeepSeek). 0: in the token itself."""
    key_latent: int = 0
    """Keys and values are linear in one latent of this width. For keys alone, as many entries more of x A as
    are rotated stand beside it, without a norm. 0: in the token itself."""

    # ---- attention: scores, pattern, mask --------------------
    kernel: str | Kernel = "softmax"
    """softmax, gaussian, uniform, sink, sigmoid, linear, sinkhorn:k, linformer:k, or a `Kernel` (`kernels.py`)."""
    divisor: float = 0.0  # Scores are divided by it: the temperature. 0: sqrt(head_width)
    score_cap: float = 0.0
    """Scores s, positions and all, become `cap tanh(s / cap)` (Gemma 2). 0: they stay as they are."""
    log_gain: float = 0.0
    """Scores, positions, cap and all, are multiplied by `log_gain ln n`, n the valid tokens of a sample; in
    cross-attention those of the memory. 0: they stay as they are."""
    mask: str | Mask = "complete"
    """Which tokens see which (`masks.py`). Masks given by layer are joined by `;` and repeat."""
    kept_heads: tuple[tuple[int, ...], ...] | None = None  # The active heads of each layer; None: all

    # ---- positions --------------------
    positions: Positions = "none"
    length: int = 512  # The most tokens a network with an `absolute` table or `linformer` can take
    rotary_base: float = 10000.0
    rotary_share: float = 1.0  # The share of each head that is rotated
    rotary_pairs: Literal["half", "adjacent"] = "half"
    """Entry k is rotated with entry k + half (Llama) or with its neighbour (GPT-J)."""
    rotary_frequencies: tuple[tuple[float, ...], ...] = ()
    """The angle per position of each rotated pair, by layer; given by layer they repeat, as masks do.
    Empty: `rotary_base^(-2k / rotated width)` in every layer."""
    rotary_scales: tuple[float, ...] = ()
    """What rotated entries of queries and keys are multiplied by (yarn, longrope), by layer, repeating. Empty: 1."""
    rotary_reach: int = 0
    """The most tokens for which the angles are right, where they follow the length of the input (dynamic,
    longrope). 0: any number."""
    rotary_grid: tuple[int, ...] = ()
    """(rows, columns, others) where tokens are patches of an image, after so many others that are not rotated
    (DINOv3): the first half of the angles is per row, the second per column, and the image ends at -1 and 1."""
    query_norm: bool = False
    """Every query and key goes through an RMSNorm of its own before positions (Qwen 3, Gemma 3). It belongs
    to the scores: a variant without norms keeps it."""
    query_norm_across: bool = False  # Whether it is one norm of all heads of a token together (OLMo 2), not one of each
    head_gate: bool = False
    """The output of each head is multiplied, entry by entry, by a sigmoid of the query's token (Qwen3-Next)."""
    bias_buckets: int = 32
    """Buckets of distances that the `bias` positions have (T5); of `disentangled` ones, those on each side."""
    bias_reach: int = 128
    """Distance from which the `bias` positions share one bucket (T5), and `disentangled` ones, which have a bucket
    for each distance if it is 1."""
    bias_ahead: bool = True
    """Whether half of the buckets are of tokens ahead; without, those all fall into the bucket of distance 0
    (T5's decoder, where none is seen)."""

    # ---- decoder --------------------
    cross_attention: bool = False
    """Between attention and MLP every block attends to a memory, tokens of another network (`pass_settings.py`)."""

    # ---- MLP --------------------
    mlp: MLP = "plain"
    mlp_width: int = 0  # Inner width of the MLP (intermediate_size). 0: 4 width
    activation: str = "gelu"
    experts: Experts | None = None
    """Of an MLP `experts`: how many, how many each token goes through, their width (`experts.py`)."""

    # ---- norms --------------------
    norm: str | Norm = "layer"
    """layer (centred, divided by its length), rms, scale (divided by the 2-norm), none, or a `Norm`."""
    norm_place: NormPlace = "post"
    norm_eps: float = 1e-12
    final_norm: bool = False  # One more norm after the last layer, as pre-norm networks have
    bare_layers: tuple[int, ...] = ()
    """Layers (0-based) whose attention reads its input without a norm (ModernBERT: the first)."""

    # ---- block --------------------
    attention_skip: float = 1.0
    """Weight of the skip around attention (lambda), and of that around cross-attention; 0 takes it out. The
    only skip of a parallel block."""
    mlp_skip: float = 1.0  # Weight of the skip around the MLP; 0 takes it out
    parallel: bool = False  # Attention and MLP read the same input and add up, instead of one after the other
    shared: bool = False  # Every layer has the same weights (ALBERT)
    biases: bool | tuple[str, ...] = BIASES
    """Which parts have a bias, of query, key, value, output, mlp, norm. True or False: all or none."""
    parts: tuple[Part | Several, ...] = ()
    """Parts of your own and remedies, in the order in which they act (`parts.py`)."""

    def mixes(self, layer: int) -> bool:
        """Whether the MLP of a layer (0-based) is a mixture of experts."""
        return self.mlp == "experts" and self.experts is not None and layer not in self.experts.dense_layers

    def has_bias(self, part: str) -> bool:
        """Whether query, key, value, output, mlp or norm has a bias."""
        return isinstance(self.biases, tuple) and part in self.biases

    @cached_property
    def pieces(self) -> tuple[Part, ...]:
        """Every part at its one place: those that stand at several are taken apart."""
        return pieces(self.parts)

    @property
    def rotary_width(self) -> int:
        """Entries of each head that are rotated."""
        return round(self.rotary_share * self.head_width)

    @property
    def latent_width(self) -> int:
        """Entries that keys are linear in, where they are of a latent: its own and those beside it."""
        return self.key_latent + (self.rotary_width if self.positions == "rotary" else 0)

    @cached_property
    def linformer_rank(self) -> int | None:
        """k of `linformer:k`; None for every other kernel."""
        return self._kernel_number("linformer")

    @cached_property
    def sinkhorn_rounds(self) -> int | None:
        """k of `sinkhorn:k`; None for every other kernel."""
        return self._kernel_number("sinkhorn")

    def _kernel_number(self, kernel: str) -> int | None:
        name, _, k = self.kernel.partition(":") if isinstance(self.kernel, str) else ("", "", "")
        return int(k) if name == kernel else None

    def rotary_scale_of(self, layer: int) -> float:
        """What rotated entries are multiplied by in a layer (0-based); 1 where nothing is rotated."""
        if self.positions != "rotary" or not self.rotary_scales:
            return 1.0
        return self.rotary_scales[layer % len(self.rotary_scales)]

    def mask_of(self, layer: int) -> str | Mask:
        """The mask of a layer (0-based): by-layer masks repeat."""
        if isinstance(self.mask, Mask):
            return self.mask
        masks = self.mask.split(";")
        return masks[layer % len(masks)]
