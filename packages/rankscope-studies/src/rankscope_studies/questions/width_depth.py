"""Width against depth: what do layers cost at equal parameters and at equal compute, and does width slow collapse?

The bound of Dong et al. (2021) for pure attention, `||res X_{l+1}|| <= (4 gamma beta H / sqrt(d_qk)) ||res X_l||^3`,
has the width of heads in it: wider networks should collapse slower. Whole networks are chosen by their loss. Both are
asked of the same shapes: what is left of differences between tokens, which paths carry the output, what attention looks
like, what the network learns at a learning rate of its own, and what `forecast` said before. `shape_trainings.py` has
the shapes (layers, width) of equal parameters and of equal compute, and how each is trained and measured.

The bound is held against fresh networks of heads alone, where nothing is trained. Besides `1 / sqrt(d_qk)` the
bound has norms of weights, which change with the width too, so that the whole bound need not fall as `1 / sqrt(d_qk)`
does. The study therefore measures the slope in the width of the constant c, and of its two factors (how large scores
are for a given difference between tokens, and what values make of scores), and computes the same slopes of the bound.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rankscope_studies.questions import shape_trainings as shape
from rankscope_studies.questions.drawing import seed_band, title_panel
from rankscope_studies.questions.question import HypothesisVerdict, Question, RuleChange, StudyAnswer, Tables
from rankscope_studies.questions.shape_trainings import FAMILIES, HEADS, ShapeSizes, shapes
from rankscope_studies.questions.summaries import rank_correlation, spread, spread_of_logs, unanimous
from rankscope_studies.study import PageTable, Setup
from rankscope_studies.trial import TrialSizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RELATED = 0.7  # Rank correlation from which on one thing is said to order another
BOUND = -0.5  # The slope that the bound's 1 / sqrt(d_qk) stands for, in the log of the width
NEAR = 0.25  # A measured slope so near to that is taken for the same
QUICK = ShapeSizes((1, 2, 4, 8), 4, 32, context=32, batch=8, steps=120, rates=(1e-2, 3e-2, 1e-1), tuning_seeds=1,
                   seeds=2, widths=(16, 32, 64, 128), pure_depth=6, pure_tokens=16, pure_seeds=3)  # fmt: skip
FULL = ShapeSizes((1, 2, 3, 6, 12, 24, 36), 6, 128, context=64, batch=32, steps=600, rates=(1e-3, 3e-3, 1e-2, 3e-2),
                  tuning_seeds=2, seeds=4, widths=(16, 32, 64, 128, 256, 512), pure_depth=8, pure_tokens=32,
                  pure_seeds=5)  # fmt: skip


def gather(setup: Setup, sizes: ShapeSizes) -> dict[str, pl.DataFrame]:
    """Forecast and tune every shape, then train it at its rate and measure; and pure attention at several widths.

    One cached piece for each shape and rate, for each shape before and after its training, and for each width and
    seed of pure attention. A shape that both families have is trained once.
    """
    distinct = sorted({(layers, width) for _, layers, width in shapes(sizes)}, reverse=True)  # The longest first
    learning = {"context": sizes.context, "batch": sizes.batch, "steps": sizes.steps}
    tuning = {
        f"tuning {layers}x{width} at {rate:g}": partial(shape.tuned, layers, width, rate, sizes, setup.device)
        for layers, width in distinct for rate in sizes.rates
    }  # fmt: skip
    before = {f"before {depth}x{width}": partial(shape.before_rows, depth, width, sizes) for depth, width in distinct}
    constants = {
        f"pure {width} {seed}": partial(shape.pure_constants, width, seed, sizes)
        for width in sizes.widths for seed in range(sizes.pure_seeds)
    }  # fmt: skip
    tuned = setup.cached_parts(tuning, **learning, seeds=sizes.tuning_seeds)
    rates = {(layers, width): shape.best_rate(tuned, layers, width) for layers, width in distinct}
    after = {
        f"after {layers}x{width} at {rate:g}": partial(shape.after_rows, layers, width, rate, sizes, setup.device)
        for (layers, width), rate in rates.items()
    }
    quantities = pl.concat([setup.cached_parts(parts, **learning, seeds=sizes.seeds) for parts in (before, after)])
    families = pl.DataFrame(shapes(sizes), schema=["family", "layers", "width"], orient="row")
    settings = {"depth": sizes.pure_depth, "tokens": sizes.pure_tokens, "quantities": shape.CONSTANTS}
    return {
        "tuning": tuned,
        "shapes": families.join(quantities, on=["layers", "width"], maintain_order="left_right").select([*shape.ROWS]),
        "pure": setup.cached_parts(constants, **settings),
    }


# ---- The answer, from tables alone


def by_shape(table: pl.DataFrame, family: str, quantity: str) -> dict[int, list[float]]:
    """The values of a quantity by depth, one for each seed in their order; what is not a number is left out."""
    rows = table.filter(family=family, quantity=quantity).filter(pl.col("value").is_finite()).sort("layers", "seed")
    values: dict[int, list[float]] = {}
    for layers, value in rows.select("layers", "value").iter_rows():
        values.setdefault(layers, []).append(value)
    return values


def slopes(pure: pl.DataFrame, quantity: str) -> list[float]:
    """For each seed, the slope of a quantity's log10 in log10 of the width; seeds with fewer than two widths are left
    out."""
    rows = pure.filter(pl.col("log10").is_finite(), quantity=quantity).sort("seed")
    return [
        float(np.polyfit(np.log10(rows_of_seed["width"].to_numpy()), rows_of_seed["log10"].to_numpy(), 1)[0])
        for _, rows_of_seed in rows.group_by("seed", maintain_order=True)
        if rows_of_seed["width"].n_unique() > 1
    ]


@dataclass(frozen=True)
class FamilyResult:
    """Which shapes of a family learn, and which of them best."""

    losses: dict[int, list[float]]  # By depth
    widths: dict[int, int]  # By depth
    blind: float  # The loss of a guess by frequency
    best: int | None  # The depth of the lowest median loss; None where no shape learns
    tied: tuple[int, ...]  # Depths whose losses overlap with the best's, the best among them

    @property
    def text(self) -> str:
        """What learns best, in a few words."""
        if self.best is None:
            lowest = min((loss for values in self.losses.values() for loss in values), default=math.nan)
            return (
                f"no shape beats guessing by more than seeds differ (lowest loss {lowest:.3f}, guess {self.blind:.3f})"
            )
        names = [f"{depth}" for depth in self.tied]
        listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
        layers = f"{listed} layer{'s' * (names != ['1'])}"
        return f"{layers} learn{'s' * (names == ['1'])} best ({spread(self.losses[self.best], '.3f')})"


def family_result(table: pl.DataFrame, family: str) -> FamilyResult:
    """Which shapes of a family learn best. A shape has learnt if its worst loss is below that of a guess by more than
    its seeds differ; one seed has no spread, and nothing is said of it."""
    losses = by_shape(table, family, "loss")
    guesses = table.filter(quantity=shape.BLIND)["value"].drop_nans()
    blind = float(guesses[0]) if len(guesses) else math.nan
    rows = table.filter(family=family).select("layers", "width").unique()
    widths = dict(rows.iter_rows())
    learnt = [
        depth for depth, values in losses.items() if len(values) > 1 and blind - max(values) > max(values) - min(values)
    ]
    if not learnt:
        return FamilyResult(losses, widths, blind, None, ())
    best = min(learnt, key=lambda depth: statistics.median(losses[depth]))
    tied = tuple(depth for depth in sorted(losses) if min(losses[depth]) <= max(losses[best]))
    return FamilyResult(losses, widths, blind, best, tied)


def answer(tables: Tables, sizes: ShapeSizes) -> StudyAnswer:
    """The answer that the tables give."""
    table, pure = tables["shapes"], tables["pure"]
    families = {family: family_result(table, family) for family in FAMILIES}
    verdicts = [
        _depth_verdict(table), _bound_verdict(slopes(pure, "c")), *map(_inner_verdict, families.values()),
        _forecast_verdict(table, tables["tuning"], families), _length_verdict(table),
        _whole_bound_verdict(slopes(pure, "c"), slopes(pure, "bound")),
    ]  # fmt: skip
    evidence = [*(_shape_table(table, family) for family in FAMILIES), *_pure_tables(pure, sizes)]
    rates = {depth: values[0] for depth, values in by_shape(table, FAMILIES[0], shape.RATE).items()}
    edge = [str(depth) for depth, rate in rates.items() if rate in (min(sizes.rates), max(sizes.rates))]
    at_end = f" (those of {', '.join(edge)} layers)" if edge else ""
    listed = ", ".join(f"{rate:g}" for rate in sizes.rates)
    notes = [
        f"Every shape has the best of {len(sizes.rates)} learning rates ({listed}), by the median loss of "
        f"{_count(sizes.tuning_seeds, 'tuning seed')}; reported are {sizes.seeds} other seeds. Of equal parameters, "
        f"{len(edge)} of {_count(len(rates), 'shape')} chose a rate at an end of the grid"
        f"{at_end}. {sizes.steps} steps of AdamW on "
        f"{sizes.batch} excerpts of {sizes.context} characters. The forecast is of the first seed at the lab's usual "
        "rate, since the chosen one is known from trainings alone. It was learnt from networks of width 64, and says "
        "so of every other width: `no trained design had width ...`.",
        "Changed after the full run was seen: whether width slows collapse is said by relative residuals, since c has "
        "a unit that changes with the width; and that the first expectation is of networks before training.",
        "The slope of c had been seen in a first quick run, with one recipe for all shapes, before rates were tuned "
        "and before the slope of the whole bound was computed: the last expectation was written after that.",
    ]
    return StudyAnswer(_sentence(families, pure), verdicts, evidence, notes)


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _sentence(families: dict[str, FamilyResult], pure: pl.DataFrame) -> str:
    best_shapes = "; ".join(f"at equal {family}, {result.text}" for family, result in families.items())
    c_slopes = slopes(pure, "c")
    width_text = _width_text(pure)
    if c_slopes:
        width_text += f"; the bound's constant c falls as width^{spread(c_slopes, '.2f')}, the bound says -0.5"
    return f"{best_shapes[0].upper()}{best_shapes[1:]}. {width_text[0].upper()}{width_text[1:]}."


def _width_text(pure: pl.DataFrame) -> str:
    """Whether wider networks of heads alone keep more of differences, the widest against the narrowest, by seed."""
    rows = pure.filter(pl.col("quantity") == "left", pl.col("log10").is_finite()).sort("seed")
    if rows["width"].n_unique() < 2:
        return "the effect of width on pure attention was not measured"
    ends = [int(width) for width in (rows["width"].min(), rows["width"].max())]  # type: ignore[arg-type]
    left = {width: dict(rows.filter(width=width).select("seed", "log10").iter_rows()) for width in ends}
    narrow, wide = left.values()
    wider_keeps_more = {wide[seed] > narrow[seed] for seed in narrow.keys() & wide.keys()}
    verb = {frozenset({True}): "slows", frozenset({False}): "does not slow"}.get(
        frozenset(wider_keeps_more), "may slow"
    )
    listed = ", ".join(f"{spread_of_logs([*values.values()])} at width {width}" for width, values in left.items())
    return f"with Xavier weights, width {verb} the collapse of pure attention (relative residual: {listed})"


def _depth_verdict(table: pl.DataFrame) -> HypothesisVerdict:
    """Whether deeper shapes of equal parameters keep less of differences before training, with every seed; beside it
    what trained ones do."""
    fresh, trained = (_depth_ranks(by_shape(table, FAMILIES[0], name)) for name in (shape.FRESH, shape.RESIDUAL))
    if not fresh:
        return HypothesisVerdict("not measured", None)
    after = f", after it {spread(trained, '.2f')}" if trained else ""
    ours = f"rank correlation of depth and residual before training {spread(fresh, '.2f')}{after}"
    return HypothesisVerdict(ours, max(fresh) <= -RELATED)


def _depth_ranks(residuals: dict[int, list[float]]) -> list[float]:
    """The rank correlation of depth and residual, for each seed."""
    seeds = min(map(len, residuals.values()), default=0)
    ranks = [rank_correlation([*residuals], [values[seed] for values in residuals.values()]) for seed in range(seeds)]
    return [rank for rank in ranks if not math.isnan(rank)]


def _bound_verdict(c_slopes: list[float]) -> HypothesisVerdict:
    """Whether c falls with the width as the bound's `1 / sqrt(d_qk)` says, with every seed."""
    if not c_slopes:
        return HypothesisVerdict("not measured", None)
    ours = f"slope of log c in log width {spread(c_slopes, '.2f')}"
    return HypothesisVerdict(ours, unanimous([abs(slope - BOUND) <= NEAR for slope in c_slopes]))


