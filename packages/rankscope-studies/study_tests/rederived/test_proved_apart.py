"""What lower bounds prove of tokens of trained networks, and why a bound by direction is no independent account."""

import math

import polars as pl
import torch
from torch.nn import functional as F

from study_tests.rederived.kept_data import near, rows, spread

LAYERS = rows("lower-bounds", "layers")
FIRST_RATE = 0.001
ENDS = LAYERS.filter(
    (pl.col("change") == "none") & (pl.col("layer") == pl.col("depth")) & pl.col("measured").is_not_null()
    & (pl.col("rate").is_null() | ((pl.col("rate") - FIRST_RATE).abs() < 1e-6)) & (pl.col("kind") != "no skips")
)  # fmt: skip
LEARNT = (pl.col("kind") == "at hand") | (pl.col("loss") < pl.col("blind") - 0.3)
TRAINED = ENDS.filter((pl.col("stage") == "trained") & LEARNT)


def proved(table: pl.DataFrame, bound: str) -> int:
    """How many networks a bound proves to have tokens a hundredth of their size apart: rows hold log10."""
    return table.filter(pl.col(bound) >= -2).height


def test_directions_prove_25_of_27_and_sizes_none_after_training() -> None:
    assert TRAINED.height == 27 and proved(TRAINED, "direction") == 25
    left = TRAINED.filter(pl.col("direction").fill_null(-math.inf) < -2)
    assert {(kind, depth) for kind, depth in left.select("kind", "depth").iter_rows()} == {("post", 12)}
    assert proved(TRAINED, "sizes") == proved(TRAINED, "weights") == 0
    fresh = ENDS.filter(stage="fresh")
    assert fresh.height == 28 and proved(fresh, "sizes") == 12
    below = TRAINED["loose"]  # Decades, of the sample of each network in which they are most
    assert near(spread(below), (0.42, 0.23, 2.39), 0.01)
    assert bool((below >= TRAINED["measured"] - TRAINED["direction"] - 1e-4).all())


def test_no_number_is_of_an_input_that_was_not_read() -> None:
    """Bounds of other samples' factors lie below the residual too: that is a count, and proves nothing."""
    carried = TRAINED["carried"].drop_nulls()
    assert len(carried) == 27 and bool((carried >= 0).all())


def test_the_price_of_a_proof_by_sizes_depends_on_how_it_is_chosen() -> None:
    """Skips of weight 1.5 at a rate of 0.001: 0.19 nats; at the rate of its lowest loss they prove nothing."""
    last = LAYERS.filter((pl.col("layer") == pl.col("depth")) & (pl.col("stage") == "trained"))
    pre = last.filter(kind="pre", depth=6)
    rates = sorted(pre.filter(change="skips of weight 1.5")["rate"].unique())
    heavy = {round(rate, 4): pre.filter(change="skips of weight 1.5").filter(pl.col("rate") == rate) for rate in rates}
    plain = {round(rate, 4): pre.filter(change="none").filter(pl.col("rate") == rate) for rate in rates}
    best = min(plain, key=lambda rate: float(plain[rate]["loss"].median()))  # type: ignore[arg-type]
    assert proved(heavy[0.001], "sizes") == 3
    seeds = heavy[0.001].join(plain[best], on="seed", suffix=" plain")
    assert near(spread(seeds["loss"] - seeds["loss plain"]), (0.19, 0.18, 0.20), 0.01)
    lowest = min(heavy, key=lambda rate: float(heavy[rate]["loss"].median()))  # type: ignore[arg-type]
    assert lowest != 0.001 and proved(heavy[lowest], "sizes") < 3


def test_the_pass_that_gives_directions_gives_the_residual_itself() -> None:
    """In a small network of plain torch, `|w + a|` of each half is a lower bound, and the parts that it is made of,
    `a` and what stands at right angles, give the residual without any loss: the bound explains nothing by itself."""
    draw = torch.Generator().manual_seed(0)
    width, tokens = 16, 7
    X = torch.randn(tokens, width, generator=draw, dtype=torch.float64)

    def apart(Y: torch.Tensor) -> torch.Tensor:
        return Y - Y.mean(0)

    start = math.log(float(apart(X).norm()))
    bound = whole = sizes = start
    for _ in range(6):
        W = [torch.randn(width, width, generator=draw, dtype=torch.float64) / math.sqrt(width) for _ in range(5)]
        Z = F.layer_norm(X, (width,))
        pattern = ((Z @ W[0]) @ (Z @ W[1]).T / math.sqrt(width)).softmax(-1)
        for half in (0, 1):
            added = pattern @ Z @ W[2] if half == 0 else F.gelu(F.layer_norm(X, (width,)) @ W[3]) @ W[4]
            R, A = apart(X), apart(added)
            c, a = float(A.norm() / R.norm()), float((A * R).sum() / R.square().sum())
            sizes += math.log(max(1 - c, 1e-300))
            bound += math.log(abs(1 + a))
            whole += 0.5 * math.log((1 + a) ** 2 + c**2 - a**2)  # what is at right angles comes back in
            X = X + added
        measured = math.log(float(apart(X).norm()))
        assert bound <= measured + 1e-9 and abs(whole - measured) < 1e-9
    assert sizes < bound
