"""Theorem 3: equilibria of every rank at once, and how much of it one meets.

The theorem is of existence: with LayerNorm and a causal mask there are weights whose equilibria have
every rank from one to full. Here each of them is built and stepped, its tokens' own multipliers say
whether it is stable, and random starts say how often a network ends at a rank above one.

The mask is causal, so the linearised layer is block triangular, with one block per token. At an equilibrium `S_i W_V =
lambda_i X_i` (`hand_built.py`) a small move of token i alone, along its sphere, becomes `x W_V / lambda_i`,
projected on the sphere: the eigenvalues of that block are its multipliers. Those of token 1 are all 1: it is at rest at
e_d, attracted from one side and repelled to the other, and they are left out.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from rankscope.figures import INK, PALETTE, Figure, panels
from rankscope.metrics import numerical_rank, stable_rank
from rankscope.shapes import Float
from rankscope_studies.hand_built import anisotropy_bound, equilibrium, equilibrium_step
from rankscope_studies.study import Comparison, Setup, Study, StudyResult, StudyTexts
from rankscope_studies.wu2024.panels import line_style, title

SIZES = range(2, 9)
LAYERS = 1000  # Of each random start: token 1 comes to rest only as 1/t
NEAR = 0.02  # How near an end must be to an equilibrium to be called that one
NEUTRAL = 1e-6  # A multiplier this near to one says nothing to first order
TEXTS = StudyTexts("wu2024", "thm3")


def _run(setup: Setup, sizes: Sequence[int] = SIZES, layers: int = LAYERS) -> StudyResult:
    count = 20_000 if setup.full else 1000
    table = pl.concat([setup.cached(f"equilibria of {n}", lambda n=n: equilibria(n), n=n) for n in sizes])
    settings = {"starts": count, "layers": layers}
    ends = pl.concat([
        setup.cached(f"starts of {n}", lambda n=n: random_starts(n, count, layers), n=n, **settings) for n in sizes
    ])  # fmt: skip
    by_size = shares(ends)
    comparisons = [_fixed(table), _anisotropy(table), _stability(table), _positive(by_size), _where(ends)]
    notes = TEXTS.notes(largest=max(sizes), equilibria=len(table), starts=count, layers=layers)
    tables = {"equilibria": table, "starts": ends, "shares": by_size}
    return StudyResult({"thm3": _figure(table, by_size)}, tables, comparisons, notes)


def multipliers(X: Float[Tensor, "token token"], w: float) -> Float[Tensor, "token move"]:
    """|Eigenvalues| of each token's own block at an equilibrium, `[N, N - 1]`."""
    n = len(X)
    W_V = torch.eye(n, dtype=X.dtype) + w * torch.diag(torch.ones(n - 1, dtype=X.dtype), 1)
    lengths = torch.linalg.vector_norm(X.cumsum(0) @ W_V, dim=1)  # lambda_i
    moves = [torch.linalg.svd(row[None]).Vh[1:] for row in X]  # orthogonal to the token
    blocks = torch.stack([T @ W_V @ T.T / size for T, size in zip(moves, lengths, strict=True)])
    return torch.linalg.eigvals(blocks).abs()


def equilibria(n: int) -> pl.DataFrame:
    """Every equilibrium of the construction: whether it is one, its ranks, its largest multiplier."""
    w, rows = n + 1.0, []
    for signs, X in construction(n, w):
        rank = len(signs) + 1
        # The first tokens are e_d: theirs are 1/i (a Jordan block, beyond any solver).
        later = multipliers(X, w)[n - rank + 1 :].flatten()
        equal = 1 / 2 if rank < n else 0.0
        labels = {"tokens": n, "rank": rank, "w": w, "signs": "".join("+" if sign > 0 else "-" for sign in signs)}
        moved = {"moved": float((equilibrium_step(X, w) - X).abs().max())}
        ranks = {"numerical_rank": int(numerical_rank(X)), "stable_rank": float(stable_rank(X))}
        largest = {"largest_multiplier": max(equal, float(later.max()) if len(later) else 0.0)}
        rows.append(labels | moved | ranks | largest | {"unstable_directions": int((later > 1 + NEUTRAL).sum())})
    return pl.DataFrame(rows)


def construction(n: int, w: float) -> Iterator[tuple[tuple[int, ...], Float[Tensor, "token token"]]]:
    """The equilibria of every rank, each with its signs, of which there is one less than the rank."""
    for rank in range(1, n + 1):
        for signs in itertools.product((1, -1), repeat=rank - 1):
            yield signs, equilibrium(n, rank, w, list(signs))


def random_starts(n: int, count: int, layers: int = LAYERS) -> pl.DataFrame:
    """Where tokens drawn uniformly on the sphere end."""
    w = n + 1.0
    generator = torch.Generator().manual_seed(n)
    X = torch.randn(count, n, n, generator=generator, dtype=torch.float64)
    X = X / X.norm(dim=-1, keepdim=True)
    for _ in range(layers):
        X = equilibrium_step(X, w)
    s = torch.linalg.svdvals(X)
    second = s[:, 1] / s[:, 0]
    return pl.DataFrame(
        {
            "tokens": torch.full((count,), n),
            "start": torch.arange(count),
            "second_singular_value": second,
            "third_singular_value": s[:, 2] / s[:, 0] if n > 2 else torch.zeros_like(second),
            "distance": to_construction(X, w),
            "moved": (equilibrium_step(X, w) - X).abs().amax((1, 2)),
            "apart": second > 0.3 / w,
        }
    )


