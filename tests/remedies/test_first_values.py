"""Values of the first layer, heard again: each remedy is what its formula says."""

import math
from typing import Any

import mpmath as mp
import pytest
import torch

from rankscope import decompose, measure
from rankscope.deviation import confirmations, propagate
from rankscope.errors import ArchitectureError, PathError
from rankscope.forecasts import mean_field
from rankscope.nets import Architecture, Plain, Transformer, traverse
from tests.builders import normal
from tests.deviation.reference import Network, Rows
from tests.raising import raises
from tests.remedies.small_networks import check, check_digits, plus, small, stirred, times

SPECS = ["valueresidual", "valueresidual:a=1.0,b=2.0", "neutreno", "neutreno:weight=0.4"]


class Heard(Network):
    """V_1 is kept when layer 1 makes its values; heads are those of keys, several sharing one."""

    first: list[Rows]
    own: list[Rows]

    def heads(self, here: int, name: str, X: Rows, kind: str = "attention") -> list[Rows]:
        V = super().heads(here, name, X, kind)
        if name != "value":
            return V
        self.first, self.own = (V if here == 0 else self.first), V
        if here == 0 or "layers.0.parts.valueresidual.a" not in self.tensors:
            return V
        a, b = (self.tensors[f"layers.{here}.parts.valueresidual.{each}"] for each in "ab")
        return [plus(times(a, v), times(b, v_1)) for v, v_1 in zip(V, self.first, strict=True)]

    def spoken(self, here: int, X: Rows, source: Rows, found: list[Rows], kind: str = "attention") -> Rows:
        out = super().spoken(here, X, source, found, kind)
        part: Any = self.arch.parts[0]
        if part.name != "neutreno" or here == 0:
            return out
        group = self.arch.heads // self.arch.key_heads
        for h in range(self.arch.heads):
            apart = plus(self.first[h // group], times(-1, self.own[h // group]))
            W = self.tensors[f"layers.{here}.attention.output.weight"][h]
            drawn = [[mp.fsum(u * W[c][j] for c, u in enumerate(row)) for j in range(len(W[0]))] for row in apart]
            out = plus(out, times(part.weight, drawn))
        return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mask", ["complete", "causal"])
@pytest.mark.parametrize("spec", SPECS)
def test_they_are_their_formulas(spec: str, mask: str) -> None:
    for fields in ({"norm_place": "pre"}, {"norm_place": "post", "key_heads": 1}):
        net = stirred(small(mask=mask, **fields).with_remedy(spec))
        check(net, Heard(net))


@pytest.mark.parametrize("mask", ["complete", "causal"])
@pytest.mark.parametrize("spec", SPECS)
def test_every_digit_of_pure_attention(spec: str, mask: str) -> None:
    net = stirred(small(layers=4, mlp="none", norm="none", attention_skip=0.0, mask=mask).with_remedy(spec))
    check_digits(net, Heard(net), normal(1, 4, 4, seed=1))


def test_digits_below_float64() -> None:
    """P mixes the first values as well: alone they do not stop collapse. NeuTRENO's do not go through P."""
    fields: dict[str, Any] = {"layers": 4, "mlp": "none", "norm": "none", "attention_skip": 0.0}
    net = small(**fields, biases=False).with_remedy("valueresidual")
    assert check_digits(net, Heard(net), 0.5 * normal(1, 4, 4, seed=1)) < -20
    net = small(**fields, biases=False).with_remedy("neutreno")
    X = 1e-100 * normal(1, 4, 4, seed=1)
    assert check_digits(net, Heard(net), X) < -250  # after layer 1, which has no remedy
    *_, last = propagate(net, X)
    assert last.state.R.log_size() > math.log(1e-104)  # what tokens began with is there again


def test_they_start_as_published() -> None:
    """Half and half, one pair a layer; nothing of NeuTRENO is trained."""
    state = small().with_remedy("valueresidual").state_dict()
    held = {name: float(tensor) for name, tensor in state.items() if ".parts." in name}
    assert len(held) == 6 and set(held.values()) == {0.5}
    assert not any(".parts." in name for name in small().with_remedy("neutreno").state_dict())


def test_the_first_layer_is_untouched_and_silent_heads_stay_silent() -> None:
    net, X = small(norm_place="pre"), normal(2, 5, 4)
    for spec in SPECS:
        assert torch.equal(net.with_remedy(spec).run(X).states[1], net.run(X).states[1])
        silent = net.with_remedy(spec).variant(heads={3: []})
        steps = list(silent.steps(X))
        assert steps[3].heads is not None and not steps[3].heads.any()
        for step, fine in zip(steps, propagate(silent, X), strict=True):
            assert torch.allclose(fine.state.tokens(), step.state, atol=1e-12)


@pytest.mark.parametrize("spec", ["neutreno", pytest.param("valueresidual", marks=pytest.mark.slow)])
def test_the_second_pass_and_doubled_precision_know_the_first_values(spec: str) -> None:
    net, X = small(norm_place="pre", mlp="none").with_remedy(spec), normal(1, 4, 4)
    assert not measure(net, X, metrics="residual").curve("residual", "below_floor").any()
    for layer, found in enumerate(confirmations(net, X)):
        torch.testing.assert_close(found.single.state.tokens(), found.doubled.state.tokens(), rtol=0, atol=1e-13)
        if layer == 2:  # from here on a second doubled pass, shaken, which did not go through layer 1 itself
            torch.testing.assert_close(found.perturbed.state.tokens(), found.doubled.state.tokens())


def test_a_pass_that_begins_later_says_so() -> None:
    net, X = small().with_remedy("valueresidual"), normal(1, 5, 4)
    rules = Plain(net.arch, net.settings(X, torch.ones(1, 5, dtype=torch.bool)))
    with raises(ArchitectureError, subject="layers"):
        traverse(net.blocks[1], rules, X)


@pytest.mark.parametrize(("spec", "place"), [("valueresidual", "values"), ("neutreno", "values")])
def test_paths_refuse_them(spec: str, place: str) -> None:
    with raises(PathError, subject=spec):
        decompose(small().with_remedy(spec), normal(1, 5, 4))


@pytest.mark.parametrize("spec", SPECS)
def test_saved_and_read_back(spec: str) -> None:
    net: Any = stirred(small().with_remedy(spec))
    assert Architecture.from_dict(net.arch.to_dict()) == net.arch
    assert Transformer.from_weights(net.arch, net.state_dict()).fingerprint == net.fingerprint


@pytest.mark.parametrize("spec", SPECS)
def test_mean_field_theory_of_uniform_attention_is_the_recursion_by_hand(spec: str) -> None:
    """All heads mix by U, of entries 1/n: a matrix acts on V, another on V_1, whose weights are independent."""
    n, width = 5, 4
    net = small(mlp="none", norm="none", kernel="uniform", biases=False, attention_skip=0.5)
    bare, net, X = net, stirred(net.with_remedy(spec)), normal(1, n, width, seed=3)
    C = X[0] @ X[0].mT / width
    U, one = torch.full((n, n), 1 / n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    first, alike = torch.zeros(n, n, dtype=torch.float64), []
    for layer, moments in enumerate(mean_field(net, X, draws=2)):
        if layer:
            w = net.weights.layers[layer - 1].attention
            gain, heads = (float(part.weight.square().mean()) * width for part in (w.value, w.output))
            V = gain * C
            first = V if layer == 1 else first
            mine, theirs = U, torch.zeros_like(U)
            if layer > 1 and spec.startswith("valueresidual"):
                numbers = net.state_dict()
                a, b = (float(numbers[f"layers.{layer - 1}.parts.valueresidual.{name}"]) for name in "ab")
                mine, theirs = a * U, b * U
            elif layer > 1:
                weight = 0.4 if "0.4" in spec else 0.6
                mine, theirs = U - weight * one, weight * one
            C = 0.25 * C + heads * (mine @ V @ mine.mT + theirs @ first @ theirs.mT)
        torch.testing.assert_close(moments.covariance[0], C, rtol=1e-12, atol=1e-14)
        alike.append(torch.allclose(moments.covariance, list(mean_field(bare, X, draws=2))[layer].covariance))
    assert alike == [True, True, False, False]  # the first layer has no remedy
