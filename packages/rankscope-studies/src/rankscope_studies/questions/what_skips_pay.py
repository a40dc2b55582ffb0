"""What do skips and MLPs pay for holding off collapse?

Dong et al. (2021) read their bound as a tug of war: attention makes tokens alike, and MLPs with a large Lipschitz
constant, and skips, hold them apart. They note that a large Lipschitz constant may cost robustness, and leave both the
size of the effect and its price open. Here the two sides are measured layer by layer (`branch_gains.py`), in trained
models and over the training of networks of our own, whose MLPs, skips, width and initial gains differ one at a time;
the price is what noise at the embedding does to the output.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import polars as pl
from matplotlib.lines import Line2D

from rankscope.errors import SourceError
from rankscope.figures import Axes, Figure, palette, panels
from rankscope_studies.questions.branch_gains import PARTS
from rankscope_studies.questions.drawing import seed_band, title_panel
from rankscope_studies.questions.question import HypothesisVerdict, Question, RuleChange, StudyAnswer, Tables
from rankscope_studies.questions.skip_networks import (
    GRADIENT,
    LAYERS,
    NOISE,
    PLACES,
    TUNING_SEEDS,
    USUAL,
    PriceSizes,
    ends,
    equal_width,
    kinds,
    model_layers,
    trained_kind,
)
from rankscope_studies.questions.skip_results import (
    MODELS,
    PRICE,
    SIDES,
    SKIPS,
    TASKS,
    PriceResults,
    known_numbers,
    skip_price,
)
from rankscope_studies.questions.summaries import spread, spread_of_logs
from rankscope_studies.study import PageTable, Setup

MOST_LAYERS = 0.75  # The share of layers in which something must be so
LOOSE = 10.0  # How many times a bound must be above what was measured to be called loose
KEEPS = 2.0  # By how much more a larger MLP must keep of differences to mitigate
GROWN = 2.0  # How many times longer tokens must be after the last layer than before the first
PULLS = 1.5  # By how much Lipschitz constants must grow in training
SAME = {"size": "equal width", "parameters": "equal parameters"}
PULLERS = {"attention": "attention", "mlp": "MLP", "norms": "norms"}  # Parts of a layer of trained models
EPS = math.log10(2.0**-23)  # Of float32, in which networks are trained: smaller relative residuals make no difference
PALE: dict[str, Any] = {"alpha": 0.45, "markerfacecolor": "white"}  # How networks that did not learn are drawn
SEEN = (
    "Hypotheses were written into the file after trials had been seen (two samples of each trained model; networks "
    "with the smallest and the largest MLP on digits), and initial weights were changed because of them: read "
    "'expected' as expected of this run. The last hypothesis was added after the first quick run, before steps along "
    "the gradient were measured. Changed after a full run was seen: tug of war and training are judged by differences "
    "over the common part after a branch is added to the stream, not within the branch; steps along the gradient have "
    "smaller sizes, as all had been below the first; rates are chosen on tuning seeds. Changed after the quick run "
    "that came then, before another full one: what norms on sums do, and layers as a whole, is measured and shown "
    "beside attention and MLPs, which are judged as before; at full size there are four rates, since each of two was "
    "an end of the grid; the answer gives each task, equal width and equal parameters by themselves. Changed after the "
    "full run of 18 November 2026: what skips pay is given over all sizes of MLPs and with noise on pixels, as the "
    "usual size alone had nearly the largest number; where networks without skips did not learn, skips of weight 0.5 "
    "stand in for them. Where both residuals are below float32's eps, mitigation is not judged: ratios of what no "
    "network could see had been counted as failures. A hypothesis of every seed fails with one that fails, though "
    "numbers of others are missing."
)


QUICK = PriceSizes(
    ("digits",), multiples=(1, 4, 16), gains=(4.0,), half_skips=(4,), layers=3, width=24, heads=4, context=32, seeds=2,
    steps=120, batch=24, rates=(3e-3,), shares=(0.0, 0.25, 1.0), samples=2, evaluated=200, draws=2, texts=2, tokens=32,
)  # fmt: skip
FULL = PriceSizes(
    ("digits", "text"), multiples=(1, 2, 4, 8, 16), gains=(0.25, 4.0), half_skips=(1, 4, 16), layers=6, width=64,
    heads=4, context=32, seeds=5, steps=1000, batch=32, rates=(3e-4, 1e-3, 3e-3, 1e-2), shares=(0.0, 0.05, 0.3, 1.0),
    samples=2, evaluated=360, draws=4, texts=3, tokens=64,
)  # fmt: skip


def gather(setup: Setup, sizes: PriceSizes) -> dict[str, pl.DataFrame]:
    """Measure trained models, where they are at hand, and train: one cached piece for each model, task and kind."""
    models, measured = [], {"draws": sizes.draws, "measured": PARTS}
    for name in MODELS:
        part: dict[str, Callable[[], pl.DataFrame]] = {f"model {name}": partial(model_layers, name, sizes)}
        try:
            models.append(setup.cached_parts(part, texts=sizes.texts, tokens=sizes.tokens, **measured))
        except SourceError as missing:  # nothing is cached: another machine may have the model
            setup.say(f"model {name} is left out: {missing}")
    settings = {
        name: value for name, value in asdict(sizes).items()
        if name not in ("tasks", "multiples", "gains", "half_skips", "texts", "tokens", "width")
    }  # fmt: skip
    parts: dict[str, Callable[[], pl.DataFrame]] = {
        f"{task} {kind.series} {kind.skip:g} {kind.multiple} {kind.gain:g} {kind.width}": partial(
            trained_kind, task, kind, sizes, setup.device
        )
        for task in sizes.tasks
        for kind in kinds(sizes)
    }
    settings |= measured | {"noise": NOISE, "gradient": GRADIENT, "places": PLACES, "tuning": TUNING_SEEDS}
    networks = setup.cached_parts(parts, **settings)
    return {"models": pl.concat([pl.DataFrame(schema=LAYERS), *models]), "networks": networks}


# ---- The answer, from tables alone


def answer(tables: Tables, sizes: PriceSizes) -> StudyAnswer:
    """The answer that the tables give."""
    results = PriceResults(tables, sizes)
    mitigation = _size_verdict(results, 0.0, "residual", "residual kept")
    price = _size_verdict(results, 1.0, "tolerance embedding", "noise tolerated")
    worst = _size_verdict(results, 1.0, "tolerance gradient", "steps tolerated")
    verdicts = [
        _tug_verdict(results), _bound_verdict(results), mitigation, price, _skip_verdict(results),
        _training_verdict(results), worst,
    ]  # fmt: skip
    absent = [name for name in MODELS if name not in results.models]
    notes = [SEEN]
    notes += [f"Trained models that were not at hand where this ran: {', '.join(absent)}."] if absent else []
    notes.append(_rates_note(results))
    evidence = [_models_table(results)] if results.models else []
    evidence += [_networks_table(results, task) for task in sizes.tasks] + [_training_table(results)]
    return StudyAnswer(_sentence(results, mitigation), verdicts, evidence, notes)


def _at_end(results: PriceResults, rate: float) -> bool:
    """True if a rate is the least or the largest of several: beyond it a better one may lie."""
    rates = results.sizes.rates
    return len(rates) > 1 and rate in (min(rates), max(rates))


def _rates_note(results: PriceResults) -> str:
    """Which kinds of networks chose an end of the grid of rates, and which are compared at different rates."""
    rates = results.sizes.rates
    if len(rates) == 1:
        return f"All networks were trained at one rate, {rates[0]:g}: kinds may differ in how well it suits them."
    chosen = dict[tuple[str, float], list[float]]()
    for task, kind in product(results.sizes.tasks, kinds(results.sizes)):
        chosen.setdefault((task, kind.skip), []).extend(results.rates(task, kind))
    texts, ends_chosen = [], 0
    for ((task, skip), of_kinds), end in product(chosen.items(), (max(rates), min(rates))):
        count = of_kinds.count(end)
        ends_chosen += count
        side = "largest" if end == max(rates) else "least"
        texts += [f"{TASKS[task]} with {SKIPS[skip]} {count} of {len(of_kinds)} ({end:g}, the {side})"] if count else []
    note = f"{ends_chosen} of {sum(map(len, chosen.values()))} kinds of networks chose an end of the grid of rates"
    note += f": {'; '.join(texts)}." if texts else "."
    unequal = [
        f"{TASKS[task]} {' and '.join(f'{rate:g}' for rate in sorted({*with_skips}))} with skips, "
        f"{' and '.join(f'{rate:g}' for rate in sorted({*of_kinds}))} with {SKIPS[skip]}"
        for (task, skip), of_kinds in chosen.items()
        if skip != 1.0 and {*of_kinds} != {*(with_skips := chosen[task, 1.0])}
    ]
    apart = (
        f" What skips pay is compared at different rates, which is part of it: {'; '.join(unequal)}. A second training "
        "of these networks on digits, at every rate, is among the findings: at equal rates much less is left."
    )
    return note + (apart if unequal else "")


def _sentence(results: PriceResults, mitigation: HypothesisVerdict) -> str:
    """What skips pay, what larger MLPs pay, and how hard all parts of trained models pull."""
    told, untold = list[str](), list[str]()
    for task in results.sizes.tasks:
        price = skip_price(results, task)
        (told if price.word else untold).append(price.in_short(bool(told)))
    skips = f"Skips cost {', '.join(told)}" if told else f"What skips pay cannot be told ({'; '.join(untold)})"
    collapsed = ", ".join(_collapsed(results))
    helps = {
        True: "it mitigates collapse", False: "it does not mitigate collapse reliably",
        None: f"all sizes collapse ({collapsed})" if collapsed else "its use cannot be judged",
    }  # fmt: skip
    small, large = ends(results.sizes)
    by_series = dict[str, dict[str, str]]()
    for task, series, by_seed, learnt in _by_size(results, 1.0, "tolerance embedding"):
        if learnt and (known := known_numbers(by_seed)):
            by_series.setdefault(SAME[series], {})[task] = f"{statistics.median(known):.2f}"
    prices, named = list[str](), list[str]()
    for same, by_task_text in by_series.items():
        known_tasks = [*by_task_text]  # Tasks are named once, where both comparisons have the same ones
        values = [text if named == known_tasks else f"{text} ({task})" for task, text in by_task_text.items()]
        prices.append(f"×{', ×'.join(values)} at {same}")
        named = known_tasks
    price_of_size = f"tolerate {', '.join(prices)}" if prices else "cannot be judged"
    mlps = f"{large // small}-fold MLPs {price_of_size}; without skips {helps[mitigation.holds]}"
    tug = ""
    if results.models:
        by_model = {
            part: known_numbers([results.middle(name, part) for name in results.models]) for part in (*PULLERS, "layer")
        }
        factors = {part: f"{statistics.median(known):.2f}" if known else "–" for part, known in by_model.items()}
        by_part = ", ".join(f"{title} ×{factors[part]}" for part, title in PULLERS.items())
        count = len(results.models)
        tug = f" {count} models' median layer: differences/common part ×{factors['layer']}, {by_part}."
    return f"{skips}. {mlps}.{tug}"


def _tug_verdict(results: PriceResults) -> HypothesisVerdict:
    """Whether attention weakens differences in most layers of every trained model, and MLPs strengthen them; with what
    norms and whole layers do."""
    shares, beside = {}, {}
    for name in results.models:
        attention, mlp = (results.by_layer(name, part, "stream") for part in ("attention", "mlp"))
        shares[name] = sum(log < 0 for log in attention) / len(attention), sum(log > 0 for log in mlp) / len(mlp)
        middles = (results.middle(name, part) for part in ("norms", "layer"))
        beside[name] = [spread(known_numbers([factor]), ".2f") for factor in middles]
    ours = "; ".join(
        f"{name}: {down:.0%} and {up:.0%} of layers (norms × {beside[name][0]}, layers in all × "
        f"{beside[name][1]})" for name, (down, up) in shares.items()
    )  # fmt: skip
    holds = all(min(pair) >= MOST_LAYERS for pair in shares.values()) if shares else None
    return HypothesisVerdict(ours or "no trained model was at hand", holds)


def _bound_verdict(results: PriceResults) -> HypothesisVerdict:
    """Whether bounds of MLPs by their weights are loose in every trained model."""
    loose = {name: results.looseness(name) for name in results.models}
    ours = "; ".join(f"{name}: {10**log:.0f} times" for name, log in loose.items())
    holds = all(log >= math.log10(LOOSE) for log in loose.values()) if loose else None
    return HypothesisVerdict(ours or "no trained model was at hand", holds)


def _by_size(results: PriceResults, skip: float, quantity: str) -> Iterator[tuple[str, str, list[float], bool]]:
    """For each task, at equal width and at equal parameters, the largest MLP against the smallest: (task, series, by
    seed what it has of a quantity, whether both have learnt)."""
    for task in results.sizes.tasks:
        for series in ("size", "parameters"):
            small, large = (results.kind(skip, multiple, series) for multiple in ends(results.sizes))
            yield task, series, results.against(task, large, small, quantity), results.learnt(task, small, large)


def _size_verdict(results: PriceResults, skip: float, quantity: str, lead: str) -> HypothesisVerdict:
    """Whether the largest MLP keeps more of the residual than the smallest, or tolerates less noise: with every seed,
    at equal width and at equal parameters, on every task that both have learnt. One that fails refutes it; else None
    where a number is missing, or both residuals are too small to be judged."""
    texts, judged = [], list[bool | None]()
    residual = quantity == "residual"
    shown = spread_of_logs if residual else partial(spread, form=".2f")
    for task, series, by_seed, learnt in _by_size(results, skip, quantity):
        texts.append(
            f"{TASKS[task]}, {SAME[series]}: {shown(known_numbers(by_seed))}{'' if learnt else ' (not learnt)'}"
        )
        texts[-1] += f" ({missing} not measured)" if (missing := len(by_seed) - len(known_numbers(by_seed))) else ""
        invisible = _invisible(results, task, series) if residual else [False] * len(by_seed)
        if any(invisible):
            texts[-1] += f" ({sum(invisible)} of {len(invisible)} pairs not judged: both below float32's eps)"
        if learnt:
            passed = [value >= math.log10(KEEPS) if residual else value <= 1 / PRICE for value in by_seed]
            open_pairs = [math.isnan(value) or unseen for value, unseen in zip(by_seed, invisible, strict=True)]
            judged += [None if is_open else ok for is_open, ok in zip(open_pairs, passed, strict=True)]
    ours = f"{lead} by the largest over the smallest: {'; '.join(texts)}"
    return HypothesisVerdict(ours, False if False in judged else True if judged and None not in judged else None)


def _invisible(results: PriceResults, task: str, series: str) -> list[bool]:
    """By seed, whether the residuals of the smallest and of the largest MLP without skips are both below `EPS`."""
    kinds_compared = [results.kind(0.0, multiple, series) for multiple in ends(results.sizes)]
    pairs = zip(*(results.of(task, kind, "residual") for kind in kinds_compared), strict=True)
    return [max(pair) < EPS for pair in pairs]


def _collapsed(results: PriceResults) -> list[str]:
    """The tasks that networks without skips have learnt, if the residuals of all that learnt are below `EPS`."""
    without = [kind for kind in kinds(results.sizes) if kind.skip == 0]
    learnt = [pair for pair in product(results.sizes.tasks, without) if results.learnt(*pair)]
    below = all(log < EPS for pair in learnt for log in results.of(*pair, "residual"))
    return list(dict.fromkeys(task for task, _ in learnt)) if below else []


def _skip_verdict(results: PriceResults) -> HypothesisVerdict:
    """Whether networks with skips tolerate less noise than those without, and their tokens grow: with every seed, at
    the usual MLP size, on every task that both have learnt; with what came at other sizes and on pixels."""
    texts, judged, unmeasured = [], list[bool](), False
    usual = results.kind(1.0)
    for task in results.sizes.tasks:
        price, text = skip_price(results, task), TASKS[task]
        if results.learnt(task, usual, results.kind(0.0)):
            noise = results.against(task, usual, results.kind(0.0), "tolerance embedding")
            growth = results.of(task, usual, "growth")
            unmeasured |= any(map(math.isnan, noise))
            frail, grown = [ratio <= 1 / PRICE for ratio in noise], [log >= math.log10(GROWN) for log in growth]
            judged.append(all(frail) and all(grown))
            times = spread([10**log for log in growth], ".1f")
            text += f": noise {spread(known_numbers(noise), '.2f')} times, tokens {times} times as long"
        else:
            text += f": {price.reason}"
        if ranges := price.ranges(SIDES):
            accuracies = [
                f"{statistics.median(known):.2f}" for skip in (1.0, price.rival)
                if (known := results.of(task, results.kind(skip), "accuracy"))
            ]  # fmt: skip
            text += (
                f" (medians by MLP size, against {SKIPS[price.rival]}: {', '.join(ranges)}; accuracies of the usual "
            )
            text += f"size {' and '.join(accuracies)})"
        texts.append(text)
    return HypothesisVerdict("; ".join(texts), all(judged) if judged and not unmeasured else None)


def _training_verdict(results: PriceResults) -> HypothesisVerdict:
    """Whether constants of MLPs grow in training, and attention weakens differences more than at first."""
    texts, holds, kind = [], list[bool](), results.kind(1.0)
    for task in results.sizes.tasks:
        bounds = [results.of(task, kind, "bound", "mlp", share) for share in (0.0, 1.0)]
        grown = [end - start for start, end in zip(*bounds, strict=True)]
        pulls = [results.of(task, kind, "stream", "attention", share) for share in (0.0, 1.0)]
        texts.append(
            f"{TASKS[task]}: constants {spread([10**log for log in grown], '.2f')} times, attention from "
            f"{_power(pulls[0])} to {_power(pulls[1])}"
        )
        harder = all(end < start for start, end in zip(*pulls, strict=True))
        holds += [harder and all(log >= math.log10(PULLS) for log in grown)] if results.learnt(task, kind) else []
    return HypothesisVerdict("; ".join(texts), all(holds) if holds else None)


def _power(logs: Sequence[float]) -> str:
    """Median and range of numbers given as log10; as powers of ten where one is below 0.01."""
    return spread([10**log for log in logs], ".2f") if min(logs, default=0) > -2 else spread_of_logs(logs)


def _models_table(results: PriceResults) -> PageTable:
    rows = []
    for name in results.models:
        columns = [
            *((part, "stream") for part in (*PULLERS, "layer")), ("attention", "differences"), ("mlp", "differences"),
            ("mlp", "steepest"), ("mlp", "bound"), ("network", "jacobian differences"), ("network", "jacobian common"),
        ]  # fmt: skip
        reads = results.tables["models"].filter(model=name)["reads"][0]
        rows.append([name, reads, *(_power(results.by_layer(name, *column)) for column in columns)])
    return PageTable(
        "Trained models: median (range) over layers",
        ["model", "reads", "attention: stream", "MLP: stream", "both norms: stream", "layer: stream",
         "attention: differences", "MLP: differences", "MLP: steepest at a token", "MLP: bound by weights",
         "output moved by differences", "output moved by the common part"],
        rows,
        "*Differences*: their size in a branch's output over that in its input. *Stream*: differences over the common "
        "part after the branch is added to the stream, over the same before; of norms, after both norms of a layer, "
        "which in these models stand on the sums, over the same before; of a layer, after it over before it. Below "
        "one, tokens become more alike. "
        "*Output moved*: relative change of the output divided by the relative change of the embedding, for small "
        "random noise.",
    )  # fmt: skip


def _networks_table(results: PriceResults, task: str) -> PageTable:
    rows = []
    for kind in kinds(results.sizes):
        fresh, trained = (results.of(task, kind, "residual", share=share) for share in (0.0, 1.0))
        count = results.of(task, kind, "parameters")
        rows.append([
            f"{kind.skip:g}", str(kind.multiple), f"{kind.gain:g}", str(kind.width), f"{count[0] / 1000:.0f}k",
            ", ".join(f"{rate:g}{' (end)' if _at_end(results, rate) else ''}" for rate in results.rates(task, kind)),
            spread(results.of(task, kind, "accuracy"), ".2f"),
            *(spread_of_logs(known_numbers(logs)) for logs in (fresh, trained)),
            *(spread(known_numbers(results.of(task, kind, f"tolerance {noise}")), ".2g") for noise in PLACES),
            *(_power(results.of(task, kind, f"jacobian {part}")) for part in ("differences", "common")),
            _power(results.of(task, kind, "growth")), _power(results.of(task, kind, "bound", "mlp")),
        ])  # fmt: skip
    sizes = results.sizes
    return PageTable(
        f"Networks of {sizes.layers} layers on {TASKS[task]}, {sizes.steps} steps: median (range) of {sizes.seeds} "
        "seeds",
        ["skip", "MLP in widths", "gain", "width", "parameters", "rate", "accuracy", "fresh residual",
         "trained residual", "noise tolerated", "along the gradient", "of inputs", "output moved by differences",
         "by the common part", "tokens grow", "MLP bound"],
        rows,
        "*Noise tolerated*: its size at the embedding, in units by which embedded tokens differ, that takes half of "
        "what accuracy is above guessing; *of inputs*: the same of noise on pixels, in their standard deviation. "
        "*End*: no lower, or no higher, rate was tried; another one may be better. Rows "
        f"of another width than {sizes.width} have about as many parameters as {USUAL} widths at {sizes.width}; heads "
        f"of the narrowest have {equal_width(max(sizes.multiples), sizes) // sizes.heads} numbers.",
    )  # fmt: skip


def _training_table(results: PriceResults) -> PageTable:
    columns = [
        ("stream", "attention"), ("stream", "mlp"), ("differences", "mlp"), ("steepest", "mlp"), ("bound", "mlp"),
    ]  # fmt: skip
    rows = [
        [TASKS[task], f"{skip:g}", f"{share:.0%}",
         *(_power(results.of(task, results.kind(skip), *column, share)) for column in columns),
         spread_of_logs(known_numbers(results.of(task, results.kind(skip), "residual", share=share)))]
        for task, skip, share in product(results.sizes.tasks, (0.0, 1.0), results.sizes.shares)
    ]  # fmt: skip
    return PageTable(
        f"Over training, MLPs of {USUAL} widths: geometric means over layers, median (range) over seeds",
        ["task", "skip", "of all steps", "attention: stream", "MLP: stream",
         "MLP: differences", "MLP: steepest at a token", "MLP: bound by weights", "residual after the last layer"],
        rows,
    )  # fmt: skip


# ---- The figure


def draw(tables: Tables, sizes: PriceSizes) -> dict[str, Figure]:
    """Both sides of the tug of war by layer in trained models, and over training; residuals and noise by MLP size."""
    results, colours = PriceResults(tables, sizes), palette()
    figure, axes = panels(2, width=5.2, height=3.7, rows=2)
    _draw_models(axes[0], results, colours)
    _draw_training(axes[1], results, colours)
    _draw_sizes(axes[2], results, "residual", colours)
    _draw_sizes(axes[3], results, "tolerance embedding", colours)
    return {QUESTION.name: figure}


def _legend(axes: Axes, colours: Mapping[str, str], styles: Mapping[str, dict[str, Any]]) -> None:
    """What colours and line styles stand for, beside the panel."""
    handles = [Line2D([], [], color=colour, linewidth=3, label=label) for label, colour in colours.items()]
    handles += [Line2D([], [], color="grey", markersize=5, label=label, **style) for label, style in styles.items()]
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.02))


def _draw_models(axes: Axes, results: PriceResults, colours: Sequence[str]) -> None:
    """What each part of each trained model does, from its first layer on the left to its last on the right."""
    named = dict(zip(results.models, colours, strict=False))
    titles = {"attention": "attention", "mlp": "MLP", "norms": "norms", "layer": "all"}
    room = 0.85 / max(1, len(named))  # Of each model, where parts are one apart
    for (column, part), (k, (name, colour)) in product(enumerate(titles), enumerate(named.items())):
        logs = results.by_layer(name, part, "stream")
        start = column + room * (k - len(named) / 2)
        x = [start + room * (0.1 + 0.8 * (layer + 0.5) / len(logs)) for layer in range(len(logs))]
        axes.plot(x, [10**log for log in logs], color=colour, linewidth=1.0, marker="o", markersize=2.5)
    axes.axhline(1.0, color="grey", linewidth=0.9)
    title_panel(axes, "Trained models, from first to last layer", "", "factor on differences / common part")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(titles)), [*titles.values()], fontsize=8)
    axes.grid(visible=False, axis="x")
    _legend(axes, named, {})


def _draw_training(axes: Axes, results: PriceResults, colours: Sequence[str]) -> None:
    sizes, task = results.sizes, results.sizes.tasks[0]
    shown = {
        "attention: stream": ("attention", "stream"), "MLP: stream": ("mlp", "stream"),
        "MLP: steepest at a token": ("mlp", "steepest"), "MLP: bound by weights": ("mlp", "bound"),
    }  # fmt: skip
    styles: dict[str, Any] = {
        "skips": {"linestyle": "-", "marker": "o"},
        "no skips": {"linestyle": "--", "marker": "s"},
    }
    for (part, quantity), colour in zip(shown.values(), colours, strict=False):
        for skip, style in zip((1.0, 0.0), styles.values(), strict=True):
            kind = results.kind(skip)
            logs = {share: results.of(task, kind, quantity, part, share) for share in sizes.shares}
            if results.learnt(task, kind):
                seed_band(axes, logs, "", colour, **style)
            else:
                _draw_unlearnt(axes, logs, colour, style["marker"])
    axes.set_xscale("symlog", linthresh=min((share for share in sizes.shares if share), default=1.0))
    axes.set_xticks(sizes.shares, [f"{share:.0%}" for share in sizes.shares])
    axes.set_xticks([], minor=True)
    _decades(axes)
    title_panel(axes, f"Over training, {TASKS[task]}", "of all steps", "log10 of the factor (linear to ±1)")
    _legend(axes, dict(zip(shown, colours, strict=False)), styles)


def _draw_sizes(axes: Axes, results: PriceResults, quantity: str, colours: Sequence[str]) -> None:
    sizes, residual = results.sizes, quantity == "residual"
    named = dict(zip((1.0, 0.5, 0.0), colours, strict=False))
    lines = {"linestyle": "-", "marker": "o"}, {"linestyle": "--", "marker": "s"}
    styles: dict[str, Any] = {TASKS[task]: line for task, line in zip(sizes.tasks, lines, strict=False)}
    crosses: dict[str, dict[str, Any]] = {
        TASKS[task]: {"linestyle": "none", "marker": marker} for task, marker in zip(sizes.tasks, "x+", strict=False)
    }
    styles |= {f"{task},\nequal parameters": cross for task, cross in crosses.items()}
    for task, (skip, colour), series in product(sizes.tasks, named.items(), ("size", "parameters")):
        of_series = sorted(kind for kind in kinds(sizes) if (kind.series, kind.skip) == (series, skip))
        points = {kind.multiple: known_numbers(results.of(task, kind, quantity)) for kind in of_series}
        learnt = {kind.multiple for kind in of_series if results.learnt(task, kind)}
        if residual:  # What a network tolerates of what it has not learnt says nothing
            unlearnt = {x: values for x, values in points.items() if x not in learnt}
            _draw_unlearnt(
                axes, unlearnt, colour, (styles[TASKS[task]] if series == "size" else crosses[TASKS[task]])["marker"]
            )
        points = {x: values for x, values in points.items() if x in learnt}
        if series == "size":
            seed_band(axes, points, "", colour, **styles[TASKS[task]])
        else:
            medians = {x: statistics.median(values) for x, values in points.items() if values}
            axes.plot([*medians], [*medians.values()], color=colour, markersize=6, **crosses[TASKS[task]])
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes.multiples, [str(multiple) for multiple in sizes.multiples])
    y = "log10 of relative residual (linear to ±1)" if residual else "noise that halves what was learnt"
    title = (
        "What is left of differences after the last layer, trained"
        if residual
        else "Noise tolerated at the embedding, trained"
    )
    title_panel(axes, title, "hidden layer of the MLP, in widths", y)
    labels = {1.0: "skips", 0.5: "skips, weight 0.5", 0.0: "no skips"}
    if residual:
        styles["did not learn:\npale, hollow"] = {"linestyle": "none", "marker": "s"} | PALE
    _legend(axes, {labels[skip]: colour for skip, colour in named.items()}, styles)
    if residual:
        axes.set_ylim(top=0.2)
        _decades(axes)
    else:
        axes.set_ylim(bottom=0.0)


def _draw_unlearnt(axes: Axes, points: Mapping[Any, Sequence[float]], colour: str, marker: str) -> None:
    """Draw medians of networks that did not learn, as pale and hollow marks without line or band."""
    medians = {x: statistics.median(values) for x, values in points.items() if values}
    axes.plot([*medians], [*medians.values()], color=colour, markersize=5, linestyle="none", marker=marker, **PALE)


def _decades(axes: Axes) -> None:
    """Make the vertical axis, which has log10, even between -1 and 1, and compressed beyond: of networks with skips,
    and of those whose tokens are the same to fifty digits."""
    axes.set_yscale("symlog", linthresh=1, linscale=1.5)
    low, high = axes.get_ylim()
    axes.set_yticks(ticks := [tick for tick in (-100, -30, -10, -3, -1, -0.5, 0, 0.5, 1, 3) if low <= tick <= high])
    axes.set_yticklabels([f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)


QUESTION = Question(
    name="what-skips-pay",
    title="What do skips and MLPs pay for holding off collapse?",
    why=(
        "Dong et al. (2021) read their bound as a tug of war: attention makes tokens alike, MLPs with a large "
        "Lipschitz constant and skips hold them apart, and a large constant may cost robustness. How strong the two "
        "sides are layer by layer, whether a larger MLP helps, and what it costs was not measured."
    ),
    hypotheses=(
        "In every trained model, attention weakens differences against what tokens share in at least three quarters of "
        "the layers, and MLPs strengthen them in at least three quarters.",
        "The Lipschitz constant of MLPs, from weights, is at least ten times what MLPs do to the differences at hand.",
        "Without skips a larger MLP mitigates collapse: the largest keeps at least twice the relative residual of the "
        "smallest after training, at equal width and at equal parameters, with every seed.",
        "A larger MLP costs robustness: with skips, the largest tolerates at least 1.5 times less noise at the "
        "embedding than the smallest, at equal width and at equal parameters, with every seed.",
        "Skips cost robustness and length: networks with skips tolerate at least 1.5 times less noise than those "
        "without, and their tokens are at least twice as long after the last layer as before the first.",
        "Both sides pull harder with training: with skips, constants of MLPs grow at least 1.5 times, and attention "
        "weakens differences more than at first, with every seed.",
        "Written after the first quick run: a step along the gradient of the loss shows the price where random noise "
        "does not. With skips, the largest MLP tolerates at least 1.5 times smaller steps at the embedding than the "
        "smallest, at equal width and at equal parameters, with every seed.",
    ),
    method=(
        "Tokens are a common part, their mean, and differences from it. For every branch (attention, MLP) the size of "
        "both in the output of the branch is divided by that in its input, in deviation arithmetic "
        "(`rankscope_studies/questions/branch_gains.py`). What a branch does to tokens is read after the sum with the "
        "skip, where there is one: differences over the common part there, over the same before (*stream*). Trained "
        "models have norms on these sums, which change the same ratio and are given by themselves, and with all parts "
        "in the factor of a layer; the norms of networks of our own are within branches. MLPs also have a bound by "
        "weights, `Lip(act) ‖W₁‖₂‖W₂‖₂`, and the largest singular value of their Jacobian at a token. Trained "
        "models are MiniLM, rxnfp, rxnmapper and AntiBERTy, on samples of what they were trained for.\n\n"
        "Pre-norm networks of our own learn digits and next characters. They differ in their skips (weight 1, 0.5, "
        "none), in the hidden layer of MLPs, and, as controls, in width, so that parameters are equal, and in the gain "
        "of the MLPs' second matrix at first, by which their Lipschitz constant is multiplied. Weights start with "
        "variance 1/inputs, so that an MLP's output is as large at every size. The learning rate is chosen for each "
        "kind by training loss of tuning seeds, where there is more than one. Noise is normal, in units by which "
        "embedded tokens differ, so that a network that embeds at a larger scale has no advantage; a step of the same "
        "size along the gradient of the loss stands for noise that is chosen against the network."
    ),
    refuted_by=(
        "Attacks of many steps; larger networks without skips, if these can be trained; trained decoders, as all "
        "trained models here are encoders with norms after their skips; networks without norms, in which a gain of "
        "MLPs is not undone by the next norm."
    ),
    quick=QUICK, full=FULL, gather=gather, answer=answer, draw=draw, seconds=240.0,
    caption="Lines and crosses: medians over seeds, bands: their range; of trained models, means over samples. Above, "
    "*stream*: what a part does to differences over the common part; a factor below one makes tokens more alike. "
    "Axes of log10 numbers are linear from −1 to 1 and logarithmic beyond, so that both ends can be seen: lengths on "
    "them cannot be compared. Networks that did not learn are pale and hollow, and left out of the noise tolerated.",
    changed=RuleChange(
        "What skips pay is given over all sizes of MLPs and on pixels (before: at the usual size alone, which "
        "had nearly the largest number), and mitigation is not judged where float32 could see neither "
        "residual.",
        {3: False},
    ),
)  # fmt: skip
