"""Decompositions as a user meets them: padding, attention of their own, collapse of single paths,
mistakes."""

from itertools import product

import numpy as np
import pytest
import torch

from rankscope.errors import PathError, TokensError
from rankscope.nets import Architecture, Transformer
from rankscope.paths import decompose, length_of
from tests.paths.enumeration import CASES, both, close, network, tokens
from tests.raising import raises

SMALL = Architecture(layers=3, width=6, heads=2, head_width=4, mlp="none", norm="none", biases=False)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
def test_padding_anywhere_changes_nothing(case: str) -> None:
    net, X = network(CASES[case]), tokens(samples=2)
    padding = torch.tensor([[False, False, False, True], [True, False, False, False]])
    d = decompose(net, X, padding)
    found = d.by_length()
    for sample, real in enumerate(~padding):
        alone = decompose(net, X[sample : sample + 1, real])
        torch.testing.assert_close(d.output[sample, real], alone.output[0], rtol=1e-9, atol=1e-11)
        mine = [d.keep(lengths=[k])[sample, real] for k in range(4)]
        theirs = [alone.keep(lengths=[k])[0] for k in range(4)]
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), rtol=1e-8, atol=1e-10)
        table, expected = found.table.filter(sample=sample), alone.by_length().table
        for column in ("norm", "residual", "share"):
            columns = (torch.tensor(each[column].to_list()) for each in (table, expected))
            torch.testing.assert_close(*columns, rtol=1e-7, atol=1e-9)
        path = (0, 1, 0)
        torch.testing.assert_close(d.path(path).P[sample][real][:, real], alone.path(path).P[0], rtol=1e-9, atol=1e-12)
    assert not d.output[padding].any()
    # Terms stand where the user had the tokens.
    torch.testing.assert_close((found.embedding + found.bias).sum(0), d.output, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.output, d.output, rtol=0, atol=0)
    assert torch.equal(found.padding, padding)


def test_heads_kept_with_all_heads_are_the_output() -> None:
    for case, fields in CASES.items():
        net, X = network(fields), tokens()
        d = decompose(net, X)
        torch.testing.assert_close(d.keep(heads=[0, 1]), d.output, rtol=1e-9, atol=1e-11, msg=case)
        torch.testing.assert_close(d.keep(lengths=range(4)), d.output, rtol=1e-9, atol=1e-11, msg=case)


def test_mistakes_are_sentences() -> None:
    d = decompose(network({}), tokens())
    for wrong, subject in [
        (lambda: d.path((0, 1)), "path"),
        (lambda: d.path((0, 1, 2)), "head"),
        (lambda: d.path((0, 1, 1), attention="mine"), "attention"),
        (lambda: d.keep(), "keep"),
        (lambda: d.keep(lengths=[1], heads=[0]), "keep"),
        (lambda: d.keep(lengths=[4]), "length"),
        (lambda: d.keep(heads=[0], attention="own"), "attention"),
        (lambda: d.sample(2, 100), "count"),
        (lambda: d.top(0), "count"),
        (lambda: d.top(3, by="size"), "by"),
        (lambda: d.residuals([9]), "length"),
        (lambda: d.residuals(count=0), "count"),
    ]:
        with raises(PathError, subject):
            wrong()
    deep = Transformer.random(Architecture(layers=12, width=24, heads=12))
    with raises(PathError, "lengths"):
        decompose(deep, torch.randn(1, 4, 24)).keep(lengths=[6], attention="own")
    with raises(TokensError, "X"):
        decompose(deep, torch.randn(4, 24))


def test_a_length_named_twice_is_kept_once() -> None:
    d = decompose(network({}), tokens())
    for attention in ("shared", "own"):
        once = d.keep(lengths=[1, 3], attention=attention)
        torch.testing.assert_close(d.keep(lengths=[3, 1, 1], attention=attention), once, rtol=0, atol=0)
        again = d.keep(lengths=iter((1, 3)), attention=attention)
        torch.testing.assert_close(again, once, rtol=0, atol=0)


