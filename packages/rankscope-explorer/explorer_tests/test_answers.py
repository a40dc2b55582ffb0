"""What is answered is what `measure`, `decompose` and `certify` say of the same network."""

import gc
import json
import weakref
from typing import Any

import polars as pl
import pytest
import torch

from explorer_tests.serving import TEXT, Served, drawn, small_networks, tiny
from rankscope import certify, decompose, load, measure
from rankscope.nets import Architecture
from rankscope.sources import fresh
from rankscope_explorer.answers import Answers, measure_page, network_with
from rankscope_explorer.controls import Controls, PageRequest
from rankscope_explorer.network_cache import MOST_RANDOM, NetworkCache

TURNS: list[dict[str, Any]] = [
    {},
    {"skip": 0.0, "mlp": False, "norm": False},
    {"remedies": "attnscale:w=0.5;sqrtl", "layers": 5, "norm": False},
    {"mask": "causal", "window": 2, "divisor": 2.0, "temperature": 3.0, "mlp": False, "skip": 0.5},
]


def figure(part: dict[str, Any]) -> dict[str, Any]:
    """The picture of a part that is shown first."""
    shown: dict[str, Any] = part["plots"][0]["views"][0]["figure"]
    return shown


def numbers(part: dict[str, Any]) -> dict[str, Any]:
    """The numbers of that picture by column, as they are saved as CSV."""
    table: dict[str, Any] = figure(part)["table"]
    return table


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "turns", [*TURNS[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in TURNS[2:])], ids=str
)
def test_the_numbers_are_those_of_the_library(served: Served, turns: dict[str, Any]) -> None:
    parts = served.parts({"setting": {"model": "tiny", "text": TEXT, **turns}})
    assert list(parts) == ["curve", "cloud", "paths", "bounds", "end"]
    net = tiny()
    if "remedies" in turns:
        net = net.variant(layers=turns["layers"]).with_remedy("attnscale", w=0.5).with_remedy("sqrtl")
    changes = {key: value for key, value in turns.items() if key in ("skip", "mlp", "norm", "mask", "layers")}
    divisor = turns.get("divisor", net.arch.divisor) * turns.get("temperature", 1.0)
    if "window" in turns:
        changes["mask"] = f"{turns['mask']}&window:{turns['window']}"
    net = net.variant(**changes, divisor=divisor)
    X, padding = net.encode([TEXT], 32)
    curve = measure(net, X, padding).curve("relative_residual", "log10")[0].tolist()
    assert numbers(parts["curve"])["log10"] == pytest.approx(curve, rel=1e-6, abs=1e-9)
    found = decompose(net, X, padding).by_length()
    drawn = pl.DataFrame(numbers(parts["paths"])).group_by("length", maintain_order=True).agg(pl.col("share").sum())
    shares = found.table.filter(start="all")["share"].to_list()
    assert drawn["share"].to_list() == pytest.approx(shares, rel=1e-5, abs=1e-8)
    listed = [row[1] for row in parts["paths"]["tables"][0]["rows"]]
    assert listed == [f"{count:,}" for count in found.counts]
    summary = certify(net, X, padding).summary()
    met = {row["theorem"]: row["met_to"] > 0 for row in summary.iter_rows(named=True)}
    (theorems,) = parts["bounds"]["tables"]
    assert {name: words.startswith(("layer ", "holds, but ")) for name, words in theorems["rows"]} == met


def test_a_kernel_without_a_rule_is_measured_in_float64(served: Served) -> None:
    part = served.parts({"setting": {"model": "sigmoid", "text": TEXT}, "parts": ["curve", "cloud"]})["curve"]
    assert part["about"]["arithmetic"] == "float64"


@pytest.mark.slow
def test_pinned_settings_come_beside_and_begin_in_the_same_place(served: Served) -> None:
    now = {"model": "tiny", "text": TEXT}
    request = {"setting": now, "A": {**now, "skip": 0.0}, "B": {**now, "text": "another text"}, "focus": "A"}
    parts = served.parts(request)
    assert list(parts["curve"]["verdicts"]) == ["now", "A", "B"]
    assert list(dict.fromkeys(numbers(parts["curve"])["variant"])) == ["now", "A", "B"]
    first = figure(parts["cloud"])["frames"][0]["data"]
    assert first[0] == first[1] != first[2]
    swapped = served.parts({"setting": now, "A": request["B"], "B": request["A"], "parts": ["cloud"]})["cloud"]
    headings = [part["text"] for part in figure(swapped)["layout"]["annotations"]]
    assert [text[: text.index("</b>")] for text in headings] == ["<b>now", "<b>A", "<b>B"]
    alone = served.parts({"setting": {**now, "skip": 0.0}})
    assert parts["paths"] == alone["paths"] and parts["bounds"] == alone["bounds"]


