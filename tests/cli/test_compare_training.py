"""`rankscope compare` of training runs, on runs whose every number is known."""

import re
from pathlib import Path

import pytest

from tests.cli.running import answered, printed, rankscope
from tests.made_trainings import falling, written


def test_runs_are_compared_at_the_steps_that_they_share(tmp_path: Path) -> None:
    """Layer 2 of the second run is twice as large from step 30 on, layer 1 for a while only."""

    def other(step: int, layer: int) -> float:
        far = (layer == 2 and step >= 30) or (layer == 1 and step == 20)
        return falling(step, layer) * (2 if far else 1.05)

    a = written(tmp_path / "a")
    b = written(tmp_path / "b", range(0, 100, 15), values=other)
    found = answered("compare", str(a), str(b))
    assert found["steps"] == [0, 30]
    parted = {line["of"]: line["parted_at"] for line in found["lines"]}
    assert parted == {"loss": None, "layer 0": None, "layer 1": None, "layer 2": 30, "layer 3": None}
    assert found["lines"][3]["values"] == {str(a): falling(30, 2), str(b): 2 * falling(30, 2)}
    said = " ".join(printed("compare", "a", "b", cwd=tmp_path).split())
    assert "they part first at layer 2, from step 30 on; in 1 of 4 layers" in said
    assert "They end at steps 50, 90" in said


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("compare run bert-tiny", "bert-tiny is none"),
        ("compare run", "at least two training runs"),
        ("compare run run", "run comes twice"),
        ("compare run odd", "none in common"),
        ("compare run odd --metrics entropy", "must all have entropy"),
        ("compare run odd -o page", "rankscope report run odd"),
    ],
)
def test_mistakes_are_sentences(tmp_path: Path, line: str, sentence: str) -> None:
    written(tmp_path / "run")
    written(tmp_path / "odd", [1, 3])
    code, out, err = rankscope(*line.split(), cwd=tmp_path)
    assert code == 2 and out == "" and sentence in err and len(err.splitlines()) == 1, err


def test_a_ratio_is_that_of_the_second_run_to_the_first_where_it_is_a_number(tmp_path: Path) -> None:
    """Also of numbers whose product leaves the range of floats; one beyond that range is none."""
    ends = [(1e200, 3e200), (1e-200, 2e200), (0.0, 1.0), (4.0, 2.0)]
    for index, name in enumerate("ab"):
        written(tmp_path / name, [0], values=lambda step, layer, index=index: ends[layer][index])
    said = printed("compare", "a", "b", cwd=tmp_path)
    for layer, ratio in enumerate(("3", "–", "–", "0.5")):
        assert re.search(rf"\n layer {layer} +\S+ +\S+ +{re.escape(ratio)} ", said), said
