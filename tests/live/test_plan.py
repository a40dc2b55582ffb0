"""The options of a watch: which are refused, and what they choose."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankscope
from rankscope.errors import MetricError, RankscopeError, TokensError, WatchError
from rankscope.live.attention import WatchedBlocks
from rankscope.live.plan import make_plan
from rankscope.profiles import DEFAULT_METRICS
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
    (encoder(), {"paddings": "none"}, WatchError, "paddings"),
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


def test_plans_share_no_list_of_metrics() -> None:
    model = encoder()
    plan = make_plan(model)
    plan.metrics.clear()  # type: ignore[attr-defined]
    assert [metric.name for metric in make_plan(model).metrics] == list(DEFAULT_METRICS)


def test_the_modules_that_a_watch_is_given_are_those_that_it_would_find() -> None:
    shared = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    for model in (encoder(), Loop(), nn.Sequential(nn.Sequential(shared), nn.Sequential(shared, nn.Linear(8, 8)))):
        blocks = ["first", "second"] if isinstance(model, Loop) else None
        plan = make_plan(model, blocks=blocks)
        in_blocks, _ = WatchedBlocks(model, plan.blocks).modules()
        assert list(plan.in_blocks) == in_blocks


class Skipping(nn.Module):
    """Two stacks, the second of which takes the first's states beside its own, mixed outside of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.in_blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.out_blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.mix = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        states = []
        for block in self.in_blocks:
            states.append(x := block(x))
        for block in self.out_blocks:
            x = block(self.mix(torch.cat([x, states.pop()], -1)))
        return x


@pytest.mark.parametrize(("named", "words"), [(None, "blocks found in it"), ("out_blocks", "blocks named")])
def test_a_refusal_speaks_of_named_blocks_where_some_were_named(named: str | None, words: str) -> None:
    with raises(WatchError, subject="blocks") as caught, rankscope.watch(Skipping(), "mu", blocks=named) as w:
        w.model(torch.randn(2, 5, 8))
    assert words in str(caught.value)
