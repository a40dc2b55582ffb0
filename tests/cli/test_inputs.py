"""What is said of networks that a command was given."""

from typing import Any

import pytest

from rankscope.cli.inputs import fallback_lines
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from tests.builders import normal


@pytest.mark.parametrize(
    ("fields", "without"),
    [
        ({}, None),
        ({"kernel": "sigmoid"}, "kernel sigmoid"),
        ({"positions": "disentangled"}, "disentangled positions"),
        ({"kernel": "sigmoid", "positions": "disentangled"}, "kernel sigmoid"),
    ],
)
def test_what_deviation_arithmetic_has_no_rule_for_is_named(fields: dict[str, Any], without: str | None) -> None:
    """The kernel where it has none; else the part of the network that has none."""
    net = Transformer.random(Architecture(layers=1, width=8, heads=2, **fields))
    said = fallback_lines(measure(net, normal(1, 4, 8), metrics="mu", variant="net"))
    words = f"net ran in float64: deviation arithmetic has no rule for {without}."
    assert said == ([] if without is None else [words])
