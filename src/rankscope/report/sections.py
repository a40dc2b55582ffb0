"""The sections of a chapter: which figures and tables a run gives, each with a sentence on how to read it."""

from collections.abc import Sequence
from dataclasses import replace

import polars as pl

from rankscope.metrics import direction_of, is_share, symbol_of
from rankscope.paths.figures import heads_chart, lengths_chart
from rankscope.profiles import Profile, Summary
from rankscope.profiles.figures import VARIANTS, arithmetics_chart, cloud_chart, curves_chart, spectrum_chart
from rankscope.profiles.views import CurveView
from rankscope.report.content import Plot, Section, Views
from rankscope.report.reported_run import ReportedRun
from rankscope.report.studies import study_sections
from rankscope.report.sweep import sweep_sections
from rankscope.report.tables import certificate_table, curve_table, failing_table, spread_table
from rankscope.report.training import training_sections
from rankscope.theory.figures import bounds_chart, proved_shares
from rankscope.theory.views import RANK

FLOORS = (
    "Marks are hollow where a value lies at or below the dotted floor, the least that its arithmetic can "
    "resolve: there it is rounding noise."
)


def sections_of(run: ReportedRun) -> list[Section]:
    """All that the run has something for, in the order of reading."""
    sections = [] if run.training is None else training_sections(run.training)
    sections += [] if run.sweep is None else sweep_sections(run.sweep)
    if run.measured is not None:
        sections += [_curves(run, run.measured), *_arithmetics(run.measured)]
    for name, section_of in TABLE_SECTIONS.items():
        if name in run.tables and run.tables[name].height:
            sections.append(section_of(run, run.tables[name]))
    return [*sections, *_bounds(run), *study_sections(run.outcomes)]


def _curves(run: ReportedRun, measured: Profile | Summary) -> Section:
    lead, *further = measured.metrics
    statistic = (
        f"Lines: median of {measured.excerpts} excerpts; bands: the middle half of them, and fainter nine tenths."
        if isinstance(measured, Summary)
        else "Lines: mean over samples, on the logarithmic axis the geometric mean; bands: their range."
    )
    proved = " Open arrows are bounds: what is proved of that variant." if run.certificates else ""
    plots = [
        Plot(
            "curves", _both(measured, lead, run),
            f"{symbol_of(lead)} after each layer; layer 0 is the input. {statistic} {FLOORS}{proved} "
            "Where the fall spans over forty decades, the axis is logarithmic in the exponent: a doubly "
            "exponential fall is a straight line.",
        )
    ]  # fmt: skip
    plots += [Plot(f"curves-{name}", _small(measured, name), name.replace("_", " "), small=True) for name in further]
    tables = [curve_table(measured.views(lead))]
    if isinstance(measured, Summary):
        tables.append(spread_table(measured, lead))
    return Section(
        "residual", "How uniform the tokens become", plots=plots, tables=tables,
        lead="The residual is what is left of the tokens when the one token nearest to all of them is "
        "taken away. At 1 they share nothing, at 0 they are the same.",
    )  # fmt: skip


def _both(measured: Profile | Summary, metric: str, run: ReportedRun | None) -> Views:
    """Logarithmic and linear, the one first that shows more."""
    curves = measured.views(metric)
    bounds = {
        variant: proved_shares(metric, certificates.guarantees(), certificates.table["sample"].n_unique())
        for variant, certificates in ({} if run is None else run.certificates).items()
    }
    log, linear = curves_chart(curves, True, bounds), curves_chart(curves, False)
    views = [("log", log), ("linear", linear)]
    powers = log.panels[0].y.powers
    return views[::-1] if powers is not None and powers.narrow else views


def _small(measured: Profile | Summary, metric: str) -> Views:
    """The same without what the large figure says already."""
    views = _both(measured, metric, None)
    return [(name, replace(chart, legend=False, height=270, colour_bar=None)) for name, chart in views]


def by_variant(curves: Sequence[CurveView]) -> dict[str, list[CurveView]]:
    """The curves of each variant."""
    groups: dict[str, list[CurveView]] = {}
    for curve in curves:
        groups.setdefault(curve.variant, []).append(curve)
    return groups


def compared_arithmetics(measured: Profile | Summary) -> dict[str, list[CurveView]]:
    """By variant the curves of a residual, where there are several arithmetics to compare."""
    metric = next((name for name in measured.metrics if direction_of(name) == 1), None)
    if isinstance(measured, Summary) or len(measured.arithmetics) < 2 or metric is None:
        return {}
    return by_variant(measured.views(metric))


def _arithmetics(measured: Profile | Summary) -> list[Section]:
    plots = [
        Plot(f"arithmetics-{k}", [("", arithmetics_chart(curves))],
             f"{variant}. Left: digits that {symbol_of(curves[0].metric)} has lost. Right: the ratio of its "
             "logarithm from layer to layer; under the doubly exponential law it tends to 3.")
        for k, (variant, curves) in enumerate(compared_arithmetics(measured).items())
    ]  # fmt: skip
    return [Section("arithmetics", "What each arithmetic can see", plots=plots, lead=FLOORS)] if plots else []


