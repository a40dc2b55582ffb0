"""Is collapse unique to attention? Recurrent, state space, mixer, graph and convolutional networks, measured alike.

Dong et al. (2021) prove that attention without skips makes tokens the same. Graph convolutions are known to
over-smooth (Li et al. 2018), and averaging with positive weights is all that takes. Here nine mixers of positions
(`token_mixers.py`) are put into the same three forms, measured by the same metrics over positions through `watch`,
fresh and trained, on the pixels of digits.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import TYPE_CHECKING

import polars as pl
import torch
from torch import Tensor

from rankscope.figures import power
from rankscope.lab import Digits, Recipe, optimizer_step
from rankscope.live import watch
from rankscope.metrics import METRICS
from rankscope_studies.questions.drawing import line_look, title_panel
from rankscope_studies.questions.falls import NEAR, THRESHOLD, StackFall, collapsed, no_collapse_verdict, seed_curves
from rankscope_studies.questions.question import HypothesisVerdict, Question, StudyAnswer, Tables
from rankscope_studies.questions.summaries import rank_correlation, spread
from rankscope_studies.questions.token_mixers import FORMS, MIXERS, MixingNetwork, averaging_ratio
from rankscope_studies.study import PageTable, Setup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRIC, ACROSS = "relative_mu", "across_images"
WATCHED = (METRIC, "relative_residual", "effective_rank")
LEARNT = 0.5  # Accuracy from which on a network has learnt; guessing gives 0.1
GEOMETRIC = 1.5  # A fall whose steps grow by more than this factor from layer to layer is faster than geometric
RELATED = 0.7  # Rank correlation from which on the first block is said to foretell the stack
TINY = 1e-12  # Ratios below are zero but for the rounding of central differences
AVERAGING = ("attention", "gcn ring", "gcn path", "gcn complete")  # Rows of positive weights that sum to one
FREE = ("mixer", "conv")  # Weights of any sign
RECURRENT = ("lstm", "gru")


@dataclass(frozen=True)
class MixerSizes:
    """How large the experiment is."""

    mixers: tuple[str, ...]
    depth: int  # Blocks of fresh networks
    width: int
    seeds: int
    images: int  # Held-out images that are measured
    trained_depth: int
    trained_seeds: int
    steps: int  # Of AdamW
    batch: int


QUICK = MixerSizes(tuple(MIXERS), 24, 32, 3, 4, trained_depth=4, trained_seeds=2, steps=80, batch=16)
FULL = MixerSizes(tuple(MIXERS), 48, 64, 5, 16, trained_depth=12, trained_seeds=3, steps=600, batch=64)
CURVES = {
    "mixer": pl.String, "form": pl.String, "trained": pl.Boolean, "seed": pl.Int64, "layer": pl.Int64,
    "metric": pl.String, "log10": pl.Float64, "marked": pl.Boolean,
}  # fmt: skip
SCORES = {
    "mixer": pl.String, "form": pl.String, "seed": pl.Int64, "loss": pl.Float64, "accuracy": pl.Float64,
    "parameters": pl.Int64,
}  # fmt: skip


def gather(setup: Setup, sizes: MixerSizes) -> dict[str, pl.DataFrame]:
    """Measure fresh networks, then train and measure: one cached piece for each mixer, form and seed."""
    settings = {"width": sizes.width, "images": sizes.images}
    fresh = {
        f"fresh {mixer} {form} {seed}": partial(fresh_curves, mixer, form, seed, sizes, setup.device)
        for mixer, form, seed in product(sizes.mixers, FORMS, range(sizes.seeds))
    }
    ratios = {
        f"ratio {mixer} {seed}": partial(first_ratio, mixer, seed, sizes)
        for mixer, seed in product(sizes.mixers, range(sizes.seeds))
    }
    trained = {
        f"trained {mixer} {form} {seed}": partial(trained_rows, mixer, form, seed, sizes, setup.device)
        for mixer, form, seed in product(sizes.mixers, ("bare", "whole"), range(sizes.trained_seeds))
    }
    curves = setup.cached_parts(fresh, depth=sizes.depth, **settings)
    averages = setup.cached_parts(ratios, **settings)
    learning = {"depth": sizes.trained_depth, "steps": sizes.steps, "batch": sizes.batch}
    rows = setup.cached_parts(trained, **learning, **settings)
    scores = rows.filter(pl.col("layer").is_null()).select([*SCORES])
    after = rows.filter(pl.col("layer").is_not_null()).select([*CURVES])
    return {"curves": pl.concat([curves, after]), "averages": averages, "scores": scores}


def fresh_curves(mixer: str, form: str, seed: int, sizes: MixerSizes, device: str = "cpu") -> pl.DataFrame:
    """The metrics of a fresh network after every block."""
    network = _network(mixer, form, sizes.depth, seed, sizes).to(device)
    rows = measured(network, Digits(patch=1).held_out(sizes.images).inputs.to(device))
    return _labelled(rows, mixer, form, seed, trained=False)


def first_ratio(mixer: str, seed: int, sizes: MixerSizes) -> pl.DataFrame:
    """The averaging ratio of the first block of a fresh bare network, on the CPU in float64."""
    network = _network(mixer, "bare", 1, seed, sizes).double()
    X = network.embed(Digits(patch=1).held_out(sizes.images).inputs.double())
    return pl.DataFrame({"mixer": [mixer], "seed": [seed], "ratio": [averaging_ratio(network, X.detach(), seed=seed)]})


def trained_rows(mixer: str, form: str, seed: int, sizes: MixerSizes, device: str = "cpu") -> pl.DataFrame:
    """Train a network on digits: a row with loss and accuracy, and rows with its metrics after every block."""
    task = Digits(patch=1)
    network = train(_network(mixer, form, sizes.trained_depth, seed, sizes).to(device), task, seed, sizes)
    held = task.held_out(360).to(device)
    with torch.no_grad():
        logits = network(held.inputs)
    count = sum(parameter.numel() for parameter in network.parameters())
    score = {"mixer": mixer, "form": form, "seed": seed, "loss": float(task.loss(logits, held)),
             "accuracy": float(task.accuracy(logits, held)), "parameters": count}  # fmt: skip
    rows = [row for row in measured(network, held.inputs[: sizes.images]) if row["metric"] != ACROSS]
    scores = pl.DataFrame([score], schema=SCORES)
    return pl.concat([scores, _labelled(rows, mixer, form, seed, trained=True)], how="diagonal")


def train(network: MixingNetwork, task: Digits, seed: int, sizes: MixerSizes) -> MixingNetwork:
    """Train with the lab's recipe: AdamW, a warm-up and a cosine, gradients cut to length one."""
    recipe = Recipe(steps=sizes.steps, batch_size=sizes.batch, warmup=0.1)
    parameters = [*network.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay)
    device = parameters[0].device
    for step in range(recipe.steps):
        batch = task.batch(recipe.batch_size, seed, step).to(device)
        optimizer.param_groups[0]["lr"] = recipe.lr * recipe.lr_scale(step)
        loss = task.loss(network(batch.inputs), batch)
        optimizer_step(loss, optimizer, lambda: _clip(parameters, recipe.max_norm))
    return network


