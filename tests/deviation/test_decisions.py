"""Questions about numbers are identified by explicit names, and replayed passes ask the same ones."""

import ast
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rankscope
from rankscope.deviation import PassInputs, at_layer, can_skip, must_compute
from rankscope.deviation.decisions import (
    MOST_ENTRIES,
    Presuming,
    Question,
    Recording,
    answering,
    keep,
    piecewise,
    saves_a_pass,
    terms_needed,
)
from rankscope.metrics import chosen_metrics
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import DEFAULT_METRICS
from rankscope.profiles.captured import CapturedPasses, _passes
from tests.builders import normal

QUESTIONS = {"can_skip", "must_compute", "saves_a_pass", "terms_needed", "piecewise"}


def names_asked(path: Path) -> list[str]:
    """The names of the questions in a file; each must be a string constant."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in QUESTIONS:
            name = node.args[0]
            assert isinstance(name, ast.Constant) and isinstance(name.value, str), (path, node.lineno)
            names.append(name.value)
    return names


def test_every_call_asks_by_a_name_of_its_own() -> None:
    files = [path for path in Path(rankscope.__file__).parent.rglob("*.py") if "decisions import" in path.read_text()]
    names = Counter(name for path in files for name in names_asked(path))
    assert len(names) > 30 and max(names.values()) == 1


METRICS = chosen_metrics("these tests", [*DEFAULT_METRICS, "effective_rank", "entropy", "head_residual"])


def computed(net: Transformer, X: Tensor) -> CapturedPasses:
    """Both passes, and what is read of them, as a graph computes them."""
    inputs, valid = PassInputs.of(net, X), torch.ones(X.shape[:2], dtype=torch.bool)
    return _passes(net, METRICS, True, False, (inputs.tensors, valid))


def recorded(net: Transformer, X: Tensor) -> Recording:
    with answering(Recording()) as asking:
        computed(net, X)
    return asking


class Listening(Presuming):
    """Notes the questions in their order."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording.answers)
        self.order: list[Question] = []

    def question(self, name: str) -> Question:
        self.order.append(super().question(name))
        return self.order[-1]


@pytest.mark.parametrize(("close", "least"), [(1.0, 25), (1e-9, 100)])
def test_a_replayed_pass_asks_the_questions_that_were_recorded(close: float, least: int) -> None:
    """In the same order, both passes and readings, in float64 and in deviation arithmetic, also with tokens for which
    other shortcuts are allowed; then some presumed answers are violated."""
    arch = Architecture(layers=2, width=8, heads=2, mlp_width=12, norm="layer", mask="causal")
    net = Transformer.random(arch, seed=1)
    X, other = (
        share * normal(2, 5, 8, seed=2) + (1 - share) * normal(1, 1, 8, seed=5) for share in (close, 1e-9 / close)
    )
    recording = recorded(net, X)
    assert recording.answers == recorded(net, X).answers and len(recording.answers) > least
    for tokens, violated in ((X, False), (other, True)):
        with answering(Listening(recording)) as asking:
            computed(net, tokens)
        assert asking.order == list(recording.answers)
        assert bool(asking.violations(X).any()) == violated


def test_answers_are_those_of_the_numbers_or_those_presumed() -> None:
    yes, no = torch.tensor(True), torch.tensor(False)

    def ask(condition: Tensor, enough: int) -> tuple[bool, bool, bool, int]:
        at_layer(1)
        return (
            can_skip("a", condition),
            must_compute("b", condition),
            saves_a_pass("c", condition, lambda: condition),
            terms_needed("d", torch.tensor(enough), 9),
        )

    assert ask(yes, 4) == (True, True, True, 4) and ask(no, 7) == (False, False, False, 7)
    with answering(Recording()) as first:
        assert ask(yes, 4) == (True, True, True, 4)
    assert first.answers == {(1, "a", 0): 1, (1, "b", 0): 0, (1, "c", 0): 1, (1, "d", 0): 5}
    with answering(Presuming(first.answers)) as presuming:
        assert ask(no, 7) == (True, True, True, 4)
    assert presuming.violations(yes).tolist() == [True, True, True]  # "b" took the general formula
    with answering(Recording(at_most=first.answers)) as second:
        assert ask(no, 3) == (False, True, False, 4)  # no more is left out than both allow
    assert second.answers == {(1, "a", 0): 0, (1, "b", 0): 0, (1, "c", 0): 0, (1, "d", 0): 5}
    with answering(Presuming({})) as general:
        assert ask(yes, 4) == (False, True, False, 9) and not len(general.violations(yes))


def test_a_condition_of_many_entries_is_one_of_them_all() -> None:
    mixed = torch.tensor([[True, False], [True, True]])
    for ask in (can_skip, must_compute):
        assert ask("a", torch.ones(2, 3, dtype=torch.bool)) and ask("a", torch.ones((), dtype=torch.bool))
        assert not ask("a", torch.zeros(2, 3, dtype=torch.bool))
    assert not can_skip("a", mixed) and must_compute("a", mixed)
    assert can_skip("a", mixed[:0]) and not must_compute("a", mixed[:0])
    assert saves_a_pass("a", mixed, lambda: mixed[1]) and not saves_a_pass("a", mixed, lambda: mixed)
    assert saves_a_pass("a", mixed, lambda: torch.tensor([-2.0, 1.0]), within=2.0)
    assert not saves_a_pass("a", mixed, lambda: torch.tensor([-2.0, 1.0]), within=1.0)