def _whole_bound_verdict(c_slopes: list[float], bound_slopes: list[float]) -> HypothesisVerdict:
    """Whether the slope of the whole bound is that of c, seed by seed."""
    if not c_slopes or len(c_slopes) != len(bound_slopes):
        return HypothesisVerdict("not measured", None)
    ours = f"slope of the whole bound {spread(bound_slopes, '.2f')}, of c {spread(c_slopes, '.2f')}"
    pairs = zip(c_slopes, bound_slopes, strict=True)
    return HypothesisVerdict(ours, unanimous([abs(slope - bound) <= NEAR for slope, bound in pairs]))


def _inner_verdict(family: FamilyResult) -> HypothesisVerdict:
    """Whether the best loss is at neither end of a family, by more than seeds differ."""
    if family.best is None or len(family.losses) < 3:
        return HypothesisVerdict(family.text if family.best is None else "fewer than three shapes", None)
    ends = {min(family.losses), max(family.losses)}
    ours = f"{family.text}; ends: " + ", ".join(
        f"{_count(depth, 'layer')} {spread(family.losses[depth], '.3f')}" for depth in sorted(ends)
    )
    at_end = ends & {*family.tied}
    return HypothesisVerdict(ours, True if not at_end else False if {*family.tied} <= ends else None)


