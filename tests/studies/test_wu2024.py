"""The studies of Wu et al. 2024 at small sizes: what their tables hold, and that a rerun gives them again."""

import math
from pathlib import Path

import polars as pl
import pytest
import torch

from rankscope.nets import Architecture, Transformer
from rankscope.sources.fresh import preset, untrained
from rankscope.sources.random_embedding import bundled_excerpts
from rankscope.studies import Setup, StudyResult, chosen, reproduce
from rankscope.studies.wu2024 import fig1, fig2, fig3, fig4, fig6, fig8, fig9, networks, thm3
from rankscope.studies.wu2024.panels import by_layer, grid, power_of_ten, powers_of_ten
from rankscope.theory.hand_built import equilibrium, equilibrium_step, spectral_radius


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every network of a study two layers deep and 16 wide; nothing trained."""

    def tiny(name: str, device: str = "cpu") -> Transformer:
        arch = preset(name)
        return untrained(arch.replace(layers=2, width=16, heads=2, mlp_width=32), name, device=device)

    for module in (fig2, fig3, fig9, networks):
        monkeypatch.setattr(module, "fresh", tiny)
    monkeypatch.setattr(fig6, "deep", lambda width, device: tiny("bert-base").variant(layers=3))
    monkeypatch.setattr(networks, "TOKENS", 12)
    texts = bundled_excerpts(128)[:2]
    for module in (networks, fig9):
        monkeypatch.setattr(module, "trained", lambda setup: {})
        monkeypatch.setattr(module, "excerpts", lambda number: texts)
        monkeypatch.setattr(module, "tokens_of", lambda net, texts, length=12: net.encode(texts, 12).X)


def run(figure: str, folder: Path) -> StudyResult:
    (study,) = chosen("wu2024", figure)
    return reproduce(study, Setup(folder=folder))


@pytest.mark.parametrize(
    "figure",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("fig2", "fig3", "fig6")), "fig4", "fig8", "fig9"],
)
def test_each_figure_is_written_and_a_rerun_gives_the_same(small: None, tmp_path: Path, figure: str) -> None:
    first = run(figure, tmp_path)
    home = tmp_path / "quick" / "wu2024" / figure
    assert first.figures and first.comparisons and first.notes
    for name in first.figures:
        assert (home / f"{name}.png").stat().st_size > 5000 and (home / f"{name}.svg").exists()
    parts = sorted((home / "parts").iterdir())
    before = [path.stat().st_mtime_ns for path in parts]
    second = run(figure, tmp_path)
    assert [path.stat().st_mtime_ns for path in sorted((home / "parts").iterdir())] == before
    third = run(figure, tmp_path / "elsewhere")
    for name, table in first.tables.items():
        assert table.equals(second.tables[name])
        assert table.equals(third.tables[name])


def test_figure_2_holds_every_curve_and_goes_on_when_interrupted(small: None, tmp_path: Path) -> None:
    """Parts that are there are read, not computed: a changed one shows in the outcome."""
    found = run("fig2", tmp_path).tables["collapse"]
    assert set(found["variant"]) == set(networks.VARIANTS) and set(found["mask"]) == set(networks.MASKS)
    # 5 variants, 4 masks, dropout off and on, 2 excerpts, 3 layers, 2 metrics
    assert len(found) == 5 * 4 * 2 * 2 * 3 * 2
    assert found["log10"].is_finite().all()
    off = found.filter(~pl.col("dropout"))
    assert set(off["arithmetic"]) == {"deviation"}
    complete, causal = (networks.last(off, "relative_mu", variant="SAN", mask=m) for m in ("complete", "causal"))
    assert complete < causal
    parts = sorted((tmp_path / "quick" / "wu2024" / "fig2" / "parts").iterdir())
    gone, changed = parts[0], parts[1]
    whole = pl.read_parquet(changed).with_columns(pl.lit(-7.0).alias("log10"))
    whole.write_parquet(changed)
    gone.unlink()
    found = run("fig2", tmp_path).tables["collapse"]
    assert gone.exists()
    assert len(found.filter(pl.col("log10") == -7.0)) == len(whole)


def test_two_tokens_end_where_the_fixed_points_say() -> None:
    """The basin map against the known points of rest: B, or token 1."""
    w = 2.0
    found = fig1.basin_map(24, w)
    first, second = (torch.tensor(found[name].to_list()) for name in ("angle_1", "angle_2"))
    X = fig1.pairs(first, second).double()
    for _ in range(3000):
        X = equilibrium_step(X, w)
    # By the symmetry X -> -X, token 1 may be taken to rest at (0, 1).
    X = X * X[:, :1, 1:].sign()
    B = equilibrium(2, 2, w, [-1])[1]
    at_B = (X[:, 1] - B).norm(dim=-1) < 2e-3
    at_token_1 = (X[:, 1] - X[:, 0]).norm(dim=-1) < 2e-3
    assert bool((at_B ^ at_token_1).all())
    assert at_B.tolist() == found["apart"].to_list()
    assert 0 < int(at_B.sum()) < len(at_B) / 2


def test_two_tokens_multipliers_and_collapse() -> None:
    c = math.sqrt(1 - 1 / fig1.W**2)
    assert fig1.multiplier(1, fig1.W) == pytest.approx(1 + c, rel=1e-4)
    assert fig1.multiplier(-1, fig1.W) == pytest.approx(1 - c, rel=1e-4)
    paths = fig1.trajectories()
    assert len(paths) == 3 * 2 * (fig1.LAYERS + 1)
    end = paths.filter(layer=fig1.LAYERS)
    assert (end.filter(~pl.col("norm"))["log10_relative_mu"] < -10).all()
    kept = end.filter(start="first", norm=True)
    assert float(kept["log10_relative_mu"][0]) > -1
    # Without LN, with W_V divided by its norm (A3), tokens shrink as well.
    assert (end.filter(~pl.col("norm"))["log10_mu"] < -15).all()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_multipliers_are_those_of_the_whole_jacobian(n: int) -> None:
    """Block by block against autograd: the mask is causal, so the blocks have all the eigenvalues."""
    for signs in ([-1] * (n - 1), [(-1) ** k for k in range(n - 1)]):
        X = equilibrium(n, n, n + 1.0, signs)
        whole = spectral_radius(X, n + 1.0)
        assert float(thm3.multipliers(X, n + 1.0).max()) == pytest.approx(whole, abs=1e-3)


def test_equilibria_of_every_rank_and_their_ends(tmp_path: Path) -> None:
    found = thm3.equilibria(4)
    assert len(found) == 1 + 2 + 4 + 8
    assert float(found["moved"].max()) < 1e-12  # type: ignore[arg-type]
    assert found["rank"].to_list() == found["numerical_rank"].to_list()
    above = found.filter(pl.col("rank") > 1)
    assert (above["largest_multiplier"] > 1).all() and (above["unstable_directions"] > 0).all()
    ends = thm3.random_starts(3, 200)
    assert 0 < int(ends["apart"].sum()) < 40
    assert (ends.filter("apart")["third_singular_value"] < 1e-3).all()
    assert ends.equals(thm3.random_starts(3, 200))


def test_smaller_divisors_slow_the_collapse() -> None:
    net = untrained(Architecture(layers=4, width=64, heads=2), "small")
    X = net.encode(bundled_excerpts(128)[:1], 24).X
    ends = [
        networks.last(networks.collapse(net, X, "SAN", "complete", divisor=divisor), "relative_mu")
        for divisor in fig3.DIVISORS.values()
    ]
    assert ends == sorted(ends, reverse=True)


def test_layer_norm_plateaus_only_with_dropout() -> None:
    net = untrained(Architecture(layers=6, width=64, heads=2), "small")
    X = net.encode(bundled_excerpts(128)[:1], 24).X
    off, on = (
        networks.last(networks.collapse(net, X, "SAN + LN", "complete", dropout=dropout), "relative_mu")
        for dropout in (False, True)
    )
    assert off < -50 and on > -1


def test_full_rank_is_asked_with_the_tolerance_of_each_arithmetic() -> None:
    values = pl.DataFrame({
        "network": ["a"] * 4, "sample": [0, 0, 1, 1], "layer": [0] * 4, "index": [1, 2] * 2, "size": [10] * 4,
        "singular_value": [1.0, 1e-9, 1.0, 1e-18], "mean_abs_cosine": [0.5] * 4,
    })  # fmt: skip
    found = fig4.by_input(values)
    assert found["full_rank"].to_list() == [1.0, 0.0] and found["full_rank_float32"].to_list() == [0.0, 0.0]


def test_singular_values_are_all_there() -> None:
    net = untrained(Architecture(layers=2, width=16, heads=2), "small")
    X = net.encode(bundled_excerpts(128)[:5], 12).X
    found = networks.spectrum(net, X, batch=2)
    assert len(found) == 5 * 3 * 12
    total = found.filter(sample=4, layer=0)["singular_value"].pow(2).sum()
    assert total == pytest.approx(float(X[4].square().sum()))
    mean = found.group_by("layer", "index").agg(pl.col("singular_value").log10().mean().alias("log10"))
    share = fig8.first_share(fig8.curves(mean))
    assert share.shape == (3,) and ((share > 0) & (share <= 1)).all()


def test_cosines_are_counted_once() -> None:
    found = fig9.angles(torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.1]]], dtype=torch.float64))
    assert int(found["pairs"].sum()) == 3
    assert found["least"][0] == pytest.approx(-1 / math.sqrt(1.01))
    assert found["negative"][0] == pytest.approx(1 / 3)


def test_excerpts_are_spread_and_no_more_than_there_are() -> None:
    some, more = networks.excerpts(4), networks.excerpts(10_000)
    assert len(set(some)) == 4 and len(more) == len(bundled_excerpts(128))
    assert networks.part("google-bert/bert", "SAN + LN", "window ±1") == "google-bert_bert_SAN_+_LN_window_1"


def test_axes_of_powers_of_ten() -> None:
    figure, ((deep, shallow),) = grid(1, 2)
    deep.plot([0, 1, 2], [0.0, -5.0, -1e6])
    shallow.plot([0, 1, 2], [2.0, 1.9, 1.95])
    powers_of_ten(deep, lowest=-1e4)
    powers_of_ten(shallow)
    by_layer(deep, 12)
    assert deep.get_ylim()[0] == pytest.approx(-1.6e4) and len(deep.texts) == 1
    low, high = shallow.get_ylim()
    assert high - low >= 0.5
    assert sum(low <= at <= high for at in shallow.get_yticks()) >= 3
    assert power_of_ten(-1e61) == "$10^{-10^{61}}$" and power_of_ten(0.0) == "$1$"
    figure.draw_without_rendering()
