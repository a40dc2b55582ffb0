"""`summary.md`: all answered questions on one page, as a paper would report them.

`write_pages` writes it beside the pages of questions, from the same data. Every number on it is computed; the prose
below is what holds for all questions alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankscope_studies.questions.question import LATER, VERDICTS, Question, RuleChange
from rankscope_studies.study import PageTable, StudyResult

NAME = "summary"
TITLE = "Questions on token uniformity, answered by experiment"
METHOD = (
    "Networks are fresh, or trained from scratch on small tasks (sorting, convex hulls, next characters of Moby "
    "Dick, digits of 8 × 8 pixels), or trained models that Python packages carry (MiniLM, and encoders of "
    "chemical reactions and antibodies). Tokens are compared by their distance from the mean token as a share of "
    "their size: `relative_residual` in the norm of Dong et al., `relative_mu` in the Frobenius norm of Wu et "
    "al.; 0 where all tokens are the same. Falls below what float64 can hold are followed in deviation "
    "arithmetic, which carries differences between tokens apart from what tokens share. Each file of "
    "`rankscope_studies/questions` is one study, and reads from top to bottom as its method section."
)
REVIEW = (  # (question, reply)
    (
        "Were hypotheses written before the data were seen?",
        f"{{before}} of {{written}} were in the study's file before its first run; the rest begin with '{LATER}'. In "
        "some studies trials had been seen before, or rules and thresholds were changed after a run; the notes of each "
        "page list the changes, and answers may rest on changed rules.",
    ),
    ("How many hypotheses failed?", "{failed} of {judged} that could be judged; all of them are listed below."),
    (
        "Are differences larger than chance?",
        "Most numbers are medians with their range over seeds, which is no interval; tables of tuned rates have none. "
        "'Holds' mostly means with every seed; where a run is too small, the verdict is 'cannot be told'. Few "
        "hypotheses have a p-value: those of does-it-pay, corrected by Holm's method on its page, and those of "
        "using-paths, whose level is divided by all its comparisons. The others have no correction. A hypothesis that "
        "asks of 3, 4 or 5 seeds only that all lie on one side holds by chance once in 8, 16 or 32: of the {judged} "
        "that were judged, {by_3:.0f}, {by_4:.0f} or {by_5:.0f} would hold with nothing to find. {held} do, and most "
        "ask for more than a side; but a single one that just holds is weak evidence.",
    ),
    (
        "Were rules changed after the numbers were in?",
        "In {changed} of {studies} studies, once the full run of the page had been seen; a table below says which, "
        "with the verdicts that the code before the run gives on the same data: {moved} of {written} were others. By "
        "those rules {held_before} hold, {failed_before} do not and {untold_before} cannot be told, in place of "
        "{held}, {failed} and {untold}.",
    ),
    (
        "Are the networks too small to matter?",
        "They are small: up to 128 layers, widths of 16 to 512, minutes of one GPU for each study. What is exact "
        "(path sums, certificates, falls in deviation arithmetic) does not depend on training. What is trained "
        "may change with scale, and each page says what would change its answer.",
    ),
    (
        "Is each arm tuned?",
        "Where arms compete (remedies, shapes), learning rates are chosen for each arm on seeds of their own, and "
        "results are of other seeds; elsewhere one recipe serves all arms, and the page says so.",
    ),
    (
        "Can a number be an artefact of rounding?",
        "Residuals in deviation arithmetic are mostly computed twice, with different rounding, and left out or marked "
        "where the two differ; most figures draw what is at the floor of float64 open or on their lower edge. Pages "
        "name exceptions.",
    ),
    (
        "Can it be run again?",
        "Each page ends with its command. Seeds are fixed; the data behind every number and figure lie beside the "
        "pages, and `rankscope study --redraw --pages packages/rankscope-studies/docs/studies` writes all "
        "pages from them. On a GPU sums are "
        "taken in another order: digits beyond the spread may differ.",
    ),
)


@dataclass(frozen=True)
class AnsweredQuestion:
    """A question with the result that its kept data give."""

    question: Question
    result: StudyResult
    kept: dict[str, Any]  # What `kept.json` holds of the run
    figures: Sequence[str]  # Files of the figures, relative to the page

    @property
    def changed(self) -> RuleChange | None:
        """The rules that were changed once the full run had been seen, if the page shows that run."""
        return self.question.changed if self.kept["full"] else None


def summary_page(answered: Sequence[AnsweredQuestion]) -> str:
    """The page of all answered questions, in Markdown.

    Args:
        answered: Every question that has been run, in the order of the overview.
    """
    verdicts = [comparison.agrees for entry in answered for comparison in entry.result.comparisons]
    judged = [agrees for agrees in verdicts if agrees is not None]
    later = sum(comparison.what.startswith(LATER) for entry in answered for comparison in entry.result.comparisons)
    changes = [entry.changed for entry in answered if entry.changed]
    earlier = [
        entry.changed.before.get(k, comparison.agrees) if entry.changed else comparison.agrees
        for entry in answered
        for k, comparison in enumerate(entry.result.comparisons, 1)
    ]
    counts: dict[str, float] = {"failed": judged.count(False), "held": judged.count(True), "judged": len(judged)}
    counts |= {"written": len(verdicts), "before": len(verdicts) - later, "untold": verdicts.count(None)}
    counts |= {
        "changed": len(changes),
        "studies": len(answered),
        "moved": sum(len(change.before) for change in changes),
    }
    counts |= {"held_before": earlier.count(True), "failed_before": earlier.count(False)}
    counts |= {"untold_before": earlier.count(None)} | {f"by_{n}": len(judged) / 2**n for n in (3, 4, 5)}
    quick = sum(not entry.kept["full"] for entry in answered)
    lines = [
        f"# {TITLE}", "",
        f"{len(answered)} questions that the papers on token uniformity left open, asked of one instrument. "
        f"{len(verdicts)} hypotheses were written down, {counts['before']} of them before a first run: "
        f"{judged.count(True)} hold, {judged.count(False)} do not, {len(verdicts) - len(judged)} cannot be told."
        + (f" {quick} of the questions were run at quick size only." if quick else ""),
        "", "## Answers", "", *_answers(answered).markdown, "",
        "## Method", "", METHOD, "", "## Results", "",
    ]  # fmt: skip
    for entry in answered:
        lines += [f"### {entry.question.title}", "", entry.result.summary, ""]
        lines += [f"![{entry.question.title}]({file})\n" for file in entry.figures]
        lines += [f"*{entry.question.caption}*", ""] if entry.question.caption else []
    lines += ["## What a reviewer would ask", ""]
    for question, reply in REVIEW:
        lines += [f"**{question}** {reply.format_map(counts)}", ""]
    if changes:
        lines += ["## Rules that were changed after the full run", "", *_changes(answered).markdown, ""]
    lines += ["## Hypotheses that do not hold", "", *_failed(answered).markdown, ""]
    lines += ["## Commands", "", "```sh", *(entry.kept["command"] for entry in answered), "```", ""]
    return "\n".join(lines)


def _answers(answered: Sequence[AnsweredQuestion]) -> PageTable:
    """One row for each question: its answer, and how many of its hypotheses hold."""
    rows = []
    for entry in answered:
        agrees = [comparison.agrees for comparison in entry.result.comparisons]
        counts = " / ".join(str(agrees.count(verdict)) for verdict in VERDICTS)
        size = "full" if entry.kept["full"] else "quick"
        rows.append([f"[{entry.question.title}]({entry.question.name}.md)", entry.result.summary, counts, size])
    return PageTable("", ["question", "answer", "hypotheses: hold / do not / cannot be told", "size"], rows)


def changed_text(changed: RuleChange) -> str:
    """What was changed, and which verdicts the rules before gave on the same data."""
    verdicts = ", ".join(f"hypothesis {position} {VERDICTS[holds]}" for position, holds in changed.before.items())
    return f"{changed.what} By the rules before, {verdicts or 'every verdict is the same'}."


def _changes(answered: Sequence[AnsweredQuestion]) -> PageTable:
    """What was changed once a full run had been seen, study by study."""
    rows = [
        [f"[{entry.question.name}]({entry.question.name}.md)", changed_text(entry.changed)]
        for entry in answered
        if entry.changed
    ]
    return PageTable("", ["study", "what was changed"], rows)


def _failed(answered: Sequence[AnsweredQuestion]) -> PageTable:
    """What was expected and did not come, with what came."""
    rows = [
        [f"[{entry.question.name}]({entry.question.name}.md)", comparison.what, comparison.ours]
        for entry in answered
        for comparison in entry.result.comparisons
        if comparison.agrees is False
    ]
    return PageTable("", ["study", "expected", "what came"], rows)
