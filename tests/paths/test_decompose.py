"""Decompositions as a user meets them: padding, attention of their own, collapse of single paths,
mistakes."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import mpmath as mp
import polars as pl
import pytest
import torch

from rankscope.errors import ClosureError, FileError, PathError, TokensError
from rankscope.metrics.log_readings import UNIT
from rankscope.nets import Architecture, Transformer
from rankscope.paths import ByLength, all_paths, decompose, length_of, rate
from rankscope.paths.collapse import path_residuals
from rankscope.paths.polynomials import PIECE
from tests.deviation.reference import Network, composite, exact, log10_residual, times
from tests.paths.test_enumeration import CASES, network, tokens
from tests.raising import raises

SMALL = Architecture(layers=3, width=6, heads=2, head_width=4, mlp="none", norm="none", biases=False)


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


@pytest.mark.parametrize("place", ["pre", "post"])
def test_many_samples_have_the_sums_that_each_has_alone(place: Any) -> None:
    """More coefficients than go through a layer together, among them those that start at biases."""
    arch = Architecture(layers=3, width=64, heads=2, mlp_width=32, norm_place=place)
    net = Transformer.random(arch, init="xavier")
    generator = torch.Generator().manual_seed(0)
    shaken = {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / 4
        for name, tensor in net.state().items()
        if name.endswith(".bias")
    }
    net = Transformer.from_weights(arch, net.state() | shaken)
    X = torch.randn(512, 16, 64, generator=generator, dtype=torch.float64)
    assert X.numel() <= PIECE < 3 * X.numel()  # two coefficients together, of up to four
    together, alone = decompose(net, X).by_length(), decompose(net, X[7:9]).by_length()
    torch.testing.assert_close(together.embedding[:, 7:9], alone.embedding, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(together.bias[:, 7:9], alone.bias, rtol=1e-11, atol=1e-12)
    assert together.bias[-1].any() and together.bias[0].any()


@pytest.mark.parametrize("case", ["post-norm", "pre-norm with a last norm", "sandwich", "parallel", "no norm"])
def test_a_path_of_its_own_is_the_network_with_one_head(case: str) -> None:
    """Where every layer takes head h, the path with its own attention is the variant without attention skips
    in which only that head speaks."""
    net, X = network({**CASES[case]}), tokens(samples=2)
    d = decompose(net, X)
    for head in range(2):
        alone = net.variant(attention_skip=0.0, heads=[head])
        if net.arch.parallel:  # a parallel block's MLP goes past the heads
            alone = alone.variant(mlp=False)
        expected = alone.run(X).output
        torch.testing.assert_close(d.path((head,) * 3, "own").term, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(d.keep(paths=[(head,) * 3], attention="own"), expected)


def test_sums_by_length_are_saved_and_read_again(tmp_path: Path) -> None:
    found = decompose(network(CASES["post-norm"]), tokens(samples=2), variant="mine", device="cpu").by_length()
    again = ByLength.read(found.save(tmp_path / "lengths.safetensors"))
    assert (again.variant, again.counts, again.closure) == ("mine", found.counts, found.closure)
    assert torch.equal(again.embedding, found.embedding) and again.table.equals(found.table)
    (tmp_path / "other").write_text("no tensors")
    for path in (tmp_path / "other", tmp_path / "none"):
        with raises(FileError, "path"):
            ByLength.read(path)


def test_own_sums_share_prefixes_and_are_the_sum() -> None:
    net, X = network(CASES["no norm"]), tokens(samples=2)
    d = decompose(net, X)
    for length in range(4):
        paths = list(all_paths(3, 2, length))
        one_by_one = torch.stack([d.path(path, "own").term for path in paths]).sum(0)
        torch.testing.assert_close(d.keep(lengths=[length], attention="own"), one_by_one, rtol=1e-10, atol=1e-11)
    # The first layer has the embedding itself before it: there own and shared attention are one.
    for path in ((1, None, None), (None, None, None)):
        bare = decompose(network(CASES["attention and skips"] | {"biases": False}), X)
        torch.testing.assert_close(bare.path(path).term, bare.path(path, "own").term, rtol=1e-12, atol=1e-13)


def test_heads_kept_with_all_heads_are_the_output() -> None:
    for case, fields in CASES.items():
        net, X = network(fields), tokens()
        d = decompose(net, X)
        torch.testing.assert_close(d.keep(heads=[0, 1]), d.output, rtol=1e-9, atol=1e-11, msg=case)
        torch.testing.assert_close(d.keep(lengths=range(4)), d.output, rtol=1e-9, atol=1e-11, msg=case)


def test_contraction_is_at_most_what_dobrushin_allows() -> None:
    """`mu(P Z) <= sqrt(n / 2) delta(P) mu(Z)`: column by column, `osc(P z) <= delta osc(z)`, with
    `osc(z) <= sqrt 2 |z - mean|` and `|P z - mean| <= sqrt n / 2 osc(P z)`."""
    d = decompose(network(CASES["post-norm"]), tokens(samples=3))
    heads = d.by_head()
    assert len(heads) == 3 * 3 * 2
    assert all(row["averaging"] <= math.sqrt(4 / 2) * row["dobrushin"] + 1e-12 for row in heads.iter_rows(named=True))


def test_silent_heads_say_nothing_and_uniform_tokens_contract_no_more() -> None:
    heads = decompose(network({}).variant(heads={1: [0]}), tokens()).by_head()
    silent = heads.filter(layer=2, head=1).row(0, named=True)
    assert [silent[name] for name in ("norm", "share", "residual_share", "contraction")] == [0.0] * 4
    assert heads.filter(pl.col("norm") > 0).height == 5
    alike = tokens()[:, :1].expand(1, 4, 6)
    noise = decompose(network({}), alike).by_head()
    assert noise["contraction"].is_nan().all() and noise["averaging"].is_nan().all()
    assert noise["share"].is_finite().all() and noise["residual_share"].is_nan().all()
    assert decompose(network({}), alike).by_layer()["residual_share"].is_nan().all()


@pytest.mark.parametrize("skip", [0.0, 0.5])
def test_single_paths_against_400_digits(skip: float) -> None:
    """Residuals of P_path X W_path down to 1e-300 and below, with attention from the full network."""
    arch = SMALL.replace(layers=5, attention_skip=skip, divisor=40.0)
    net = Transformer.random(arch, seed=3, init="xavier")
    X = tokens()
    d = decompose(net, X)
    paths = [(0, 1, 0, 1, 1), (1, 1, 1, 1, 1)] + ([(None, 0, None, 1, 1)] if skip else [])
    table = path_residuals(d.frozen, list(paths))
    with mp.workdps(400):
        reference, start = Network(net), exact(X[0])
        states = reference.states(X[0])
        attention = [reference.matrices(layer, layer, states[layer]) for layer in range(5)]
        for path, row in zip(paths, table.iter_rows(named=True), strict=True):
            Y = start
            for layer, head in enumerate(path):
                if head is None:
                    Y = [[mp.mpf(skip) * u for u in each] for each in Y]
                else:
                    output = reference.tensors[f"layers.{layer}.attention.output.weight"][head]
                    V = reference.heads(layer, "value", Y)[head]
                    Y = times(times(attention[layer][head], V), output)
            residual, size = log10_residual(Y), mp.log10(composite(Y))
            assert row["log10"] == pytest.approx(float(residual - size), abs=1e-9 * abs(float(residual)) + 1e-10)
            assert row["arithmetic"] == "deviation" and not row["below_floor"]
    if not skip:
        assert table["log10"].min() < -20  # type: ignore[operator]


def test_single_paths_lose_digits_at_a_steady_rate() -> None:
    """With attention from a network that keeps its tokens apart, each head in a path averages once more."""
    arch = Architecture(layers=8, width=16, heads=4, mlp="none", norm="none", biases=False)
    d = decompose(Transformer.random(arch, init="xavier"), torch.randn(2, 12, 16, dtype=torch.float64))
    table = d.residuals(count=6)
    assert table.group_by("length").len().sort("length")["len"].to_list() == [2] + [12] * 8
    assert -3 < rate(table) < -0.1
    whole = decompose(network(CASES["post-norm"]), tokens())
    plain = whole.residuals([0, 2], count=3)
    assert set(plain["arithmetic"]) == {"float64"} and set(plain["length"]) == {0, 2}


def test_closure_is_an_error_where_it_fails() -> None:
    """Tokens of 1e200 overflow the squares of a norm: the frozen network is not the network."""
    net = network({})
    with raises(ClosureError, "closure"):
        decompose(net, tokens() * 1e200)
    with raises(ClosureError, "closure"):
        decompose(net.to(torch.float32), tokens() * 1e30)


def test_parts_add_up_to_what_the_network_itself_gives() -> None:
    """Not to a second forward pass: the output is the network's own, to the bit."""
    for case, fields in CASES.items():
        net, X = network(fields), tokens(samples=2)
        torch.testing.assert_close(decompose(net, X).output, net.run(X).output, rtol=0, atol=0, msg=case)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "identity"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_units_at_zero_have_a_gate(activation: str, dtype: torch.dtype) -> None:
    """Tokens of zero and no biases: every unit is act(0) = 0, and its gate the slope there."""
    net = network({"activation": activation, "norm": "none", "biases": False}).to(dtype)
    d = decompose(net, torch.zeros(1, 4, 6))
    assert d.closure == 0 and not d.output.any()
    slope = {"relu": 1.0, "tanh": 1.0, "identity": 1.0}.get(activation, 0.5)
    for layer in d.frozen.layers:
        assert layer.gate is not None
        torch.testing.assert_close(layer.gate.double(), torch.full((1, 4, 5), slope).double(), rtol=1e-3, atol=0)


