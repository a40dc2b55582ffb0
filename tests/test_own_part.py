"""A part of one's own, in every arithmetic, without touching the package: AttnScale (Wang et al. 2022).

P <- C + (1 + w) (P - C),    C the average over all tokens
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mpmath as mp
import pytest
import torch
from torch import Tensor

from rankscope import Architecture, Transformer, certify, decompose, measure
from rankscope.deviation import propagate
from rankscope.errors import ArchitectureError, PathError
from rankscope.metrics import composite_norm
from rankscope.nets import Dropout, training_states
from tests.deviation.reference import Network, Rows, log10_residual
from tests.raising import raises

PADDING = torch.arange(6)[None] >= torch.tensor([[6], [4]])


@dataclass(frozen=True)
class AttnScale:
    """Attention's departure from the average, made larger."""

    w: float
    name: ClassVar[str] = "attn_scale"
    place: ClassVar[Any] = "pattern"

    def plain(self, P: Tensor, block: Any, rules: Any, inside: Tensor) -> Tensor:
        real = rules.settings.valid[:, None].to(P.dtype)  # [batch, 1, token]
        C = real[..., None] * (real / real.sum(-1, keepdim=True))[:, :, None]
        return C + (1 + self.w) * (P - C)

    def deviation(self, P: Any, block: Any, rules: Any, inside: Any) -> Any:
        real = rules.settings.valid[:, None].double()
        c = real / real.sum(-1, keepdim=True)  # every row of C
        p, off_top = c + (1 + self.w) * (P.p - c), P.off_top * (1 + self.w)
        return replace(P, p=p, off_top=off_top, signed=True)


@dataclass(frozen=True)
class Louder:
    """Heads whose values are those of the first layer and of their own: what a layer leaves to later ones."""

    b: float
    name: ClassVar[str] = "value_residual"
    place: ClassVar[Any] = "values"

    def plain(self, V: Tensor, block: Any, rules: Any, inside: Tensor) -> Tensor:
        return V + self.b * rules.carried.setdefault("first values", V)


def network(**fields: Any) -> Transformer:
    sizes: dict[str, Any] = {"layers": 4, "width": 6, "heads": 2, "head_width": 3, "mlp_width": 8}
    return Transformer.random(Architecture(**{**sizes, **fields}), seed=3, init="xavier")


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_part(net: Transformer, *parts: Any) -> Transformer:
    return Transformer.from_weights(net.arch.replace(parts=parts), net.state_dict())


@pytest.mark.parametrize("mask", ["complete", "causal"])
@pytest.mark.parametrize("padding", [None, PADDING])
def test_one_layer_is_the_two_networks_it_is_made_of(mask: str, padding: Tensor | None) -> None:
    """`P'` is linear in P and C, and the uniform kernel over a complete mask has C for its P."""
    net = network(layers=1, mask=mask, mlp="none", norm="none", attention_skip=0.0)
    own, average = (
        each.run(tokens(), padding).output for each in (net, net.variant(kernel="uniform", mask="complete"))
    )
    scaled = with_part(net, AttnScale(0.7)).run(tokens(), padding).output
    torch.testing.assert_close(scaled, 1.7 * own - 0.7 * average, rtol=1e-12, atol=1e-13)


def test_at_zero_it_changes_nothing() -> None:
    net = network()
    plain, scaled = (each.run(tokens(), attention=True) for each in (net, with_part(net, AttnScale(0.0))))
    torch.testing.assert_close(scaled.output, plain.output, rtol=1e-14, atol=1e-14)
    left, right = (measure(each, tokens(), metrics="mu") for each in (net, with_part(net, AttnScale(0.0))))
    torch.testing.assert_close(left.curve("mu", "log10"), right.curve("mu", "log10"), rtol=1e-12, atol=1e-12)


class Scaled(Network):
    """The same in hundreds of digits."""

    def __init__(self, net: Transformer, w: float) -> None:
        super().__init__(net)
        self.average, self.w = Network(net.variant(kernel="uniform", mask="complete")), mp.mpf(w)

    def attention(self, index: int, here: int, X: Rows) -> Rows:
        pairs = zip(super().attention(index, here, X), self.average.attention(index, here, X), strict=True)
        return [[(1 + self.w) * p - self.w * c for p, c in zip(*rows, strict=True)] for rows in pairs]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mask", ["complete", "causal"])
@pytest.mark.parametrize(
    ("norm", "mlp", "skip"), [("none", "none", 0.0), ("layer", "plain", 1.0), ("rms", "gated", 0.0)]
)
def test_its_rule_in_deviation_arithmetic_has_all_digits(mask: str, norm: str, mlp: Any, skip: float) -> None:
    net = network(mask=mask, norm=norm, mlp=mlp, attention_skip=skip, mlp_skip=skip)
    X = 0.5 * tokens()[:1]
    with mp.workdps(200):
        exact = [log10_residual(state) for state in Scaled(net, 0.25).states(X[0])]
    for step, true in zip(propagate(with_part(net, AttnScale(0.25)), X), exact, strict=True):
        residual = step.state.centred()[1]
        mine = math.log10(float(composite_norm(residual.value)[0])) + float(residual.log[0]) / math.log(10)
        assert abs(mine - float(true)) < 1e-10 * max(1.0, abs(float(true)))
    if norm == "none" and mask == "complete":
        assert float(true) < -20  # it falls far below float64, and every digit is still there


