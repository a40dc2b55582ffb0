"""What is counted before a pass is what the pass does."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rankscope import Architecture, Transformer
from rankscope.nets import Experts
from rankscope.profiles.pass_cost import in_words, multiply_adds, rate, seconds

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "arch",
    [
        Architecture(layers=2, width=8, heads=2),
        Architecture(layers=3, width=12, heads=4, key_heads=2, mlp="gated", mlp_width=20),
        Architecture(layers=1, width=8, heads=2, mlp="none"),
    ],
)
def test_products_are_those_that_torch_counts(arch: Architecture) -> None:
    net, X = Transformer.random(arch), torch.randn(3, 5, arch.width, dtype=torch.float64)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        net.run(X, attention=True)
    assert 2 * multiply_adds(arch, 3, 5) == counted.get_total_flops()


def test_a_token_meets_the_experts_that_it_is_sent_to() -> None:
    few, many = (
        Architecture(layers=1, width=8, heads=2, mlp="experts", experts=Experts(number=n, chosen=2, width=16))
        for n in (4, 8)
    )
    assert multiply_adds(many, 1, 10) - multiply_adds(few, 1, 10) == 10 * 8 * 4  # the router alone


def test_it_grows_with_what_is_asked() -> None:
    arch = Architecture(layers=2, width=8, heads=2)
    one, four = (seconds(arch, samples, 16, "float", torch.float64, CPU) for samples in (1, 4))
    assert one > 0 and four == pytest.approx(4 * one)
    assert seconds(arch, 1, 16, "confirm", torch.float64, CPU) > one
    assert rate(torch.float64, CPU) == rate(torch.float64, CPU)


def test_it_is_said_in_words() -> None:
    assert [in_words(each) for each in (12.3, 180.0, 3 * 3600.0)] == [
        "about 12 seconds", "about 3 minutes", "about 3 hours",
    ]  # fmt: skip
