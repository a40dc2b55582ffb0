"""The sections of a chapter: those of each result that a run holds, and of tables that only a report shows."""

import warnings
from collections.abc import Callable

import polars as pl

from rankscope.depths import DepthCard
from rankscope.errors import PluginWarning
from rankscope.metrics import is_share, symbol_of
from rankscope.paths import heads_section, lengths_section
from rankscope.profiles import VARIANTS, Bounds, cloud_chart, spectrum_chart
from rankscope.report.reported_run import CHAPTERS, Chapter, ReportedRun
from rankscope.results import KINDS, Plot, Section, Views, sentence
from rankscope.theory import bounds_section, proved_shares


def sections_of(run: ReportedRun) -> list[Section]:
    """All that the run has something for, in the order of reading; what plugins add comes last."""
    sections: list[Section] = []
    for name, chapter in CHAPTERS.items():
        try:
            sections += [] if isinstance(chapter, type) else chapter(run)
        except (Exception, SystemExit) as error:  # a stranger's chapter takes no other with it
            CHAPTERS.failed(name, error)
    return sections


def results_sections(run: ReportedRun) -> list[Section]:
    """The sections of the results that a run holds."""
    sections = [] if run.training is None else run.training.sections()
    sections += [] if run.sweep is None else run.sweep.sections()
    sections += [] if run.measured is None else run.measured.sections(_bounds(run, run.measured.metrics[0]))
    for name, section_of in TABLE_SECTIONS.items():
        if name in run.tables and run.tables[name].height:
            sections.append(section_of(run, run.tables[name]))
    proved = {variant: certificates.proved() for variant, certificates in run.certificates.items()}
    sections += [bounds_section(proved)] if proved else []
    for result in run.further:
        try:
            sections += result.sections()
        except (Exception, SystemExit) as error:
            if result.kind in KINDS.shipped:
                raise
            sentence = f"sections of results called {result.kind}, of a plugin, are left out"
            warnings.warn(f"{sentence}: {type(error).__name__}: {error}", PluginWarning, stacklevel=2)
    for contributed in run.chapters:
        sections += contributed.sections()
    return sections


SHIPPED: tuple[Chapter, ...] = (results_sections,)


def _bounds(run: ReportedRun, metric: str) -> Bounds:
    """What is proved of a metric, by variant."""
    shares = {
        variant: proved_shares(metric, certificates.guarantees(), certificates.samples)
        for variant, certificates in run.certificates.items()
    }
    return {metric: shares} if shares else {}


def _cloud(run: ReportedRun, table: pl.DataFrame) -> Section:
    shown = table.filter(pl.col("shown").is_finite(), pl.col("shown") > 0)["shown"].to_numpy()
    part = ""
    if len(shown):
        part = sentence("cloud", "plane", least=_percent(shown.min()), most=_percent(shown.max()))
    caption = f"{sentence('cloud', 'caption')}{part}{_few(run, table)}{_apart(run)}"
    plot = Plot("cloud", cloud_views(table), caption)
    return Section("The tokens, layer by layer", _which(run, 1), [plot], key="cloud")


def cloud_views(table: pl.DataFrame) -> Views:
    """A cloud of tokens at its own size and, so that its shape is seen, at the same size in every layer."""
    return [("as it is", cloud_chart(table)), ("magnified", cloud_chart(table, magnified=True))]


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
    return Section("Singular values", _which(run, samples), [plot], key="spectrum")


def depth_card(run: ReportedRun) -> DepthCard:
    """The depth card of a run that has one."""
    tables = {name: run.tables[name].fill_nan(None) for name in DepthCard.schemas}
    return DepthCard.made_of(tables, run.manifests.get(DepthCard.kind, run.manifest), {"notes": ()})


TABLE_SECTIONS: dict[str, Callable[[ReportedRun, pl.DataFrame], Section]] = {
    "depth_layers": lambda run, _: depth_card(run).sections()[0],
    "cloud": _cloud,
    "spectrum": _spectrum,
    "lengths": lambda run, table: lengths_section(table, run.closure),
    "heads": lambda _, table: heads_section(table),
}
"""Tables that have a section of their own, in the order of reading."""
