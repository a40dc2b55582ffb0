"""Does preventing collapse pay? Remedies against a baseline of equal compute, each at a learning rate of its own.

The table of remedies (`docs/remedies.md`) has one recipe for all: a remedy may look good because the baseline's rate is
wrong for it, or because its step costs more than the baseline's. Here every network, the baseline among them, gets the
same compute (steps are divided by its operations over the baseline's, as torch counts them) and the same tuning (every
rate of one grid on tuning seeds; the rate of the lowest median loss is reported on other seeds).

Less collapse is a larger relative residual after the last layer: after training, where it may be a result of learning
as well as its cause, and before, where it can be a cause alone. `pay_trainings.py` trains and measures networks,
`pay_results.py` says who learns and who beats whom; here are the answer, its tables and its figure.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

import polars as pl

from rankscope.errors import StudyError
from rankscope.extras import listed
from rankscope.figures import Axes, Figure, palette, panels
from rankscope_studies.questions.pay_results import CHANCE, LEARNS, MATTERS, RELATED, PayResults
from rankscope_studies.questions.pay_trainings import (
    LONGER,
    MORE,
    REPORTED,
    SETTINGS,
    TUNED,
    PayCell,
    PaySizes,
    best_tuned,
    equal_steps,
    fresh_rows,
    operations_row,
    ratio,
    times,
    trained_rows,
)
from rankscope_studies.questions.question import HypothesisVerdict, Question, RuleChange, StudyAnswer, Tables
from rankscope_studies.questions.summaries import holm, spread, spread_of_logs
from rankscope_studies.study import PageTable, Setup
from rankscope_studies.trial import NONE

LABELS = {"pre": "pre-norm", "post": "post-norm", "no skips": "without skips"}
REMEDY_NAMES = {
    NONE: "no remedy", "neutreno": "NeuTRENO", "valueresidual": "value residual", "sqrtl": "branches × 1/√L",
    "gate": "gates", "differential2": "differential attention", "contranorm": "ContraNorm",
}  # fmt: skip
HARMED = ("post", "no skips")  # Settings in which the table of remedies has a baseline of 24 layers that learns nothing
EXTRA = 1.5  # Of the baseline's compute, for the baseline that is given more
MARKS = ("o", "s", "^", "D")  # Of widths
GAINS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # Ticks on both sides of 0, in nats, of which those near the data are drawn
NOT_MEASURED = HypothesisVerdict("not measured", None)
CHANGED = (
    "Changed after a quick run was seen (4 layers, 50 steps, widths 16 and 24), before any full one. In rank "
    "correlations losses that differ by less than what matters count as equal, since networks that learn nothing "
    "would else be ordered by chance; a correlation that is large enough, but whose p is not small, is not judged, "
    "and neither are fewer than five networks. The grids of rates moved, since many networks chose an end. Changed "
    "after a full run was seen: reported seeds are new; 'yes' asks that the remedy, chosen on tuning seeds, also has "
    "the larger residual and beats the baseline with more compute; a baseline that diverges can be beaten; branches × "
    "1/√L is left out where there are no skips. Changed after the quick run of this study (3 layers, 60 steps, widths "
    "24 and 32), before the next full run: a baseline learns nothing only if its best seed does, at every rate of the "
    "grid (before, if some seed did at the chosen rate, unless that was an end of the grid); one correlation that is "
    "not as expected refutes a hypothesis about all of them (before, it left that open); where so many losses are "
    "equal that no order is improbable, there is no correlation (before, it was said to be weak); that no remedy "
    "helps pre-norm networks is left open where one gains with every seed at both widths; at full size residuals are "
    "means of four excerpts (before, of one). Changed after the full run of this page was seen: gains are reported by "
    "width; a correlation is also taken without networks that learn nothing, and the answer says where it rests on "
    "those; a setting in which longer training changes who wins does not refute where the baseline or such a remedy "
    "had its rate at an end of the grid (before, it did, and hypothesis 7 did not hold)."
)

QUICK = PaySizes(
    ("neutreno", "valueresidual", "gate", "contranorm"), depth=3, widths=(24, 32), heads=4, context=16, batch=16,
    steps=60, longer=2, rates=(3e-3, 1e-2, 3e-2), tuning_seeds=1, seeds=2, samples=1, timed_steps=2,
)  # fmt: skip
FULL = PaySizes(
    ("neutreno", "valueresidual", "sqrtl", "gate", "differential2", "contranorm"), depth=24, widths=(64, 128), heads=4,
    context=64, batch=32, steps=300, longer=4, rates=(2e-4, 7e-4, 2.3e-3, 8e-3, 2.7e-2), tuning_seeds=2, seeds=4,
    samples=4, timed_steps=5,
)  # fmt: skip


def gather(setup: Setup, sizes: PaySizes) -> dict[str, pl.DataFrame]:
    """Count operations, tune every network, and train it at its rate: a cached piece for each network and rate.

    Raises:
        StudyError: There are too few rates to tune, or too few seeds to have a spread.
    """
    if len({*sizes.rates}) < 3 or sizes.seeds < 2:
        wanted = "rates must be at least 3 different ones, and seeds at least 2"
        raise StudyError(f"{wanted}; got {len({*sizes.rates})} and {sizes.seeds}", subject="sizes")
    key = {"depth": sizes.depth, "heads": sizes.heads, "context": sizes.context}
    cells = sizes.cells
    counted = {f"operations {cell}": partial(operations_row, cell, sizes) for cell in cells}
    fresh = {f"fresh {cell}": partial(fresh_rows, cell, sizes) for cell in cells}
    tables = {
        "costs": setup.cached_parts(counted, **key),
        "fresh": setup.cached_parts(fresh, **key, seeds=[*sizes.fresh_seeds], samples=sizes.samples),
        "times": setup.cached("times", partial(times, sizes, setup.device), **key, **{
            "batch": sizes.batch, "width": sizes.widths[0], "remedies": sizes.remedies, "steps": sizes.timed_steps,
        }),
    }  # fmt: skip
    key |= {"batch": sizes.batch}
    steps = {cell: equal_steps(tables["costs"], cell, sizes.steps) for cell in cells}

    def part(arm: str, cell: PayCell, rate: float, count: int) -> tuple[str, Callable[[], pl.DataFrame]]:
        work = partial(trained_rows, arm, cell, rate, count, sizes, setup.device)
        return f"{arm} {cell} {count} at {rate:g}", work

    tuning = dict(part(TUNED, cell, rate, steps[cell]) for cell, rate in product(cells, sizes.rates))
    tables["tuning"] = setup.cached_parts(tuning, **key, seeds=sizes.tuning_seeds)
    final: dict[str, Callable[[], pl.DataFrame]] = {}
    for cell in cells:
        rate, _ = best_tuned(tables["tuning"], cell)
        arms = {REPORTED: steps[cell]}
        arms |= {LONGER: sizes.longer * steps[cell]} if cell.width == sizes.widths[0] else {}
        arms |= {MORE: round(EXTRA * steps[cell])} if cell.remedy == NONE else {}
        final |= dict(part(arm, cell, rate, count) for arm, count in arms.items())
    tables["runs"] = setup.cached_parts(final, **key, seeds=[*sizes.fresh_seeds], samples=sizes.samples)
    return tables


# ---- The answer, from tables alone


def answer(tables: Tables, sizes: PaySizes) -> StudyAnswer:
    """The answer that the tables give."""
    results = PayResults(tables, sizes)
    verdicts = [
        _rate_verdict(results), _harmed_verdict(results), _pre_verdict(results),
        _relation_verdict(results, HARMED, "trained", True), _relation_verdict(results, HARMED, "fresh", True),
        _relation_verdict(results, ("pre",), "trained", False), _longer_verdict(results),
    ]  # fmt: skip
    evidence = [*(_setting_table(results, setting) for setting in SETTINGS), _relations(results), _rates(results)]
    notes = [
        f"Rates {', '.join(f'{rate:g}' for rate in sizes.rates)} for every network, the baseline among them, chosen by "
        f"the median loss of {sizes.tuning_seeds} tuning seed{'s' * (sizes.tuning_seeds != 1)} and reported on "
        f"{sizes.seeds} other seeds. {_ends(results)} The longer "
        f"training, {sizes.longer} times as many steps at width {sizes.widths[0]}, and the baseline with {EXTRA:g} "
        "times the compute have the rates of the usual length, which need not be best for them.",
        f"Seconds of a step over the baseline's, pre-norm at width {sizes.widths[0]}: {_seconds(results)}.",
        f"A network learns if its worst seed beats a guess by frequency (loss {results.blind:.3f}) by {LEARNS:g} nats "
        f"and by more than its seeds differ; it learns nothing if its best seed is not better by {LEARNS:g} nats. A "
        "remedy beats the baseline if it learns, its worst seed is better than "
        f"the baseline's best, and medians are apart by {MATTERS:g} nats and by more than the seeds of either differ; "
        "it has to do so at both widths.",
        CHANGED,
    ]
    return StudyAnswer(_sentence(results), verdicts, evidence, notes)


def _named(remedies: Sequence[str]) -> str:
    """Remedies by their names for readers; `none` where there are none."""
    return listed([REMEDY_NAMES.get(remedy, remedy) for remedy in remedies]) or "none"


def _title(setting: str) -> str:
    """The name of a setting, to begin a title with."""
    return LABELS[setting][0].upper() + LABELS[setting][1:]


def _ends(results: PayResults) -> str:
    """Which networks chose a rate at an end of the grid, those that learn nothing only counted."""
    sizes = results.sizes
    reported = {cell: result for cell in sizes.cells if (result := results.cell(*cell)).losses}
    at_end = [cell for cell, result in reported.items() if sizes.at_end(result.rate)]
    learning = [cell for cell in at_end if not reported[cell].learns_nothing(results.blind)]
    groups: dict[str, list[str]] = {}
    for cell in learning:
        where = f"{LABELS[cell.setting]} at width {cell.width} ({reported[cell].rate:g})"
        groups.setdefault(where, []).append(cell.remedy)
    texts = [f"{where}: {_named(names)}" for where, names in groups.items()]
    idle = len(at_end) - len(learning)
    texts += [f"{idle} that learn{'s' * (idle == 1)} nothing"] * bool(idle)
    beyond = f", where a better one may lie beyond ({'; '.join(texts)})" * bool(texts)
    return f"{len(at_end)} of {len(reported)} networks chose an end of the grid{beyond}."


def _seconds(results: PayResults) -> str:
    """Seconds of a step with each remedy, over those of the baseline."""
    ratios = {name: results.tables["times"].filter(remedy=name)["ratio"].to_list() for name in results.sizes.remedies}
    return ", ".join(f"{_named([name])} {spread(values, '.2f')}" for name, values in ratios.items())


def _sentence(results: PayResults) -> str:
    """Where remedies beat the tuned baseline, by how much, and whether less collapse goes with a lower loss."""
    known = [setting for setting in SETTINGS if results.complete(setting)]
    if not results.any_learns(known):
        return "Cannot be told: no network beats guessing, or no setting was trained with every remedy."
    paying = [setting for setting in known if results.best(setting) in results.winners_everywhere(setting)]
    preventing = [setting for setting in paying if not _but(results, setting)]
    start = "Yes" if preventing == known else "It depends on the network" if preventing else "No"
    if not preventing and paying:
        start = "A remedy pays, not by preventing collapse"
    elif not preventing and any(results.winners_everywhere(setting) for setting in known):
        start = "Not told"
    parts = [_gain_clause(results, setting) for setting in sorted(known, key=lambda setting: setting not in paying)]
    widths = results.sizes.widths
    pays = {setting: [results.relation(setting, width, "trained").pays for width in widths] for setting in known}
    related = [setting for setting in known if all(pays[setting])]
    goes = "In no setting does a larger residual go with a lower loss at both widths"
    if related:
        alone = [results.relation(*pair, "trained", learning=True).pays for pair in product(related, widths)]
        goes = f"A larger residual goes with a lower loss {listed([LABELS[setting] for setting in related])}"
        goes += ", counting networks that learn nothing" * (not all(alone))
    elif any(None in by_width and False not in by_width for by_width in pays.values()):
        goes = "Whether remedies help by keeping tokens apart cannot be told"
    where = ", ".join(map(str, widths))
    return f"{start}: at equal compute and tuned rates (nats, widths {where}), {'; '.join(parts)}. {goes}."


def _but(results: PayResults, setting: str) -> str:
    """Why the gain of a setting's best remedy need not be that of preventing collapse; empty if nothing says so."""
    name = results.best(setting)
    if not results.less_collapsed(setting, name):
        return "no larger residual"
    more = name in results.winners_everywhere(setting, REPORTED, MORE)
    return "" if more else f"not below a baseline with {EXTRA:g}× compute"


