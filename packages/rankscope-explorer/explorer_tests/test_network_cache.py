"""Networks that a page can choose, and the remedies on them."""

import gc
import weakref
from typing import Any

import pytest

from explorer_tests.serving import TEXT, Served, drawn, small_networks
from rankscope.errors import SettingError
from rankscope_explorer.answers import Answers
from rankscope_explorer.controls import Controls, PageRequest
from tests.raising import raises


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ({"remedies": "deepnorm"}, "the place of the norm must be 'post'"),
        ({"remedies": "lambda", "skip": 0.5}, "sets the weight of the skip"),
        ({"remedies": "sinkhorn:rounds=1000000"}, "of sinkhorn must be from -100 to 100 here"),
        ({"remedies": "attnscale;attnscale:w=1"}, "'attnscale' is there twice"),
        ({"remedies": "sqrtl;" * 5}, "emedies must be 4 at most"),
    ],
    ids=str,
)
def test_a_remedy_that_cannot_go_on_is_a_sentence(served: Served, turns: dict[str, Any], said: str) -> None:
    answer = served.ask({"setting": {"model": "tiny", "text": TEXT, **turns}, "parts": ["curve"]})
    assert answer.status_code == 422 and said in answer.json()["error"]


def test_remedied_networks_are_kept_as_long_as_what_they_were_put_on() -> None:
    networks = small_networks()
    setting = drawn(1).model_copy(update={"remedies": "attnscale:w=0.5"})
    found = weakref.ref(networks.network(setting))
    assert networks.network(setting.model_copy(update={"skip": 0.5})) is found()
    for seed in (2, 3, 4):
        networks.network(drawn(seed))
    gc.collect()
    assert found() is None


def test_a_network_that_is_not_in_the_cache_is_refused() -> None:
    with raises(SettingError, subject="model"):
        list(Answers(small_networks()).parts(PageRequest(setting=Controls(model="/etc")), lambda: None))
