"""What can be named on the command line, for shells to complete: known without importing torch.

The names live where their things do; these are copies, and a test holds them together.
"""

from rankscope.remedies.names import REMEDY_FILES

MODELS = (
    "minilm", "bert-tiny", "bert-mini", "bert-base", "bert-large", "albert-base", "xlnet-base", "gpt2",
    "llama-1b", "pythia-160m", "t5-base", "vit-base",
)  # fmt: skip
PARTS = ("skip", "attention_skip", "mlp_skip", "mlp", "norm")
VARIANTS = (
    "transformer",
    *(f"transformer-{part}" for part in PARTS),
    "san",
    *(f"san+{part}" for part in PARTS),
    "san+norm+skip",
    "san+norm+mlp+mlp_skip",
)
MASKS = (
    "complete", "causal", "window:1", "unidirectional", "dilated:2:2", "strided", "prefix:4",
    "longformer:1:1", "bigbird:1:1:2:0", "causal&window:4",
)  # fmt: skip
REMEDIES = tuple(REMEDY_FILES)
METRICS = (
    "residual", "relative_residual", "mu", "relative_mu", "spectral_residual", "relative_spectral_residual",
    "max_residual", "relative_max_residual", "high_frequency_share", "numerical_rank", "affine_rank",
    "stable_rank", "effective_rank", "participation_ratio", "sigma_min", "residual_stable_rank",
    "residual_effective_rank", "residual_singular_ratio", "mean_cosine", "mean_abs_cosine",
    "mean_cosine_gap", "max_cosine_gap", "min_cosine", "dobrushin", "entropy", "second_singular_value",
    "spectral_gap", "first_token_mass", "row_sum_defect", "expert_load", "expert_entropy",
)  # fmt: skip
ARITHMETICS = ("deviation", "float64", "float32", "bfloat16")
INITS = ("bert", "xavier", "kaiming", "orthogonal")
SPLITS = ("auto", "paragraph", "line", "jsonl")
DEVICES = ("cpu", "cuda", "mps")
THEOREMS = (
    "dong2021-2.2", "dong2021-2.3", "dong2021-2.3-gamma1", "dong2021-3.2", "dong2021-skip", "oscillation",
    "attention-factors", "exact-factors", "dobrushin", "wu2024-1", "wu2024-2", "wu2024-cor1", "hemisphere",
    "elementary-skip", "aligned-skip", "untouched", "lambda-skip", "norm-rank",
)  # fmt: skip
FIGURES = {
    "dong2021": ("fig2", "fig3", "fig4", "lengths", "rate"),
    "wu2024": ("fig1", "fig2", "fig3", "fig4", "fig6", "fig8", "fig9", "thm3"),
}
