"""What goes into a page stays what it is: text, and JSON."""

import json
import math
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from rankscope.figures.text import LONGEST, TURNS, escaped, plain, script_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES)
def test_json_reads_back_and_cannot_end_a_script(value: object) -> None:
    text = script_json(value)
    assert json.loads(text) == value
    for mark in "<>&\u2028\u2029":
        assert mark not in text


@given(st.text(max_size=LONGEST))
def test_escaped_text_reads_back_and_opens_no_tag(text: str) -> None:
    safe = escaped(text)
    assert "<" not in safe
    assert safe.replace("&lt;", "<").replace("&amp;", "&") == text.translate(TURNS)


@given(st.floats())
def test_numbers_keep_eight_digits_and_what_json_lacks_is_null(value: float) -> None:
    kept = plain([value])[0]
    if math.isfinite(value):
        assert math.isclose(kept, value, rel_tol=1e-7, abs_tol=1e-300)
    else:
        assert kept is None


def test_half_a_character_can_be_written() -> None:
    script_json("\ud800 alone").encode()


@given(st.text())
def test_a_label_can_stand_in_an_xml_file(text: str) -> None:
    read = ElementTree.fromstring(f"<text>{escaped(text)}</text>".encode("utf-8", "replace"))
    assert read.tag == "text"


def test_marks_that_turn_text_about_and_controls_are_shown() -> None:
    assert escaped("a\u202eb\x00c\x1b[31m\td") == "a\ufffdb\ufffdc\ufffd[31m\td"
