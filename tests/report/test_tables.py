"""Tables of the page hold the numbers of the profile."""

import pytest

from rankscope.figures.text import power
from rankscope.profiles import Profile, measure
from rankscope.profiles.sections import curve_table
from tests.report.runs import NET, X


@pytest.mark.slow
def test_layers_of_networks_of_other_depths_stand_under_their_numbers() -> None:
    nets = {"short": NET, "deep": NET.variant(layers=40)}
    both = Profile.join([measure(net, X[:1], metrics="relative_residual", variant=v) for v, net in nets.items()])
    table = curve_table(both.views("relative_residual"))
    assert {len(row) for row in table.rows} == {len(table.headings)}
    for row in table.rows:
        logs = both.curve("relative_residual", "log10", variant=row[0]).mean(0).tolist()
        for layer, cell in zip(table.headings[1:], row[1:], strict=True):
            assert cell == (power(logs[int(layer)]) if int(layer) < len(logs) else "")
