"""Which feature of a network each theorem covers, and what its proof needs in place of those that it refuses.

Of every field of `Architecture` and every remedy `COVERAGE` says who refuses it, which is what the proofs say.
`tests/theory/test_catalogue.py` walks through it: it puts each feature on the network of each theorem and demands the
refusal, or a bound that holds; a field without an entry fails it. The page of theorems shows the table.
"""

from dataclasses import dataclass
from itertools import chain

from rankscope.theory import THEOREMS


@dataclass(frozen=True)
class Refusal:
    """Theorems whose proofs do not have a feature, and what they need in its place."""

    needs: str
    theorems: frozenset[str]

    @classmethod
    def of(cls, needs: str, *theorems: str) -> "Refusal":
        """The refusal by theorems named one by one; by all, if none is named."""
        return cls(needs, frozenset(theorems or THEOREMS))


_ALONE = ("dong2021-2.2", "dong2021-2.3", "dong2021-2.3-gamma1", "oscillation")
_SCORES = (*_ALONE, "dong2021-3.2", "dong2021-skip")
_SPHERES = ("wu2024-2", "wu2024-cor1", "hemisphere")
_MEASURED = ("elementary-skip", "aligned-skip", "untouched")

ANY = Refusal.of("networks without any of these")
SCORES = Refusal.of("scores that are a bilinear form of two tokens", *_SCORES)
VIEWS = Refusal.of("tokens that all see the same ones", *_SCORES)
SOFTMAX = Refusal.of("a softmax of scores", *_SCORES, *_SPHERES, "exact-factors", "lambda-skip", "norm-rank")
AVERAGES = Refusal.of("rows of attention that sum to one", *(name for name in THEOREMS if name not in _MEASURED))
CONNECTED = Refusal.of("a mask by which every token reaches every other", "wu2024-2")
CENTRE = Refusal.of("one mask, by which tokens see themselves and one reaches all", "wu2024-1", *_SPHERES)
HEADS = Refusal.of("one head", "dong2021-2.2", *_SPHERES)
VALUES = Refusal.of("values of one head that are orthogonal, without a bias", *_SPHERES)
ACTIVE = Refusal.of("an active head in each layer", "wu2024-1", *_SPHERES)
MLP = Refusal.of(
    "layers without an MLP", *_ALONE, "attention-factors", "exact-factors", "wu2024-1", "dong2021-skip", *_SPHERES,
    "lambda-skip",
)  # fmt: skip
LIPSCHITZ = Refusal.of("an MLP after attention, with a Lipschitz constant", "dong2021-3.2")
NORM = Refusal.of("layers without a norm", *_SCORES, "attention-factors", "exact-factors", "wu2024-1")
SUM = Refusal.of("no norm after the skip's sum or after a branch", "untouched")
SCALING = Refusal.of("a norm after attention that only scales", *_SPHERES)
LENGTH = Refusal.of("a norm after attention that leaves all tokens of one length", "lambda-skip", *_SPHERES)
SKIP = Refusal.of(
    "layers without a skip", *_ALONE, "attention-factors", "exact-factors", "wu2024-1", "dong2021-3.2", *_SPHERES
)

COVERAGE: dict[str, tuple[Refusal, ...]] = {
    "layers": (), "width": (), "heads": (HEADS,), "key_heads": (HEADS,), "head_width": (VALUES,),
    "value_width": (VALUES,), "query_latent": (ANY,), "key_latent": (ANY,),
    "kernel=gaussian": (), "kernel=uniform": (), "kernel=linear": (SOFTMAX,), "kernel=sinkhorn": (SOFTMAX,),
    "kernel=sigmoid": (AVERAGES,), "kernel=sink": (AVERAGES,),
    "kernel=linformer": (AVERAGES,), "kernel=a Kernel": (SOFTMAX,),
    "divisor": (), "score_cap": (SCORES,), "log_gain": (ANY,),
    "mask=causal": (VIEWS, CONNECTED), "mask=window": (VIEWS,), "mask=unidirectional": (VIEWS, CONNECTED),
    "mask=dilated": (VIEWS, CENTRE), "mask=strided": (VIEWS, CONNECTED), "mask=prefix": (VIEWS, CONNECTED),
    "mask=longformer": (VIEWS,), "mask=bigbird": (VIEWS,), "mask=edges": (VIEWS, CONNECTED),
    "mask=matrix": (VIEWS, CENTRE), "mask by layer": (VIEWS, CENTRE), "mask=a Mask": (VIEWS, CONNECTED),
    "kept_heads": (VALUES,), "kept_heads, none in a layer": (ACTIVE,),
    "positions=absolute": (), "positions=relative": (SCORES,), "positions=rotary": (SCORES,),
    "positions=bias": (SCORES,), "positions=alibi": (SCORES,), "positions=disentangled": (SCORES,), "length": (),
    "rotary_base": (SCORES,), "rotary_share": (SCORES,), "rotary_pairs": (SCORES,), "rotary_frequencies": (SCORES,),
    "rotary_scales": (SCORES,), "rotary_reach": (SCORES,), "rotary_grid": (SCORES,), "query_norm": (SCORES,),
    "query_norm_across": (SCORES,), "head_gate": (ANY,),
    "bias_buckets": (SCORES,), "bias_reach": (SCORES,), "bias_ahead": (SCORES,), "cross_attention": (ANY,),
    "mlp=plain": (MLP,), "mlp=gated": (MLP, LIPSCHITZ), "mlp=experts": (ANY,), "mlp_width": (MLP,),
    "activation": (MLP,), "experts": (ANY,),
    "norm=layer": (NORM, SUM, SCALING), "norm=rms": (NORM, SUM), "norm=scale": (NORM, SUM),
    "norm=a Norm": (NORM, SUM, LENGTH), "norm_place=pre": (NORM, LENGTH), "norm_place=sandwich": (NORM, SUM, LENGTH),
    "norm_place=output": (NORM, SUM, LENGTH),
    "norm_eps": (NORM, SUM, LENGTH), "final_norm": (NORM, SUM), "bare_layers": (NORM, LENGTH),
    "attention_skip": (SKIP,), "mlp_skip": (MLP,), "parallel": (MLP, LIPSCHITZ), "shared": (), "biases=all": (VALUES,),
    "biases=none": (),
    "parts=a Part": (ANY,), "remedy": (ANY,), "remedy=sinkhorn": (SOFTMAX,), "remedy=lambda": (SKIP,),
    "remedy=deepnorm": (SKIP, NORM, SUM), "padding": (), "dtype": (VALUES,),
}  # fmt: skip
"""By feature who refuses it: a field set to other than its usual value (`length`, `rotary_`, `bias_`, MLPs and norms
with what they belong to), a remedy, padding, weights in another dtype than float64."""


def refusing(feature: str) -> frozenset[str]:
    """The theorems that refuse a feature, as `COVERAGE` names it; one without an entry of its own is its field's.

    >>> sorted(refusing("mask=causal") - refusing("mask=window"))
    ['wu2024-2']
    """
    refusals = COVERAGE[feature if feature in COVERAGE else feature.partition("=")[0]]
    return frozenset(chain.from_iterable(refusal.theorems for refusal in refusals))