def _forecast_verdict(
    table: pl.DataFrame, tuning: pl.DataFrame, families: dict[str, FamilyResult]
) -> HypothesisVerdict:
    """Whether the forecast place orders the losses of all shapes, in medians over seeds; a shape of both families
    counts once. Beside it the same for losses at the rate that the forecast is made for, where that was trained."""
    places: dict[tuple[int, int], float] = {}
    losses: dict[tuple[int, int], float] = {}
    for family, result in families.items():
        for depth, values in result.losses.items():
            if depth in by_shape(table, family, shape.PLACE):
                places[depth, result.widths[depth]] = by_shape(table, family, shape.PLACE)[depth][0]
                losses[depth, result.widths[depth]] = statistics.median(values)
    rank = rank_correlation([*places.values()], [*losses.values()]) if places else math.nan
    if math.isnan(rank) or all(result.best is None for result in families.values()):
        return HypothesisVerdict("not measured, or nothing was learnt", None)
    ours = f"rank correlation {rank:.2f} over {len(places)} shapes"
    usual = tuning.filter(rate=TrialSizes().lr).group_by("layers", "width").agg(pl.col("loss").median())
    at_usual = {(layers, width): loss for layers, width, loss in usual.iter_rows() if (layers, width) in places}
    if len(at_usual) == len(places):
        same_rate = rank_correlation([places[key] for key in at_usual], [*at_usual.values()])
        ours += f"; {same_rate:.2f} with losses at the rate that was forecast"
    return HypothesisVerdict(ours, rank >= RELATED)