def _gain_clause(results: PayResults, setting: str) -> str:
    """What the best remedy of a setting does to the loss, and what its baseline learns if not every seed does."""
    name, winners, where = results.best(setting), results.winners_everywhere(setting), LABELS[setting]
    if not results.any_learns([setting]):
        return f"{where}: nothing learns"
    widths = results.sizes.widths
    baselines = [results.cell(setting, width, NONE) for width in widths]
    remark = ""
    if all(baseline.learns_nothing(results.blind) for baseline in baselines):
        remark = " (baseline learns nothing)"
    elif not all(baseline.learns(results.blind) for baseline in baselines):
        remark = " (baseline learns with some seeds)"
    if name in winners:
        by_width = [results.gains(setting, width, name) for width in widths]
        texts = [f"{statistics.median(gains):.2f}" if gains else "–" for gains in by_width]
        gain = f"gains {listed(texts)}" if any(by_width) else "learns where the baseline diverges"
        but = _but(results, setting)
        return f"{where}: {_named([name])} {gain}{f', {but}' * bool(but)}{remark}"
    if winners:
        return f"{where}: a gain only by {_named(winners)}, not {_named([name])}, the best in tuning{remark}"
    once = [
        statistics.median(gains)
        for width in widths for winner in results.winners(setting, width)
        if (gains := results.gains(setting, width, winner))
    ]  # fmt: skip
    gain = f"at most {max(once):.2f}, shown at one width" if once else "no gain was shown"
    return f"{where}: {gain}{remark}"


