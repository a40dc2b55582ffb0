"""Attention masks, written as short strings and read as boolean matrices.

`M[i, j]` is True where token i attends to token j (Wu et al. 2024, section 2). A mask is a rule for any number of
tokens:

| spec                   | token i attends to                                                        |
|------------------------|---------------------------------------------------------------------------|
| `complete`             | every token                                                               |
| `causal`               | itself and every earlier token                                            |
| `window:w`             | tokens at distance at most w, both sides                                  |
| `unidirectional`       | itself and the one before                                                 |
| `dilated:w:s`          | w tokens on each side, s apart                                            |
| `strided[:s]`          | the last s tokens and every s-th before (Child et al. 2019; s = sqrt n)   |
| `prefix:p`             | the first p tokens, and causally the rest                                 |
| `longformer:w:g`       | window w; the first g tokens see and are seen by all                      |
| `bigbird:w:g:r[:seed]` | the same, and r random tokens                                             |
| `edges:0>1,0>2`        | the listed sources (source > target) and itself                           |
| `matrix:n:hex`         | a fixed matrix of n tokens (made by `from_matrix`)                        |

`a&b` keeps what both allow: `causal&window:4` is a causal sliding window. Your own mask is a `Mask`.

`graph` reads a mask as a directed graph: the edge (j, i) means that i attends to j, so information runs from j to i. A
**centre** reaches every token; the graph is **quasi-strongly connected** when a centre exists, and **strongly
connected** when every token is one. The **radius** is, over centres, the smallest largest distance to any token: the
number of layers after which some token has reached all. The **diameter** is the largest distance between any two.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import MaskError, require, require_one_of
from rankscope.shapes import Bool, Int

Matrix = Bool[Tensor, "token token"]
Rows = Bool[Tensor, "row token"]
Places = Int[Tensor, " row"]


@dataclass(frozen=True)
class Mask:
    """A mask that you write yourself: a name, and the boolean matrix `M[i, j]` on n tokens.

    >>> even = Mask("even", lambda n: torch.eye(n, dtype=torch.bool) | (torch.arange(n) % 2 == 0))
    >>> matrix(even, 3).int().tolist()
    [[1, 0, 1], [1, 1, 1], [1, 0, 1]]
    """

    name: str
    build: Callable[[int], Matrix]


MaskLike = str | Mask | Tensor | Iterable[tuple[int, int]]


@dataclass(frozen=True)
class MaskRule:
    """One kind of mask: how many numbers follow its name, and the matrix they give."""

    fewest: int
    most: int
    build: Callable[..., Rows]  # Of rows `i` `[row]`, the number of tokens, and what follows the name
    usage: str


def spec_of(mask: MaskLike) -> str:
    """The canonical string of a mask given as a string, a boolean matrix or edges (j, i); the name of a `Mask`.

    >>> spec_of([(0, 1), (0, 2)])
    'edges:0>1,0>2'
    >>> spec_of("causal & window:04")
    'causal&window:4'
    """
    if isinstance(mask, str):
        return "&".join(_canonical(part) for part in mask.split("&"))
    if isinstance(mask, Mask):
        return mask.name
    if isinstance(mask, Tensor):
        return from_matrix(mask)
    pairs: list[Any] = list(mask) if isinstance(mask, Iterable) else [mask]
    sentence = f"a mask must be a string, a boolean tensor or a list of edges (source, target); got {mask!r:.60}"
    for pair in pairs:
        is_edge = isinstance(pair, tuple | list) and len(pair) == 2 and all(type(end) is int for end in pair)
        require(is_edge, sentence, MaskError, "mask")
    return _canonical("edges:" + ",".join(f"{source}>{target}" for source, target in pairs))


def mask_spec(mask: MaskLike) -> "str | Mask":
    """Return a `Mask` as it is, any other mask as one canonical string, or several joined by `;`, one per layer."""
    if isinstance(mask, str):
        return ";".join(spec_of(part) for part in mask.split(";"))
    return mask if isinstance(mask, Mask) else spec_of(mask)


def _canonical(part: str) -> str:
    """One spec without spaces and leading zeros, checked."""
    name = part.strip().partition(":")[0]
    _, numbers = _check(part)
    if name == "edges":
        numbers = (",".join(f"{source}>{target}" for source, target in _edge_list(str(numbers[0]))),)
    elif name == "matrix":
        _bits(str(numbers[0]), str(numbers[1]))
    return ":".join([name, *map(str, numbers)])


def matrix(mask: MaskLike, n: int, device: torch.device | str = "cpu") -> Matrix:
    """The boolean matrix `M[i, j]` of a mask on n tokens.

    >>> matrix("causal", 3).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    return rows(mask, n, 0, n, device)


def rows(mask: MaskLike, n: int, start: int, stop: int, device: torch.device | str = "cpu") -> Rows:
    """Rows `start` to `stop` of the matrix of a mask on n tokens, without the others where its rule allows.

    >>> rows("causal", 4, 2, 4).int().tolist()
    [[1, 1, 1, 0], [1, 1, 1, 1]]
    """
    if isinstance(mask, Mask):
        name, M = mask.name, mask.build(n)
        if not isinstance(M, Tensor) or M.dtype != torch.bool or M.shape != (n, n):
            got = f"{M.dtype} of shape {tuple(M.shape)}" if isinstance(M, Tensor) else type(M).__name__
            raise MaskError(f"mask {name!r} must build a boolean matrix [{n}, {n}]; it built {got}", subject="mask")
        result = M.cpu()[start:stop]
    else:
        name, result = spec_of(mask), torch.ones(stop - start, n, dtype=torch.bool)
        for part in name.split("&"):
            rule, numbers = _check(part)
            result &= rule.build(torch.arange(start, stop), n, *numbers)
    if blind := (~result.any(-1)).nonzero().flatten().tolist():
        sentence = f"every token must attend to some token; under mask {name[:60]} token {start + blind[0]} sees none"
        raise MaskError(sentence, subject="mask")
    return result.to(device)


