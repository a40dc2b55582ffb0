"""`Question`: a question that is answered by experiment, as one file writes it down.

A file of this folder reads like a method section, from top to bottom:

1. its docstring and the texts of its `Question`: the question, what was expected before anything was run, how it is
   measured, and what would change the answer;
2. a frozen dataclass of sizes, with one `quick` and one `full` value of it;
3. `gather(setup, sizes)`: runs the experiment and gives tables. Every piece goes through `setup.cached_parts`, so an
   interrupted study resumes, and a second run gives the same bits;
4. `answer(tables, sizes)`: the answer, computed from the tables alone (`summaries.py` has medians, ranges and rank
   correlations); numbers in sentences are computed, never typed in;
5. `draw(tables, sizes)`: the figure, from the tables alone (`drawing.py` has bands of seeds and looks of lines).

Where trainings and measurements are long, they stand in a file beside it, which the question's file names.

Hypotheses and thresholds are fixed before the run. What is changed once numbers were seen (a threshold, a rule, a
candidate) is said in the notes of the answer, in a sentence with the word "Changed", to which the page points. A
hypothesis made on a run's data is judged by another run, and begins with `LATER`: the page and the summary tell it from
the others by that.

What was changed once the full run of a page had been seen is a `RuleChange` of the question, with the verdicts that
the rules before it gave on the same data.

Since 4 and 5 need nothing but tables, `page.py` makes the page again from the data that is kept beside the page. To add
a question: write its file, and add one line to `__init__.py` and its name to `commands/study.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl

from rankscope.errors import StudyError
from rankscope_studies.study import Comparison, PageTable, Setup, Study, StudyResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tables = Mapping[str, pl.DataFrame]
LATER = "Written after"  # How a hypothesis begins that was made once a run had been seen


@dataclass(frozen=True)
class HypothesisVerdict:
    """The verdict on one hypothesis, with the numbers that it rests on."""

    ours: str  # What was measured, with its spread over seeds
    holds: bool | None  # None where the experiment cannot tell


@dataclass(frozen=True)
class StudyAnswer:
    """The answer to a question, computed from tables alone."""

    sentence: str  # The whole answer in one sentence, with numbers
    verdicts: Sequence[HypothesisVerdict]  # One for each hypothesis, in their order
    evidence: Sequence[PageTable] = ()
    notes: Sequence[str] = ()  # What else a reader should know: seeds, sizes, limits that came up


@dataclass(frozen=True)
class RuleChange:
    """Rules that were changed once the full run that a page shows had been seen: the weakest kind of evidence."""

    what: str  # A sentence
    before: Mapping[int, bool] = field(default_factory=dict)
    """By the rules before, on the same data: verdicts of the hypotheses, numbered from 1, that have another one now."""


@dataclass(frozen=True)
class Question:
    """A question, what was expected of it, how it is measured, and how tables become its answer."""

    name: str  # As in `rankscope study NAME`; the file of its page
    title: str  # The question in one sentence
    why: str  # Who asked, and what is known; Markdown
    hypotheses: Sequence[str]  # Written before the run, but for those that begin with `LATER`
    method: str  # What is run and measured; Markdown
    refuted_by: str  # What would change the answer; Markdown
    quick: Any  # Sizes for two cores and minutes: a frozen dataclass of numbers, texts and tuples
    full: Any  # Sizes for a GPU, of the same class
    gather: Callable[[Setup, Any], dict[str, pl.DataFrame]]
    answer: Callable[[Tables, Any], StudyAnswer]
    draw: "Callable[[Tables, Any], dict[str, Figure]]"
    seconds: float = 60.0  # What the quick size takes on one core, roughly
    caption: str = ""  # Below the figure: what its axes, bands and marks are
    keep: Sequence[str] = field(default_factory=tuple)  # Tables to keep beside the page; all if empty
    changed: RuleChange | None = None  # After the full run was seen

    def sizes(self, full: bool) -> Any:
        """The sizes of a full or a quick run."""
        return self.full if full else self.quick

    def run(self, setup: Setup, sizes: Any = None) -> StudyResult:
        """Run the experiment, or what is left of it, and answer the question.

        Args:
            setup: Where pieces are cached, on which device, and whether at full size.
            sizes: In place of the question's own sizes.
        """
        sizes = sizes or self.sizes(setup.full)
        return self.result(self.gather(setup, sizes), sizes)

    def result(self, tables: Tables, sizes: Any) -> StudyResult:
        """The answer and the figure that tables give.

        Raises:
            StudyError: The answer does not have one verdict for each hypothesis.
        """
        answer = self.answer(tables, sizes)
        if len(answer.verdicts) != len(self.hypotheses):
            wanted = f"an answer must judge each of the {len(self.hypotheses)} hypotheses of {self.name}"
            raise StudyError(f"{wanted}; got {len(answer.verdicts)} verdicts", subject=self.name)
        comparisons = [
            Comparison(hypothesis, "", verdict.ours, verdict.holds, verdict=VERDICTS[verdict.holds])
            for hypothesis, verdict in zip(self.hypotheses, answer.verdicts, strict=True)
        ]
        return StudyResult(
            self.draw(tables, sizes), dict(tables), comparisons, list(answer.notes), list(answer.evidence),
            answer.sentence,
        )  # fmt: skip

    @property
    def study(self) -> Study:
        """The question as a study, to be run and written like those of the papers."""
        return Study("", self.name, self.title, self.run, self.seconds)


VERDICTS = {True: "holds", False: "does not hold", None: "cannot be told"}