def _rate_verdict(results: PayResults) -> HypothesisVerdict:
    """Whether no seed of the baseline learns at any rate, in settings that collapse; refuted where a baseline learns
    with every seed at its own rate. Not told where some seeds learn, or nothing learns at all."""
    cells = [PayCell(setting, width, NONE) for setting, width in product(HARMED, results.sizes.widths)]
    known = {cell: baseline for cell in cells if (baseline := results.cell(*cell)).losses}
    tuned = {cell: cell.rows(results.tables["tuning"])["loss"].to_list() for cell in known}
    lowest = {cell: min(losses) for cell, losses in tuned.items() if losses}
    ours = "; ".join(
        f"{LABELS[cell.setting]} {cell.width}: {spread(baseline.losses, '.3f')} at {baseline.rate:g}"
        + (f", in tuning at least {lowest[cell]:.3f}" if cell in lowest else "")
        for cell, baseline in known.items()
    )
    if len(lowest) < len(cells):
        return HypothesisVerdict(ours or "not measured", None)
    ours += f" (guessing: {results.blind:.3f})"
    if any(baseline.learns(results.blind) for baseline in known.values()):
        return HypothesisVerdict(ours, False)
    nothing = all(baseline.learns_nothing(results.blind) for baseline in known.values())
    nothing &= all(results.blind - loss <= LEARNS for loss in lowest.values())
    return HypothesisVerdict(ours, True if nothing and results.any_learns() else None)