def test_metrics_of_attention_are_of_what_it_made() -> None:
    net = with_part(network(mask="causal"), AttnScale(0.5))
    found = {
        name: measure(net, tokens(), PADDING, ["row_sum_defect", "dobrushin"], name)
        for name in ("deviation", "float64")
    }
    P = net.run(tokens(), PADDING, attention=True).attention[0]
    assert float(P.min()) < 0 and found["deviation"].arithmetics == ["deviation"]
    for name in ("row_sum_defect", "dobrushin"):
        curves = [each.curve(name)[:, 1:] for each in found.values()]
        torch.testing.assert_close(curves[0], curves[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("place", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("parallel", [False, True])
def test_its_paths_add_up(place: Any, parallel: bool) -> None:
    """Frozen, attention is kept as it came out of the part: no rule is needed."""
    net = with_part(network(norm_place=place, parallel=parallel), AttnScale(0.5))
    d = decompose(net, tokens(), PADDING)
    assert d.closure < 1e-12
    torch.testing.assert_close(d.output, net.run(tokens(), PADDING).output * ~PADDING[..., None])


@dataclass(frozen=True)
class BranchScale:
    """What a branch adds, or the stream after a block, times a number."""

    place: Any
    by: float = 0.5
    name: ClassVar[str] = "branch_scale"

    def plain(self, X: Tensor, block: Any, rules: Any, inside: Tensor) -> Tensor:
        return self.by * X

    def frozen(self, terms: Any, block: Any, rules: Any, inside: Any) -> Any:
        return terms._replace(parts=self.by * terms.parts)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("place", ["attention", "mlp", "stream"])
def test_a_linear_part_elsewhere_brings_its_frozen_rule(place: str, parallel: bool) -> None:
    net = with_part(network(norm_place="pre", parallel=parallel), BranchScale(place))
    d = decompose(net, tokens(), PADDING)
    found = d.by_length()
    assert d.closure < 1e-12 and not torch.allclose(
        d.output, network(norm_place="pre", parallel=parallel).run(tokens(), PADDING).output
    )
    torch.testing.assert_close((found.embedding + found.bias).sum(0), d.output, rtol=1e-10, atol=1e-12)
    paths = [path for length in range(5) for path in d.sample(length, found.counts[length])]
    torch.testing.assert_close(d.keep(paths=paths), found.embedding.sum(0), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_theorems_know_nothing_of_it_and_say_so() -> None:
    found = certify(with_part(network(), AttnScale(0.5)), tokens()[:1])
    assert not found.table["met"].any()
    assert all("attn_scale" in why for why in found.table["why"])


def test_it_is_part_of_the_fingerprint_and_comes_back_from_a_file_with_the_object() -> None:
    net = network()
    one, two = with_part(net, AttnScale(0.5)), with_part(net, AttnScale(0.6))
    assert len({net.fingerprint, one.fingerprint, two.fingerprint}) == 3
    assert Architecture.from_dict(one.arch.to_dict(), own=[AttnScale(0.5)]) == one.arch
    with raises(ArchitectureError, subject="attn_scale(w=0.5)"):
        Architecture.from_dict(one.arch.to_dict())


def test_one_without_a_rule_falls_back_and_is_refused_by_paths() -> None:
    """A term that needs the first layer's values: the rules remember what a layer leaves."""
    net = network(layers=2, mlp="none", norm="none", attention_skip=0.0)
    mine = with_part(net, Louder(0.5))
    profile = measure(mine, tokens())
    assert profile.arithmetics == ["float64"]
    first, second = net.blocks
    values = [block.weights.attention.value.weight.flatten(1) for block in (first, second)]
    run = mine.run(tokens(), attention=True)
    V1, V2 = tokens() @ values[0], run.states[1] @ values[1]
    assert not net.weights.layers[0].attention.value.bias.any()  # type: ignore[union-attr]
    mixed = run.attention[1] @ (V2 + 0.5 * V1).view(2, 6, 2, 3).transpose(1, 2)
    expected = mixed.transpose(1, 2).flatten(-2) @ second.weights.attention.output.weight.flatten(0, 1)
    torch.testing.assert_close(run.states[2], expected, rtol=1e-12, atol=1e-13)
    with raises(PathError, subject="value_residual"):
        decompose(mine, tokens())


def test_paths_refuse_a_part_without_a_linear_rule() -> None:
    class Elsewhere(AttnScale):
        place: ClassVar[Any] = "stream"

    with raises(PathError, subject="attn_scale"):
        decompose(with_part(network(), Elsewhere(0.0)), tokens())


def test_dropout_goes_through_it_too() -> None:
    net = with_part(network(), AttnScale(0.5))
    *_, last = training_states(net, tokens(), Dropout.seeded(0.0, 0, "cpu"))
    torch.testing.assert_close(last, net.run(tokens()).states[-1])


def test_a_place_that_there_is_not() -> None:
    class Lost(AttnScale):
        place: ClassVar[Any] = "nowhere"

    with raises(ArchitectureError, subject="place"):
        Architecture(layers=1, width=4, heads=1, parts=(Lost(1.0),))  # type: ignore[arg-type]