def _length_verdict(table: pl.DataFrame) -> HypothesisVerdict:
    """Whether the mean length of paths grows with depth, at a smaller power than one."""
    medians = {depth: statistics.median(values) for depth, values in by_shape(table, FAMILIES[0], shape.LENGTH).items()}
    lengths = {depth: length for depth, length in medians.items() if length > 0}
    if len(lengths) < 3:
        return HypothesisVerdict("fewer than three shapes", None)
    slope = float(np.polyfit(np.log([*lengths]), np.log([*lengths.values()]), 1)[0])
    ours = ", ".join(f"{depth}: {length:.2f}" for depth, length in lengths.items())
    return HypothesisVerdict(f"length ∝ depth^{slope:.2f} ({ours})", 0 < slope < 1)


def _shape_table(table: pl.DataFrame, family: str) -> PageTable:
    forms = {shape.RATE: ".3g", "loss": ".3f", shape.FRESH: "", shape.RESIDUAL: "", "entropy": ".2f",
             shape.LENGTH: ".2f", shape.PLACE: ".2f", shape.CHANCE: ".2f"}  # fmt: skip
    rows = []
    for layers, width in table.filter(family=family).select("layers", "width").unique().sort("layers").iter_rows():
        shape_rows = table.filter(family=family, layers=layers)
        values = {name: shape_rows.filter(quantity=name)["value"].drop_nans().to_list() for name in shape.QUANTITIES}
        cells = [spread(values[name], form) if form else spread_of_logs(values[name]) for name, form in forms.items()]
        rows.append([f"{layers} × {width}", f"{max(values['parameters'], default=0):,.0f}", *cells])
    guess = table.filter(quantity=shape.BLIND)["value"].drop_nans()
    return PageTable(
        f"Equal {family}: median (range) over seeds",
        ["layers × width", "parameters", "rate chosen", "held-out loss", "fresh residual", "trained residual",
         "entropy, nats", "mean path length", "forecast: place", "forecast: learns"], rows,
        "*Residual*: relative, after the last layer. *Mean path length*: heads that the paths which carry the output "
        "go through. *Place*: 0 for the lowest loss among designs of the lab, 1 for the highest. The loss of a guess "
        f"by frequency: {spread(guess.to_list()[:1], '.3f')}." if family == FAMILIES[0] else "",
    )  # fmt: skip


