"""The list of built-in remedies: the one place, beside its file, that a new remedy is added to."""

REMEDY_FILES = {
    "shaped": "shaping",
    "attnscale": "shaping",
    "centred": "shaping",
    "sinkhorn": "scores",
    "logn": "scores",
    "differential": "differential",
    "differential2": "differential",
    "rezero": "branch_weights",
    "skipinit": "branch_weights",
    "sqrtl": "branch_weights",
    "lnscale": "branch_weights",
    "deepnorm": "skip_weights",
    "lambda": "skip_weights",
    "valueresidual": "first_values",
    "neutreno": "first_values",
    "featscale": "featscale",
    "contranorm": "contranorm",
    "gate": "gates",
    "headgate": "gates",
}
"""The file of every built-in remedy, by its name. Readable without torch, for the command line."""
