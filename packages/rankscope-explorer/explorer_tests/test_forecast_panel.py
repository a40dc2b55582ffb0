"""The panel says what `forecast` says of the same network, and stays off the path of measuring."""

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from explorer_tests.serving import QUICK, SMALL, Served, small_networks
from rankscope import Architecture, Transformer, forecast
from rankscope.errors import LateError
from rankscope.forecasts import PARTS, Design, place_of_100
from rankscope.sources import fresh
from rankscope_explorer.controls import Controls, ForecastRequest
from rankscope_explorer.forecast_panel import MOST_MENDS, TRAINED, ForecastPanel, size
from rankscope_explorer.jobs import JobCancelled
from rankscope_explorer.network_cache import NetworkCache
from tests.raising import raises

SETTING: dict[str, Any] = {"shape": {**SMALL, "init": "xavier", "place": "pre"}, "skip": 0.5, "text": "a b c"}
LARGE: dict[str, Any] = {"shape": {"layers": 6, "width": 512, "heads": 8}}


def nothing() -> None: ...


def parts_of(panel: ForecastPanel, **request: Any) -> list[dict[str, Any]]:
    return list(panel.parts(ForecastRequest.model_validate(request), nothing))


def posted(served: Served, visitor: str = "someone", **request: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/api/forecast", json=request, headers={"X-Visitor": visitor}, timeout=300)


@pytest.fixture(scope="module")
def panel() -> ForecastPanel:
    return ForecastPanel(small_networks())


@pytest.mark.slow
def test_the_numbers_and_sentences_are_those_of_forecast(served: Served) -> None:
    answer = posted(served, setting=SETTING)
    part, end = map(json.loads, answer.text.splitlines())
    arch = Architecture(layers=2, width=8, heads=2, norm_place="pre")
    expected = forecast(fresh(arch, 0, "xavier", name="random").variant(skip=0.5), design=Design(init="xavier"))
    assert end == {"part": "end"} and part["probability"] == expected.probability
    assert part["place"] == place_of_100(expected.place)
    assert part["spread"] == round(100 * expected.prediction.place_spread)
    assert part["sentences"] == [sentence.replace("_", " ") for sentence in expected.verdict]
    assert not any("not trained" in sentence for sentence in part["sentences"])  # weights were drawn


@pytest.mark.slow
def test_text_makes_no_difference_and_is_not_waited_for(panel: ForecastPanel) -> None:
    (first,) = parts_of(panel, setting=SETTING)

    def never() -> None:
        pytest.fail("it was computed again")

    request = ForecastRequest.model_validate({"setting": {**SETTING, "text": "another", "tokens": 2}})
    assert list(panel.parts(request, never)) == [first]
    (other,) = parts_of(panel, setting={**SETTING, "skip": 0.0})
    assert other["probability"] != first["probability"]


def test_trained_weights_get_a_sentence_and_no_number() -> None:
    given = Transformer.random(Architecture(layers=2, width=8, heads=2))  # of which nobody says that they were drawn
    panel = ForecastPanel(NetworkCache({"mine": given}))
    assert parts_of(panel, setting={"model": "mine"}) == [{"part": "forecast", "why": TRAINED}]
    assert parts_of(panel, setting={"model": "mine"}, large=True, mends=True) == [{"part": "forecast", "why": TRAINED}]


def test_a_large_network_is_forecast_on_demand_and_a_huge_one_not(panel: ForecastPanel) -> None:
    (part,) = parts_of(panel, setting=LARGE, mends=True)
    assert part["ask"] and "6 layers of width 512" in part["why"] and "probability" not in part
    (part,) = parts_of(panel, setting={**LARGE, "layers": 96}, large=True)
    assert not part["ask"] and "rankscope forecast" in part["why"]
    assert size(Architecture(layers=6, width=512, heads=8)) == 54

    def stopped() -> None:
        raise JobCancelled

    request = ForecastRequest.model_validate({"setting": LARGE, "large": True})
    with pytest.raises(JobCancelled):  # it began
        list(panel.parts(request, stopped))


@pytest.mark.slow
def test_repeated_layers_are_said_to_be(panel: ForecastPanel) -> None:
    (part,) = parts_of(panel, setting={**SETTING, "layers": 3})
    assert part["sentences"][-1] == "Layers after the first 2 repeat those, with the same weights."
    assert part["sentences"][0].startswith("3 layers")


def test_what_cannot_be_forecast_says_why(panel: ForecastPanel) -> None:
    (part,) = parts_of(panel, setting={**SETTING, "mask": "edges:0>1,0>2,99>0"})
    assert part["why"].endswith(".") and "probability" not in part


@pytest.mark.slow
def test_mends_come_kind_by_kind_the_best_first_and_are_kept(panel: ForecastPanel) -> None:
    setting = {**SETTING, "skip": 0.0, "norm": False}
    first, *mends = parts_of(panel, setting=setting, mends=True)
    assert first["part"] == "forecast" and [part["done"] for part in mends] == [*range(1, len(PARTS) + 1)]
    rows = mends[-1]["mends"]
    assert 0 < len(rows) <= MOST_MENDS
    order = [(-round(row["probability"], 2), row["place"]) for row in rows]
    assert order == sorted(order) and all(row["probability"] >= first["probability"] for row in rows)
    tried = [row["change"] for part in mends for row in part["mends"]]
    assert len({*tried}) > 1 and "a LayerNorm before each branch" in tried
    assert parts_of(panel, setting=setting, mends=True) == [first, mends[-1]]


def test_time_that_is_up_ends_it_and_nothing_is_kept() -> None:
    """A forecast goes on without parts that are refused; that time is up is no such refusal."""
    panel, asked = ForecastPanel(small_networks()), ForecastRequest.model_validate({"setting": SETTING})
    calls = iter(range(10**9))

    def late() -> None:
        if next(calls) > 2000:
            raise LateError("an answer may take 1 s", subject="seconds")

    with raises(LateError, subject="seconds"):
        list(panel.parts(asked, late))
    assert not panel.networks.forecasting.locked()
    (part,) = panel.parts(asked, nothing)
    assert "probability" in part


@pytest.mark.slow
def test_measurements_do_not_wait_for_a_forecast_and_a_newer_one_takes_its_place(served: Served) -> None:
    answers: list[httpx.Response] = []
    older = threading.Thread(target=lambda: answers.append(posted(served, "a", setting=LARGE, large=True)))
    older.start()
    (forecasts,) = served.jobs._beside
    while "a" not in forecasts._latest:
        pass
    job = forecasts._latest["a"]
    for visitor in ("a", "b"):
        assert served.ask(QUICK, **{"X-Visitor": visitor}).status_code == 200
        assert not job.ended.is_set()
    assert "probability" in posted(served, "a", setting=SETTING).text
    older.join()
    assert job.cancelled and job.ended.is_set() and answers[0].status_code == 409


def test_a_network_is_not_loaded_while_a_forecast_is_computed(tmp_path: Path) -> None:
    """Loading changes torch's default dtype for all threads; a forecast that is under way gives way."""
    torch.manual_seed(0)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(Architecture(layers=2, width=8, heads=2).to_dict()))
    networks = NetworkCache({}, later=[str(path)])
    panel = ForecastPanel(networks)
    loading: list[threading.Thread] = []

    def check() -> None:
        if not loading:  # the first operation of the forecast
            loading.append(threading.Thread(target=lambda: networks.network(Controls(model=str(path)))))
            loading[0].start()
            while not networks.load_waits.is_set():
                pass
            assert networks.forecasting.locked() and networks.names == [str(path), "random"]

    with pytest.raises(JobCancelled):
        list(panel.parts(ForecastRequest.model_validate({"setting": SETTING}), check))
    loading[0].join(60)
    assert not loading[0].is_alive() and not networks.load_waits.is_set()
    assert networks.network(Controls(model=str(path))).arch.layers == 2


@pytest.mark.parametrize(
    ("request_", "said"),
    [({}, "a setting"), ({"setting": {}, "mends": 3}, "on or off"), ({"setting": {"skip": 7}}, "skip weight"),
     ({"setting": {}, "parts": []}, "no control named")],
)  # fmt: skip
def test_a_bad_request_is_a_sentence(served: Served, request_: dict[str, Any], said: str) -> None:
    answer = httpx.post(f"{served.url}/api/forecast", json=request_)
    assert answer.status_code == 422 and said in answer.json()["error"]