def _pure_tables(pure: pl.DataFrame, sizes: ShapeSizes) -> list[PageTable]:
    """The constant of a layer by width, and slopes of its parts beside those of the bound."""

    def text_of(quantity: str, width: int) -> str:
        return spread_of_logs(pure.filter(quantity=quantity, width=width)["log10"].drop_nans().to_list())

    columns = ("left", "relative", "c", "bound", "gamma")
    rows = [[str(width), *(text_of(name, width) for name in columns)] for width in sizes.widths]
    named = {"whole": ("c", "bound"), "scores": ("scores", "bound_scores"), "values": ("values", "bound_values")}
    slope_rows = [
        [part, *(spread(slopes(pure, name), "+.2f") for name in names)]
        for part, names in named.items()
    ]  # fmt: skip
    return [
        PageTable(
            f"Pure attention of {sizes.pure_depth} layers and {HEADS} heads: the constant of the last layer, median "
            f"(range) of {sizes.pure_seeds} seeds",
            ["width", "relative residual", "c of relative residuals", "c, measured", "whole bound", "γ of the bound"],
            rows, "`‖R_L‖ = c ‖R_(L-1)‖³`, R the residual about the mean; the bound is `4 κ γ β H / √d_qk`. c has a "
            "unit: at the same differences of entries, ‖R‖² grows with the width, and c falls as 1 / width for that "
            "alone. The constant of relative residuals has none.",
        ),
        PageTable(
            "Slopes in log10 of the width", ["factor", "measured", "of the bound"], slope_rows,
            "*Scores*: the largest difference between two scores of a row over ‖R‖²; in the bound `max ‖W_QK‖₁ / "
            "√d_qk`. *Values*: what is left. The bound's norms add up entries of `W_QK` and of `W_V W_O`, more of "
            "them in wider networks. Tokens that are nearly the same differ along few directions v: their scores are "
            "`v·W_QK·v / √d_qk`, and of one direction `v·W_QK·v` of random weights falls as 1/√width too.",
        ),
    ]  # fmt: skip


# ---- The figure


def draw(tables: Tables, sizes: ShapeSizes) -> "dict[str, Figure]":
    """Loss, residual and path length by depth of both families; and c of pure attention by width."""
    from rankscope.figures import palette, panels

    figure, axes = panels(2, width=5.0, height=3.2, rows=2)
    shown = {
        "loss": ("Held-out loss, at the best rate", "nats"),
        shape.FRESH: ("Fresh networks: relative residual, last layer", "log10"),
        shape.LENGTH: ("Trained: mean length of paths", "heads"),
    }
    for panel, (quantity, (title, unit)) in zip(axes, shown.items(), strict=False):
        for index, family in enumerate(FAMILIES):
            seed_band(panel, by_shape(tables["shapes"], family, quantity), f"equal {family}", palette()[index])
        _doubling(panel, sizes.depths)
        title_panel(panel, title, "layers", unit)
    guess = tables["shapes"].filter(quantity=shape.BLIND)["value"].drop_nans()
    if len(guess):
        axes[0].axhline(float(guess[0]), color="grey", linewidth=0.9, linestyle="--", label="guess by frequency")
    axes[0].legend(fontsize=8, frameon=False, loc="best")
    _constants(axes[3], tables["pure"])
    return {QUESTION.name: figure}