def _clip(parameters: Sequence[Tensor], max_norm: float) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def measured(network: MixingNetwork, images: Tensor) -> list[dict[str, object]]:
    """Metrics after every block, in float64: the mean of log10 over images, and whether any image lies at its floor.

    `across_images` is `relative_mu` over images in place of positions, an image being one row of all its positions: by
    how much what the network holds depends on the image at all.
    """
    network = network.double().eval()
    settings = {"blocks": "blocks", "padding": "none", "layout": "batch first", "keep": "states"}
    with torch.no_grad(), watch(network, list(WATCHED), **settings) as watched:  # type: ignore[arg-type]
        network(images.double())
    profile = watched.profile()
    rows: list[dict[str, object]] = []
    for metric in WATCHED:
        logs, floors = profile.curve(metric, "log10"), profile.curve(metric, "below_floor")
        for layer in range(logs.shape[1]):
            rows.append(_row(layer, metric, logs[:, layer], floors[:, layer] == 1))
    for layer, (states,) in watched.states.items():
        reading = METRICS[METRIC].read(states.flatten(1)[None])
        rows.append(_row(layer, ACROSS, reading.log10, reading.below_floor))
    return rows


def _row(layer: int, metric: str, logs: Tensor, marked: Tensor) -> dict[str, object]:
    return {"layer": layer, "metric": metric, "log10": float(logs.mean()), "marked": bool(marked.any())}