def test_only_what_is_asked_for_is_answered(served: Served) -> None:
    assert list(served.parts({"setting": {"model": "tiny"}, "parts": ["paths"]})) == ["paths", "end"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tokens", [1, 2])
def test_few_tokens_are_answered(served: Served, tokens: int) -> None:
    parts = served.parts({"setting": {"model": "tiny", "text": TEXT, "tokens": tokens}})
    assert ("One token alone" in parts["curve"]["verdicts"]["now"]) == (tokens == 1)


def test_too_deep_for_paths_says_so(served: Served) -> None:
    """24^2 * 64 * 234 * (12 * 234 + 2 * 64) = 2.53e10 multiplications, of which attention's part makes the difference:
    without its 2 * 64 they are 2.42e10."""
    shape = {"layers": 1, "width": 234, "heads": 2}
    request = {"setting": {"shape": shape, "layers": 24, "text": TEXT * 9, "tokens": 64}, "parts": ["paths"]}
    assert "too many to wait for" in served.parts(request)["paths"]["sentence"]


def test_tokens_stay_text_in_every_label(served: Served) -> None:
    hostile = "<script>alert(1)</script> <img src=x onerror=alert(1)> &lt;"
    parts = served.parts({"setting": {"model": "tiny", "text": hostile}, "parts": ["curve", "cloud"]})
    labels = json.dumps([trace["text"] for trace in figure(parts["cloud"])["data"]])
    assert "&lt;" in labels and "<script" not in labels and "<img" not in labels


def test_results_are_kept_and_the_oldest_forgotten() -> None:
    answers, controls = Answers(small_networks(), most=3), Controls(model="tiny", text=TEXT)
    first = answers.measurement(controls, lambda: None)
    for skips in ((0.1, 0.2), (0.3, 0.4, 0.5)):
        assert answers.measurement(controls, lambda: None) is first
        for skip in skips:
            answers.measurement(Controls(model="tiny", text=TEXT, skip=skip), lambda: None)
    assert answers.measurement(controls, lambda: None) is not first


@pytest.mark.slow
def test_a_network_that_has_left_the_cache_is_not_kept_by_its_results() -> None:
    answers = Answers(small_networks())
    nets = []
    for seed in range(4):
        list(answers.parts(PageRequest(setting=drawn(seed)), lambda: None))
        nets.append(weakref.ref(answers.networks.network(drawn(seed))))
    gc.collect()
    assert [net() is not None for net in nets] == [False, True, True, True]


def test_a_network_with_remedies_that_has_left_the_cache_is_not_kept_by_its_results() -> None:
    net = fresh(Architecture(layers=2, width=8, heads=2), name="post")
    answers, nets = Answers(NetworkCache({"post": net})), []
    for k in range(8):
        controls = Controls(model="post", text="a b", remedies=f"deepnorm;attnscale:w=0.{k}")
        list(answers.parts(PageRequest(setting=controls, parts=("curve",)), lambda: None))
        weights = answers.networks.network(controls).weights.layers[0].attention.value.weight  # deepnorm scales it
        nets.append(weakref.ref(weights))
        del weights
    gc.collect()
    assert [net() is not None for net in nets] == [k >= 8 - MOST_RANDOM for k in range(8)]
    kept = answers.measurement(controls, lambda: None)
    list(answers.parts(PageRequest(setting=Controls(model="post", text="a b"), A=controls), lambda: None))
    assert answers.measurement(controls, lambda: None) is kept


def test_pinned_random_networks_stay_while_another_is_drawn_anew() -> None:
    answers = Answers(small_networks())
    A, B = drawn(1), drawn(2)
    found = []
    for seed in (0, 3, 4, 5):
        list(answers.parts(PageRequest(setting=drawn(seed), A=A, B=B, parts=("curve",)), lambda: None))
        found.append([answers.measurement(pin, lambda: None) for pin in (A, B)])
    assert all(mine is first for pair in found for mine, first in zip(pair, found[0], strict=True))


@pytest.mark.slow  # a small network is answered so above
def test_minilm_is_answered_as_it_is_measured() -> None:
    net = load("minilm")
    asked = Controls(model="minilm", text="Call me <b>Ishmael</b>.", skip=0.5)
    (part, *_) = Answers(NetworkCache({"minilm": net})).parts(
        PageRequest(setting=asked, parts=("curve",)), lambda: None
    )
    expected = measure(net.variant(skip=0.5), *net.encode([asked.text])).curve("relative_residual", "log10")
    assert torch.allclose(torch.tensor(numbers(part)["log10"]).double(), expected[0], rtol=1e-6)


def test_a_window_narrows_every_mask_of_a_network_that_has_several() -> None:
    assert network_with(tiny(), Controls(window=3)).arch.mask == "causal&window:3;complete&window:3"
    deeper = network_with(tiny(), Controls(window=3, layers=4)).arch
    assert deeper.mask_of(1) == "complete&window:3" and deeper.mask_of(3) == "causal&window:3"


def test_what_is_not_turned_is_the_network_itself() -> None:
    net = tiny()
    assert network_with(net, Controls()).arch == net.arch
    assert network_with(net, Controls(temperature=2.0)).arch.divisor == 2 * net.arch.divisor


def test_a_question_between_layers_can_end_it() -> None:
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_page(tiny(), Controls(model="tiny", text=TEXT), check)
    assert len(asked) == 3
