"""Terms of single paths, with shared attention and with their own, against independent code."""

import pytest
import torch

from rankscope.nets import Architecture
from rankscope.paths import all_paths, decompose
from tests.paths.enumeration import CASES, both, close, network, tokens


@pytest.mark.parametrize("case", CASES)
def test_every_single_path(case: str) -> None:
    d, reference = both(case)
    for term in reference.embedding_terms:
        found = d.path(term.choices)
        close(found.term[0], term.value, reference.output)
        assert found.path == term.choices


def test_paths_of_pure_attention_are_the_theorems() -> None:
    """`P_path X W_path`, Dong et al. 2021, Thm 2.1; skips are identities with their weight."""
    for case in ("pure attention", "attention and skips"):
        net, X = network(CASES[case] | {"biases": False}), tokens()
        d = decompose(net, X)
        for path in ((0, 1, 1), (1, 0, 0)) + (((None, 1, None),) if "skips" in case else ()):
            found = d.path(path)
            torch.testing.assert_close(found.term, found.P @ X @ found.W, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(found.P.sum(-1), torch.ones(1, 4, dtype=torch.float64))


SMALL = Architecture(layers=3, width=6, heads=2, head_width=4, mlp="none", norm="none", biases=False)


@pytest.mark.parametrize("case", ["post-norm", "pre-norm with a last norm", "sandwich", "parallel", "no norm"])
def test_a_path_of_its_own_is_the_network_with_one_head(case: str) -> None:
    """Where every layer takes head h, the path with its own attention is the variant without attention skips
    in which only that head speaks."""
    net, X = network({**CASES[case]}), tokens(samples=2)
    d = decompose(net, X)
    for head in range(2):
        alone = net.variant(attention_skip=0.0, heads=[head])
        if net.arch.parallel:  # a parallel block's MLP goes past the heads
            alone = alone.variant(mlp=False)
        expected = alone.run(X).output
        torch.testing.assert_close(d.path((head,) * 3, "own").term, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(d.keep(paths=[(head,) * 3], attention="own"), expected)


def test_own_sums_share_prefixes_and_are_the_sum() -> None:
    net, X = network(CASES["no norm"]), tokens(samples=2)
    d = decompose(net, X)
    for length in range(4):
        paths = list(all_paths(3, 2, length))
        one_by_one = torch.stack([d.path(path, "own").term for path in paths]).sum(0)
        torch.testing.assert_close(d.keep(lengths=[length], attention="own"), one_by_one, rtol=1e-10, atol=1e-11)
    # The first layer has the embedding itself before it: there own and shared attention are one.
    for path in ((1, None, None), (None, None, None)):
        bare = decompose(network(CASES["attention and skips"] | {"biases": False}), X)
        torch.testing.assert_close(bare.path(path).term, bare.path(path, "own").term, rtol=1e-12, atol=1e-13)


def test_paths_of_their_own_have_attention_of_their_own() -> None:
    """`term = P X W` holds with the path's own P, which is not the full network's."""
    net, X = network(CASES["attention and skips"] | {"biases": False}), tokens(samples=2)
    padding = torch.tensor([[True, False, False, False], [False] * 4])
    d, real = decompose(net, X, padding), ~padding[..., None]
    for path in ((0, 1, 1), (1, None, 0), (None, 1, None)):
        own, shared = d.path(path, "own"), d.path(path)
        for found in (own, shared):
            torch.testing.assert_close(found.term, found.P @ X @ found.W * real, rtol=1e-11, atol=1e-13)
    assert not torch.allclose(d.path((0, 1, 1), "own").P, d.path((0, 1, 1)).P)
