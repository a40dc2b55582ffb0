"""What rounding decided is marked, and nothing else is."""

from typing import Any

import mpmath as mp
import pytest
import torch

from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from tests.builders import normal, thinned
from tests.deviation.reference import DIGITS, Network, log10_residual


def test_differences_within_a_cluster_are_marked_when_they_are_lost() -> None:
    """Two pairs of tokens, each equal to 1e-19, far from one another: R cannot hold what differs within a
    pair, and when attention next looks at one pair alone the residual is unknown. It is said to be."""
    arch = Architecture(layers=3, width=4, heads=1, norm="none", mlp="none", attention_skip=0.0)
    net = Transformer.random(arch, seed=20, init="xavier")
    X = 10 * normal(1, 4, 4, seed=20)
    with mp.workdps(DIGITS):
        exact = [log10_residual(state) for state in Network(net).states(X[0])]
    profile = measure(net, X, metrics="residual")
    assert profile.curve("residual", "below_floor").tolist() == [[0, 0, 1, 1]]
    assert profile.curve("residual", "log10")[0, :2].tolist() == pytest.approx([float(e) for e in exact[:2]])


def tokens(n: int, width: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return normal(batch, n, width, seed=seed)


@pytest.mark.parametrize(
    ("norm", "place", "query_norm"), thinned(("layer", "rms", "scale"), ("pre", "post"), (False, True))
)
def test_padding_casts_no_doubt_on_real_tokens(norm: Any, place: Any, query_norm: bool) -> None:
    """A padded token has no length, and a norm of a small epsilon would draw out its rounding without end."""
    arch = Architecture(layers=4, width=16, heads=2, norm=norm, norm_place=place, query_norm=query_norm, norm_eps=1e-12)
    net = Transformer.random(arch, init="xavier")
    X = tokens(9, 16)
    padding = (torch.arange(9) >= 5)[None]
    assert not measure(net, X, padding).table["below_floor"].any()
