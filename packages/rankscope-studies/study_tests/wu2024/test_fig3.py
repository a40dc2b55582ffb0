"""Figure 3 of the 2024 paper: divisors of scores."""

from rankscope.nets import Architecture
from rankscope.sources import bundled_excerpts, fresh
from rankscope_studies.wu2024 import fig3, networks


def test_smaller_divisors_slow_the_collapse() -> None:
    net = fresh(Architecture(layers=4, width=64, heads=2), name="small")
    X = net.encode(bundled_excerpts(128)[:1], 24).X
    ends = [
        networks.last(networks.collapse(net.variant(divisor=divisor), X, "SAN", "complete"), "relative_mu")
        for divisor in fig3.DIVISORS.values()
    ]
    assert ends == sorted(ends, reverse=True)
