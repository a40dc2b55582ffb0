"""Width against depth: what do layers cost at equal parameters and at equal compute, and does width slow collapse?

The bound of Dong et al. (2021) for pure attention, `||res X_{l+1}|| <= (4 gamma beta / sqrt(d_qk)) ||res X_l||^3`, has
the width of heads in it: wider networks should collapse slower. Whole networks are chosen by their loss; here both are
asked of the same shapes: what is left of differences between tokens, which paths carry the output, what attention looks
like, what the network learns, and what `forecast` said before.

Two families of shapes (layers, width), as `shapes` makes them: of equal parameters, `L d^2` is the same; of equal
compute, `L (24 d^2 + 4 n d)` is, the operations of one token among n in all blocks.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rankscope.forecasts.forecast import forecast
from rankscope.lab import Initialisation
from rankscope.lab.tasks import NextCharacter
from rankscope.lab.trial import NONE, Trial, TrialSizes
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from rankscope.sources.random_embedding import bundled_excerpts, word_tokens
from rankscope.studies.questions.question import HypothesisVerdict, Question, StudyAnswer, Tables
from rankscope.studies.questions.summaries import rank_correlation, spread, spread_of_logs
from rankscope.studies.study import PageTable, Setup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAMILIES = ("parameters", "compute")
HEADS = 4
RESIDUAL = "relative_residual"
FRESH, PLACE, CHANCE, LENGTH = "fresh_residual", "forecast_place", "forecast_probability", "path_length"
RELATED = 0.7  # Rank correlation from which on one thing is said to order another
BOUND = -0.5  # The slope that the bound's 1 / sqrt(d_qk) stands for, in the log of the width
NEAR = 0.25  # A measured slope so near to that is taken for the same
QUANTITIES = ("loss", "accuracy", RESIDUAL, "entropy", "parameters", LENGTH, FRESH, PLACE, CHANCE)
ROWS = {
    "family": pl.String, "layers": pl.Int64, "width": pl.Int64, "seed": pl.Int64, "quantity": pl.String,
    "value": pl.Float64,
}  # fmt: skip


@dataclass(frozen=True)
class ShapeSizes:
    """How large the experiment is."""

    depths: tuple[int, ...]
    middle_depth: int  # The shape that both families share
    middle_width: int
    context: int
    batch: int
    steps: int
    seeds: int
    widths: tuple[int, ...]  # Of pure attention, at one depth
    pure_depth: int
    pure_tokens: int
    pure_seeds: int


QUICK = ShapeSizes((1, 2, 4, 6, 8, 12), 4, 32, context=32, batch=8, steps=40, seeds=2,
                   widths=(16, 32, 64, 128), pure_depth=6, pure_tokens=16, pure_seeds=3)  # fmt: skip
FULL = ShapeSizes((1, 2, 3, 6, 12, 24, 48), 6, 256, context=64, batch=32, steps=600, seeds=3,
                  widths=(16, 32, 64, 128, 256, 512), pure_depth=8, pure_tokens=32, pure_seeds=5)  # fmt: skip


def shapes(sizes: ShapeSizes) -> list[tuple[str, int, int]]:
    """(family, layers, width) of every shape; widths are multiples of the number of heads.

    >>> [width for family, _, width in shapes(QUICK) if family == "parameters"]
    [64, 44, 32, 28, 24, 20]
    """
    n, found = sizes.context, []
    parameters = sizes.middle_depth * sizes.middle_width**2
    compute = sizes.middle_depth * (24 * sizes.middle_width**2 + 4 * n * sizes.middle_width)
    for layers in sizes.depths:
        found.append(("parameters", layers, _whole_heads(math.sqrt(parameters / layers))))
        of_layer = compute / layers  # 24 d^2 + 4 n d, solved for d
        found.append(("compute", layers, _whole_heads((math.sqrt(16 * n**2 + 96 * of_layer) - 4 * n) / 48)))
    return found


def _whole_heads(width: float) -> int:
    return max(2 * HEADS, HEADS * round(width / HEADS))


def gather(setup: Setup, sizes: ShapeSizes) -> dict[str, pl.DataFrame]:
    """Forecast, train and measure every shape; then pure attention at several widths. One cached piece for each."""
    learning = {"context": sizes.context, "batch": sizes.batch, "steps": sizes.steps, "seeds": sizes.seeds}
    pure = {"depth": sizes.pure_depth, "tokens": sizes.pure_tokens}
    trained: dict[str, Callable[[], pl.DataFrame]] = {
        f"{family} {layers}x{width}": partial(shape_rows, family, layers, width, sizes, setup.device)
        for family, layers, width in shapes(sizes)
    }
    constants: dict[str, Callable[[], pl.DataFrame]] = {
        f"pure {width} {seed}": partial(pure_constant, width, seed, sizes)
        for width in sizes.widths for seed in range(sizes.pure_seeds)
    }  # fmt: skip
    return {"shapes": setup.cached_parts(trained, **learning), "pure": setup.cached_parts(constants, **pure)}


def shape_rows(family: str, layers: int, width: int, sizes: ShapeSizes, device: str = "cpu") -> pl.DataFrame:
    """Everything that is known of one shape: rows of family · layers · width · seed · quantity · value.

    A `Trial` of the lab trains it and measures residual, entropy and shares of paths at the end; before, its fresh
    residual is measured and its training forecast.
    """
    trial_sizes = TrialSizes(width=width, heads=HEADS, context=sizes.context, batch=sizes.batch, steps=sizes.steps)
    trial = Trial(NONE, "pre", layers, tuple(range(sizes.seeds)), trial_sizes)
    found = trial.table(device).filter(pl.col("value").is_not_null())
    rows = [
        (family, layers, width, seed, quantity, value)
        for seed, quantity, value in found.select("seed", "quantity", "value").iter_rows()
        if quantity in QUANTITIES
    ]
    task = NextCharacter(sizes.context)
    arch = task.architecture(layers, width, HEADS)
    start = Initialisation(trial_sizes.scheme, trial_sizes.embedding_std)
    for seed in range(sizes.seeds):
        rows.append((family, layers, width, seed, LENGTH, _mean_length(found.filter(seed=seed))))
        expected = forecast(
            arch, task=task, init=start, steps=sizes.steps, lr=trial_sizes.lr, batch=sizes.batch, seed=seed
        )
        rows.append((family, layers, width, seed, PLACE, expected.place))
        rows.append((family, layers, width, seed, CHANCE, expected.probability))
        rows.append((family, layers, width, seed, FRESH, float(expected.table["residual"][-1])))
    return pl.DataFrame(rows, schema=ROWS, orient="row")


def _mean_length(rows: pl.DataFrame) -> float:
    """How many heads the paths that carry the output go through, on average; a negative share counts by its size."""
    shares = {
        int(quantity.removeprefix("path_share_")): abs(value)
        for quantity, value in rows.select("quantity", "value").iter_rows()
        if quantity.startswith("path_share_")
    }
    total = sum(shares.values())
    return sum(length * share for length, share in shares.items()) / total if total else math.nan


def pure_constant(width: int, seed: int, sizes: ShapeSizes) -> pl.DataFrame:
    """log10 of c in `mu(X_L) = c mu(X_{L-1})^3`, of a fresh network of heads alone, in deviation arithmetic.

    Once tokens are nearly the same, a layer of pure attention cubes what they differ by; c is what the bound estimates
    by `4 gamma beta / sqrt(d_qk)`.
    """
    arch = Architecture(layers=sizes.pure_depth, width=width, heads=HEADS)
    net = Transformer.random(arch, seed=seed, init="xavier").variant("san")
    X, padding = word_tokens(bundled_excerpts(sizes.pure_tokens)[:1], width, sizes.pure_tokens)
    profile = measure(net, X, padding, "mu")
    logs = profile.curve("mu", "log10")[0]
    known = not bool((profile.curve("mu", "below_floor")[0, -2:] == 1).any())
    constant = float(logs[-1] - 3 * logs[-2]) if known else math.nan
    return pl.DataFrame({"width": [width], "seed": [seed], "log10": [constant]})


# ---- The answer, from tables alone


def by_shape(table: pl.DataFrame, family: str, quantity: str) -> dict[int, list[float]]:
    """The values of a quantity by depth, one for each seed in their order; what is not a number is left out."""
    rows = table.filter(family=family, quantity=quantity).filter(pl.col("value").is_finite()).sort("layers", "seed")
    found: dict[int, list[float]] = {}
    for layers, value in rows.select("layers", "value").iter_rows():
        found.setdefault(layers, []).append(value)
    return found


def slopes(pure: pl.DataFrame) -> list[float]:
    """For each seed, the slope of log10 c in log10 of the width; seeds with fewer than two widths are left out."""
    found = []
    for _, one in pure.filter(pl.col("log10").is_finite()).sort("seed").group_by("seed", maintain_order=True):
        if one["width"].n_unique() > 1:
            found.append(float(np.polyfit(np.log10(one["width"].to_numpy()), one["log10"].to_numpy(), 1)[0]))
    return found


def answer(tables: Tables, sizes: ShapeSizes) -> StudyAnswer:
    """The answer that the tables give."""
    table, steep = tables["shapes"], slopes(tables["pure"])
    verdicts = [
        _depth_verdict(table), _bound_verdict(steep), *(_inner_verdict(table, family) for family in FAMILIES),
        _forecast_verdict(table), _length_verdict(table),
    ]  # fmt: skip
    evidence = [_shape_table(table, family) for family in FAMILIES]
    rows = [
        [str(width), spread(tables["pure"].filter(width=width)["log10"].drop_nans().to_list(), ".2f")]
        for width in sizes.widths
    ]
    evidence.append(PageTable(
        f"Pure attention of {sizes.pure_depth} layers and {HEADS} heads: log10 of c, median (range) of "
        f"{sizes.pure_seeds} seeds", ["width", "log10 c"], rows,
        f"`mu(X_L) = c mu(X_(L-1))³`. Slope in log10 of the width: {spread(steep, '.2f')}; the bound's 1/√d: {BOUND}.",
    ))  # fmt: skip
    notes = [
        f"{sizes.seeds} seeds of each shape, {sizes.steps} steps of AdamW at 0.001 on {sizes.batch} excerpts of "
        f"{sizes.context} characters; one recipe for all shapes, tuned for none."
    ]
    return StudyAnswer(_sentence(table, steep), verdicts, evidence, notes)


def _best(table: pl.DataFrame, family: str) -> tuple[int, int] | None:
    """(layers, width) of the lowest median loss of a family."""
    losses = by_shape(table, family, "loss")
    if not losses:
        return None
    layers = min(losses, key=lambda depth: statistics.median(losses[depth]))
    return layers, int(table.filter(family=family, layers=layers)["width"][0])


def _sentence(table: pl.DataFrame, steep: list[float]) -> str:
    parts = []
    for family in FAMILIES:
        best, losses = _best(table, family), by_shape(table, family, "loss")
        if best is None:
            parts.append(f"at equal {family} nothing was learnt")
            continue
        parts.append(f"at equal {family} {best[0]} layers of width {best[1]} learn best "
                     f"(loss {spread(losses[best[0]], '.3f')})")  # fmt: skip
    left = by_shape(table, "parameters", FRESH)
    shown = "what is left of differences was not measured"
    if len(left) > 1:
        ends = [10 ** statistics.median(left[depth]) for depth in (min(left), max(left))]
        shown = f"what is left of differences goes from {ends[0]:.2g} with {min(left)} layer{'s' * (min(left) > 1)} "
        shown += f"to {ends[1]:.2g} with {max(left)}"
    width = "the effect of width was not measured"
    if steep:
        slope = statistics.median(steep)
        same = "as" if abs(slope - BOUND) <= NEAR else "not as"
        slows = "slows" if slope < 0 else "does not slow"
        width = f"width {slows} pure attention's collapse, {same} the bound says (c ∝ width^{slope:.2f}, bound {BOUND})"
    return f"{parts[0][0].upper()}{parts[0][1:]}, {parts[1]}; fresh, {shown}; {width}."


def _depth_verdict(table: pl.DataFrame) -> HypothesisVerdict:
    """Whether deeper shapes of equal parameters keep less of differences, with every seed."""
    left = by_shape(table, "parameters", FRESH)
    seeds = min(map(len, left.values()), default=0)
    ranks = [rank_correlation([*left], [values[seed] for values in left.values()]) for seed in range(seeds)]
    ranks = [rank for rank in ranks if not math.isnan(rank)]
    if not ranks:
        return HypothesisVerdict("not measured", None)
    return HypothesisVerdict(f"rank correlation of depth and residual {spread(ranks, '.2f')}", max(ranks) <= -RELATED)


def _bound_verdict(steep: list[float]) -> HypothesisVerdict:
    if not steep:
        return HypothesisVerdict("not measured", None)
    near = [abs(slope - BOUND) <= NEAR for slope in steep]
    holds = True if all(near) else None if any(near) else False
    return HypothesisVerdict(f"slope of log c in log width {spread(steep, '.2f')}", holds)


def _inner_verdict(table: pl.DataFrame, family: str) -> HypothesisVerdict:
    """Whether the best loss is at neither end of a family, by more than seeds differ."""
    losses = by_shape(table, family, "loss")
    best = _best(table, family)
    if best is None or len(losses) < 3:
        return HypothesisVerdict("fewer than three shapes", None)
    ends = {depth: losses[depth] for depth in (min(losses), max(losses))}
    ours = f"best at {best[0]} layers: {spread(losses[best[0]], '.3f')}; ends: " + ", ".join(
        f"{depth}: {spread(values, '.3f')}" for depth, values in ends.items()
    )
    if best[0] in ends:
        return HypothesisVerdict(ours, False)
    apart = all(max(losses[best[0]]) < min(values) for values in ends.values())
    return HypothesisVerdict(ours, True if apart else None)


def _forecast_verdict(table: pl.DataFrame) -> HypothesisVerdict:
    """Whether the forecast place orders the losses of all shapes, in medians over seeds."""
    pairs = [
        (statistics.median(by_shape(table, family, PLACE)[depth]), statistics.median(values))
        for family in FAMILIES
        for depth, values in by_shape(table, family, "loss").items()
        if depth in by_shape(table, family, PLACE)
    ]
    rank = rank_correlation(*zip(*pairs, strict=True)) if pairs else math.nan
    if math.isnan(rank):
        return HypothesisVerdict("not measured", None)
    return HypothesisVerdict(f"rank correlation {rank:.2f} over {len(pairs)} shapes", rank >= RELATED)


def _length_verdict(table: pl.DataFrame) -> HypothesisVerdict:
    """Whether the mean length of paths grows with depth, at a smaller power than one."""
    lengths = {depth: statistics.median(found) for depth, found in by_shape(table, "parameters", LENGTH).items()}
    lengths = {depth: length for depth, length in lengths.items() if length > 0}
    if len(lengths) < 3:
        return HypothesisVerdict("fewer than three shapes", None)
    slope = float(np.polyfit(np.log([*lengths]), np.log([*lengths.values()]), 1)[0])
    ours = ", ".join(f"{depth}: {length:.2f}" for depth, length in lengths.items())
    return HypothesisVerdict(f"length ∝ depth^{slope:.2f} ({ours})", 0 < slope < 1)


def _shape_table(table: pl.DataFrame, family: str) -> PageTable:
    rows = []
    for layers in table.filter(family=family)["layers"].unique().sort():
        mine = table.filter(family=family, layers=layers)

        def of(quantity: str, mine: pl.DataFrame = mine) -> list[float]:
            return mine.filter(quantity=quantity)["value"].drop_nans().to_list()

        rows.append([
            f"{layers} × {mine['width'][0]}", f"{max(of('parameters'), default=0):,.0f}", spread(of("loss"), ".3f"),
            spread_of_logs(of(FRESH)), spread_of_logs(of(RESIDUAL)), spread(of("entropy"), ".2f"),
            spread(of(LENGTH), ".2f"), spread(of(PLACE), ".2f"), spread(of(CHANCE), ".2f"),
        ])  # fmt: skip
    return PageTable(
        f"Equal {family}: median (range) over seeds",
        ["layers × width", "parameters", "held-out loss", "fresh residual", "trained residual", "entropy, nats",
         "mean path length", "forecast: place", "forecast: learns"], rows,
        "*Residual*: relative, after the last layer. *Mean path length*: heads that the paths which carry the output "
        "go through. *Place*: 0 for the lowest loss among designs of the lab, 1 for the highest."
        if family == FAMILIES[0] else "",
    )  # fmt: skip


# ---- The figure


def draw(tables: Tables, sizes: ShapeSizes) -> "dict[str, Figure]":
    """Loss, residual and path length by depth of both families; and c of pure attention by width."""
    from rankscope.figures.matplotlib import palette, panels

    figure, axes = panels(2, width=5.0, height=3.2, rows=2)
    shown = {"loss": "Held-out loss", FRESH: "Fresh: log10 of the relative residual", LENGTH: "Mean length of paths"}
    for panel, (quantity, title) in zip(axes, shown.items(), strict=False):
        for number, family in enumerate(FAMILIES):
            _by_depth(panel, by_shape(tables["shapes"], family, quantity), f"equal {family}", palette()[number])
        panel.set_xscale("log", base=2)
        panel.set_title(title, loc="left", fontsize=9)
        panel.set_xlabel("layers")
    axes[0].legend(fontsize=8, frameon=False)
    known = tables["pure"].filter(pl.col("log10").is_finite()).sort("width")
    axes[3].plot(known["width"], known["log10"], linestyle="none", marker="o", markersize=4, color=palette()[0])
    if len(known):
        widths = np.array(sorted({*known["width"].to_list()}), dtype=float)
        middle = float(known["log10"].median()) - BOUND * float(np.log10(widths).mean())  # type: ignore[arg-type]
        axes[3].plot(widths, middle + BOUND * np.log10(widths), color="grey", linewidth=0.9, label="width^(-1/2)")
        axes[3].legend(fontsize=8, frameon=False)
    axes[3].set_xscale("log", base=2)
    axes[3].set_title("Pure attention: log10 of c, mu' = c mu³", loc="left", fontsize=9)
    axes[3].set_xlabel("width")
    return {QUESTION.name: figure}


def _by_depth(axes: "Axes", values: dict[int, list[float]], label: str, colour: str) -> None:
    depths = sorted(values)
    middle = [statistics.median(values[depth]) for depth in depths]
    low, high = ([pick(values[depth]) for depth in depths] for pick in (min, max))
    axes.fill_between(depths, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(depths, middle, color=colour, marker="o", markersize=4, linewidth=1.4, label=label)


QUESTION = Question(
    name="width-depth",
    title="Width or depth: what do more layers cost at equal parameters and at equal compute?",
    why=(
        "The bound of Dong et al. (2021) has 1/√d in it: wide networks should collapse slower. Networks are chosen by "
        "their loss. Whether the two agree, and whether width slows collapse as the bound says, was not asked of the "
        "same shapes."
    ),
    hypotheses=(
        "Of equal parameters, deeper networks keep less of the differences between tokens (rank correlation of -0.7 or "
        "below with every seed).",
        "Width slows the collapse of pure attention as the bound's 1/√d says: the constant c of a layer falls with the "
        "power -1/2 of the width (within 0.25).",
        "Of equal parameters, neither the shallowest nor the deepest network learns best.",
        "Of equal compute, neither the shallowest nor the deepest network learns best.",
        "The forecast orders the losses of all shapes (rank correlation of at least 0.7).",
        "Deeper networks use longer paths, but not in proportion: the mean length grows with a power of depth below "
        "one.",
    ),
    method=(
        "Shapes (layers × width) in two families: of equal parameters, L·d² is constant; of equal compute, "
        "L·(24 d² + 4 n d) is. Pre-norm decoders with four heads and Xavier weights learn the next character of Moby "
        "Dick. Before: `forecast` (place among trained designs, chance to learn) and the relative residual after the "
        "last layer. After: held-out loss, the residual in deviation arithmetic, entropy, and shares of paths by "
        "length (`decompose`). For the bound: fresh networks of heads alone at one depth and several widths; in "
        "deviation arithmetic `mu` cubes from layer to layer, and the constant of the last layer is read."
    ),
    refuted_by=(
        "A learning rate tuned for each shape, longer training, or other initial weights: the norms of weights in the "
        "bound change with the width too, so that another scheme has another slope. Larger budgets move the best shape."
    ),
    quick=QUICK, full=FULL, gather=gather, answer=answer, draw=draw, seconds=300.0,
    caption="Medians over seeds, bands: their range; of c, every seed. Grey: the slope of the bound.",
)  # fmt: skip