def _doubling(axes: "Axes", ticks: Sequence[int]) -> None:
    """A logarithmic axis with these numbers on it."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()


def _constants(axes: "Axes", pure: pl.DataFrame) -> None:
    """c and the whole bound by width, over their medians at the narrowest, and the slope of 1/sqrt(d)."""
    from rankscope.figures import palette

    widths = sorted({*pure["width"].to_list()})
    for index, (quantity, label) in enumerate(
        (("c", "c, measured"), ("bound", "whole bound"), ("relative", "c of relative residuals"))
    ):
        rows = pure.filter(pl.col("log10").is_finite(), quantity=quantity).sort("width", "seed")
        values: dict[int, list[float]] = {}
        for width, log in rows.select("width", "log10").iter_rows():
            values.setdefault(width, []).append(log)
        if values:
            at_narrowest = statistics.median(values[min(values)])
            shifted = {width: [log - at_narrowest for log in logs] for width, logs in values.items()}
            seed_band(axes, shifted, label, palette()[index + 2])
    line = [BOUND * math.log10(width / widths[0]) for width in widths]
    axes.plot(widths, line, color="grey", linewidth=0.9, linestyle="--", label="width^(−1/2)")
    _doubling(axes, widths)
    title_panel(axes, "Pure attention: ‖R_L‖ = c ‖R_(L−1)‖³", "width", "log10, relative to the narrowest")
    axes.legend(fontsize=8, frameon=False, loc="best")


QUESTION = Question(
    name="width-depth",
    title="Width or depth at equal parameters and at equal compute: which learns, and does width slow collapse?",
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
        "Written after a first quick run had shown the slope of c: the whole bound, with the norms of the same "
        "weights, has that slope (within 0.25, seed by seed).",
    ),
    method=(
        "Shapes (layers × width) in two families: of equal parameters, L·d² is constant; of equal compute, "
        "L·(24 d² + 4 n d) is. Pre-norm decoders with four heads and Xavier weights learn the next character of Moby "
        "Dick. One recipe would be a confound between shapes, so each shape is trained at every learning rate of a "
        "grid on tuning seeds, and reported at the rate of its lowest median loss, on other seeds. A shape has learnt "
        "if its worst seed beats a guess by frequency by more than its seeds differ; shapes whose losses overlap with "
        "the best's are not told from it. Before training: `forecast` (place among trained designs, chance to learn) "
        "and the relative residual after the last layer. After: held-out loss, the residual in deviation arithmetic, "
        "entropy, and shares of paths by length (`decompose`).\n\nThe bound is asked apart from training: fresh "
        "networks of heads alone at one depth and several widths; in deviation arithmetic the residual cubes from "
        "layer to layer, and the constant c of the last layer is read, in the measure of the bound. For the same "
        "layers γ, β and the whole bound are computed, since norms of weights change with the width as 1/√d does."
    ),
    refuted_by=(
        "Longer training or larger budgets, which move the best shape; rates beyond the grid; weights that start "
        "smaller in deeper networks (here Xavier at every depth); heads of one width (here four heads at every width); "
        "trained weights, whose scores may follow the directions that tokens differ along. Initial weights whose norms "
        "have another slope in the width did: under N(0, 0.02) wider networks fall slower, and on 8 tokens in place of "
        "32 all widths fall alike (`pytest packages/rankscope-studies/study_tests/rederived/test_cubing.py -m ''`)."
    ),
    quick=QUICK, full=FULL, gather=gather, answer=answer, draw=draw, seconds=300.0,
    caption="Medians over seeds, bands: their range. Grey: a guess by frequency, and the slope of the bound's 1/√d.",
    changed=RuleChange(
        "Whether width slows collapse is said by relative residuals: by the constant c, as before, the answer "
        "was that width slows it.",
    ),
)  # fmt: skip