def from_matrix(M: Tensor) -> str:
    """The spec `matrix:n:hex` of a square boolean matrix, rows read left to right."""
    sentence = f"a mask matrix must be boolean and square; received {M.dtype} with shape {tuple(M.shape)}"
    require(M.dtype == torch.bool and M.ndim == 2 and M.shape[0] == M.shape[1], sentence, MaskError, "mask")
    bits = "".join("1" if bit else "0" for bit in M.flatten().tolist())
    return f"matrix:{len(M)}:{int('1' + bits, 2):x}"  # the leading 1 keeps leading zeros


@lru_cache(256)
def _check(part: str) -> tuple[MaskRule, tuple[int | str, ...]]:
    """The rule of one spec and its numbers, or `MaskError`."""
    name, *arguments = part.strip().split(":")
    require_one_of("mask", name, RULES, MaskError)
    rule = RULES[name]
    usage = f"mask {name!r} must be written {rule.usage}"
    require(rule.fewest <= len(arguments) <= rule.most, f"{usage}; got {part!r}", MaskError, "mask")
    if name in ("edges", "matrix"):
        return rule, tuple(arguments)
    decimal = all(argument.isdecimal() and len(argument) < 10 for argument in arguments)
    require(decimal, f"{usage} with whole numbers >= 0; got {part!r}", MaskError, "mask")
    numbers = tuple(int(argument) for argument in arguments)
    still = name in ("strided", "dilated") and numbers[-1:] == (0,)
    require(not still, f"{usage} with a stride s >= 1; got {part!r}", MaskError, "mask")
    return rule, numbers


def _offset(i: Places, n: int) -> Int[Tensor, "row token"]:
    """`i - j`: how far back token i looks to see token j."""
    return i[:, None] - torch.arange(n)[None, :]


def _strided(i: Places, n: int, s: int | None = None) -> Rows:
    stride = s or max(1, round(math.sqrt(n)))
    back = _offset(i, n)
    return (back >= 0) & ((back < stride) | (back % stride == 0))


def _longformer(i: Places, n: int, w: int, g: int) -> Rows:
    return (_offset(i, n).abs() <= w) | (i < g)[:, None] | (torch.arange(n) < g)[None, :]


def _bigbird(i: Places, n: int, w: int, g: int, r: int, seed: int = 0) -> Rows:
    draw = torch.rand(n, n, generator=torch.Generator().manual_seed(seed))[i]
    chosen = draw.topk(min(r, n), dim=-1).indices
    return _longformer(i, n, w, g).scatter(-1, chosen, True)


def _edges(i: Places, n: int, listed: str) -> Rows:
    result = torch.eye(n, dtype=torch.bool)
    for source, target in _edge_list(listed):
        sentence = f"edges must join tokens 0..{n - 1}; got '{source}>{target}'"
        require(max(source, target) < n, sentence, MaskError, "mask")
        result[target, source] = True
    return result[i]


def _edge_list(listed: str) -> list[tuple[int, int]]:
    edges = []
    for edge in filter(None, listed.split(",")):
        source, arrow, target = (part.strip() for part in edge.partition(">"))
        written = arrow and source.isdecimal() and target.isdecimal() and len(source + target) < 18
        require(written, f"an edge must be written source>target, as in 0>1; got {edge!r}", MaskError, "mask")
        edges.append((int(source), int(target)))
    return edges


def _matrix(i: Places, n: int, size: str, digits: str) -> Rows:
    bits = _bits(size, digits)
    require(int(size) == n, f"this mask is a matrix on {size} tokens; received {n} tokens", MaskError, "mask")
    return torch.tensor([bit == "1" for bit in bits]).reshape(n, n)[i]


def _bits(size: str, digits: str) -> str:
    try:
        bits = f"{int(digits, 16):b}"[1:]
    except ValueError:
        raise MaskError(f"mask 'matrix' must be matrix:n:hex; got {digits[:20]!r} for hex", subject="mask") from None
    square = size.isdecimal() and len(bits) == int(size) ** 2
    require(square, f"mask 'matrix' must hold n * n bits; got {len(bits)} for n = {size}", MaskError, "mask")
    return bits


RULES: dict[str, MaskRule] = {
    "complete": MaskRule(0, 0, lambda i, n: torch.ones(len(i), n, dtype=torch.bool), "complete"),
    "causal": MaskRule(0, 0, lambda i, n: _offset(i, n) >= 0, "causal"),
    "window": MaskRule(1, 1, lambda i, n, w: _offset(i, n).abs() <= w, "window:w"),
    "unidirectional": MaskRule(0, 0, lambda i, n: (_offset(i, n) == 0) | (_offset(i, n) == 1), "unidirectional"),
    "dilated": MaskRule(
        2, 2, lambda i, n, w, s: (_offset(i, n).abs() <= w * s) & (_offset(i, n) % s == 0), "dilated:w:s"
    ),
    "strided": MaskRule(0, 1, _strided, "strided or strided:s"),
    "prefix": MaskRule(1, 1, lambda i, n, p: (_offset(i, n) >= 0) | (torch.arange(n) < p), "prefix:p"),
    "longformer": MaskRule(2, 2, _longformer, "longformer:w:g"),
    "bigbird": MaskRule(3, 4, _bigbird, "bigbird:w:g:r or bigbird:w:g:r:seed"),
    "edges": MaskRule(1, 1, _edges, "edges:0>1,0>2 (source>target)"),
    "matrix": MaskRule(2, 2, _matrix, "matrix:n:hex"),
}


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
