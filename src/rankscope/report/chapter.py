"""A chapter of the page: what the template needs of one run, and what each part of it weighs."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rankscope.figures.description import Chart
from rankscope.figures.escaping import script_json
from rankscope.figures.page import page_figure
from rankscope.report.facts import facts, stopped
from rankscope.report.finding import finding
from rankscope.report.plots import Plot, Section
from rankscope.report.run import Run
from rankscope.report.sections import sections_of
from rankscope.report.tables import checks
from rankscope.runs import Manifest

MANIFEST = 200_000
"""Characters of a manifest that are shown at most."""


@dataclass(eq=False)
class Chapter:
    """One run in the page."""

    run: Run
    number: int
    title: str
    sections: list[Section]
    finding: str
    """What the run says."""
    facts: list[str]
    """What was run on what."""
    checks: list[dict[str, str]]
    """What the run found about itself."""
    figures: dict[str, str] = field(default_factory=dict)
    """By id of the element that it is drawn into: its views as JSON."""
    manifests: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    """What was left out for the size of the page."""

    @property
    def id(self) -> str:
        """Of its element."""
        return f"run{self.number}"

    def section_id(self, section: Section) -> str:
        """Of a section's element."""
        return f"{self.id}-{section.key}"

    def plot_id(self, plot: Plot) -> str:
        """Of the element that a figure is drawn into."""
        return f"{self.id}-figure-{plot.key}"

    @property
    def notes(self) -> list[str]:
        """What a reader should know before the figures."""
        return [note for note in (stopped(self.run), *self.run.notes, self._left()) if note]

    @property
    def command(self) -> str:
        """The command line that made it."""
        return self.run.manifest.command or ""

    def _left(self) -> str:
        if not self.left:
            return ""
        what = self.left[0] if len(self.left) == 1 else f"{', '.join(self.left[:-1])} and {self.left[-1]}"
        return (
            f"Left out, so that a page of so many runs still opens: {what}. A report of this run alone has "
            f"them: rankscope report {shlex.quote(str(self.run.folder))}"
        )

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
        empty = [each for each in self.sections if not (each.plots or each.tables or each.pictures)]
        for section in self.sections:
            if kind == "picture":
                section.pictures.clear()
            for plot in [plot for plot in section.plots if plot.kind == kind]:
                section.plots.remove(plot)
                del self.figures[self.plot_id(plot)]
        self.sections = [
            each for each in self.sections if each.plots or each.tables or each.pictures or each in empty
        ]


def chapter(run: Run, number: int, title: str) -> Chapter:
    """The chapter of a run, with all its parts."""
    checked = [] if run.measured is None else checks(run.measured)
    found = Chapter(run, number, title, sections_of(run), finding(run), facts(run), checked)
    for section in found.sections:
        for plot in section.plots:
            found.figures[found.plot_id(plot)] = script_json(views(plot.views))
    several = len(run.manifests) > 1
    manifests = {
        f"manifest of {name}" if several else "manifest": each for name, each in run.manifests.items()
    }
    for variant, certificates in run.certificates.items():
        if certificates.manifest not in manifests.values():
            manifests[f"certificates of {variant}"] = certificates.manifest
    found.manifests = {name: _shown(manifest) for name, manifest in manifests.items()}
    return found


def views(given: list[tuple[str, Chart]]) -> list[dict[str, Any]]:
    """The views of one figure: what its CSV holds is the same in all, and kept once."""
    found: list[dict[str, Any]] = []
    for label, chart in given:
        figure = page_figure(chart)
        again = found and figure["table"] == found[0]["figure"]["table"]
        kept = {name: part for name, part in figure.items() if not (again and name == "table")}
        found.append({"label": label, "figure": kept})
    return found


def _shown(manifest: Manifest) -> str:
    try:
        text = json.dumps(manifest.to_dict(), indent=1, ensure_ascii=False)
    except RecursionError:
        return "nested too deeply to be shown"
    return text if len(text) <= MANIFEST else f"{text[:MANIFEST]}\n… {len(text) - MANIFEST} characters more"