def _harmed_verdict(results: PayResults) -> HypothesisVerdict:
    """Whether in settings that collapse some remedy beats both baselines at every width."""
    if not all(results.complete(setting) for setting in HARMED):
        return NOT_MEASURED
    texts, both = [], []
    for setting in HARMED:
        equal, more = (results.winners_everywhere(setting, REPORTED, against) for against in (REPORTED, MORE))
        also = "the same" if more == equal else _named(more)
        texts.append(f"{LABELS[setting]}: {_named(equal)} ({also} where the baseline has {EXTRA:g} times the compute)")
        both.append({*equal} & {*more})
    return HypothesisVerdict("; ".join(texts), all(both))


def _pre_verdict(results: PayResults) -> HypothesisVerdict:
    """Whether no remedy beats the baseline where that learns; not told where one does at one width alone, or gains with
    every seed though by less than seeds differ."""
    if not results.complete("pre"):
        return NOT_MEASURED
    by_width = {width: results.winners("pre", width) for width in results.sizes.widths}
    ours = "; ".join(f"width {width}: {_named(names)}" for width, names in by_width.items())
    more, name = results.winners_everywhere("pre", REPORTED, MORE), results.best("pre")
    ours += (
        f"; {_named(more)} where the baseline has {EXTRA:g} times the compute; the best on tuning seeds is "
        f"{_named([name])}, {_gains(results, 'pre', name)} nats"
    )
    if not all(results.cell("pre", width, NONE).learns(results.blind) for width in results.sizes.widths):
        return HypothesisVerdict(f"{ours}; the baseline does not learn", None)
    if results.winners_everywhere("pre"):
        return HypothesisVerdict(ours, False)
    paired = [name for name in results.sizes.conditions("pre")[1:] if results.gains_by_seed("pre", name)]
    if paired:
        by_name = [f"{_named([name])} {_gains(results, 'pre', name)}" for name in paired]
        ours += f"; with every seed, though by less than seeds differ: {listed(by_name)}"
    return HypothesisVerdict(ours, None if paired or any(by_width.values()) else True)


