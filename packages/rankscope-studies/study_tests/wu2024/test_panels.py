"""Axes of powers of ten."""

import pytest

from rankscope.figures import panels
from rankscope_studies.wu2024.panels import by_layer, power_of_ten, powers_of_ten


def test_axes_of_powers_of_ten() -> None:
    figure, (deep, shallow) = panels(2)
    deep.plot([0, 1, 2], [0.0, -5.0, -1e6])
    shallow.plot([0, 1, 2], [2.0, 1.9, 1.95])
    powers_of_ten(deep, lowest=-1e4)
    powers_of_ten(shallow)
    by_layer(deep, 12)
    assert deep.get_ylim()[0] == pytest.approx(-1.6e4) and len(deep.texts) == 1
    low, high = shallow.get_ylim()
    assert high - low >= 0.5
    assert sum(low <= at <= high for at in shallow.get_yticks()) >= 3
    assert power_of_ten(-1e61) == "$10^{-10^{61}}$" and power_of_ten(0.0) == "$1$"
    figure.draw_without_rendering()
