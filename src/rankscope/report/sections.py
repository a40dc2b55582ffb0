"""The sections of a chapter: which figures and tables a run gives, each with a sentence on how to read it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import polars as pl

from rankscope.depths import DepthCard
from rankscope.depths.card import ENTRY as DEPTH_ENTRY
from rankscope.depths.card import TABLES as DEPTH_TABLES
from rankscope.depths.figures import caption
from rankscope.depths.tables import MARKS
from rankscope.depths.views import norms_sentence
from rankscope.metrics import direction_of, is_share, symbol_of
from rankscope.paths.figures import heads_chart, lengths_chart
from rankscope.plugins import Group
from rankscope.profiles import Profile, Summary
from rankscope.profiles.figures import VARIANTS, arithmetics_chart, cloud_chart, curves_chart, spectrum_chart
from rankscope.profiles.views import CurveView
from rankscope.report.content import Plot, Section, Views, sentence
from rankscope.report.reported_run import ReportedRun
from rankscope.report.studies import study_sections
from rankscope.report.sweep import sweep_sections
from rankscope.report.tables import (
    certificate_table,
    curve_table,
    depth_table,
    effective_depth_table,
    failing_table,
    spread_table,
)
from rankscope.report.training import training_sections
from rankscope.theory.figures import bounds_chart, proved_shares
from rankscope.theory.views import RANK

FLOORS = sentence("curves", "floors")


def sections_of(run: ReportedRun) -> list[Section]:
    """All that the run has something for, in the order of reading; what plugins add comes last."""
    sections: list[Section] = []
    for name, chapter in CHAPTERS.items():
        try:
            sections += chapter(run)
        except Exception as error:  # a stranger's chapter takes no other with it
            CHAPTERS.failed(name, error)
    return sections


def results_sections(run: ReportedRun) -> list[Section]:
    """The sections of the results that a run holds."""
    sections = [] if run.training is None else training_sections(run.training)
    sections += [] if run.sweep is None else sweep_sections(run.sweep)
    if run.measured is not None:
        sections += [_curves(run, run.measured), *_arithmetics(run.measured)]
    for name, section_of in TABLE_SECTIONS.items():
        if name in run.tables and run.tables[name].height:
            sections.append(section_of(run, run.tables[name]))
    return [*sections, *_bounds(run)]


def studies_sections(run: ReportedRun) -> list[Section]:
    """The sections of studies."""
    return study_sections(run.outcomes)


Chapter = Callable[[ReportedRun], Sequence[Section]]
SHIPPED: tuple[Chapter, ...] = (results_sections, studies_sections)
CHAPTERS: Group[Chapter] = Group(
    "chapters", "a function that makes sections of a run", callable, named=lambda each: getattr(each, "__name__", "")
)
"""What makes the sections of a run, by the name of each function."""


def _curves(run: ReportedRun, measured: Profile | Summary) -> Section:
    lead, *further = measured.metrics
    summary = isinstance(measured, Summary)
    statistic = sentence("curves", "of_excerpts" if summary else "of_samples", excerpts=run.excerpts)
    proved = sentence("curves", "proved") if run.certificates else ""
    filled = {"symbol": symbol_of(lead), "statistic": statistic, "floors": FLOORS, "proved": proved}
    plots = [Plot("curves", _both(measured, lead, run), sentence("curves", "caption", **filled))]
    plots += [Plot(f"curves-{name}", _small(measured, name), name.replace("_", " "), small=True) for name in further]
    tables = [curve_table(measured.views(lead))]
    if isinstance(measured, Summary):
        tables.append(spread_table(measured, lead))
    return Section("residual", "How uniform the tokens become", sentence("curves", "lead"), plots, tables)


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
    plots = []
    for k, (variant, curves) in enumerate(compared_arithmetics(measured).items()):
        caption = sentence("arithmetics", "caption", variant=variant, symbol=symbol_of(curves[0].metric))
        plots.append(Plot(f"arithmetics-{k}", [("", arithmetics_chart(curves))], caption))
    return [Section("arithmetics", "What each arithmetic can see", plots=plots, lead=FLOORS)] if plots else []


def _cloud(run: ReportedRun, table: pl.DataFrame) -> Section:
    shown = table.filter(pl.col("shown").is_finite(), pl.col("shown") > 0)["shown"].to_numpy()
    part = ""
    if len(shown):
        part = sentence("cloud", "plane", least=_percent(shown.min()), most=_percent(shown.max()))
    views = [("as it is", cloud_chart(table)), ("magnified", cloud_chart(table, magnified=True))]
    caption = f"{sentence('cloud', 'caption')}{part}{_few(run, table)}{_apart(run)}"
    return Section("cloud", "The tokens, layer by layer", _which(run, 1), plots=[Plot("cloud", views, caption)])


def _apart(run: ReportedRun) -> str:
    """How the number above a cloud differs from the verdict's, where both are shares of the tokens' size."""
    lead = "" if run.measured is None else run.measured.metrics[0]
    if not is_share(lead):
        return ""
    norm = "" if lead == "relative_mu" else f", the verdict's {symbol_of(lead)}"
    every = run.excerpts
    over = f"{' and' if norm else ', the verdict'} is of all {every} {run.sample}s" if every > 1 else ""
    if not norm + over:
        return ""
    return sentence("cloud", "apart", symbol=symbol_of("relative_mu"), norm=norm, over=over, sample=run.sample)


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
        return f"The first {run.sample} of {every}{begins}"
    return f"The first {k} {run.sample}s of {every}."


def _few(run: ReportedRun, table: pl.DataFrame, excerpt: bool = True) -> str:
    """Which variants are drawn, where those are not all that were measured; with `excerpt`, how many excerpts."""
    names, samples = table["variant"].unique(maintain_order=True).to_list(), table["sample"].n_unique()
    measured = names if run.measured is None else run.measured.variants
    drawn = f"Drawn are {min(len(names), VARIANTS)} of the {len(measured)} variants: {', '.join(names[:VARIANTS])}."
    few = f" {drawn}" if len(measured) > min(len(names), VARIANTS) else ""
    return f"{few} One {run.sample} is shown of {samples}." if excerpt and samples > 1 else few


def _spectrum(run: ReportedRun, table: pl.DataFrame) -> Section:
    samples = table["sample"].n_unique()
    over = f", geometric means over {samples} {run.sample}s" if samples > 1 else ""
    caption = f"{sentence('spectrum', 'caption', over=over)}{_few(run, table, excerpt=False)}"
    plot = Plot("spectrum", [("", spectrum_chart(table))], caption)
    return Section("spectrum", "Singular values", _which(run, samples), plots=[plot])


def _paths(run: ReportedRun, table: pl.DataFrame) -> Section:
    adds = "" if run.closure is None else sentence("paths", "closure", closure=run.closure)
    plot = Plot("lengths", [("", lengths_chart(table))], f"{sentence('paths', 'caption')}{adds}")
    return Section("paths", "Which paths carry the output", sentence("paths", "lead"), [plot])


def _heads(_: ReportedRun, table: pl.DataFrame) -> Section:
    names = ("contraction", "averaging", "share", "residual_share")
    views = [(name.replace("_", " "), heads_chart(table, name)) for name in names]
    plot = Plot("heads", views, sentence("heads", "caption"))
    return Section("heads", "What each head does", plots=[plot])


def _bounds(run: ReportedRun) -> list[Section]:
    if not run.certificates:
        return []
    plots, tables, notes = [], [], []
    for k, (variant, certificates) in enumerate(run.certificates.items()):
        if (certificates.table["quantity"] != RANK).any():
            caption = sentence("bounds", "caption", variant=variant)
            plots.append(Plot(f"bounds-{k}", [("", bounds_chart(certificates.table))], caption))
        tables += [certificate_table(certificates, variant), failing_table(certificates, variant)]
        if len(certificates.broken()):
            notes.append(sentence("bounds", "contradicted", variant=variant))
    lead = sentence("bounds", "lead")
    return [Section("bounds", "What is proved", lead, plots, [table for table in tables if table.rows], notes)]


def depth_card(run: ReportedRun) -> DepthCard:
    """The depth card of a run that has one."""
    tables = {name: run.tables[f"depth_{name}"].fill_nan(None) for name in DEPTH_TABLES}
    marks = {name: [column for column in table.columns if column in MARKS] for name, table in tables.items()}
    tables = {name: table.with_columns(pl.col(marks[name]).cast(pl.Boolean)) for name, table in tables.items()}
    return DepthCard(tables, run.manifests.get(DEPTH_ENTRY, run.manifest))


def _depth(run: ReportedRun, _: pl.DataFrame) -> Section:
    card = depth_card(run)
    plot = Plot("depth", [("", card.chart)], caption(card.chart))
    lead = f"{sentence('depth', 'lead')} {card.sentence} {norms_sentence(card.norms)}"
    tables = [depth_table(card.layers), effective_depth_table(card.effective_depths)]
    return Section("depth", "Which layers and heads the output needs", lead, [plot], tables)


TABLE_SECTIONS = {
    "depth_layers": _depth, "cloud": _cloud, "spectrum": _spectrum, "lengths": _paths, "heads": _heads,
}  # fmt: skip
"""Tables that have a section of their own, in the order of reading."""