def _network(mixer: str, form: str, depth: int, seed: int, sizes: MixerSizes) -> MixingNetwork:
    task = Digits(patch=1)
    positions = task.held_out(1).inputs.shape[1]
    return MixingNetwork(mixer, form, depth, positions, sizes.width, task.interface.classes, seed)


def _labelled(rows: list[dict[str, object]], mixer: str, form: str, seed: int, trained: bool) -> pl.DataFrame:
    labels = {"mixer": mixer, "form": form, "trained": trained, "seed": seed}
    return pl.DataFrame([labels | row for row in rows], schema=CURVES)


# ---- The answer, from tables alone


@dataclass(frozen=True)
class MixerFall(StackFall):
    """How differences between positions fall along the stacks of one mixer, over seeds."""

    decades: float  # By how many powers of ten a block weakens them, up to the floor; the median over seeds
    order: float  # By how much each step of the fall is larger than the one before; NaN of falls below two decades

    @property
    def text(self) -> str:
        """The median and the range over seeds; at the floor, that it is an upper limit."""
        if not self.at_floor:
            return super().text
        return f"≤ {power(max(self.ends))} (floor)" if math.isfinite(max(self.ends)) else "0 (in float64)"

    @property
    def speed(self) -> str:
        """The decades of a block."""
        return "all at once" if math.isinf(self.decades) else f"{self.decades:.2f}"


def mixer_fall(
    curves: pl.DataFrame, mixer: str, form: str, trained: bool = False, metric: str = METRIC
) -> MixerFall | None:
    """The fall of one mixer in one form; None where the table has none."""
    ends, decades, orders, floor = [], [], [], False
    for logs, known in seed_curves(curves.filter(mixer=mixer, form=form, trained=trained, metric=metric)):
        floor |= known < len(logs)
        ends.append(logs[-1] if math.isfinite(logs[-1]) else -math.inf)
        if known < 2:  # at its floor after the first block
            decades.append(math.inf)
            continue
        steps = [before - after for before, after in pairwise(logs[:known])]
        decades.append(sum(steps) / len(steps))
        ratios = [later / earlier for earlier, later in pairwise(steps) if earlier > 0]
        if sum(steps) > 2 and ratios:
            orders.append(statistics.median(ratios))
    if not ends:
        return None
    order = statistics.median(orders) if orders else math.nan
    return MixerFall(tuple(ends), floor, statistics.median(decades), order)


MixerFalls = Mapping[str, MixerFall]


def mixer_falls(
    curves: pl.DataFrame, sizes: MixerSizes, form: str, trained: bool = False, metric: str = METRIC
) -> MixerFalls:
    """The falls of all mixers that were measured in a form."""
    falls = {mixer: mixer_fall(curves, mixer, form, trained, metric) for mixer in sizes.mixers}
    return {mixer: fall for mixer, fall in falls.items() if fall is not None}


