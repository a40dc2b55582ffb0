import math

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import MaskError
from rankscope.nets import graph
from rankscope.nets import mask_matrix as matrix
from rankscope.nets.masks import from_matrix, rows, spec_of
from tests.raising import raises

DEFINITIONS = {
    "complete": lambda i, j, n: True,
    "causal": lambda i, j, n: j <= i,
    "window:2": lambda i, j, n: abs(i - j) <= 2,
    "unidirectional": lambda i, j, n: j in (i, i - 1),
    "dilated:2:3": lambda i, j, n: abs(i - j) in (0, 3, 6),
    "strided:4": lambda i, j, n: j <= i and (i - j < 4 or (i - j) % 4 == 0),
    "prefix:3": lambda i, j, n: j < 3 or j <= i,
    "longformer:1:2": lambda i, j, n: abs(i - j) <= 1 or i < 2 or j < 2,
    "causal&window:3": lambda i, j, n: 0 <= i - j <= 3,
    "edges:0>2,1>0": lambda i, j, n: i == j or (j, i) in ((0, 2), (1, 0)),
}


@pytest.mark.parametrize("spec", DEFINITIONS)
@pytest.mark.parametrize("n", [3, 4, 11])
def test_every_mask_is_its_definition(spec: str, n: int) -> None:
    M = matrix(spec, n)
    assert M.tolist() == [[bool(DEFINITIONS[spec](i, j, n)) for j in range(n)] for i in range(n)]


def test_strided_without_a_stride_takes_the_root_of_the_length() -> None:
    for n in (1, 9, 20):
        assert torch.equal(matrix("strided", n), matrix(f"strided:{round(math.sqrt(n))}", n))


def test_bigbird_adds_random_tokens_that_its_seed_fixes() -> None:
    plain, big = matrix("longformer:1:1", 40), matrix("bigbird:1:1:3:5", 40)
    assert bool((big | ~plain).all())
    extra = (big & ~plain).sum(-1)
    assert 0 < int(extra.max()) <= 3
    assert torch.equal(big, matrix("bigbird:1:1:3:5", 40))
    assert not torch.equal(big, matrix("bigbird:1:1:3:6", 40))
    assert torch.equal(matrix("bigbird:1:1:3", 40), matrix("bigbird:1:1:3:0", 40))


@given(st.integers(1, 9), st.integers(0, 2**31))
def test_any_matrix_survives_its_spec(n: int, seed: int) -> None:
    M = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)) < 0.3
    M |= torch.eye(n, dtype=torch.bool)
    assert torch.equal(matrix(from_matrix(M), n), M)
    assert torch.equal(matrix(M, n), M)


def test_a_list_of_edges_is_a_mask() -> None:
    assert torch.equal(matrix([(0, 1), (2, 1)], 3), matrix("edges:0>1,2>1", 3))


WRONG = (
    "windw:1 window window:-1 window:x causal:2 dilated:2:0 causal& edges:0-1 edges:0>7 matrix:3:f edges:zzz "
    "matrix:2:zz window:99999999999999999999"
)


@pytest.mark.parametrize("spec", WRONG.split())
def test_a_bad_spec_is_refused(spec: str) -> None:
    with raises(MaskError, "mask") as caught:
        matrix(spec, 4)
    assert spec != "windw:1" or "'window'" in str(caught.value)


def test_masks_that_do_not_fit_are_refused() -> None:
    with raises(MaskError, "mask"):
        matrix(from_matrix(torch.eye(3, dtype=torch.bool)), 4)
    with raises(MaskError, "mask") as caught:
        matrix(torch.tensor([[True, False], [False, False]]), 2)
    assert "token 1" in str(caught.value)
    with raises(MaskError, "mask"):
        spec_of(torch.ones(2, 2))


MASKS = ["complete", "causal", "window:2", "unidirectional", "dilated:2:3", "strided", "strided:2",
         "prefix:3", "longformer:1:2", "bigbird:1:1:2:5", "edges:0>4,6>2", "causal&window:2"]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
def test_rows_of_a_mask_are_those_of_its_matrix(mask: str) -> None:
    whole = matrix(mask, 9)
    for start in range(9):
        for stop in range(start + 1, 10):
            assert rows(mask, 9, start, stop).equal(whole[start:stop])


@pytest.mark.parametrize("spec", ["matrix:3:f", "matrix:3:ffff", "matrix:x:3ff", "matrix:-3:3ff", "matrix:3:zz"])
def test_a_matrix_of_other_than_n_times_n_bits_is_refused(spec: str) -> None:
    """Also where its n is the number of tokens; 3ff is nine ones after the first, which keeps leading zeros."""
    assert bool(matrix("matrix:3:3ff", 3).all())
    with raises(MaskError, "mask"):
        matrix(spec, 3)


@given(st.integers(1, 8), st.floats(0.05, 0.6), st.integers(0, 2**31))
def test_graphs_agree_with_networkx(n: int, density: float, seed: int) -> None:
    M = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)) < density
    M |= torch.eye(n, dtype=torch.bool)
    found = graph(M, n)
    slow = nx.DiGraph([(j, i) for i in range(n) for j in range(n) if M[i, j]])
    reach = {node: nx.single_source_shortest_path_length(slow, node) for node in slow}
    centres = [node for node in range(n) if len(reach[node]) == n]
    assert found.centres == tuple(centres)
    assert found.strongly_connected == nx.is_strongly_connected(slow)
    assert found.quasi_strongly_connected == bool(centres)
    assert found.radius == min((max(reach[c].values()) for c in centres), default=None)
    assert found.diameter == (nx.diameter(slow) if nx.is_strongly_connected(slow) else None)
    assert found.edges == slow.number_of_edges()


@pytest.mark.parametrize("n", [2, 5, 16, 33])
def test_the_papers_masks_have_the_papers_radii(n: int) -> None:
    """Wu et al. 2024: complete and causal 1, window about N/2w, uni-directional N - 1."""
    assert graph("complete", n).radius == graph("causal", n).radius == 1
    assert graph("unidirectional", n).radius == n - 1
    assert graph("causal", n).centres == graph("unidirectional", n).centres == (0,)
    for w in (1, 3):
        assert graph(f"window:{w}", n).radius == -(-(n // 2) // w)


def test_missing_self_loops_and_missing_centres_are_told() -> None:
    swap = torch.tensor([[False, True], [True, False]])
    assert not graph(swap, 2).self_loops
    apart = graph("edges:0>1", 3)
    assert (apart.centres, apart.radius, apart.diameter) == ((), None, None)
    assert not apart.quasi_strongly_connected
    one = graph("complete", 1)
    assert (one.centres, one.radius, one.diameter) == ((0,), 0, 0)
