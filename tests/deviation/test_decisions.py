"""Questions about numbers are identified by explicit names, and replayed passes ask the same ones."""

import ast
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

import rankscope
from rankscope.deviation.decisions import (
    Presuming,
    Recording,
    answering,
    at_layer,
    can_skip,
    must_compute,
    saves_a_pass,
    terms_needed,
)
from rankscope.deviation.propagate import PassInputs
from rankscope.deviation.replay import ReplayInputs, run_layers
from rankscope.deviation.second_pass import second_pass_of_layers
from rankscope.nets import Architecture, Transformer
from tests.builders import normal

QUESTIONS = {"can_skip", "must_compute", "saves_a_pass", "terms_needed"}


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


def recorded(inputs: PassInputs) -> Recording:
    weights = tuple(block.weights for block in inputs.net.blocks)
    with answering(Recording()) as asking:
        run_layers(inputs.net, ReplayInputs(weights, inputs.settings, inputs.state), second_pass_of_layers)
    return asking


class Listening(Presuming):
    """Notes the questions in their order."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording.answers)
        self.order: list[tuple[int, str, int]] = []

    def answer(self, name: str, condition: Tensor) -> int:
        layer = (self.layer, name)
        self.order.append((*layer, self._asked[layer]))
        return super().answer(name, condition)


def test_a_replayed_pass_asks_the_questions_that_were_recorded() -> None:
    """In the same order, first pass and second, also with tokens for which other shortcuts are allowed; then
    some presumed answers are violated."""
    arch = Architecture(layers=2, width=8, heads=2, mlp_width=12, norm="layer", mask="causal")
    net = Transformer.random(arch, seed=1)
    X = normal(2, 5, 8, seed=2)
    recording = recorded(PassInputs.of(net, X))
    assert recording.answers == recorded(PassInputs.of(net, X)).answers and len(recording.answers) > 100
    close = PassInputs.of(net, X * 1e-9 + normal(1, 1, 8, seed=5))
    weights = tuple(block.weights for block in close.net.blocks)
    for inputs, violated in ((PassInputs.of(net, X), False), (close, True)):
        with answering(Listening(recording)) as asking:
            run_layers(net, ReplayInputs(weights, inputs.settings, inputs.state), second_pass_of_layers)
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