def answer(tables: Tables, sizes: MixerSizes) -> StudyAnswer:
    """The answer that the tables give."""
    curves, scores = tables["curves"], tables["scores"]
    falls = {form: mixer_falls(curves, sizes, form) for form in FORMS}
    falls |= {metric: mixer_falls(curves, sizes, "bare", metric=metric) for metric in (ACROSS, "effective_rank")}
    ratio = pl.col("ratio")
    averages = tables["averages"].with_columns(ratio=pl.when(ratio < TINY).then(0.0).otherwise(ratio))
    ratios = {mixer: averages.filter(mixer=mixer)["ratio"].to_list() for mixer in sizes.mixers}
    bare = falls["bare"]
    verdicts = [
        _averaging_verdict(bare), _order_verdict(bare), _forgetting_verdict(bare, falls[ACROSS]),
        _ratio_verdict(ratios, bare), no_collapse_verdict(falls["whole"]), _learning_verdict(bare, scores, sizes),
    ]  # fmt: skip
    notes = [
        "Graph convolution on the complete graph *is* attention with a uniform pattern, and graph convolutions in "
        "general are attention with a fixed pattern: rows of positive weights that sum to one, so that differences "
        "shrink by the second eigenvalue and what is common stays. Of MLP-Mixer's matrices only their part along "
        "`11ᵀ/n` is such an average, one of n² directions; the rest moves differences about. Convolutions have weights "
        "of any sign and average nothing at first.",
        f"Fresh: seeds 0 to {sizes.seeds - 1}; trained: {sizes.trained_depth} blocks, seeds 0 to "
        f"{sizes.trained_seeds - 1}, {sizes.steps} steps. All metrics in float64; values at the floor of float64 are "
        "marked, and stand as upper limits.",
        "Expectations were written before any run. Changed after the quick run was seen, on the same data: what "
        "differs between images was first taken at each position, where pixels that are blank in all images gave "
        "zero, and is now taken over whole images. 'Cannot be told' replaced 'does not hold' for learning (80 steps "
        "are too few for attention itself) and 'holds' for the order of the fall (one mixer is at its floor after "
        "one block). In that run LSTM and GRU end at either side of the threshold of 0.1, which was fixed before: that "
        "one counts as collapsed and the other does not says little. The answer leaves undecided what ends within "
        f"{NEAR:g} decades of the threshold; verdicts, whose rules are those of before the run, do not.",
    ]
    evidence = [_fresh_table(falls, ratios, sizes), _trained_table(curves, scores, sizes)]
    trained = mixer_fall(curves, "attention", "bare", trained=True)
    return StudyAnswer(_sentence(sizes, falls, scores, trained), verdicts, evidence, notes)


def _sentence(
    sizes: MixerSizes, falls: Mapping[str, MixerFalls], scores: pl.DataFrame, trained: MixerFall | None
) -> str:
    near = [mixer for mixer, fall in falls["bare"].items() if fall.near]
    fallen = [mixer for mixer in collapsed(falls["bare"]) if mixer not in ("attention", *near)]
    rivals = len(sizes.mixers) - ("attention" in sizes.mixers)
    held = len(sizes.mixers) - len(collapsed(falls["whole"]))
    beginning = f"No: {len(fallen)}" if fallen else "Yes: none"
    named = [*([", ".join(fallen)] if fallen else []), *([f"undecided: {', '.join(near)}"] if near else [])]
    which = f" ({'; '.join(named)})" if named else ""
    attention = falls["bare"].get("attention")
    speed = "; attention was not measured"
    if attention is not None:
        grown = "" if math.isnan(attention.order) else f" (each step {attention.order:.1f} times the one before)"
        faster = attention.order > GEOMETRIC  # False of NaN
        verb = "falls" if attention.collapsed else "keeps positions apart, falling"
        speed = f"; attention {verb} by {attention.speed} decades a block{', faster with each' * faster}{grown}"
    equal = ""
    if trained is not None and trained.collapsed and _learns(scores, "attention", "bare"):
        accuracy = spread(scores.filter(mixer="attention", form="bare")["accuracy"].to_list(), ".2f")
        equal = f"; though its positions are the same, it learns digits bare (accuracy {accuracy})"
    return (
        f"{beginning} of {rivals} other mixers {'makes' if len(fallen) == 1 else 'make'} positions the same in "
        f"{sizes.depth} bare blocks{which}{speed}{equal}; with skips, norms and MLPs {held} of "
        f"{len(sizes.mixers)} keep positions apart."
    )


def _averaging_verdict(bare: MixerFalls) -> HypothesisVerdict:
    """Whether mixers that average collapse, and those with free weights do not."""
    known = [mixer for mixer in (*AVERAGING, *FREE) if mixer in bare]
    wrong = [mixer for mixer in known if bare[mixer].collapsed != (mixer in AVERAGING)]
    ours = f"so for {len(known) - len(wrong)} of {len(known)}" + (f"; not for {', '.join(wrong)}" if wrong else "")
    return HypothesisVerdict(ours, not wrong if known else None)


