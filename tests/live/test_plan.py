"""The options of a watch: which are refused, and what they choose."""

from typing import Any

import pytest
import torch
from torch import nn

import rankscope
from rankscope.errors import MetricError, RankscopeError, TokensError, WatchError
from tests.live.encoders import Loop, encoder, padded
from tests.live.families import checks, seen
from tests.raising import raises

ALL = ["mu", "entropy", "head_mu"]


def test_layers_can_be_chosen() -> None:
    model, (X, _) = encoder(), padded()
    with torch.no_grad(), rankscope.watch(model, ALL, layers=[2]) as w:
        model(X)
    assert w.profile().table["layer"].unique().to_list() == [2]
    every = seen(model, ALL, X).profile()
    for metric in ALL:
        torch.testing.assert_close(w.profile().curve(metric)[:, 2], every.curve(metric)[:, 2])


def test_padding_can_be_given_or_refused() -> None:
    model, (X, padding) = encoder(), padded()
    with torch.no_grad():
        cases: list[tuple[Any, int]] = [("model", 2), ("none", 0), (padding, 2)]
        for given, expected in cases:
            with rankscope.watch(model, "mu", padding=given) as w:
                model(X, src_key_padding_mask=padding)
            assert checks(w)["padded_tokens"] == expected
        watching = rankscope.watch(model, "mu", padding=padding.int())
        with raises(TokensError), watching:
            model(X)


def test_an_attention_mask_says_what_padding_says() -> None:
    model, (X, padding) = encoder(), padded()
    mask = (~padding).long()
    with torch.no_grad():
        curves = []
        options: list[dict[str, Any]] = [{"padding": padding}, {"attention_mask": mask}]
        for option in options:
            with rankscope.watch(model, "mu", **option) as w:
                model(X, src_key_padding_mask=padding)
            curves.append(w.profile().curve("mu"))
    assert torch.equal(*curves) and checks(w)["padded_tokens"] == 2
    for given in (padding, "none"):
        with pytest.raises(RankscopeError):
            rankscope.watch(model, "mu", padding=given, attention_mask=mask)


REFUSED: list[tuple[Any, dict[str, Any], type[RankscopeError], str | None]] = [
    (encoder().to("meta"), {}, WatchError, "model"),
    (encoder(), {"metrics": []}, MetricError, None),
    (encoder(), {"metrics": "muu"}, MetricError, None),
    *((encoder(), {"layers": layers}, WatchError, "layers") for layers in ([4], [-1], [], [1, 9], 2)),
    (encoder(), {"metrics": ["mu", "entropy"], "layers": [0]}, WatchError, "layers"),
    (encoder(), {"keep": "state"}, WatchError, "keep"),
    (encoder(), {"layout": "first"}, WatchError, "layout"),
    (encoder(), {"padding": "mine"}, WatchError, "padding"),
    (Loop(), {}, WatchError, "blocks"),
    (Loop(), {"blocks": ["secnd"]}, WatchError, "blocks"),
    (Loop(), {"blocks": [nn.Linear(2, 2)]}, WatchError, "blocks"),
    (Loop(), {"blocks": []}, WatchError, "blocks"),
    (Loop(), {"blocks": "first.up"}, WatchError, "blocks"),
    (encoder(), {"blocks": ["layers"]}, WatchError, "blocks"),
]


@pytest.mark.parametrize(("model", "options", "error", "subject"), REFUSED)
def test_what_cannot_be_watched(
    model: Any, options: dict[str, Any], error: type[RankscopeError], subject: str | None
) -> None:
    with raises(error, subject=subject):
        rankscope.watch(model, **options)


def test_an_error_names_the_blocks_that_could_be_meant() -> None:
    with raises(WatchError, subject="blocks") as caught:
        rankscope.watch(Loop())
    assert "first, second, spare (3 blocks of Mixer) could be" in str(caught.value)