def test_paths_of_their_own_have_attention_of_their_own() -> None:
    """`term = P X W` holds with the path's own P, which is not the full network's."""
    net, X = network(CASES["attention and skips"] | {"biases": False}), tokens(samples=2)
    padding = torch.tensor([[True, False, False, False], [False] * 4])
    d, real = decompose(net, X, padding), ~padding[..., None]
    for path in ((0, 1, 1), (1, None, 0), (None, 1, None)):
        own, shared = d.path(path, "own"), d.path(path)
        for found in (own, shared):
            torch.testing.assert_close(found.term, found.P @ X @ found.W * real, rtol=1e-11, atol=1e-13)
    assert not torch.allclose(d.path((0, 1, 1), "own").P, d.path((0, 1, 1)).P)


def test_float32_networks_close_within_their_own_rounding() -> None:
    d = decompose(network({}).to(torch.float32), tokens().float())
    assert 1e-9 < d.closure < 1e-5 and d.output.dtype == torch.float32
    assert d.by_length().table["share"].is_finite().all()
    assert d.closure > UNIT


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
    net, X = network(CASES[case]).variant(heads=heads), tokens()
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


@pytest.mark.parametrize("scale", [1e-170, 1e-100, 1e100])
def test_shares_add_up_at_any_scale(scale: float) -> None:
    d = decompose(network(CASES["attention and skips"] | {"biases": False}), tokens() * scale)
    table = d.by_length().table.filter(start="all")
    assert table["share"].sum() == pytest.approx(1.0)
    assert table["cosine"].is_between(-1 - 1e-12, 1 + 1e-12).all()


def test_sampled_paths_can_be_kept() -> None:
    d = decompose(network(CASES["attention and skips"]), tokens())
    drawn = d.sample(2, 5, seed=1)
    assert {length_of(path) for path in drawn} == {2}
    total = torch.stack([d.path(path).term for path in drawn]).sum(0)
    torch.testing.assert_close(d.keep(paths=drawn), total, rtol=1e-12, atol=1e-13)
