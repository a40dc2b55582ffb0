"""The key of a piece of work holds all that decides its numbers."""

from pathlib import Path

import pytest

from rankscope.runs import difference, digest, files_of, key_of
from rankscope.sources import fresh, load


def test_the_key_holds_all_that_decides_the_numbers(tmp_path: Path) -> None:
    net = fresh("bert-tiny")
    key = key_of({"a": net}, tokens=8)
    assert {"rankscope", "torch", "polars"} <= set(key["versions"]) and key["device"] == "cpu"
    assert digest(key) == digest(key_of({"a": fresh("bert-tiny")}, tokens=8))
    assert difference(key, key_of({"a": net}, tokens=9)) == "tokens (8, now 9)"
    assert "variants of a" in difference(key, key_of({"a": fresh("bert-tiny", seed=1)}, tokens=8))
    older = {**key, "versions": {**key["versions"], "torch": "1.0"}}
    assert difference(older, key).startswith("versions of torch (1.0, now ")
    (tmp_path / "weights").write_text("a")
    before = files_of(str(tmp_path))
    (tmp_path / "weights").write_text("ab")
    assert files_of(str(tmp_path)) != before and files_of("bert-base") == ["bert-base"]


@pytest.mark.slow
def test_a_tokenizer_is_known_by_what_it_does() -> None:
    origin = load("minilm").origin
    assert origin is not None
    before = origin.fingerprint()
    origin.words(["Call me Ishmael."], 3)  # it has cut a text since
    assert origin.fingerprint() == before == load("minilm").origin.fingerprint()  # type: ignore[union-attr]
    origin.tokenizer.add_tokens(["ishmaelite"])  # type: ignore[attr-defined]
    assert origin.fingerprint() != before