def _order_verdict(bare: MixerFalls) -> HypothesisVerdict:
    """Whether only attention falls faster than geometrically; it cannot be told beside a fall that is too fast."""
    orders = {mixer: fall.order for mixer, fall in bare.items() if not math.isnan(fall.order)}
    if "attention" not in orders:
        return HypothesisVerdict("attention falls by less than two decades above its floor", None)
    sudden = [mixer for mixer, fall in bare.items() if math.isinf(fall.decades)]
    flat = [mixer for mixer in bare if mixer not in (*orders, *sudden)]
    ours = "growth of steps: " + ", ".join(f"{mixer} {order:.2f}" for mixer, order in orders.items())
    ours += f"; at the floor after one block: {', '.join(sudden)}" if sudden else ""
    ours += f"; too small a fall: {', '.join(flat)}" if flat else ""
    only = [mixer for mixer, order in orders.items() if order > GEOMETRIC] == ["attention"]
    return HypothesisVerdict(ours, None if only and sudden else only)


def _forgetting_verdict(bare: MixerFalls, images: MixerFalls) -> HypothesisVerdict:
    """Whether recurrent stacks lose images wherever they lose positions."""
    known = [mixer for mixer in RECURRENT if mixer in bare]
    ours = "; ".join(f"{mixer}: positions {_text(bare, mixer)}, images {_text(images, mixer)}" for mixer in known)
    lost = {*collapsed(bare)} & {*collapsed(images)}
    return HypothesisVerdict(ours or "not measured", {*known} <= lost if known else None)


def _ratio_verdict(ratios: Mapping[str, list[float]], bare: MixerFalls) -> HypothesisVerdict:
    """Whether the order of mixers by the first block's ratio is that by the fall of the stack."""
    pairs = [
        (-math.log(max(TINY, statistics.median(ratios[mixer]))), fall.decades)
        for mixer, fall in bare.items()
        if ratios[mixer]
    ]
    if len(pairs) < 4:
        return HypothesisVerdict("fewer than four mixers", None)
    rank = rank_correlation(*zip(*pairs, strict=True))
    holds = None if math.isnan(rank) else rank >= RELATED
    return HypothesisVerdict(f"rank correlation {rank:.2f} over {len(pairs)} mixers", holds)


def _learning_verdict(bare: MixerFalls, scores: pl.DataFrame, sizes: MixerSizes) -> HypothesisVerdict:
    """Whether whole networks learn with every seed, and bare ones only where fresh positions differ."""
    learnt = {form: [mixer for mixer in sizes.mixers if _learns(scores, mixer, form)] for form in ("bare", "whole")}
    against = [mixer for mixer in learnt["bare"] if mixer in collapsed(bare)]
    missing = [mixer for mixer in sizes.mixers if mixer not in learnt["whole"]]
    ours = f"whole: {len(learnt['whole'])} of {len(sizes.mixers)} learn; bare: {', '.join(learnt['bare']) or 'none'}"
    if against:
        ours += f"; of these {', '.join(against)} begin collapsed at {sizes.depth} blocks"
    if not scores.height or (missing and "attention" in missing):  # whole attention learns, given the steps
        return HypothesisVerdict(f"{ours}: too few steps to tell", None)
    return HypothesisVerdict(ours, not against and not missing)


def _learns(scores: pl.DataFrame, mixer: str, form: str) -> bool:
    """True if the networks of a mixer in a form have learnt with every seed."""
    accuracies = scores.filter(mixer=mixer, form=form)["accuracy"].to_list()
    return bool(accuracies) and min(accuracies) > LEARNT


def _fresh_table(falls: Mapping[str, MixerFalls], ratios: Mapping[str, list[float]], sizes: MixerSizes) -> PageTable:
    rows = []
    for mixer in sizes.mixers:
        fall = falls["bare"].get(mixer)
        order = "–" if fall is None or math.isnan(fall.order) else f"{fall.order:.2f}"
        cells = [_text(falls[column], mixer) for column in (ACROSS, "effective_rank", "norm", "whole")]
        speed = "–" if fall is None else fall.speed
        rows.append([mixer, spread(ratios[mixer]), _text(falls["bare"], mixer), speed, order, *cells])
    return PageTable(
        f"Fresh networks of {sizes.depth} blocks: `relative_mu` over positions after the last, median (range) of "
        f"{sizes.seeds} seeds",
        ["mixer", "averaging ratio", "bare", "decades a block", "growth of steps", "bare, between images",
         "bare, effective rank", "norm", "whole"], rows,
        "*Averaging ratio*: by how much the first block weakens differences between positions against what they share. "
        "*Growth of steps*: the factor from one block's fall to the next's (1 is geometric, 3 is pure attention's "
        "law); of falls of two decades and more. *Between images*: `relative_mu` over images, by how much what the "
        "network holds depends on the image.",
    )  # fmt: skip


