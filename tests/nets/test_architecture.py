import json
from pathlib import Path
from typing import Any

from hypothesis import given

from rankscope.errors import ArchitectureError, FileError
from rankscope.nets import Architecture
from rankscope.remedies.first_values import FirstValuePull
from tests.raising import raises
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
    assert Architecture(**SMALL, mask="causal & window:01").mask == Architecture(**SMALL, mask="causal&window:1").mask


def test_masks_may_differ_by_layer() -> None:
    arch = Architecture(**{**SMALL, "layers": 5}, mask="complete;window:1")
    assert [arch.mask_of(layer) for layer in range(5)] == ["complete", "window:1"] * 2 + ["complete"]


def test_bad_fields_and_files_are_sentences(tmp_path: Path) -> None:
    with raises(ArchitectureError, subject="depth"):
        Architecture.from_dict({**SMALL, "depth": 3})
    with raises(ArchitectureError, subject="heads"):
        Architecture.from_dict({"layers": 1, "width": 4})
    with raises(FileError, subject=str(tmp_path / "absent.json")):
        Architecture.read(tmp_path / "absent.json")
    (tmp_path / "half.json").write_text('{"layers": 2,')
    with raises(FileError, subject=str(tmp_path / "half.json")):
        Architecture.read(tmp_path / "half.json")
    (tmp_path / "list.json").write_text("[1]")
    with raises(FileError, subject=str(tmp_path / "list.json")):
        Architecture.read(tmp_path / "list.json")
    (tmp_path / "good.json").write_text(json.dumps(SMALL))
    assert Architecture.read(tmp_path / "good.json") == Architecture(**SMALL)


def test_a_part_of_ones_own_that_a_file_names_is_asked_for() -> None:
    """The sentence says which one is missing, and which were given in its place."""
    kept: Any
    other: Any
    kept, other = (FirstValuePull(name, 0.5) for name in ("kept", "other"))
    fields = Architecture(**SMALL, parts=(kept,)).to_dict()
    assert Architecture.from_dict(fields, own=[kept]).parts == (kept,)
    given: list[tuple[list[Any], str]] = [([], "got none"), ([other], "got own:other(weight=0.5)")]
    for own, said in given:
        with raises(ArchitectureError) as caught:
            Architecture.from_dict(fields, own=own)
        assert "the user's own part 'kept(weight=0.5)'" in str(caught.value) and str(caught.value).endswith(said)
