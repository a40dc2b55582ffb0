"""`head_` metrics: a metric of tokens, of what each head adds to the attention branch."""

import pytest
import torch

from rankscope.errors import MetricError
from rankscope.metrics import metric
from rankscope.metrics.residuals import mu
from rankscope.nets import Architecture, Transformer
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.plain import Plain
from rankscope.profiles import measure
from tests.raising import raises

ARCH = Architecture(layers=2, width=12, heads=3, key_heads=1, norm_place="post", mask="causal")
X = torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
PADDING = torch.arange(7)[None] >= torch.tensor([[7], [4]])


@pytest.mark.parametrize("arithmetic", ["deviation", "float64"])
def test_a_head_adds_what_the_branch_has_with_it_alone(arithmetic: str) -> None:
    """The branch with one head kept, its output bias taken off, is that head's contribution."""
    net = Transformer.random(ARCH, init="xavier")
    profile = measure(net, X, PADDING, ["head_mu", "mu"], arithmetic)
    found = profile.curve("head_mu")  # [sample, layer, head]
    assert found[:, 0].isnan().all() and profile.curve("mu").shape == (2, 3)
    states = net.run(X, PADDING).states
    for layer in range(2):
        for head in range(3):
            alone = net.variant(heads=[head])
            rules = Plain(alone.arch, PassSettings.of(alone.arch, alone.weights, X, ~PADDING))
            block, state = alone.blocks[layer], states[layer]
            heads = rules.mix(block, rules.pattern(block, state), rules.values(block, state))
            branch = rules.output(block, heads)
            torch.testing.assert_close(found[:, layer + 1, head], mu(branch, PADDING), rtol=1e-10, atol=1e-14)


def test_padding_may_stand_anywhere() -> None:
    net = Transformer.random(ARCH, init="xavier")
    for arithmetic in ("deviation", "float64"):
        right = measure(net, X, PADDING, "head_residual", arithmetic).curve("head_residual")
        left = measure(net, X.roll(3, 1), PADDING.roll(3, 1), "head_residual", arithmetic)
        torch.testing.assert_close(left.curve("head_residual")[1], right[1], equal_nan=True)


def test_only_metrics_of_tokens_have_a_head_form() -> None:
    with raises(MetricError, subject="metric"):
        metric("head_dobrushin")
