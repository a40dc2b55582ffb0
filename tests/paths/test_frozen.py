"""A network frozen on its input gives what the network gives."""

import pytest
import torch

from rankscope.nets import Architecture
from rankscope.paths import decompose
from tests.paths.enumeration import CASES, network, tokens

SMALL = Architecture(layers=3, width=6, heads=2, head_width=4, mlp="none", norm="none", biases=False)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "identity"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_units_at_zero_have_a_gate(activation: str, dtype: torch.dtype) -> None:
    """Tokens of zero and no biases: every unit is act(0) = 0, and its gate the slope there."""
    net = network({"activation": activation, "norm": "none", "biases": False}).to(dtype)
    d = decompose(net, torch.zeros(1, 4, 6))
    assert d.closure == 0 and not d.output.any()
    slope = {"relu": 1.0, "tanh": 1.0, "identity": 1.0}.get(activation, 0.5)
    for layer in d.frozen.layers:
        assert layer.gate is not None
        torch.testing.assert_close(layer.gate.double(), torch.full((1, 4, 5), slope).double(), rtol=1e-3, atol=0)


def test_parts_add_up_to_what_the_network_itself_gives() -> None:
    """Not to a second forward pass: the output is the network's own, to the bit."""
    for case, fields in CASES.items():
        net, X = network(fields), tokens(samples=2)
        torch.testing.assert_close(decompose(net, X).output, net.run(X).output, rtol=0, atol=0, msg=case)