def _cloud(run: ReportedRun, table: pl.DataFrame) -> Section:
    shown = table.filter(pl.col("shown").is_finite(), pl.col("shown") > 0)["shown"].to_numpy()
    part = (
        f" The plane shows {_percent(shown.min())} to {_percent(shown.max())} of a layer's variance."
        if len(shown)
        else ""
    )
    views = [("as it is", cloud_chart(table)), ("magnified", cloud_chart(table, magnified=True))]
    caption = (
        "Each mark is a token, coloured by its place in the text from dark to light; point at it to read it. "
        "The two axes are the leading principal directions of all layers of all variants together, the same "
        "in every panel, in units of a token's length. As it is, a cloud that becomes uniform falls into the "
        "middle; magnified, every layer is drawn at the same size, and one sees what is left of its shape."
        f"{part}{_few(table, VARIANTS)}{_apart(run)}"
    )
    return Section("cloud", "The tokens, layer by layer", _which(run, 1), plots=[Plot("cloud", views, caption)])


def _apart(run: ReportedRun) -> str:
    """How the number above a cloud differs from the verdict's, where both are shares of the tokens' size."""
    lead = "" if run.measured is None else run.measured.metrics[0]
    if not is_share(lead):
        return ""
    norm = "" if lead == "relative_mu" else f", the verdict's {symbol_of(lead)}"
    every = run.excerpts
    over = f"{' and' if norm else ', the verdict'} is of all {every} excerpts" if every > 1 else ""
    if not norm + over:
        return ""
    return (
        f" “Apart by” is not the verdict's number: it is {symbol_of('relative_mu')} of this excerpt alone"
        f"{norm}{over}. Both are 0 when tokens are the same."
    )


def _percent(share: float) -> str:
    return "less than 0.1%" if share < 0.001 else f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _which(run: ReportedRun, k: int) -> str:
    """Which of the excerpts that were measured are shown, where that is not all, and how the first begins."""
    every = run.excerpts
    if every <= k:
        return ""
    first = run.manifest.text.first if run.manifest.text is not None else None
    begins = f": “{first[:200]}”" if first else "."
    if k == 1:
        return f"The first excerpt of {every}{begins}"
    return f"The first {k} excerpts of {every}."


def _few(table: pl.DataFrame, most: int) -> str:
    """Which part of the table is drawn, where that is not all."""
    variants, samples = (table[name].n_unique() for name in ("variant", "sample"))
    few = f" Drawn are the first {most} of {variants} variants." if variants > most else ""
    return f"{few} One excerpt is shown of {samples}." if samples > 1 else few


def _spectrum(run: ReportedRun, table: pl.DataFrame) -> Section:
    samples = table["sample"].n_unique()
    over = f", geometric means over {samples} excerpts" if samples > 1 else ""
    caption = (
        f"Singular values of the residual as shares of the tokens' norm, a line a layer{over}. Lines that "
        "fall as a whole: tokens draw together in every direction. Lines that grow steep: they still differ, "
        "but along few directions."
    )
    plot = Plot("spectrum", [("", spectrum_chart(table))], caption)
    return Section("spectrum", "Singular values", _which(run, samples), plots=[plot])


def _paths(run: ReportedRun, table: pl.DataFrame) -> Section:
    closure = run.closure
    adds = "" if closure is None else f" All of them add up to the output within {closure:.0e} of it."
    lead = (
        "A path goes through one head, or past all of them, in every layer; its length is the number of "
        "heads in it. The terms of all paths are summed exactly, with attention, norms and activations "
        "frozen as measured."
    )
    caption = (
        "Left: share of the output, mean over samples; shares add up to 100%. One may be "
        "negative, and another then above 100%: what some paths write, others take back. Right: the "
        f"relative residual of each length's sum, a mark for each sample.{adds}"
    )
    plot = Plot("lengths", [("", lengths_chart(table))], caption)
    return Section("paths", "Which paths carry the output", lead, plots=[plot])


def _heads(_: ReportedRun, table: pl.DataFrame) -> Section:
    names = ("contraction", "averaging", "share", "residual_share")
    views = [(name.replace("_", " "), heads_chart(table, name)) for name in names]
    caption = (
        "Contraction: how much a head's output varies from token to token, as a share of how much its input "
        "does; averaging: the same without its weights. Share and residual share: what passes through "
        "the head of the output, and of what tells tokens apart in it; blue adds, orange takes away. Point "
        "at a head for all of them."
    )
    return Section("heads", "What each head does", plots=[Plot("heads", views, caption)])


def _bounds(run: ReportedRun) -> list[Section]:
    if not run.certificates:
        return []
    plots, tables, notes = [], [], []
    for k, (variant, certificates) in enumerate(run.certificates.items()):
        if (certificates.table["quantity"] != RANK).any():
            plots.append(Plot(
                f"bounds-{k}", [("", bounds_chart(certificates.table))],
                f"{variant}: measured (heavy line) and proved. Upper bounds are solid, lower bounds dashed; "
                "hollow marks are vacuous: as large as the tokens themselves, or zero. A bound is drawn as "
                "far as its hypotheses hold. One excerpt is shown; the table is of all.",
            ))  # fmt: skip
        tables += [certificate_table(certificates, variant), failing_table(certificates, variant)]
        if len(certificates.broken()):
            notes.append(f"{variant}: a measurement contradicts a theorem. Please report this network.")
    lead = "Theorems whose hypotheses were checked on this network and this text, next to what was measured."
    return [Section("bounds", "What is proved", lead, plots, [table for table in tables if table.rows], notes)]


TABLE_SECTIONS = {"cloud": _cloud, "spectrum": _spectrum, "lengths": _paths, "heads": _heads}
"""Tables that have a section of their own, in the order of reading."""
