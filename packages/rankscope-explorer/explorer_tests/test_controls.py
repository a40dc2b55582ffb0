import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.errors import ArchitectureError, RankscopeError, SettingError
from rankscope_explorer.controls import CONTROL_NAMES, MOST_TEXT, Controls, PageRequest, RandomShape, read_request
from tests.raising import raises


def test_a_setting_that_says_nothing_turns_nothing() -> None:
    setting = read_request(b'{"setting": {}}', PageRequest).setting
    assert (setting.skip, setting.mask, setting.window, setting.divisor, setting.layers) == (None,) * 5
    assert setting.mlp and setting.norm and setting.temperature == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("skip", 2.5), ("skip", "0.5"), ("skip", [1]), ("skip", True), ("mlp", 1), ("norm", "yes"),
        ("tokens", 0), ("tokens", 65), ("tokens", 3.5), ("temperature", 0), ("temperature", -1.0),
        ("divisor", 0.0),
        ("layers", 0), ("layers", 97), ("layers", 10**30), ("window", -1), ("mask", ""),
        ("mask", "x" * 201),
        ("text", "x" * (MOST_TEXT + 1)), ("text", None), ("model", ""), ("shape", 3),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_one_sentence_that_names_it(field: str, value: Any) -> None:
    with raises(SettingError, subject=field) as caught:
        read_request(json.dumps({"setting": {field: value}}).encode(), PageRequest)
    assert str(caught.value).startswith(CONTROL_NAMES[field])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


NONE = (b"", b"[]", b"null", b"{", b'{"setting": {"skip": NaN}}', b"\xff\xfe", b"[" * 10**5)


@pytest.mark.parametrize(
    ("body", "subject"),
    [*((body, None) for body in NONE), (b'{"setting": {}, "parts": []}', "parts"),
     (b'{"setting": {"skipp": 1}}', "skipp")],
)  # fmt: skip
def test_bytes_that_are_no_request_are_refused(body: bytes, subject: str | None) -> None:
    with raises(SettingError, subject=subject):
        read_request(body, PageRequest)


NAMES = st.sampled_from(["setting", "A", "skip", "shape", "text"])
VALUES = st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.dictionaries(NAMES, inner))


@settings(max_examples=40)
@given(st.binary(max_size=200) | VALUES)
def test_any_bytes_are_a_request_or_a_sentence(body: Any) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        assert isinstance(read_request(raw, PageRequest), PageRequest)
    except SettingError as error:
        assert "\n" not in str(error)


def test_a_random_network_has_a_limit_to_its_weights() -> None:
    assert RandomShape(layers=24, width=64, heads=4).architecture().layers == 24
    with raises(SettingError, subject="shape.layers"):
        RandomShape(layers=24, width=512, heads=8).architecture()


@given(st.builds(RandomShape, layers=st.integers(1, 24), width=st.integers(2, 512), heads=st.integers(1, 32)))
def test_a_shape_is_a_network_or_a_sentence(shape: RandomShape) -> None:
    try:
        arch = shape.architecture()
    except RankscopeError as error:
        assert isinstance(error, SettingError | ArchitectureError)
    else:
        assert (arch.layers, arch.width, arch.heads) == (shape.layers, shape.width, shape.heads)


def test_the_same_setting_has_the_same_key_and_another_has_not() -> None:
    kept = {Controls(skip=0.5): "half"}
    assert Controls(skip=0.5) in kept and Controls(skip=0.25) not in kept