FINE = torch.tensor([-2.0, 0.0, 2.0])
TRUE = torch.ones(2, 3, dtype=torch.bool)


def ask_each(numbers: Tensor, truths: Tensor, enough: int) -> tuple[bool, bool, bool, int]:
    """A question of every kind."""
    return (
        saves_a_pass("numbers", numbers, lambda: numbers, within=2.0),
        can_skip("truths", truths),
        must_compute("falsehoods", ~truths),
        terms_needed("terms", torch.tensor(enough), 9),
    )


ONE_FALSE = torch.tensor([[True, True, True], [True, False, True]])
VIOLATIONS = {
    "above": (torch.tensor([0.0, 2.5, 0.0]), TRUE, 4, 1),
    "below": (torch.tensor([0.0, -2.5, -3.0]), TRUE, 4, 2),
    "NaN": (torch.tensor([torch.nan, 0.0, 0.0]), TRUE, 4, 1),
    "inf": (torch.tensor([0.0, torch.inf, 0.0]), TRUE, 4, 1),
    "-inf": (torch.tensor([0.0, 0.0, -torch.inf]), TRUE, 4, 1),
    "truths": (FINE, ONE_FALSE, 4, 2),  # of what can be skipped, and of what must be computed
    "terms": (FINE, TRUE, 5, 1),
    "all": (FINE + 1, ~TRUE, 9, 1 + 12 + 1),
}


@pytest.mark.parametrize("many", [1, MOST_ENTRIES])
@pytest.mark.parametrize("kind", VIOLATIONS)
def test_every_kind_of_violated_condition_is_found(kind: str, many: int) -> None:
    """Entries are looked at together in the end; of a condition of very many entries, one is made before."""
    with answering(Recording()) as recording:
        assert ask_each(FINE.repeat(many), TRUE.repeat(1, many), 4) == (True, True, False, 4)
    numbers, truths, enough, count = VIOLATIONS[kind]
    for given, expected in (((FINE, TRUE, 4), 0), ((FINE / 2, TRUE, 3), 0), ((numbers, truths, enough), count)):
        with answering(Presuming(recording.answers)) as presuming:
            found = ask_each(given[0].repeat(many), given[1].repeat(1, many), given[2])
        assert found == (True, True, False, 4)
        violations = presuming.violations(FINE)
        assert violations.dtype == torch.bool and bool(violations.any()) == (expected > 0)
        assert int(violations.sum()) == expected or many > 1


def test_conditions_that_nothing_was_left_out_for_are_no_violations() -> None:
    with answering(Recording()) as recording:
        assert ask_each(FINE + 1, ~TRUE, 9) == (False, False, True, 9)
    with answering(Presuming(recording.answers)) as presuming:
        assert ask_each(FINE * torch.nan, ~TRUE, 9) == (False, False, True, 9)
    assert not len(presuming.violations(FINE))


def test_what_a_graph_reads_is_kept_while_answers_are_presumed() -> None:
    t = torch.ones(2)
    keep(t)
    with answering(Recording()):
        keep(t)
    with answering(Presuming({})) as presuming:
        keep(t)
    assert len(presuming.kept) == 1 and presuming.kept[0] is t


@pytest.mark.parametrize("asked", [None, {}, {"p, nowhere": 1}, {"p, everywhere": 1}])
def test_a_formula_of_two_pieces_takes_each_where_it_holds(asked: dict[str, int] | None) -> None:
    """And computes no piece that no sample needs, unless answers are presumed."""
    x, called = torch.tensor([[1.0, 2.0], [-3.0, 4.0], [5.0, 6.0]]), []

    def piece(name: str, factor: float) -> tuple[Tensor, Tensor]:
        called.append(name)
        return x * factor, x[:, 0] * factor

    for pick, needed in (([1, 1, 1], ["there"]), ([0, 0, 0], ["elsewhere"]), ([1, 0, 1], ["elsewhere", "there"])):
        picked = torch.tensor(pick, dtype=torch.bool)
        answers = {(0, name, 0): answer for name, answer in (asked or {}).items()}
        with nullcontext() if asked is None else answering(Presuming(answers)) as asking:
            whole, first = piecewise("p", picked, lambda: piece("there", 10.0), lambda: piece("elsewhere", 1.0))
        if asked is None:
            assert called == needed
        violated = asking is not None and bool(asking.violations(x).any())
        assert violated == (bool(asked) and "p, nowhere" in (asked or {}) and any(pick)) | (
            "p, everywhere" in (asked or {}) and not all(pick)
        )
        if not violated:
            factor = torch.where(picked, 10.0, 1.0)
            assert torch.equal(whole, x * factor[:, None]) and torch.equal(first, x[:, 0] * factor)
        called.clear()
