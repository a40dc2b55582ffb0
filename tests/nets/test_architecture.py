import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from rankscope.errors import ArchitectureError, FileError, MaskError
from rankscope.nets import Architecture
from tests.strategies import architectures

SMALL: dict[str, Any] = {"layers": 2, "width": 8, "heads": 2}


@given(architectures())
def test_an_architecture_survives_json(arch: Architecture) -> None:
    assert Architecture.from_dict(json.loads(json.dumps(arch.to_dict()))) == arch


@given(architectures())
def test_an_architecture_reads_back_what_it_shows(arch: Architecture) -> None:
    assert eval(repr(arch), {"Architecture": Architecture}) == arch


def test_an_architecture_shows_only_what_is_unusual() -> None:
    assert repr(Architecture(**SMALL)) == "Architecture(layers=2, width=8, heads=2)"
    assert repr(Architecture(**SMALL, mask="causal")).endswith("heads=2, mask='causal')")


def test_usual_values_are_filled_in_and_follow_a_replacement() -> None:
    arch = Architecture(**SMALL)
    assert (arch.head_width, arch.key_heads, arch.mlp_width, arch.divisor) == (4, 2, 32, 2.0)
    wide = arch.replace(width=32)
    assert (wide.head_width, wide.mlp_width, wide.divisor) == (16, 128, 4.0)
    assert arch.replace(divisor=3.0).replace(width=32).divisor == 3.0
    assert Architecture(**SMALL, biases=False).biases == ()
    odd = Architecture(layers=1, width=10, heads=3, head_width=3)
    assert odd.replace(mask="causal").head_width == 3
    assert Architecture.from_dict({**SMALL, "biases": ["query"]}).has_bias("query")


def test_equal_masks_have_equal_specs() -> None:
    assert (
        Architecture(**SMALL, mask="causal & window:01").mask
        == Architecture(**SMALL, mask="causal&window:1").mask
    )


def test_masks_may_differ_by_layer() -> None:
    arch = Architecture(**{**SMALL, "layers": 5}, mask="complete;window:1")
    assert [arch.mask_of(layer) for layer in range(5)] == ["complete", "window:1"] * 2 + ["complete"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers": 0}, "layers must be a whole number >= 1; got 0"),
        ({"heads": 3}, "width must be a multiple of heads unless head_width is given; got width 8 and 3"),
        ({"heads": 3, "head_width": 2, "key_heads": 2}, "heads must be a multiple of key_heads; got 3 and 2"),
        ({"activation": "gelo"}, r"activation must be one of gelu, .*did you mean 'gelu'"),
        ({"kernel": "softmax:3"}, "kernel 'softmax' takes no number; got 'softmax:3'"),
        ({"kernel": "linformer"}, "kernel linformer must be written linformer:k"),
        ({"kernel": "linformer:2", "mask": "causal"}, "its mask must be complete; got 'causal'"),
        ({"kernel": "linformer:2", "positions": "rotary"}, "positions must be none or absolute"),
        ({"kernel": "linear", "positions": "alibi"}, "no scores to add alibi positions to"),
        ({"divisor": -1.0}, "divisor must be > 0, or 0 for its usual value; got -1.0"),
        ({"attention_skip": float("nan")}, "attention_skip must be a finite number"),
        ({"parallel": True, "mlp_skip": 0.5}, "a parallel block has one skip, attention_skip"),
        ({"positions": "rotary", "rotary_share": 0.25}, r"even number >= 2; got 0.25 \* 4"),
        ({"biases": ("key", "values")}, "biases must be one of .*got 'values'"),
        ({"kept_heads": ((0,),)}, r"one tuple per layer \(2\); got 1"),
        ({"kept_heads": ((0,), (2,))}, r"heads are numbered 0\.\.1; got 2"),
        ({"norm_eps": -1.0}, "norm_eps must be a finite number >= 0; got -1.0"),
        ({"head_width": -4}, "head_width must be > 0, or 0 for its usual value; got -4"),
        ({"norm_eps": float("inf")}, "norm_eps must be a finite number"),
        ({"mlp_width": -4}, "mlp_width must be a whole number >= 1; got -4"),
    ],
)
def test_a_bad_architecture_is_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ArchitectureError, match=sentence):
        Architecture(**{**SMALL, **change})


def test_a_bad_mask_is_a_sentence() -> None:
    with pytest.raises(MaskError, match="did you mean 'causal'"):
        Architecture(**SMALL, mask="casual")


def test_bad_fields_and_files_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match="architecture field must be one of .*got 'depth'"):
        Architecture.from_dict({**SMALL, "depth": 3})
    with pytest.raises(ArchitectureError, match="heads is missing"):
        Architecture.from_dict({"layers": 1, "width": 4})
    with pytest.raises(FileError, match="there is none at .*absent.json"):
        Architecture.read(tmp_path / "absent.json")
    (tmp_path / "half.json").write_text('{"layers": 2,')
    with pytest.raises(FileError, match="half.json must be a JSON file of architecture fields"):
        Architecture.read(tmp_path / "half.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(FileError, match="must hold a JSON object of architecture fields; got a list"):
        Architecture.read(tmp_path / "list.json")
    (tmp_path / "good.json").write_text(json.dumps(SMALL))
    assert Architecture.read(tmp_path / "good.json") == Architecture(**SMALL)
