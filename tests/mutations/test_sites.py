"""What counts as an operator that can be changed, and that a change is of that operator alone."""

import ast
from pathlib import Path

from rankscope import nets
from tests.mutations.__main__ import outcome
from tests.mutations.sites import Site, sites, sites_of

SOURCE = b"""
def f(x: int | None, y: "a + b" = 0) -> int | None:
    name = "a" + x  # 1 + 1
    return (x <  # x < y
            y) and x * 2 >= -y or [x] + [y]
"""


def test_each_operator_between_numbers_and_truths_is_found_once() -> None:
    found = [(site.line, site.before, site.after) for site in sites_of("f.py", SOURCE)]
    assert sorted(found) == [(4, "<", "<="), (5, "*", "/"), (5, ">=", ">"), (5, "and", "or"), (5, "or", "and")]


def test_a_change_is_of_one_operator_and_leaves_a_file_that_can_be_read() -> None:
    root = Path(nets.__file__).parent
    places = sites(root)
    assert len(places) > 300 and len({site.name for site in places}) == len(places)
    for site in places[::20]:
        source = (root / site.path).read_bytes()
        changed = site.changed(source)
        left, right = ast.parse(source), ast.parse(changed)
        assert ast.dump(left) != ast.dump(right) and len(list(ast.walk(left))) <= len(list(ast.walk(right))) + 2
        assert changed[: site.start] == source[: site.start]


def test_tests_that_notice_a_change_are_told_from_those_that_do_not(tmp_path: Path) -> None:
    package = tmp_path / "rankscope"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sums.py").write_text("def total(a, b):\n    return a + b\n")
    (tmp_path / "test_near.py").write_text(
        "from rankscope.sums import total\ndef test():\n    assert total(1, 2) == 3\n"
    )
    (tmp_path / "test_blind.py").write_text(
        "from rankscope.sums import total\ndef test():\n    assert total(1, 0) == 1\n"
    )
    site = Site("sums.py", 2, len("def total(a, b):\n    return a "), "+", "-")
    asked = {
        name: outcome(site, tmp_path, [str(tmp_path / f"test_{name}.py")], set(), 100) for name in ("near", "blind")
    }
    assert {name: line["outcome"] for name, line in asked.items()} == {"near": "noticed", "blind": "unnoticed"}
    assert outcome(site, tmp_path, [], set(), 100)["outcome"] == "uncovered"
    assert "a + b" in (package / "sums.py").read_text()
