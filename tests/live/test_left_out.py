"""How parts of a model are named that a watch leaves out."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.errors import WatchError
from rankscope.live import watch
from rankscope.live.left_out import choose
from rankscope.live.plan import LeftOut
from tests.live.gpt import GPT
from tests.raising import raises


def chosen(model: nn.Module, **parts: Any) -> LeftOut:
    return watch(model, "mu").without(**parts).stacks[""].plan.left_out


def test_names_and_numbers() -> None:
    out = chosen(GPT(), layers=[3, 1], heads={2: [1, 0]}, branches="transformer.h.*.mlp", norms=["transformer.ln_f"])
    assert out.layers == {1, 3} and out.heads == {2: {0, 1}}
    assert list(out.branches) == [f"transformer.h.{k}.mlp" for k in range(3)]
    assert out.asked == (
        "layer 1",
        "layer 3",
        "heads 0, 1 of layer 2",
        "branch transformer.h.*.mlp",
        "norm transformer.ln_f",
    )
    assert out.words[:3] == list(out.asked[:3]) and out.words[3:6] == [f"branch {name}" for name in out.branches]


def test_pairs_are_heads_too() -> None:
    assert chosen(GPT(), heads=[(1, 0), (1, 3), (2, 1)]).heads == {1: {0, 3}, 2: {1}}


def test_a_star_stands_for_one_step_of_a_name() -> None:
    assert list(chosen(GPT(), branches="transformer.*.1.mlp").branches) == ["transformer.h.1.mlp"]
    with raises(WatchError, "branches"):
        chosen(GPT(), branches="transformer.*.mlp")


@pytest.mark.slow
def test_names_are_those_of_the_model_that_was_compiled() -> None:
    model = GPT()
    model.transformer["h"][0].mlp = torch.compile(model.transformer["h"][0].mlp)  # type: ignore[index]
    assert list(chosen(model, branches="transformer.h.0.mlp.c_proj").branches) == ["transformer.h.0.mlp.c_proj"]


def test_two_choices_are_left_out_together() -> None:
    model = GPT()
    a = chosen(model, layers=[1], heads={2: [0]}, branches="transformer.h.0.mlp")
    b = chosen(model, layers=[1, 2], heads={2: [1]}, skips="transformer.h.2.mlp")
    assert a.beside(b).words == ["layer 1", "layer 2", "heads 0, 1 of layer 2", *a.words[-1:], *b.words[-1:]]
    assert not LeftOut() and LeftOut().beside(a) == a


def test_numbers_may_be_those_of_numpy() -> None:
    numbers: Any = np.array([2, 1])
    out = chosen(GPT(), layers=numbers, heads={3: numbers})
    assert out == chosen(GPT(), layers=[2, 1], heads={3: [2, 1]}) and {type(n) for n in out.layers} == {int}


@pytest.mark.parametrize(
    "parts",
    [
        {"layers": 1}, {"layers": "1"}, {"layers": [0]}, {"layers": [4]}, {"layers": [True]}, {"layers": ["1"]},
        {"heads": {1: 0}}, {"heads": [1]}, {"heads": {1: [-1]}}, {"heads": {0: [0]}}, {"heads": [(1, "0")]},
        {"heads": 1}, {"branches": "mlp"}, {"branches": 3}, {"branches": [GPT()]},
        {"skips": ["transformer.h.9.mlp"]}, {"norms": "transformer.h.0.mlp"}, {"norms": "transformer.h.0.mlp.c_proj"},
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(parts: dict[str, Any]) -> None:
    with raises(WatchError, next(iter(parts))):
        chosen(GPT(), **parts)


def test_a_layer_is_one_module_that_is_called() -> None:
    block, lists = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])
    choices: list[list[nn.Module]] = [[block, block], [lists]]
    for blocks in choices:
        with raises(WatchError, "layers"):
            choose(nn.Sequential(block, lists), blocks, [1], (), (), (), ())
