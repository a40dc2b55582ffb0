"""`rankscope masks`, `metrics` and `models`."""

import json
import subprocess
from importlib import import_module
from typing import Any, ClassVar

import pytest

from rankscope.metrics import METRICS
from rankscope.sources import FAMILIES
from rankscope.sources.families.gpt import Bloom
from rankscope.sources.families.llama import Llama
from tests.cli.running import COMMAND, answered, printed, rankscope

SMALL = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def test_masks_as_a_table_a_picture_and_json() -> None:
    table = printed("masks", "--tokens", "12", "--picture")
    assert "unidirectional" in table and "█" in table
    (answer,) = answered("masks", "window:2", "--tokens", "12")
    assert answer["mask"] == "window:2" and answer["radius"] == 3 and answer["strongly_connected"]


@pytest.mark.slow
def test_models_lists_every_family_with_its_parity() -> None:
    answer = answered("models")
    assert {row["family"] for row in answer["families"]} == set(FAMILIES)
    assert all(max(row["states"], row["attention"]) < 1e-12 for row in answer["families"])


@pytest.mark.slow
def test_models_are_printed_as_they_are_measured() -> None:
    """Into a pipe too: a reader that leaves after the first family ends the command before it measures the others."""
    with subprocess.Popen([*COMMAND, "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as listing:
        assert listing.stdout is not None and listing.stderr is not None
        assert any(line.split()[:2] == ["bert", "bert"] for line in listing.stdout)
        listing.stdout.close()
        assert listing.wait(timeout=300) == 141 and listing.stderr.read() == ""


def test_a_family_that_fails_is_listed_with_why_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One family gives other states than its original, another asks for a config that transformers does not have."""

    class Confused(Llama):
        tiny_fields: ClassVar = {"text": ("LlamaConfig", SMALL)}

        def layer(self, block: Any, arch: Any) -> Any:
            parts = super().layer(block, arch)
            swapped = {"mlp.up.weight": "mlp.gate.weight", "mlp.gate.weight": "mlp.up.weight"}
            return parts | {name: parts[other] for name, other in swapped.items()}

    class Renamed(Bloom):
        tiny_fields: ClassVar = {"text": ("BloomSettings", {})}

    for name, family in {"llama": Confused(), "bloom": Renamed()}.items():
        monkeypatch.setitem(FAMILIES.shipped, name, family)
    some = {name: FAMILIES[name] for name in ("llama", "bloom", "smollm3")}
    monkeypatch.setattr(import_module("rankscope.sources.loading"), "FAMILIES", some)
    done = rankscope("models", "--json")
    rows = {row["family"]: row for row in json.loads(done.out)["families"]}
    assert done.code == 2 and "2 of 3" in done.err and "llama, bloom" in done.err and "smollm3" not in done.err
    assert "off by" in rows["llama"]["failure"] and "BloomSettings" in rows["bloom"]["failure"]
    assert rows["smollm3"]["states"] < 1e-12 and "failure" not in rows["smollm3"]
    table = rankscope("models")
    assert table.code == 2 and table.err == done.err and max(map(len, table.out.splitlines())) <= 80
    assert table.out.count(" failed ") == 2 and "bloom: module transformers" in " ".join(table.out.split())


def test_metrics_are_listed_and_explained() -> None:
    text = printed("metrics")
    assert all(f"\n{name} " in text for name in METRICS)
    assert "they can be above 1, up to 2" in " ".join(text.split())
    one = " ".join(printed("metrics", "relative_residual").split())
    assert "Range: 0 to 2." in one and "2 (1 - 1/n)" in one and "The cloud of a report says relative_mu" in one
    assert [each["range"] for each in answered("metrics", "entropy")] == ["0 to log n"]
    assert "not with their mean" in " ".join(printed("metrics", "mu@argmin").split())
    assert "did you mean 'entropy'" in rankscope("metrics", "entropie").err
