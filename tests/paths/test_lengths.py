"""What each length carries, as a table and as a file."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rankscope.errors import ClosureError, FileError
from rankscope.metrics import UNIT
from rankscope.nets import Architecture
from rankscope.paths import ByLength, decompose
from tests.paths.enumeration import CASES, both, network, sums, tokens
from tests.raising import raises


@pytest.mark.parametrize("case", CASES)
def test_the_table_says_what_the_sums_are(case: str) -> None:
    d, reference = both(case)
    table = d.by_length().table
    total = sums(reference.embedding_terms + reference.bias_terms, 4, reference.output)
    O = reference.output  # noqa: E741
    for row in table.filter(start="all").iter_rows(named=True):
        term = total[row["length"]]
        centred = term - term.mean(0)
        composite = np.sqrt(np.abs(centred).sum(0).max() * np.abs(centred).sum(1).max())
        size = np.sqrt(np.abs(term).sum(0).max() * np.abs(term).sum(1).max())
        assert row["norm"] == pytest.approx(np.linalg.norm(term), rel=1e-9, abs=1e-12)
        assert row["share"] == pytest.approx((term * O).sum() / (O * O).sum(), rel=1e-8, abs=1e-11)
        assert row["residual"] == pytest.approx(composite, rel=1e-8, abs=1e-11)
        if np.linalg.norm(term):
            cosine = (term * O).sum() / np.linalg.norm(term) / np.linalg.norm(O)
            assert row["cosine"] == pytest.approx(cosine, rel=1e-8, abs=1e-11)
            assert row["relative_residual"] == pytest.approx(composite / size, rel=1e-8, abs=1e-11)
    shares = table.filter(start="all")["share"].sum()
    assert shares == pytest.approx(1.0, abs=1e-10)


SMALL = Architecture(layers=3, width=6, heads=2, head_width=4, mlp="none", norm="none", biases=False)


def test_sums_by_length_are_saved_and_read_again(tmp_path: Path) -> None:
    found = decompose(network(CASES["post-norm"]), tokens(samples=2), variant="mine", device="cpu").by_length()
    again = ByLength.read(found.save(tmp_path / "lengths"))
    assert (again.variant, again.counts, again.closure) == ("mine", found.counts, found.closure)
    assert torch.equal(again.embedding, found.embedding) and again.table.equals(found.table)
    (tmp_path / "other").write_text("no tensors")
    for path in (tmp_path / "other", tmp_path / "none"):
        with raises(FileError, str(path)):
            ByLength.read(path)


def test_closure_is_an_error_where_it_fails() -> None:
    """Tokens of 1e200 overflow the squares of a norm: the frozen network is not the network."""
    net = network({})
    with raises(ClosureError, "closure"):
        decompose(net, tokens() * 1e200)
    with raises(ClosureError, "closure"):
        decompose(net.to(torch.float32), tokens() * 1e30)


@pytest.mark.parametrize("scale", [1e-170, 1e-100, 1e100])
def test_shares_add_up_at_any_scale(scale: float) -> None:
    d = decompose(network(CASES["attention and skips"] | {"biases": False}), tokens() * scale)
    table = d.by_length().table.filter(start="all")
    assert table["share"].sum() == pytest.approx(1.0)
    assert table["cosine"].is_between(-1 - 1e-12, 1 + 1e-12).all()


def test_float32_networks_close_within_their_own_rounding() -> None:
    d = decompose(network({}).to(torch.float32), tokens().float())
    assert 1e-9 < d.closure < 1e-5 and d.output.dtype == torch.float32
    assert d.by_length().table["share"].is_finite().all()
    assert d.closure > UNIT
