"""Pages of questions: written from the data beside them, and nothing else."""

from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl
import pytest

from rankscope.errors import StudyError
from rankscope.figures import Figure, panels
from rankscope_studies.commands.study import StudyOptions, study
from rankscope_studies.questions import QUESTIONS, Question, keep, read_kept, write_pages
from rankscope_studies.questions import page as pages
from rankscope_studies.questions.question import LATER, HypothesisVerdict, RuleChange, StudyAnswer, Tables
from rankscope_studies.questions.summary import AnsweredQuestion, summary_page
from rankscope_studies.study import Comparison, PageTable, Setup


@dataclass(frozen=True)
class CoinSizes:
    """How often a coin is thrown, and by whom."""

    throws: int
    hands: tuple[str, ...]


def gather(setup: Setup, sizes: CoinSizes) -> dict[str, pl.DataFrame]:
    return {"throws": setup.cached("throws", lambda: pl.DataFrame({"heads": [1] * sizes.throws}), n=sizes.throws)}


def answer(tables: Tables, sizes: CoinSizes) -> StudyAnswer:
    heads = int(tables["throws"]["heads"].sum())
    return StudyAnswer(
        f"{heads} of {sizes.throws} are heads.", [HypothesisVerdict(f"{heads} heads", heads == sizes.throws)],
        [PageTable("Throws", ["a|b"], [["x|y"]], "A note.")], ["Thrown by hand."],
    )  # fmt: skip


def draw(tables: Tables, sizes: CoinSizes) -> dict[str, Figure]:
    figure, (axes,) = panels()
    axes.plot(tables["throws"]["heads"].to_list())
    return {"coin": figure}


COIN = Question(
    "coin", "Does a coin land on heads?", "Nobody asked.", ("All throws are heads.",), "It is thrown.", "A tail.",
    CoinSizes(2, ("left",)), CoinSizes(5, ("left", "right")), gather, answer, draw, caption="A coin.",
)  # fmt: skip


def kept(folder: Path, full: bool = False, question: Question = COIN) -> None:
    setup, sizes = Setup(folder / "run", full=full), question.sizes(full)
    keep(folder / "docs", question, setup, question.run(setup, sizes), sizes)


def test_a_page_has_what_a_reader_needs(tmp_path: Path) -> None:
    kept(tmp_path)
    written = write_pages(tmp_path / "docs", [COIN])
    assert [path.name for path in written] == ["coin.md", "summary.md", "index.md"]
    text = (tmp_path / "docs" / "coin.md").read_text(encoding="utf-8")
    order = ["# Does a coin land on heads?", "**2 of 2 are heads.**", "images/coin.png", "A coin.", "Nobody asked.",
             "All throws are heads. | 2 heads | holds", r"x\|y", "It is thrown.",
             "| size | quick (this page) | full |", "| throws | 2 | 5 |",
             "Thrown by hand.", "A tail.", "rankscope study coin\n"]  # fmt: skip
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert (tmp_path / "docs" / "images" / "coin.png").stat().st_size > 1000
    index = (tmp_path / "docs" / "index.md").read_text(encoding="utf-8")
    assert "(coin.md)** 2 of 2 are heads. *(quick size)*" in index and "\ncoin\n" in index


def test_pages_are_made_again_from_their_data_alone(tmp_path: Path) -> None:
    kept(tmp_path)
    write_pages(tmp_path / "docs", [COIN])
    before = (tmp_path / "docs" / "coin.md").read_text(encoding="utf-8")

    def fail(setup: Setup, sizes: CoinSizes) -> dict[str, pl.DataFrame]:
        raise AssertionError("a page is no experiment")

    (tmp_path / "docs" / "coin.md").unlink()
    write_pages(tmp_path / "docs", [replace(COIN, gather=fail)])
    assert (tmp_path / "docs" / "coin.md").read_text(encoding="utf-8") == before
    path = tmp_path / "docs" / "data" / "coin" / "throws.parquet"
    pl.DataFrame({"heads": [0, 1]}).write_parquet(path)
    write_pages(tmp_path / "docs", [COIN])
    after = (tmp_path / "docs" / "coin.md").read_text(encoding="utf-8")
    assert "**1 of 2 are heads.**" in after and "does not hold" in after