def to_construction(X: Float[Tensor, "start token token"], w: float) -> Float[Tensor, " start"]:
    """The largest entry of the difference to the nearest equilibrium of the construction, up to sign."""
    X = X * X[:, :1, -1:].sign()  # token 1 at e_d
    nearest = torch.full((len(X),), torch.inf, dtype=X.dtype)
    for _, rest in construction(X.shape[-1], w):
        nearest = torch.minimum(nearest, (X - rest).abs().amax((1, 2)))
    return nearest


def shares(ends: pl.DataFrame) -> pl.DataFrame:
    """The share of starts that end above rank one, and its standard error, by N."""
    table = ends.group_by("tokens", maintain_order=True).agg(pl.col("apart").mean().alias("share"), pl.len())
    error = (pl.col("share") * (1 - pl.col("share")) / pl.col("len")).sqrt()
    return table.with_columns(error.alias("error")).rename({"len": "starts"})


def _fixed(table: pl.DataFrame) -> Comparison:
    moved, largest = (float(table[name].max()) for name in ("moved", "tokens"))  # type: ignore[arg-type]
    right = table.filter(pl.col("rank") == pl.col("numerical_rank")).height
    agrees = moved < 1e-12 and right == len(table)
    return TEXTS.compare("fixed", agrees, count=len(table), largest=round(largest), moved=moved, right=right)


def _anisotropy(table: pl.DataFrame) -> Comparison:
    full = table.filter(pl.col("rank") == pl.col("tokens"))
    most = max(full["stable_rank"])
    worst = max(rank / anisotropy_bound(n, w) for n, w, rank in full.select("tokens", "w", "stable_rank").iter_rows())
    return TEXTS.compare("anisotropy", worst <= 1 + 1e-12, worst=worst, most=most)


def _stability(table: pl.DataFrame) -> Comparison:
    """How many equilibria above rank one no small move of a later token leaves, by size."""
    above = table.filter(pl.col("rank") > 1)
    sizes = above.group_by("tokens", maintain_order=True)
    best = dict(sizes.agg(pl.col("largest_multiplier").min()).iter_rows())
    distance = pl.col("largest_multiplier") - 1
    return TEXTS.compare(
        "stability", None, multipliers=", ".join(f"{n}: {size:.3f}" for n, size in best.items()),
        stable=_counted(above, distance < -NEUTRAL), neutral=_counted(above, distance.abs() <= NEUTRAL),
    )  # fmt: skip


def _counted(above: pl.DataFrame, those: pl.Expr) -> str:
    """How many of the equilibria of each size fulfil `those`, in words: '1 of 2 at N = 2'."""
    counts = (
        above.group_by("tokens", maintain_order=True).agg(those.sum().alias("so"), pl.len()).filter(pl.col("so") > 0)
    )
    return ", ".join(f"{so} of {total} at N = {n}" for n, so, total in counts.iter_rows()) or "none"


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) or "none"


def _positive(by_size: pl.DataFrame) -> Comparison:
    words = ", ".join(f"{row['tokens']}: {row['share']:.1%}" for row in by_size.iter_rows(named=True))
    return TEXTS.compare("positive", bool((by_size["share"] > 0).any()), shares=words)


def _where(ends: pl.DataFrame) -> Comparison:
    """Full rank exists; what is reached is rank two, and mostly no equilibrium of the construction."""
    apart = ends.filter(pl.col("apart") & (pl.col("tokens") > 2))
    third = max(apart["third_singular_value"], default=0.0)
    near = apart.filter(pl.col("distance") < NEAR)
    sizes = _listed(near["tokens"].unique().sort().to_list())
    return TEXTS.compare("rank", None, apart=len(apart), third=third, near=len(near), sizes=sizes)


def _figure(table: pl.DataFrame, by_size: pl.DataFrame) -> Figure:
    figure, (spread, stable, ends) = panels(3, width=4.4, height=3.8)
    sizes = by_size["tokens"].to_list()
    for k, n in enumerate(sizes):
        by_rank = table.filter(tokens=n).group_by("rank")
        best = by_rank.agg(pl.col("largest_multiplier").min(), pl.col("stable_rank").max()).sort("rank")
        spread.plot(best["rank"], best["largest_multiplier"], **line_style(k), label=f"$N$ = {n}")
        stable.plot(best["rank"], best["stable_rank"], **line_style(k))
    spread.axhline(1.0, color=INK, linewidth=1, linestyle="--")
    above: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "ha": "right", "fontsize": 9}
    spread.annotate("unstable above", (max(sizes), 1.0), color=INK, **above)
    rank = "rank of the equilibrium"
    title(spread, "Most stable choice of signs", xlabel=rank, ylabel="largest |multiplier|, tokens 2 to $N$")
    spread.legend(fontsize=9, ncols=2, frameon=False, loc="best")
    size = r"stable rank $\|X\|_F^2 / \|X\|_2^2$"
    title(stable, "Any rank, nearly one direction", xlabel=rank, ylabel=size, ylim=(0.995, 1.1))
    look: dict[str, Any] = {"color": PALETTE[1], "marker": "o", "capsize": 3, "linewidth": 1.6}
    ends.errorbar(by_size["tokens"], 100 * by_size["share"], yerr=200 * by_size["error"], **look)
    title(ends, "Random starts that end above rank one")
    ends.set(xlabel="tokens $N$ (width $d = N$, $w = N + 1$)", ylabel="per cent of starts (2 standard errors)")
    ends.set_ylim(bottom=0)
    return figure


STUDY = Study("wu2024", "thm3", "Theorem 3: equilibria of every rank, and their stability", _run, seconds=10.0)