def _gains(results: PayResults, setting: str, remedy: str) -> str:
    """Gains of a remedy over the tuned baseline, width by width."""
    return listed([spread(results.gains(setting, width, remedy), "+.3f") for width in results.sizes.widths])


def _relation_verdict(results: PayResults, settings: Sequence[str], when: str, wanted: bool) -> HypothesisVerdict:
    """Whether residual and loss go together at every width of some settings, or (`wanted=False`) at none: one width
    where it is otherwise refutes that, and one that is not told leaves it open. Longer training is shown, not judged.
    """
    relations = {
        f"{LABELS[setting]} {width}": results.relation(setting, width, when)
        for setting, width in product(settings, results.sizes.widths)
    }
    ours = "; ".join(f"{name}: {relation.text}" for name, relation in relations.items())
    for setting, width in product(settings, results.widths(LONGER)):
        later = results.relation(setting, width, when, LONGER)
        ours += f"; {LABELS[setting]} {width}, longer training: {later.text}" * (not math.isnan(later.rank))
    pays = {relation.pays for relation in relations.values()}
    return HypothesisVerdict(ours, False if (not wanted) in pays else None if None in pays else True)


def _longer_verdict(results: PayResults) -> HypothesisVerdict:
    """Whether after longer training remedies beat the baseline in the same settings as before it, at the same width. A
    setting where they do not leaves that open if a rate, chosen for the usual length, was at an end of the grid."""
    if not all(results.complete(setting, arm) for setting in SETTINGS for arm in (REPORTED, LONGER)):
        return NOT_MEASURED
    width, texts, same = results.sizes.widths[0], [], list[bool | None]()
    for setting in SETTINGS:
        before, after = (results.winners(setting, width, arm) for arm in (REPORTED, LONGER))
        losses = {name: results.cell(setting, width, name, LONGER).loss for name in results.sizes.conditions(setting)}
        best = min(losses, key=losses.__getitem__)
        texts.append(
            f"{LABELS[setting]}: {_named(after)} (before: {_named(before)}), lowest {_named([best])} {losses[best]:.3f}"
        )
        if bool(before) != bool(after):
            ends = [results.sizes.at_end(results.cell(setting, width, name).rate) for name in (NONE, *before, *after)]
            same.append(None if any(ends) else False)
            texts[-1] += "; rates were not tuned for this length, and one is an end of the grid" * any(ends)
    holds = False if False in same else None if None in same or not results.any_learns() else True
    return HypothesisVerdict("; ".join(texts), holds)


