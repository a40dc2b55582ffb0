"""A chapter of the page: what the template needs of one run (what it says in a sentence or two, what was run on
what, its sections), and what each part of it weighs.

Of many runs the later chapters leave out what weighs most and says least (`fit`). The first chapter is whole,
so that a page of one run never lacks anything; tables and findings always stay.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rankscope.extras import counted, listed
from rankscope.figures import page_figure, script_json
from rankscope.paths import carried, length_views
from rankscope.profiles import Profile, Summary
from rankscope.report.causes import verdict
from rankscope.report.reported_run import ReportedRun
from rankscope.report.sections import depth_card, sections_of
from rankscope.results import SENTENCES, Plot, Section, Views
from rankscope.runs import Manifest, Network
from rankscope.theory import bounds_sentence

BUDGET = 12_000_000  # Characters of figures, pictures and manifests, beside plotly itself: a page that opens on a phone
LEFT_OUT = SENTENCES["left_out"]  # Kinds of parts in the order in which they go, and what each is called
MANIFEST = 200_000  # Characters of a manifest that are shown at most


@dataclass(eq=False)
class Chapter:
    """One run in the page."""

    run: ReportedRun
    index: int  # Its place in the page, from 1
    title: str
    sections: list[Section]
    finding: str  # What the run says
    facts: list[str]  # What was run on what
    checks: list[dict[str, str]]  # What the run found about itself
    figures: dict[str, str] = field(default_factory=dict)
    """By id of the element that it is drawn into: its views as JSON."""
    manifests: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)  # What was left out for the size of the page

    @property
    def id(self) -> str:
        """The id of the chapter's element."""
        return f"run{self.index}"

    def section_id(self, section: Section) -> str:
        """The id of a section's element."""
        return f"{self.id}-{section.key}"

    def plot_id(self, plot: Plot) -> str:
        """The id of the element that a figure is drawn into."""
        return f"{self.id}-figure-{plot.key}"

    @property
    def notes(self) -> list[str]:
        """What a reader should know before the figures."""
        notes = [stopped(self.run), *self.run.notes]
        if self.left:
            notes.append(
                f"Left out, so that a page of so many runs still opens: {listed(self.left)}. A report of this run "
                f"alone has them: rankscope report {shlex.quote(str(self.run.folder))}"
            )
        return [note for note in notes if note]

    def weights(self) -> Iterator[tuple[str, int]]:
        """(kind of part, characters) of all that weighs something."""
        for section in self.sections:
            for plot in section.plots:
                yield plot.kind, len(self.figures[self.plot_id(plot)])
            yield "picture", sum(len(picture["uri"]) for picture in section.pictures)
        yield "manifest", sum(map(len, self.manifests.values()))

    def leave_out(self, kind: str) -> None:
        """Take the parts of this kind out, and sections that hold nothing without them."""
        if kind == "manifest":
            self.manifests.clear()
        empty = [section for section in self.sections if not section.holds_something]
        for section in self.sections:
            if kind == "picture":
                section.pictures.clear()
            for plot in [plot for plot in section.plots if plot.kind == kind]:
                section.plots.remove(plot)
                del self.figures[self.plot_id(plot)]
        self.sections = [section for section in self.sections if section.holds_something or section in empty]


def chapter(run: ReportedRun, index: int, title: str) -> Chapter:
    """The chapter of a run, with all its parts."""
    checked = [] if run.measured is None else checks(run.measured)
    made = Chapter(run, index, title, sections_of(run), finding(run), facts(run), checked)
    made.figures = {made.plot_id(plot): figure_json(plot.views) for section in made.sections for plot in section.plots}
    several = len(run.manifests) > 1
    manifests = {f"manifest of {name}" if several else "manifest": manifest for name, manifest in run.manifests.items()}
    for variant, certificates in run.certificates.items():
        if certificates.manifest not in manifests.values():
            manifests[f"certificates of {variant}"] = certificates.manifest
    made.manifests = {name: _manifest_text(manifest) for name, manifest in manifests.items()}
    return made


def finding(run: ReportedRun) -> str:
    """What the run says, in a sentence or two: of measurements the verdict, else what its tables come to."""
    if run.measured is not None:
        return verdict(run.measured)
    if run.training is not None:
        return run.training.sentence
    if run.sweep is not None:
        return run.sweep.overview().sentence
    if run.chapters:
        return run.chapters[0].finding
    if "depth_layers" in run.tables:
        return depth_card(run).sentence
    if "lengths" in run.tables:
        return carried(length_views(run.tables["lengths"]))
    if run.further and not run.certificates:
        brief = run.further[0].overview()
        return brief.sentence or " ".join(brief.notes)
    return " ".join(bounds_sentence(proved.views(), f"for {name}") for name, proved in run.certificates.items())


def stopped(run: ReportedRun) -> str:
    """A sentence where the run ended before it was through; nothing where it did not."""
    early, text = run.manifest.stopped, run.manifest.text
    if early is not None:
        done = ", ".join(early.finished) or "none"
        return f"This run was stopped early: of {early.asked} there are {len(early.finished)} ({done})."
    if text is not None and text.read_to_the_end is False:
        return "This run was stopped before it had read all of the text."
    return ""


