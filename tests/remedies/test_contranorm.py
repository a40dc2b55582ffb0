"""FeatScale and ContraNorm: each is what its formula says, and reads nothing that a mask hides."""

from typing import Any

import mpmath as mp
import pytest
import torch

from rankscope.deviation import propagate, rounded
from rankscope.forecasts.mean_field import MeanField
from rankscope.nets import Architecture, Transformer, mask_matrix, streams
from tests.builders import normal, thinned
from tests.deviation.reference import Network, Rows, dot
from tests.remedies.small_networks import PADDING, check, check_digits, check_paths, small, stirred

MASKS = ["complete", "causal", "window:1"]


class Scaled(Network):
    """Loops over tokens and channels."""

    def adds(self, index: int, kind: str, Y: Rows) -> Rows:
        if kind == "mlp":
            return Y
        s, t = (self.tensors[f"layers.{index}.parts.featscale.{each}"] for each in "st")
        sees = mask_matrix(self.arch.mask_of(index), len(Y)).tolist()
        out = []
        for i, row in enumerate(Y):
            seen = [Y[j] for j in range(len(Y)) if sees[i][j]]
            mean = [mp.fsum(column) / len(seen) for column in zip(*seen, strict=True)]
            out.append([u + s[k] * m + t[k] * (u - m) for k, (u, m) in enumerate(zip(row, mean, strict=True))])
        return out


class Contrasted(Network):
    """Token by token, every weight from the definition."""

    def contrast(self, index: int, X: Rows) -> Rows:
        part: Any = self.arch.parts[0]
        s = mp.mpf(part.s)
        sees = mask_matrix(self.arch.mask_of(index), len(X)).tolist()
        length = [mp.sqrt(dot(x, x)) for x in X]
        out = []
        for i, x in enumerate(X):
            seen = [j for j in range(len(X)) if sees[i][j]]
            e = [mp.exp(dot(x, X[j]) / length[i] / length[j]) for j in seen]
            heard = [mp.fsum(w * X[j][k] for w, j in zip(e, seen, strict=True)) / mp.fsum(e) for k in range(len(x))]
            out.append([(1 + s) * u - s * v for u, v in zip(x, heard, strict=True)])
        return out

    def before(self, index: int, X: Rows) -> Rows:
        return self.contrast(index, X) if self.arch.norm_place == "pre" else X

    def sums(self, index: int, X: Rows) -> Rows:
        return self.contrast(index, X) if self.arch.norm_place == "post" else X


REFERENCES = {"featscale": Scaled, "contranorm": Contrasted}
PURE: dict[str, Any] = {"layers": 4, "mlp": "none", "norm": "none", "attention_skip": 0.0}


@pytest.mark.parametrize(("name", "place", "mask"), thinned([*REFERENCES], ["pre", "post"], MASKS))
def test_they_are_their_formulas(name: str, place: Any, mask: str) -> None:
    net = stirred(small(norm_place=place, mask=mask).with_remedy(name))
    check(net, REFERENCES[name](net))


@pytest.mark.parametrize("mask", ["complete", "causal"])
@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("name", REFERENCES)
def test_every_digit_of_pure_attention(name: str, place: Any, mask: str) -> None:
    net = stirred(small(norm_place=place, mask=mask, **PURE).with_remedy(name))
    lowest = check_digits(net, REFERENCES[name](net), normal(1, 4, 4, seed=1))
    assert mask == "causal" or lowest < -20


@pytest.mark.parametrize("place", ["pre", "post"])
def test_contranorm_of_tokens_that_are_far_below_one(place: Any) -> None:
    """Directions have no length: tokens of 1e-60, that without biases come to be 1e-400 apart."""
    net = small(norm_place=place, biases=False, **PURE | {"layers": 2}).with_remedy("contranorm", s=0.5)
    assert check_digits(net, Contrasted(net), 1e-60 * normal(1, 4, 4, seed=1), digits=900) < -400


