"""One layer of a pass: its residual as a shape and a scale, and what each head adds."""

import pytest
import torch

from rankscope.errors import MetricError
from rankscope.metrics import metric, mu
from rankscope.nets import Architecture, PassSettings, Plain, Transformer
from rankscope.profiles import measure
from tests.profiles.residual_shapes import NET, PADDING, X, residual, shapes
from tests.raising import raises


def test_shape_and_scale_are_the_residual() -> None:
    plain = [step.state for step in NET.steps(X, PADDING)]
    for each in shapes(NET, X, PADDING):
        for sample in range(2):
            real = ~PADDING[sample]
            state = plain[each.layer][sample]
            whole = torch.linalg.vector_norm(state[real])
            found = each.R[sample, real] * 10 ** each.log10[sample] * whole
            assert torch.allclose(found, residual(state, real), rtol=1e-9, atol=1e-12)
            assert not each.R[sample, ~real].any()


def test_scales_are_the_relative_residual_at_any_depth() -> None:
    san = NET.variant("san").variant(layers=12)
    logs = measure(san, X, metrics="relative_mu").curve("relative_mu", "log10")
    for each in shapes(san, X):
        assert torch.allclose(each.log10, logs[:, each.layer], rtol=1e-9, atol=1e-9)
    assert float(logs[0, -1]) < -1000


def test_a_kernel_without_a_rule_runs_in_float64() -> None:
    net = Transformer.random(Architecture(layers=2, width=16, heads=2, kernel="sigmoid"))
    *_, last = shapes(net, X)
    *_, step = net.steps(X)
    centred = step.state - step.state.mean(1, keepdim=True)
    share = torch.linalg.vector_norm(centred, dim=(1, 2)) / torch.linalg.vector_norm(step.state, dim=(1, 2))
    assert torch.allclose(last.log10, share.log10())


ARCH = Architecture(layers=2, width=12, heads=3, key_heads=1, norm_place="post", mask="causal")
TOKENS = torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
SHORTER = torch.arange(7)[None] >= torch.tensor([[7], [4]])


@pytest.mark.parametrize("arithmetic", ["deviation", "float64"])
def test_a_head_adds_what_the_branch_has_with_it_alone(arithmetic: str) -> None:
    """The branch with one head kept, its output bias taken off, is that head's contribution."""
    net = Transformer.random(ARCH, init="xavier")
    profile = measure(net, TOKENS, SHORTER, ["head_mu", "mu"], arithmetic)
    found = profile.curve("head_mu")  # [sample, layer, head]
    assert found[:, 0].isnan().all() and profile.curve("mu").shape == (2, 3)
    states = net.run(TOKENS, SHORTER).states
    for layer in range(2):
        for head in range(3):
            alone = net.variant(heads=[head])
            rules = Plain(alone.arch, PassSettings.of(alone.arch, alone.weights, TOKENS, ~SHORTER))
            block, state = alone.blocks[layer], states[layer]
            heads = rules.mix(block, rules.pattern(block, state), rules.values(block, state))
            branch = rules.output(block, heads)
            torch.testing.assert_close(found[:, layer + 1, head], mu(branch, SHORTER), rtol=1e-10, atol=1e-14)


def test_padding_may_stand_anywhere() -> None:
    net = Transformer.random(ARCH, init="xavier")
    for arithmetic in ("deviation", "float64"):
        right = measure(net, TOKENS, SHORTER, "head_residual", arithmetic).curve("head_residual")
        left = measure(net, TOKENS.roll(3, 1), SHORTER.roll(3, 1), "head_residual", arithmetic)
        torch.testing.assert_close(left.curve("head_residual")[1], right[1], equal_nan=True)


def test_only_metrics_of_tokens_have_a_head_form() -> None:
    with raises(MetricError, subject="metric"):
        metric("head_dobrushin")


def test_rows_that_sum_to_other_numbers_each_are_all_looked_at() -> None:
    """Differential attention with a weight of each token's own: rows miss one by what the plain network has."""
    net = Transformer.random(ARCH, init="xavier").with_remedy("differential2")
    checks = measure(net, TOKENS, SHORTER, "mu").manifest.networks[0].checks
    plain = [step.attention for step in net.steps(TOKENS, SHORTER) if step.attention is not None]
    defects = [((P.sum(-1) - 1).abs() * ~SHORTER[:, None]).max().item() for P in plain]
    assert checks["largest_row_sum_defect"] == pytest.approx(max(defects), rel=1e-12)
