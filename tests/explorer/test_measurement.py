"""The network as its controls have it."""

import pytest

from rankscope.explorer.answers import measure_page, network_with
from rankscope.explorer.controls import Controls
from tests.explorer.serving import TEXT, tiny


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