def _trained_table(curves: pl.DataFrame, scores: pl.DataFrame, sizes: MixerSizes) -> PageTable:
    rows = [[mixer] for mixer in sizes.mixers]
    for form in ("bare", "whole"):
        falls = mixer_falls(curves, sizes, form, trained=True)
        for row, mixer in zip(rows, sizes.mixers, strict=True):
            form_scores = scores.filter(mixer=mixer, form=form)
            row += [spread(form_scores[name].to_list()) for name in ("accuracy", "loss")] + [_text(falls, mixer)]
    return PageTable(
        f"Trained on digits: {sizes.trained_depth} blocks, {sizes.steps} steps, {sizes.trained_seeds} seeds; held-out "
        "accuracy and loss, and `relative_mu` after the last block",
        ["mixer", "bare: accuracy", "loss", "relative_mu", "whole: accuracy", "loss", "relative_mu"], rows,
        "Guessing has an accuracy of 0.1 and a loss of 2.30. Attention in the form `whole` is a vision transformer "
        "whose patches are single pixels.",
    )  # fmt: skip


def _text(falls: MixerFalls, mixer: str) -> str:
    return falls[mixer].text if mixer in falls else "–"


# ---- The figure


def draw(tables: Tables, sizes: MixerSizes) -> "dict[str, Figure]":
    """Differences between positions by layer in three forms, fresh; and the same trained, against accuracy."""
    from rankscope.figures import panels, tick

    figure, axes = panels(3, width=4.2, height=3.3, rows=2)
    fresh = tables["curves"].filter(~pl.col("trained"))
    shown = {
        "bare: the mixer alone": ("bare", METRIC), "norm after every mixer": ("norm", METRIC),
        "skips, norms and MLPs": ("whole", METRIC), "bare, between images": ("bare", ACROSS),
    }  # fmt: skip
    for panel, (title, (form, metric)) in zip(axes, shown.items(), strict=False):
        for index, mixer in enumerate(sizes.mixers):
            _curve(panel, fresh.filter(mixer=mixer, form=form, metric=metric), mixer, index)
        panel.axhline(math.log10(THRESHOLD), color="grey", linewidth=0.8, linestyle=":")
        title_panel(panel, f"Fresh, {title}", "block")
        if form != "whole":
            panel.set_yscale("symlog", linthresh=1.0)
            panel.set_ylim(-25, 0.2)
            panel.set_yticks([0, -1, -4, -16])
        else:
            panel.set_yticks([math.log10(value) for value in (0.1, 0.2, 0.5, 1.0)])
        panel.yaxis.set_major_formatter(tick if form != "whole" else lambda log10, _: power(log10))
    axes[0].set_ylabel("relative mu over positions")
    axes[3].set_ylabel("relative mu over images")
    _scores(axes[4], tables, sizes)
    axes[5].axis("off")
    handles, names = axes[0].get_legend_handles_labels()
    axes[5].legend(handles, names, loc="center", frameon=False, fontsize=9)
    return {QUESTION.name: figure}


