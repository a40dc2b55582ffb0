"""Structures of tensors are cut, joined and made numbers as torch does with each of their tensors."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.deviation.replay import NumberTable, joined, joined_by_form, parts, samples
from rankscope.nets import form, tensors_of
from tests.builders import normal


@dataclass(frozen=True)
class Leaf:
    values: Tensor
    name: str


class Tree(NamedTuple):
    leaf: Leaf
    same: Leaf
    by_name: dict[str, Any]


def tree(seed: int, count: int = 3, name: str = "a") -> Tree:
    """A structure of `count` samples, one part of which it has twice."""
    leaf = Leaf(normal(count, 2, seed=seed), name)
    return Tree(leaf, leaf, {"flags": normal(count, seed=seed + 1) > 0, "none": None})


def assert_equal(found: Tree, expected: Tree) -> None:
    assert torch.equal(found.leaf.values, expected.leaf.values) and found.leaf.name == expected.leaf.name
    assert torch.equal(found.by_name["flags"], expected.by_name["flags"]) and found.by_name["none"] is None


def test_what_is_joined_is_cut_into_the_same_parts() -> None:
    trees = [tree(seed) for seed in (1, 5, 9)]
    together = joined(trees)
    assert together.leaf is together.same
    assert torch.equal(together.leaf.values, torch.cat([each.leaf.values for each in trees]))
    for index, (part, expected) in enumerate(zip(parts(together, 3), trees, strict=True)):
        assert_equal(part, expected)
        assert_equal(samples(together, 3 * index, 3), expected)


def test_a_part_that_only_the_first_has_twice_is_joined_place_by_place() -> None:
    first, second = tree(1), tree(5)
    second = second._replace(same=tree(7).leaf)
    together = joined([first, second])
    assert torch.equal(together.same.values, torch.cat([first.same.values, second.same.values]))
    assert torch.equal(together.leaf.values, torch.cat([first.leaf.values, second.leaf.values]))


def test_those_of_one_form_that_follow_each_other_are_joined() -> None:
    trees = [tree(1), tree(2), tree(3, name="b"), tree(4, count=2), tree(5, count=2), tree(6)]
    groups = list(joined_by_form(trees))
    assert [which for which, _ in groups] == [[0, 1], [2], [3, 4], [5]]
    for which, together in groups:
        for part, index in zip(parts(together, len(which)), which, strict=True):
            assert_equal(part, trees[index])
    assert form(tree(1)) == form(tree(2)) != form(tree(2)._replace(same=tree(2).leaf))
    assert len(tensors_of(tree(1))) == 2


def test_numbers_of_each_sample_stand_where_its_tensors_stood() -> None:
    sizes, flags = normal(3, seed=1), torch.tensor([True, False])
    structure = Tree(Leaf(sizes, "a"), Leaf(sizes, "a"), {"flags": flags, "none": None})
    table, numbers = NumberTable.of(structure, 3)
    assert numbers.shape == (2, 3)
    for index, found in enumerate(table.by_sample(numbers)):
        assert found.leaf.values == found.same.values == float(sizes[index]) and found.leaf.name == "a"
        assert found.by_name == {"flags": [1.0, 0.0, 0.0][index], "none": None}  # shorter ones end in zeros