def facts(run: ReportedRun) -> list[str]:
    """What was run on what, in a few words each."""
    architectures = [network.architecture or {} for network in run.manifest.networks]
    sizes = [
        f"{counted(arch['layers'], 'layer')} of {counted(arch['heads'], 'head')}, width {arch['width']}"
        for arch in architectures
        if all(isinstance(arch.get(name), int) for name in ("layers", "heads", "width"))
    ]
    words = sizes[:1] if len(set(sizes)) == 1 else [f"{len(set(sizes))} sizes of network"] if sizes else []
    if run.measured is not None:
        words += [counted(run.excerpts, run.sample), f"{', '.join(run.measured.arithmetics)} arithmetic"]
    if run.training is not None and run.measured is None:
        models = [network.model or {} for network in run.training.manifest.networks[:1]]
        words += [f"{model['parameters']:,} parameters" for model in models if isinstance(model.get("parameters"), int)]
        words.append(counted(len(run.training.steps), "measurement"))
    if run.sweep is not None and run.measured is None:
        words += [counted(len(run.sweep.cells), "cell"), f"{len(run.sweep.view().varied)} factors that differ"]
    return [*words, _when(run.manifest.created)] if run.manifest.created else words


def _when(created: str) -> str:
    """A time as one says it.

    >>> _when("2026-03-01T09:05:00+00:00")
    '1 March 2026, 09:05 UTC'
    """
    try:
        time = datetime.fromisoformat(created).astimezone(UTC)
    except (ValueError, OverflowError):
        return created
    return f"{time.day} {time:%B %Y, %H:%M} UTC"


def figure_json(views: Views) -> str:
    """The views of one figure as JSON for the page."""
    return script_json(_page_views(views))


def section_json(section: Section) -> dict[str, Any]:
    """A section as a page is sent it: its words, the views of each of its pictures, and its tables."""
    plots = [{"key": plot.key, "views": _page_views(plot.views)} for plot in section.plots]
    tables = [{"title": table.title, "headings": [*table.headings], "rows": [*map(list, table.rows)],
               "marked": sorted(table.marked), "note": table.note} for table in section.tables]  # fmt: skip
    words = {"heading": section.heading, "sentence": section.sentence, "notes": section.notes}
    return {**words, "plots": plots, "tables": tables}


def _page_views(views: Views) -> list[dict[str, Any]]:
    """The views of one figure by label: what its CSV holds is the same in all, and kept once."""
    figures = [page_figure(chart) for _, chart in views]
    for figure in figures[1:]:
        if figure["table"] == figures[0]["table"]:
            del figure["table"]
    return [{"label": label, "figure": figure} for (label, _), figure in zip(views, figures, strict=True)]


def _manifest_text(manifest: Manifest) -> str:
    try:
        text = json.dumps(manifest.to_dict(), indent=1, ensure_ascii=False)
    except RecursionError:
        return "nested too deeply to be shown"
    return text if len(text) <= MANIFEST else f"{text[:MANIFEST]}\n… {len(text) - MANIFEST} characters more"


def fit(chapters: Sequence[Chapter], budget: int = BUDGET) -> None:
    """Take parts out of later chapters, from the last on, until the page is within its budget."""
    total = sum(weight for chapter in chapters for _, weight in chapter.weights())
    for kind, name in LEFT_OUT.items():
        for chapter in reversed(chapters[1:]):
            if total <= budget:
                return
            weight = sum(weight for part, weight in chapter.weights() if part == kind)
            if weight:
                chapter.leave_out(kind)
                chapter.left.append(name)
                total -= weight


def checks(measured: Profile | Summary) -> list[dict[str, str]]:
    """What the run found about itself, in words."""
    return [
        {"variant": network.variant, "arithmetic": network.arithmetic, "said": _checked(network)}
        for network in measured.manifest.networks
    ]


def _checked(network: Network) -> str:
    """In words, of a check that is there what it says: other versions may have others."""
    checks = network.checks
    notes = [_rows(checks.get("rows_sum_to_one"), checks.get("largest_row_sum_defect"))]
    if isinstance(checks.get("padded_tokens"), int):
        notes.append(f"{checks['padded_tokens']} padded tokens left out")
    if isinstance(checks.get("dropout"), int | float):
        notes.append(f"dropout {checks['dropout']:g}")
    overflow = checks.get("first_layer_not_finite", "unknown")
    if overflow is None:
        notes.append("all layers finite")
    elif isinstance(overflow, int):
        notes.append(f"numbers overflow from layer {overflow}")
    asked = checks.get("arithmetic_asked", network.arithmetic)
    if asked != network.arithmetic:
        notes.append(f"run instead of {asked}, which has no rule for one of its parts")
    return "; ".join(notes)


def _rows(one: object, defect: object) -> str:
    if not isinstance(one, bool) or not isinstance(defect, int | float):
        return "attention was not looked at"
    if one:
        return f"attention rows sum to one within {defect:.1e}"
    return f"attention rows miss one by up to {defect:.2g}: theorems on averaging do not apply"