def _curve(axes: "Axes", rows: pl.DataFrame, mixer: str, index: int) -> None:
    """The median over seeds as a line, their range as a band; layers at a floor are open markers."""
    look = line_look(index)
    by_layer = rows.group_by("layer").agg(
        pl.col("log10").median().alias("middle"), pl.col("log10").min().alias("low"),
        pl.col("log10").max().alias("high"), pl.col("marked").any(),
    ).sort("layer")  # fmt: skip
    sure = by_layer.filter(~pl.col("marked"))
    every = max(1, rows["layer"].n_unique() // 6)
    axes.fill_between(sure["layer"], sure["low"], sure["high"], color=look["color"], alpha=0.15, linewidth=0)
    marked = (index % every, every)
    axes.plot(sure["layer"], sure["middle"], markersize=4, markevery=marked, linewidth=1.4, label=mixer, **look)
    floor = by_layer.filter("marked").head(1)
    if len(floor):
        look |= {"markerfacecolor": "none", "markersize": 6, "linestyle": "none"}
        axes.plot(floor["layer"], [max(-16.0, *floor["middle"])], **look)


def _scores(axes: "Axes", tables: Tables, sizes: MixerSizes) -> None:
    """Accuracy of trained networks against what is left of differences between their positions."""
    from rankscope.figures import tick

    for index, mixer in enumerate(sizes.mixers):
        look = line_look(index) | {"linestyle": "none", "markersize": 6}
        for form in ("bare", "whole"):
            scores = tables["scores"].filter(mixer=mixer, form=form).sort("seed")
            rows = tables["curves"].filter(mixer=mixer, form=form, trained=True, metric=METRIC)
            last = rows.filter(layer=sizes.trained_depth).sort("seed")
            face = look["color"] if form == "whole" else "none"
            x = [max(-16.0, value) for value in last["log10"].to_list()]
            axes.plot(x, scores["accuracy"].to_list(), markerfacecolor=face, **look)
    axes.axhline(0.1, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(-25, 0.2)
    axes.set_xticks([0, -1, -4, -16], [tick(log10) for log10 in (0, -1, -4, -16)])
    title = "Trained: accuracy (filled: whole, open: bare)"
    title_panel(axes, title, "relative mu after the last block", "held-out accuracy")


QUESTION = Question(
    name="beyond-attention",
    title="Is collapse unique to attention?",
    why=(
        "Dong et al. (2021) prove doubly exponential collapse for attention alone, and ask what other parts of "
        "networks do. Graph networks are known to over-smooth; whether recurrent, state space, mixer and "
        "convolutional stacks lose the differences between positions was not measured on one scale."
    ),
    hypotheses=(
        "Without skips and norms, mixers that average with positive weights (attention, graph convolutions) make "
        "positions the same, and those with free weights (MLP-Mixer, ConvNet) do not.",
        "Only attention falls faster than geometrically: its pattern flattens as positions become alike, other mixers "
        "have the same weights at every scale.",
        "LSTM and GRU stacks lose positions by forgetting: at their last block, images are as much the same as "
        "positions are.",
        "The first block foretells the stack: the more it weakens differences against what positions share, the faster "
        "the stack falls (rank correlation of at least 0.7).",
        "With skips, norms and MLPs no mixer collapses.",
        "Whole networks learn with every seed; bare ones learn only if they do not collapse fresh.",
    ),
    method=(
        "Nine mixers of positions, written in plain torch (`rankscope_studies/questions/token_mixers.py`), each in "
        "three forms: `bare` (the mixer alone), `norm` (a LayerNorm after it) and `whole` (pre-norm, with skips and an "
        "MLP). "
        "Positions are the 64 pixels of 8 × 8 digits, embedded as `pixel · a + position`. Fresh networks are watched "
        "in float64 with `rankscope.watch(network, blocks=\"blocks\")`: `relative_mu`, `relative_residual` and "
        "`effective_rank` after every block, and `relative_mu` between images (an image is one row of all its "
        "positions), which tells a network "
        "whose positions are alike from one that has forgotten what it was shown. Positions count as the same where "
        "`relative_mu` is below 0.1 in the median over seeds. Networks are trained on which digit is shown with the "
        "lab's recipe (AdamW, rate 0.001, warm-up and cosine) and measured again. Linear maps start as N(0, "
        "1/inputs), before ReLU as N(0, 2/inputs), recurrent layers as torch has them, the state space model as "
        "S4D-Lin."
    ),
    refuted_by=(
        "Other initial weights: larger recurrent weights make LSTM and GRU stacks chaotic, and negative eigenvalues "
        "of a graph convolution's weights do not help it, but learned residual weights would. A mixer with positive "
        "weights and rows that sum to one that keeps positions apart in bare stacks, or a ConvNet or Mixer that loses "
        "them at larger width or depth, would change the first half of the answer; a whole network that collapses at "
        "hundreds of blocks would change the second."
    ),
    quick=QUICK, full=FULL, gather=gather, answer=answer, draw=draw, seconds=200.0,
    caption="Lines: medians over seeds, bands: their range, open markers: the floor of float64. Dotted: 0.1, below "
    "which positions count as the same; of trained networks, guessing.",
)  # fmt: skip