def test_mean_and_deviation_scale_apart() -> None:
    """At t = -1 under a complete mask nothing is left of what tokens differ by, not even rounding."""
    net = small(**PURE).with_remedy("featscale", s=0.7, t=-1.0)
    *_, last = propagate(net, normal(1, 4, 4, seed=1))
    assert not last.state.R.value.any()
    plain, doubled = (small(**PURE).with_remedy("featscale", **each) for each in ({}, {"s": 1.0, "t": 1.0}))
    X = normal(2, 4, 4, seed=1)
    A = plain.run(X).states[1]
    torch.testing.assert_close(doubled.run(X).states[1], 2 * A, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("mask", ["causal", "window:1"])
@pytest.mark.parametrize("place", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("name", REFERENCES)
def test_nothing_hidden_is_read(name: str, place: Any, mask: str) -> None:
    """Of one layer: what a token does not see can change as it likes, and so can padding."""
    net = stirred(small(norm_place=place, mask=mask, layers=1).with_remedy(name))
    X, other = normal(2, 5, 4, seed=7), normal(2, 5, 4, seed=8)
    sees = mask_matrix(mask, 5)
    for i in range(5):
        # What the tokens that i sees see themselves, since ContraNorm comes before attention, or after it.
        reach = (sees[i].double() @ sees.double() > 0) if name == "contranorm" else sees[i]
        reach = (reach.double() @ sees.double() > 0) if place != "post" or name == "featscale" else reach
        changed = torch.where(reach[:, None], X, other)
        assert torch.equal(net.run(changed).output[:, i], net.run(X).output[:, i])
    padded = torch.where(PADDING[..., None], other, X)
    assert torch.equal(net.run(padded, PADDING).output, net.run(X, PADDING).output)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", REFERENCES)
def test_doubled_precision_agrees(name: str) -> None:
    net, X = stirred(small(norm_place="pre", mask="causal", layers=1).with_remedy(name)), normal(2, 5, 4)
    both = zip(propagate(net, X, PADDING), propagate(net, X, PADDING, doubled=True), strict=True)
    for step, doubled in both:
        expected = rounded(doubled).state.tokens()
        torch.testing.assert_close(step.state.tokens(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("place", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("name", REFERENCES)
def test_paths_add_up(name: str, place: Any) -> None:
    net = stirred(small(norm_place=place, mask="causal").with_remedy(name))
    check_paths(net)
    if place == "pre":
        check_paths(stirred(small(norm_place=place, parallel=True).with_remedy(name)))


@pytest.mark.parametrize("name", REFERENCES)
def test_masks_are_there_whole_and_files_know_them(name: str) -> None:
    net = stirred(small().with_remedy(name))
    assert streams(small().arch) and not streams(net.arch)
    assert Architecture.from_dict(net.arch.to_dict()) == net.arch
    assert Transformer.from_weights(net.arch, net.state_dict()).fingerprint == net.fingerprint


def test_a_token_of_length_zero_stays() -> None:
    X = normal(1, 4, 4)
    X[0, 1] = 0.0
    net = small(norm_place="pre", biases=False).with_remedy("contranorm")
    for step, fine in zip(net.steps(X), propagate(net, X), strict=True):
        torch.testing.assert_close(fine.state.tokens(), step.state, rtol=0, atol=1e-13)


def test_rows_of_contranorm_sum_to_one() -> None:
    """Equal tokens stay as they are."""
    X = normal(1, 1, 4).expand(1, 5, 4)
    net = small(norm_place="post", norm="none", mlp="none", attention_skip=1.0)
    torch.testing.assert_close(net.with_remedy("contranorm", s=0.5).run(X).output, net.run(X).output)


@pytest.mark.parametrize("mask", MASKS)
def test_covariances_under_featscale_are_those_of_the_linear_map_of_each_channel(mask: str) -> None:
    """Of channel k, `(I + s_k K + t_k (I - K)) C (...)^T`, K the average over what each token sees; their mean."""
    net = stirred(small(norm_place="post", mask=mask).with_remedy("featscale"))
    X, valid, _ = net.prepared(normal(1, 5, 4, seed=7), None)
    rules = MeanField(net, net.settings(X, valid), 1, torch.Generator().manual_seed(0))
    half = normal(5, 5, seed=3)
    C = half @ half.mT
    part: Any = net.arch.parts[0]
    for index, block in enumerate(net.blocks):
        s, t = (net.state_dict()[f"layers.{index}.parts.featscale.{each}"].tolist() for each in "st")
        assert len({*s, *t}) == 8
        sees = mask_matrix(mask, 5).double()
        K, eye = sees / sees.sum(-1, keepdim=True), torch.eye(5, dtype=torch.float64)
        maps = [eye + a * K + b * (eye - K) for a, b in zip(s, t, strict=True)]
        expected = sum(M @ C @ M.mT for M in maps) / 4
        torch.testing.assert_close(part.mean_field(C[None], block, rules, None)[0], expected, rtol=1e-12, atol=1e-12)