def _setting_table(results: PayResults, setting: str) -> PageTable:
    """Every network of a setting: cost, rate, losses, gains and residuals."""
    sizes, tables, rows = results.sizes, results.tables, []
    for cell in sizes.cells:
        result = results.cell(*cell)
        if cell.setting != setting or not result.losses:
            continue
        baseline, gain = results.cell(setting, cell.width, NONE), "–"
        if result.learns_nothing(results.blind):
            gain = "learns nothing"
        elif cell.remedy != NONE and baseline.losses:
            apart = baseline.loss - result.loss  # infinite, or not a number, where a training diverged
            gain = f"{apart:+.3f}" if math.isfinite(apart) else "–"
            gain += " **beats**" * result.beats(baseline, results.blind)
        fresh = cell.rows(tables["fresh"])
        rows.append([
            _named([cell.remedy]), str(cell.width), f"{ratio(tables['costs'], cell):.2f}", str(result.steps),
            f"{result.rate:g}{' (end)' * sizes.at_end(result.rate)}", spread(result.losses, ".3f"), gain,
            *(spread_of_logs(fresh[name].drop_nulls().to_list()) for name in ("gradient", "residual")),
            spread_of_logs([log for log in result.residuals if log is not None]),
            spread(results.cell(*cell, LONGER).losses, ".3f"),
        ])  # fmt: skip
    more, plain = (
        "; ".join(f"width {width}: {spread(losses, '.3f')}" for width in sizes.widths
                  if (losses := results.cell(of, width, NONE, arm).losses))
        for of, arm in ((setting, MORE), ("pre", REPORTED))
    )  # fmt: skip
    note = f" Pre-norm without a remedy: {plain}." if setting != "pre" and plain else ""
    return PageTable(
        f"{_title(setting)}: {sizes.depth} layers, median (range) of {sizes.seeds} seeds",
        ["remedy", "width", "operations", "steps", "rate", "held-out loss", "gain", "first gradient",
         "fresh residual", "trained residual", f"loss, {sizes.longer}× steps"], rows,
        "*Operations* of a step over the baseline's; *(end)*: of the grid of rates; *gain* over the tuned baseline in "
        "nats, of medians; *first gradient*: norm of the loss's gradient at the first layer before training; residuals "
        "are relative, after the last layer, before and after training. Longer training was at width "
        f"{sizes.widths[0]} alone. The baseline with {EXTRA:g} times the compute: {more or 'not trained'}.{note}",
    )  # fmt: skip


def _relations(results: PayResults) -> PageTable:
    """Rank correlations of residual and loss, by setting, width and length of training."""
    rows, known = [], list[float]()
    for setting, (arm, length) in product(SETTINGS, ((REPORTED, "usual"), (LONGER, "longer"))):
        for width in results.widths(arm):
            relations = [
                results.relation(setting, width, "trained", arm),
                results.relation(setting, width, "trained", arm, learning=True),
                *(results.relation(setting, width, when, arm) for when in ("fresh", "gradient")),
            ]
            rows.append([LABELS[setting], str(width), length, *(relation.text for relation in relations)])
            known += [relation.p for relation in relations if not math.isnan(relation.p)]
    left = holm(known).count(True)
    return PageTable(
        "Rank correlation of residual and held-out loss across the baseline and remedies",
        ["setting", "width", "training", "residual after training", "the same without networks that learn nothing",
         "residual before training", "first layer's gradient before training"], rows,
        "In brackets 90% of the draws of seeds; p: the share of all orders of networks with as large a correlation, "
        "of either sign. Negative: less collapse, or a larger gradient, goes with a lower loss; positive: with a "
        "higher one. Where the gradient's is as large as the residual's, of either sign, gradients may explain as "
        "much. *Not told*: nothing learns, there are too few networks, or losses of so many are equal (networks that "
        "learn nothing) that even a perfect "
        f"order may be chance. Of the {len(known)} p-values of this table, {left or 'none'} stays small by Holm's "
        f"correction (at most {CHANCE:g} together): a single small one may be chance.",
    )  # fmt: skip


