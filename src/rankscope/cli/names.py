"""Names on the command line: which there are, what a shell completes on Tab, and what a misspelt one gets.

Nothing here imports torch: a name is completed, or refused, at once. The names live where their things do;
the tables are copies, and a test holds them together.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from rankscope.errors import SourceError
from rankscope.files import must_be_text
from rankscope.naming import forgiven, is_path, may_be_on_hub, nearest
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
DEVICES = ("cpu", "cuda")
THEOREMS = (
    "dong2021-2.2", "dong2021-2.3", "dong2021-2.3-gamma1", "dong2021-3.2", "dong2021-skip", "oscillation",
    "attention-factors", "exact-factors", "dobrushin", "wu2024-1", "wu2024-2", "wu2024-cor1", "hemisphere",
    "elementary-skip", "aligned-skip", "untouched", "lambda-skip", "norm-rank",
)  # fmt: skip
FIGURES = {
    "dong2021": ("fig2", "fig3", "fig4", "lengths", "rate"),
    "wu2024": ("fig1", "fig2", "fig3", "fig4", "fig6", "fig8", "fig9", "thm3"),
}

Completer = Callable[[str], list[str]]  # Gives the names that complete the beginning of one


def complete_one(names: Sequence[str]) -> Completer:
    """A completer for an option that takes one of these names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def complete_several(names: Sequence[str]) -> Completer:
    """A completer for an option that takes several of these names, joined by commas.

    >>> complete_several(("mu", "entropy"))("mu,e")
    ['mu,entropy']
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        given = before.split(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(last) and name not in given]

    return complete


def complete_compared(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a model or, after its colon, a variant; bash takes the colon for a word of its own."""
    before = ctx.params.get("things") or ()
    if before and before[-1] == ":":
        return complete_one(VARIANTS)(incomplete)
    model, colon, variant = incomplete.partition(":")
    if colon:
        return [f"{model}:{name}" for name in complete_one(VARIANTS)(variant)]
    return complete_one(MODELS)(incomplete)


def complete_figure(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a figure of the paper that was named before it."""
    return complete_one(FIGURES.get(str(ctx.params.get("paper")), ()))(incomplete)


def model_named(name: str) -> str:
    """The known name of a model, whatever its case and hyphens; a name that can be no model is refused.

    >>> model_named("MiniLM"), model_named("BERT_Tiny"), model_named("google/bert_uncased_L-2_H-128_A-2")
    ('minilm', 'bert-tiny', 'google/bert_uncased_L-2_H-128_A-2')
    """
    called = forgiven(name, MODELS)
    if called in MODELS or called.endswith(".json") or Path(called).exists() or may_be_on_hub(called):
        return called
    listed = "rankscope models lists the names"
    if is_path(called):
        raise SourceError(f"a model must be a directory; there is none at {called} ({listed})", subject="model")
    near = nearest(called, MODELS)
    hint = f"did you mean {near}? {listed}" if near else listed
    raise SourceError(
        f"{called!r} is no model known here, no directory and no id on the hub (owner/name): {hint}", subject="model"
    )


def text_named(path: str | None) -> str | None:
    """The path of a text; refused where there is no text at that path."""
    if path is not None:
        must_be_text(path)
    return path


def say_hub(model: str, quiet: bool) -> None:
    """Say on stderr that the hub is asked for a model that is not on this machine."""
    local = model in MODELS or model.endswith(".json") or Path(model).exists()
    if not (local or quiet):
        sys.stderr.write(f"looking for {model} on the hub ...\n")
        sys.stderr.flush()
