"""A mask as a directed graph on the tokens: what can reach what, and in how many layers.

The edge (j, i) means that i attends to j, so information runs from j to i. A **centre** reaches every token;
the graph is **quasi-strongly connected** when a centre exists, and **strongly connected** when every token is one. The
**radius** is, over centres, the smallest largest distance to any token: the number of layers after which some token has
reached all. The **diameter** is the largest distance between any two tokens. (Wu et al. 2024, section 2.)
"""

from dataclasses import dataclass
from typing import Any

from rankscope.nets.masks import MaskLike, Matrix, matrix


@dataclass(frozen=True)
class MaskGraph:
    """What the theorems on masked attention need to know of a mask on n tokens."""

    tokens: int
    edges: int  # Including self-loops
    self_loops: bool  # Every token attends to itself (assumption A1 of Wu et al. 2024)
    centres: tuple[int, ...]
    radius: int | None  # None where there is no centre
    diameter: int | None  # None where some token cannot reach another

    @property
    def strongly_connected(self) -> bool:
        """Every token reaches every token."""
        return len(self.centres) == self.tokens

    @property
    def quasi_strongly_connected(self) -> bool:
        """Some token reaches every token."""
        return bool(self.centres)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and properties as plain Python."""
        connected = ("strongly_connected", "quasi_strongly_connected")
        names = ("tokens", "edges", "self_loops", *connected, "centres", "radius", "diameter")
        return {name: getattr(self, name) for name in names} | {"centres": list(self.centres)}


def graph(mask: MaskLike, n: int) -> MaskGraph:
    """The graph of a mask on n tokens.

    >>> graph("unidirectional", 5).radius
    4
    >>> graph("causal", 5).centres
    (0,)
    """
    return matrix_graph(matrix(mask, n))


def matrix_graph(M: Matrix) -> MaskGraph:
    """The graph of the boolean matrix `M[i, j]` of a mask on its tokens."""
    import rustworkx as rx

    n = len(M)
    arrows = rx.PyDiGraph.from_adjacency_matrix(M.T.double().numpy())
    components = rx.strongly_connected_components(arrows)
    home = {node: index for index, component in enumerate(components) for node in component}
    entered = {home[target] for source, target in arrows.edge_list() if home[source] != home[target]}
    sources = [component for index, component in enumerate(components) if index not in entered]
    # Everything is reachable from a component exactly when it alone is entered from nowhere.
    centres = sorted(sources[0]) if len(sources) == 1 else []
    reach = rx.distance_matrix(arrows, null_value=float("inf"))[centres].max(axis=1) if centres else []
    return MaskGraph(
        tokens=n,
        edges=int(M.sum()),
        self_loops=bool(M.diagonal().all()),
        centres=tuple(centres),
        radius=int(min(reach)) if centres else None,
        diameter=int(max(reach)) if len(centres) == n and n else None,
    )