def test_short_paths_of_their_own_need_no_walk_through_all() -> None:
    """144 of 13^12 paths: the sum over one head in one layer, the others skipped."""
    arch = Architecture(layers=12, width=12, heads=12, mlp="none", norm="none", biases=False)
    d = decompose(Transformer.random(arch), torch.randn(1, 3, 12, dtype=torch.float64))
    one = [tuple(h if at == layer else None for at in range(12)) for layer in range(12) for h in range(12)]
    expected = d.keep(paths=one, attention="own")
    torch.testing.assert_close(d.keep(lengths=[1], attention="own"), expected, rtol=1e-11, atol=1e-13)


def test_paths_of_a_network_deeper_than_python_recurses() -> None:
    net = Transformer.random(SMALL.replace(layers=1)).variant(layers=1100)
    X = tokens()
    torch.testing.assert_close(decompose(net, X).path((None,) * 1100).term, X, rtol=0, atol=0)


SILENT: dict[str, dict[int, list[int]]] = {"some heads silent": {0: [0], 2: [1]}, "a layer without heads": {1: []}}


@pytest.mark.parametrize("case", ["post-norm", "attention and skips", "no skip past heads"])
@pytest.mark.parametrize("silent", SILENT)
def test_only_paths_that_exist_are_drawn_kept_and_found(case: str, silent: str) -> None:
    """A silent head has no path through it; without a skip none goes past. What is left adds up."""
    heads = SILENT[silent]
    net, X = network(CASES[case]).variant(heads={layer + 1: kept for layer, kept in heads.items()}), tokens()
    past = [None] if net.arch.attention_skip else []
    exist = set(product(*([*past, *heads.get(layer, [0, 1])] for layer in range(3))))
    d = decompose(net, X)
    by_length = [[path for path in exist if length_of(path) == k] for k in range(4)]
    assert d.by_length().counts == [len(paths) for paths in by_length]
    for k, paths in enumerate(by_length):
        assert set(d.sample(k, len(paths))) == set(paths)
        torch.testing.assert_close(d.keep(lengths=[k], biases=False), d.keep(paths=paths), rtol=1e-10, atol=1e-12)
        own = d.keep(paths=paths, attention="own")
        torch.testing.assert_close(d.keep(lengths=[k], attention="own"), own, rtol=1e-12, atol=1e-13)
    for path in set(product((None, 0, 1), repeat=3)) - exist:
        for wrong in (lambda path=path: d.path(path), lambda path=path: d.keep(paths=[path], attention="own")):
            with raises(PathError, "path"):
                wrong()
    if exist:
        drawn = d.residuals(count=100)
        assert len(drawn) == len(exist) and drawn["relative_residual"].gt(0).all()
        assert set(d.top(100).paths) == exist


def test_sampled_paths_can_be_kept() -> None:
    d = decompose(network(CASES["attention and skips"]), tokens())
    drawn = d.sample(2, 5, seed=1)
    assert {length_of(path) for path in drawn} == {2}
    total = torch.stack([d.path(path).term for path in drawn]).sum(0)
    torch.testing.assert_close(d.keep(paths=drawn), total, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", CASES)
def test_keep(case: str) -> None:
    """Only some lengths, some paths, some heads: the sum of what is left."""
    d, reference = both(case)
    embedding, bias = reference.embedding_terms, reference.bias_terms
    zero = np.zeros_like(reference.output)
    for lengths in ([0, 2], [3], [0, 1, 2, 3]):
        alone = sum((t.value for t in embedding if t.length in lengths), zero)
        with_bias = alone + sum((t.value for t in bias if t.length in lengths), zero)
        close(d.keep(lengths=lengths)[0], with_bias, reference.output)
        close(d.keep(lengths=lengths, biases=False)[0], alone, reference.output)
    some = [t.choices for t in embedding][1::3]
    close(d.keep(paths=some)[0], sum((t.value for t in embedding if t.choices in some), zero), reference.output)
    only = {0: [1], 2: [0]}
    allowed = [{None, *only.get(layer, [0, 1])} for layer in range(3)]
    through = [t for t in embedding if all(c in allowed[k] for k, c in enumerate(t.choices))]
    close(
        d.keep(heads={layer + 1: kept for layer, kept in only.items()}, biases=False)[0],
        sum((t.value for t in through), zero),
        reference.output,
    )