def _rates(results: PayResults) -> PageTable:
    """What tuning is worth: the baseline and the best remedy at the middle rate of the grid and at their own."""
    tuning, rows = results.tables["tuning"], []
    middle = sorted(results.sizes.rates)[len(results.sizes.rates) // 2]
    for setting, width in product(SETTINGS, results.sizes.widths):
        cells = [PayCell(setting, width, remedy) for remedy in results.sizes.conditions(setting)]
        rows.append([LABELS[setting], str(width)])
        for table in (tuning.filter(rate=middle), tuning):
            losses = {cell.remedy: best_tuned(table, cell)[1] for cell in cells}
            baseline = losses.pop(NONE)
            best = min(losses, key=losses.__getitem__)
            rows[-1] += [f"{baseline:.3f}", f"{_named([best])} {losses[best]:.3f}", f"{baseline - losses[best]:+.3f}"]
    return PageTable(
        f"Is it the remedy or the rate? Medians of tuning seeds at {middle:g} for all, and at each network's own rate",
        ["setting", "width", "baseline, one rate", "best remedy, one rate", "gain, one rate", "baseline, own rate",
         "best remedy, own rate", "gain, own rates"], rows,
        "Own rates were chosen on these seeds: losses of other seeds are in the tables above.",
    )  # fmt: skip


# ---- The figure


def draw(tables: Tables, sizes: PaySizes) -> dict[str, Figure]:
    """Loss against residual in each setting, and what each remedy gains over the tuned baseline."""
    results = PayResults(tables, sizes)
    figure, axes = panels(2, width=5.2, height=3.4, rows=2)
    colours = {name: palette()[k % len(palette())] for k, name in enumerate(sizes.remedies)} | {NONE: "black"}
    for panel, setting in zip(axes, SETTINGS, strict=False):
        for remedy, (k, width) in product(sizes.conditions("pre"), enumerate(sizes.widths)):
            cell = results.cell(setting, width, remedy)
            seeds = [(log, loss) for log, loss in zip(cell.residuals, cell.losses, strict=True) if log is not None]
            if seeds:
                label = _named([remedy]) if k == 0 else None
                panel.plot(*zip(*seeds, strict=True), linestyle="none", marker=MARKS[k % len(MARKS)], markersize=5,
                           color=colours[remedy], markerfacecolor=colours[remedy] if k == 0 else "none",
                           alpha=0.7, label=label)  # fmt: skip
        panel.axhline(results.blind, color="grey", linewidth=0.9, linestyle="--")
        panel.set_title(_title(setting), loc="left", fontsize=9)
        panel.set_xlabel("log10 of the relative residual after training")
        panel.set_ylabel("held-out loss, nats")
    _gain_panel(axes[3], results, colours)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    return {QUESTION.name: figure}


def _gain_panel(axes: Axes, results: PayResults, colours: Mapping[str, str]) -> None:
    """Median and range of gains over the tuned baseline, width by width and after longer training: setting by setting,
    remedies in their colours from above."""
    names, shown = results.sizes.remedies, [0.0]
    lines = [(REPORTED, width, MARKS[k % len(MARKS)]) for k, width in enumerate(results.sizes.widths)]
    lines.append((LONGER, results.sizes.widths[0], "D"))
    step = 0.9 / max(1, len(names))
    for (row, setting), (k, remedy), (n, (arm, width, mark)) in product(
        enumerate(SETTINGS), enumerate(names), enumerate(lines)
    ):
        gains = results.gains(setting, width, remedy, arm)
        if gains:
            colour, y = colours[remedy], row + step * (k - (len(names) - 1) / 2 + 0.27 * (n - 1))
            axes.plot([min(gains), max(gains)], [y, y], color=colour, linewidth=1)
            axes.plot([statistics.median(gains)], [y], linestyle="none", marker=mark, markersize=3.5, color=colour,
                      markerfacecolor=colour if n == 0 else "white")  # fmt: skip
            shown += gains
    for row in range(1, len(SETTINGS)):
        axes.axhline(row - 0.5, color="lightgrey", linewidth=0.9)
    axes.axvline(0, color="grey", linewidth=0.9)
    axes.set_xscale("symlog", linthresh=0.1)
    low, high = min(shown), max(shown)
    ticks = [tick for tick in (*(-gain for gain in GAINS), 0.0, *GAINS) if 1.5 * low <= tick <= 1.5 * high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(1.2 * low - 0.01, 1.2 * high + 0.01)
    axes.set_ylim(len(SETTINGS) - 0.5, -0.5)
    axes.set_yticks(range(len(SETTINGS)), [LABELS[setting] for setting in SETTINGS], fontsize=8)
    axes.grid(visible=False, axis="y")
    axes.set_title("Gain over the tuned baseline, equal compute", loc="left", fontsize=9)
    axes.set_xlabel("nats (linear up to 0.1 on both sides, logarithmic beyond)")


QUESTION = Question(
    name="does-it-pay",
    title="Does preventing collapse pay, at equal compute and with a tuned learning rate for each?",
    why=(
        "Remedies against collapse are published with one recipe, and our own table of 19 of them has one rate for "
        "all. Whether a network that keeps its tokens apart also learns better, once the baseline has its own rate and "
        "as much compute, was not asked. It decides whether collapse is a disease or a symptom."
    ),
    hypotheses=(
        "Tuning alone does not help: post-norm and without skips, the baseline learns nothing at any rate of the grid, "
        "at either width.",
        "Post-norm and without skips, some remedy beats the tuned baseline at equal compute and at both widths, also "
        f"where the baseline has {EXTRA:g} times the compute.",
        "Pre-norm, where nothing collapses, no remedy beats the tuned baseline at both widths.",
        "Post-norm and without skips, a larger residual after training goes with a lower loss across remedies (rank "
        f"correlation of at most -{RELATED:g}, p of at most {CHANCE:g}, at both widths).",
        "The same holds of the residual before training, which cannot be a result of learning.",
        "Pre-norm, it does not hold of the residual after training, at either width.",
        "Longer training changes none of this: remedies beat the baseline in the same settings.",
    ),
    method=(
        "Decoders learn the next character of Moby Dick, from Xavier weights by AdamW (gradients cut to length one) "
        "with a warm-up of a tenth of the steps and a cosine, in three settings: norms before branches (`pre`), norms "
        "after skips (`post`), and no skips. Remedies were chosen by the table of remedies: those that held collapse "
        "off most (NeuTRENO, value residual, branches × 1/√L), those that learnt best in `pre` (gates, differential "
        "attention), and one that costs much (ContraNorm). Differential attention is its second version "
        "(`differential2`); *branches × 1/√L* (`sqrtl`), L the depth, weighs branches against skips, and is left out "
        "where there are none. The choice favours remedies; networks of that table (width 128, seeds 0 to 2) are none "
        "of those reported here.\n\nNeuTRENO and value residual take the first layer's values to every later layer, "
        "which without skips is a shortcut where there was none: they may help by the gradient that comes back on it, "
        "and not by tokens that stay apart. The first layer's gradient before training is the control: where it "
        "orders networks as well as the residual, the two explanations are not told apart.\n\nEqual compute: steps "
        "are divided by a remedy's operations over the baseline's, matrix products forward and backward as torch "
        "counts them. That was fixed beforehand: seconds of networks this small are those of starting kernels and "
        "differ between machines. Beating the second baseline, of 1.5 times the steps, cannot be explained by costs "
        "FLOPs do not count, unless a step takes more than 1.5 times as long. Every network is tuned on the same grid "
        "of rates and the same tuning seeds, and reported on others; the remedy that the answer names is the best on "
        "tuning seeds. The relative residual after the last layer is measured in deviation arithmetic. Rank "
        "correlations are of medians over seeds, across the baseline and all remedies of a setting, with p by "
        "enumeration of all orders and an interval by drawing seeds. Networks that collapse and learn nothing, beside "
        "others that do neither, make such a correlation by themselves: it is therefore also taken without those that "
        "learn nothing."
    ),
    refuted_by=(
        "Larger models, other data, or thousands of times the steps; a warm-up or initial weights tuned for the "
        "baseline as well (a post-norm network may learn with a longer warm-up, or a rate below the grid, at whose "
        "lower end two remedies are best); remedies that were not tried; numbers "
        "of a remedy's own (its strength) tuned beside the rate."
    ),
    quick=QUICK, full=FULL, gather=gather, answer=answer, draw=draw, seconds=450.0,
    caption="Every seed; circles: the smaller width, squares: the larger. Dashed: a guess by frequency. Gains: median "
    "and range over seeds; diamonds: longer training, at the smaller width.",
    changed=RuleChange(
        "Longer training that changes who wins tells nothing where a rate was an end of the grid.", {7: False}
    ),
)  # fmt: skip
