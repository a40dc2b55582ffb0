"""Counting, numbering and drawing paths."""

from itertools import product
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import PathError
from rankscope.paths import (
    Ways,
    all_paths,
    counts_along,
    length_of,
    path_counts,
    path_shares,
    paths_along,
    sampled_paths,
)
from rankscope.paths.counts import checked, path_number
from tests.raising import raises


def alike(layers: int, heads: int) -> Ways:
    return ((None, *range(heads)),) * layers


WAYS = st.lists(st.sets(st.sampled_from([None, 0, 1, 2])).map(tuple), min_size=1, max_size=5).map(tuple)
"""Some heads silent in some layers, some layers without a way past them."""


@given(WAYS)
def test_only_paths_that_exist_are_counted_numbered_and_listed(ways: Ways) -> None:
    everything = list(product(*ways))
    for k, number in enumerate(counts_along(ways)):
        here = {path for path in everything if length_of(path) == k}
        assert number == len(here)
        listed = list(paths_along(ways, k))
        assert set(listed) == here and len(listed) == number
        assert {path_number(ways, k, index) for index in range(number)} == here


def test_few_paths_of_a_huge_network_are_listed_without_walking_all() -> None:
    assert len(list(all_paths(126, 128, 1))) == 126 * 128


@given(st.integers(0, 5), st.integers(0, 3))
def test_counts_are_those_of_the_enumeration(layers: int, heads: int) -> None:
    paths = list(all_paths(layers, heads))
    assert len(set(paths)) == len(paths) == (1 + heads) ** layers
    counts = path_counts(layers, heads)
    assert counts == [sum(length_of(path) == k for path in paths) for k in range(layers + 1)]
    for k in range(layers + 1):
        assert set(all_paths(layers, heads, k)) == {path for path in paths if length_of(path) == k}


def test_counts_have_no_end() -> None:
    counts = path_counts(126, 128)
    assert sum(counts) == 129**126 and counts[63] == comb(126, 63) * 128**63
    assert sum(path_shares(126, 128)) == pytest.approx(1.0)


@given(st.integers(1, 5), st.integers(1, 3), st.data())
def test_numbers_and_paths_are_one_to_one(layers: int, heads: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, layers))
    total = path_counts(layers, heads)[length]
    numbered = [path_number(alike(layers, heads), length, index) for index in range(total)]
    assert set(numbered) == set(all_paths(layers, heads, length)) and len(numbered) == total


@given(st.integers(1, 4), st.integers(1, 3), st.data(), st.integers(0, 1000))
def test_samples_do_not_repeat(layers: int, heads: int, data: st.DataObject, seed: int) -> None:
    length = data.draw(st.integers(0, layers))
    count = data.draw(st.integers(0, path_counts(layers, heads)[length]))
    drawn = sampled_paths(alike(layers, heads), length, count, seed)
    assert len(set(drawn)) == len(drawn) == count and all(length_of(path) == length for path in drawn)
    assert drawn == sampled_paths(alike(layers, heads), length, count, seed)


def test_samples_are_uniform() -> None:
    """Each of 12 paths of length 2 is drawn a twelfth of the time, within five standard deviations."""
    seen = dict.fromkeys(all_paths(3, 2, 2), 0)
    for seed in range(6000):
        seen[sampled_paths(alike(3, 2), 2, 1, seed)[0]] += 1
    assert all(abs(number - 500) < 5 * (6000 * 11 / 144) ** 0.5 for number in seen.values())


def test_samples_of_huge_networks() -> None:
    drawn = sampled_paths(alike(126, 128), 63, 20, seed=0)
    assert len(set(drawn)) == 20 and {length_of(path) for path in drawn} == {63}
    assert {head for path in drawn for head in path if head is not None} <= set(range(128))


def test_bad_numbers() -> None:
    with raises(PathError, "count"):
        sampled_paths(alike(3, 2), 2, 13, 0)
    with raises(PathError, "length"):
        sampled_paths(alike(3, 2), 4, 1, 0)
    with raises(PathError, "layers"):
        path_counts(-1, 2)
    assert list(product(range(2), repeat=0)) == [()] == list(all_paths(0, 2))


def test_a_head_that_is_not_there_is_told_which_are() -> None:
    for wrong in (3, -1, 1.0, True):
        with raises(PathError, subject="head") as caught:
            checked((0, wrong), alike(2, 3), 3)
        assert f"heads are numbered 0..2; got {wrong!r} in" in str(caught.value)
    assert checked([2, None], alike(2, 3), 3) == (2, None)
