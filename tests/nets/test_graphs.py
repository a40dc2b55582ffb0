import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.nets import graph


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
