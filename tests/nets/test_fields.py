"""Architectures that cannot be: each is refused, with the field that is wrong as subject."""

from typing import Any

import pytest

from rankscope.errors import ArchitectureError, MaskError
from rankscope.nets import Architecture
from tests.raising import raises

SMALL: dict[str, Any] = {"layers": 2, "width": 8, "heads": 2}


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"layers": 0}, "layers"),
        ({"heads": 3}, "width"),
        ({"heads": 3, "head_width": 2, "key_heads": 2}, "heads"),
        ({"activation": "gelo"}, r"activation"),
        ({"kernel": "softmax:3"}, "kernel"),
        ({"kernel": "linformer"}, "kernel"),
        ({"kernel": "linformer:2", "mask": "causal"}, "mask"),
        ({"kernel": "linformer:2", "positions": "rotary"}, "positions"),
        ({"kernel": "linear", "positions": "alibi"}, "positions"),
        ({"divisor": -1.0}, "divisor"),
        ({"attention_skip": float("nan")}, "attention_skip"),
        ({"parallel": True, "mlp_skip": 0.5}, "mlp_skip"),
        ({"positions": "rotary", "rotary_share": 0.25}, "rotary_share"),
        ({"biases": ("key", "values")}, "biases"),
        ({"kept_heads": ((0,),)}, "kept_heads"),
        ({"kept_heads": ((0,), (2,))}, "kept_heads"),
        ({"norm_eps": -1.0}, "norm_eps"),
        ({"head_width": -4}, "head_width"),
        ({"norm_eps": float("inf")}, "norm_eps"),
        ({"mlp_width": -4}, "mlp_width"),
    ],
)
def test_a_bad_architecture_is_a_sentence(change: dict[str, Any], subject: str) -> None:
    with raises(ArchitectureError, subject=subject):
        Architecture(**{**SMALL, **change})


def test_a_bad_mask_is_a_sentence() -> None:
    with raises(MaskError, subject="mask"):
        Architecture(**SMALL, mask="casual")


@pytest.mark.parametrize(
    ("more", "subject"),
    [
        ({"parallel": True}, "cross_attention"),
        ({"query_norm": True}, "cross_attention"),
        ({"kernel": "linformer:2"}, "cross_attention"),
        ({"positions": "relative"}, "cross_attention"),
        ({"key_latent": 4}, "key_latent"),
        ({"key_latent": 1, "cross_attention": False}, "key_latent"),
        ({"query_latent": -3, "cross_attention": False}, "query_latent"),
        ({"value_width": -1}, "value_width"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(more: dict[str, Any], subject: str) -> None:
    with raises(ArchitectureError, subject=subject):
        Architecture(**{**SMALL, "cross_attention": True, **more})


@pytest.mark.parametrize(
    "change",
    [{"layers": "2"}, {"layers": True}, {"width": 8.0}, {"norm_eps": "1e-5"}, {"norm_eps": True}, {"parallel": 1},
     {"norm": 3}, {"mlp_skip": None}],
    ids=str,
)  # fmt: skip
def test_a_field_of_another_type_is_refused_before_it_is_used(change: dict[str, Any]) -> None:
    (field,) = change
    with raises(ArchitectureError, field) as caught:
        Architecture(**(SMALL | change))
    assert f"{field} must be " in str(caught.value) and f"got {change[field]!r}" in str(caught.value)


def test_whole_numbers_are_numbers() -> None:
    assert isinstance(Architecture(**SMALL, mlp_skip=1).mlp_skip, float)