@pytest.mark.parametrize("full", [False, True])
def test_rules_that_were_changed_after_a_full_run_stand_beside_the_verdicts_of_the_rules_before(
    tmp_path: Path, full: bool
) -> None:
    question = replace(COIN, changed=RuleChange("Edges count as heads.", {1: False}))
    kept(tmp_path, full=full, question=question)
    write_pages(tmp_path / "docs", [question])
    text, summary = ((tmp_path / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("coin", "summary"))
    said = "Edges count as heads. By the rules before, hypothesis 1 does not hold."
    assert ("| holds (by the rule before: does not hold) |" in text) == full  # a quick run is judged as the full one
    assert (said in text) == (said in summary) == full
    assert ("In 1 of 1 studies" in summary and "By those rules 0 hold, 1 do not and 0 cannot" in summary) == full


def test_brackets_are_said_to_be_ranges(tmp_path: Path) -> None:
    kept(tmp_path)
    write_pages(tmp_path / "docs", [COIN])
    assert "That is no confidence interval" in (tmp_path / "docs" / "coin.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_earlier_verdicts_are_of_hypotheses_that_have_another_one_now(question: Question) -> None:
    if question.changed is None:
        return
    assert all(1 <= number <= len(question.hypotheses) for number in question.changed.before)


def test_sizes_come_back_as_they_were(tmp_path: Path) -> None:
    kept(tmp_path, full=True)
    tables, sizes, more = read_kept(tmp_path / "docs", COIN)
    assert sizes == COIN.full and tables["throws"].height == 5
    assert more["command"] == "rankscope study coin --full" and more["full"]


@pytest.mark.parametrize("full", [False, True])
def test_sizes_that_the_command_would_not_run_at_any_more_are_said_to_be_earlier_ones(
    tmp_path: Path, full: bool
) -> None:
    kept(tmp_path, full=full)
    changed = replace(COIN, quick=CoinSizes(3, ("left",)), full=CoinSizes(7, ("left",)))
    for question, earlier in ((COIN, False), (changed, True)):
        write_pages(tmp_path / "docs", [question])
        for name in ("coin", "index"):
            text = (tmp_path / "docs" / f"{name}.md").read_text(encoding="utf-8")
            assert ("sizes of an earlier version" in text) == earlier


def test_a_quick_run_does_not_replace_a_full_one(tmp_path: Path) -> None:
    kept(tmp_path, full=True)
    with pytest.raises(StudyError, match="full size"):
        kept(tmp_path)
    assert read_kept(tmp_path / "docs", COIN)[1] == COIN.full


def test_data_of_other_sizes_is_refused(tmp_path: Path) -> None:
    kept(tmp_path)

    @dataclass(frozen=True)
    class OtherSizes:
        """Sizes of a later version of the question."""

        tosses: int

    with pytest.raises(StudyError, match="tosses"):
        read_kept(tmp_path / "docs", replace(COIN, quick=OtherSizes(2)))


def test_tables_that_are_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MOST_BYTES", 10)
    with pytest.raises(StudyError, match="kB"):
        kept(tmp_path)


def test_tables_that_are_refused_leave_the_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path)
    files = {path: path.read_bytes() for path in (tmp_path / "docs").rglob("*") if path.is_file()}
    monkeypatch.setattr(pages, "MOST_BYTES", 10)
    with pytest.raises(StudyError, match="kB"):
        kept(tmp_path, full=True)
    assert {path: path.read_bytes() for path in (tmp_path / "docs").rglob("*") if path.is_file()} == files


def test_tables_that_a_later_run_has_not_are_gone(tmp_path: Path) -> None:
    kept(tmp_path)
    folder = tmp_path / "docs" / "data" / "coin"
    (folder / "throws.parquet").rename(folder / "tosses.parquet")
    kept(tmp_path)
    assert [path.name for path in sorted(folder.parent.rglob("*.*"))] == ["kept.json", "throws.parquet"]


@dataclass(frozen=True)
class ManySizes:
    """Sizes that would make a table unreadable if they were shown as Python writes them."""

    rate: float
    gains: tuple[float, ...]
    cases: tuple[tuple[int, float, str], ...]


def test_sizes_are_shown_short_and_once(tmp_path: Path) -> None:
    quick = ManySizes(3e-3, (1.0, 2**0.5), ((4, 1.0, "complete"), (8, 0.1, "causal")))
    full = ManySizes(1e-3, tuple(2.0**k for k in range(15)), quick.cases)
    for sizes, header in (
        (quick, "| size | quick (this page) | full |"), (full, "| size | quick | full (this page) |"),
        (replace(quick, rate=0.5), "| size | this page | quick | full |"),
    ):  # fmt: skip
        lines = pages._sizes_table(replace(COIN, quick=quick, full=full), sizes).markdown
        assert lines[0] == header
        assert lines[2].endswith("| 0.003 | 0.001 |") and lines[3].endswith("| 1, 1.41421 | 1, 2, 4, … 16384 (15) |")
        assert "4 1 complete, 8 0.1 causal" in lines[4] and "(" not in lines[4]


def test_a_page_points_to_what_was_changed(tmp_path: Path) -> None:
    result = COIN.run(Setup(tmp_path))
    kept = {"full": False, "command": "toss", "device": "cpu", "tables": [], "versions": {}}
    changed = replace(result, notes=["Changed after a first throw: the coin."])
    texts = [pages.page(COIN, outcome, COIN.quick, kept) for outcome in (result, changed)]
    assert ["what was changed since" in text for text in texts] == [False, True]


def test_every_hypothesis_needs_a_verdict(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="each of the 2"):
        replace(COIN, hypotheses=("one", "two")).run(Setup(tmp_path))


def test_questions_are_written_down_whole() -> None:
    for question in QUESTIONS:
        assert question.title.endswith("?") and question.hypotheses and question.why and question.refuted_by
        assert type(question.quick) is type(question.full) and question.quick != question.full


DOCS = Path(__file__).parents[2] / "docs" / "studies"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_the_pages_of_the_docs_are_those_of_their_data(question: Question) -> None:
    if not (DOCS / "data" / question.name).is_dir():
        pytest.skip("not run yet")
    tables, sizes, more = read_kept(DOCS, question)
    expected = pages.page(question, question.result(tables, sizes), sizes, more)
    assert (DOCS / f"{question.name}.md").read_text(encoding="utf-8") == expected


def test_every_answer_can_be_read_in_a_breath() -> None:
    written = {question.name: DOCS / f"{question.name}.md" for question in QUESTIONS}
    answers = {name: path.read_text(encoding="utf-8").split("**")[1] for name, path in written.items() if path.exists()}
    assert answers and {name: length for name in answers if (length := len(answers[name].split())) > 60} == {}


def test_the_summary_counts_verdicts_and_lists_what_did_not_hold(tmp_path: Path) -> None:
    true = Comparison("heads come", "", "so", True)
    wrong, open_ = replace(true, what="tails come", agrees=False), replace(true, what="edges come", agrees=None)
    result = replace(COIN.run(Setup(tmp_path)), comparisons=[true, wrong, open_], summary="It is fair.")
    text = summary_page([AnsweredQuestion(COIN, result, {"full": False, "command": "toss"}, ["images/coin.png"])])
    assert "3 hypotheses were written down, 3 of them before a first run: 1 hold, 1 do not, 1 cannot be told" in text
    assert "1 of 2 that could be judged" in text and "1 / 1 / 1 | quick" in text and "](images/coin.png)" in text
    failed = text.partition("## Hypotheses that do not hold")[2]
    assert "tails come" in failed and "heads come" not in failed and "edges come" not in failed
    assert text.count("It is fair.") == 2 and "toss" in failed


def test_a_hypothesis_made_after_a_run_is_not_said_to_be_expected_before_it(tmp_path: Path) -> None:
    later = replace(COIN, hypotheses=(f"{LATER} a first throw: all throws are heads.",))
    for question, header, before in ((COIN, "| expected before the run |", 1), (later, "unless it begins with", 0)):
        result = question.run(Setup(tmp_path))
        kept = {"full": False, "command": "toss", "device": "cpu", "tables": [], "versions": {}}
        page = pages.page(question, result, question.quick, kept)
        assert header in page and ("| expected before the run |" in page) == bool(before)
        assert f"written down, {before} of them before a first run" in summary_page(
            [AnsweredQuestion(question, result, kept, [])]
        )


def test_the_command_writes_pages_again_without_an_experiment(tmp_path: Path) -> None:
    study(options=StudyOptions(pages=tmp_path, redraw=True), output=tmp_path / "run")
    text = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert all(question.title in text for question in QUESTIONS) and not (tmp_path / "run").exists()
    with pytest.raises(StudyError, match="--pages"):
        study(options=StudyOptions(redraw=True), output=tmp_path / "run")
