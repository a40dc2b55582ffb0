"""What passes through each head and layer, against every path walked one at a time."""

import math

import numpy as np
import polars as pl
import pytest

from rankscope.nets import Architecture, Block, Branch, Half
from rankscope.paths import Frozen, WholeNetwork, decompose
from tests.paths.enumeration import CASES, both, network, tokens


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", CASES)
def test_shares_of_heads_and_layers_are_those_of_their_paths(case: str) -> None:
    """Everything that passes through head h of layer l: the sum of all terms that name it."""
    d, reference = both(case)
    O = reference.output  # noqa: E741
    centred = O - O.mean(0)
    heads, layers = d.by_head(), d.by_layer()
    terms = reference.embedding_terms + reference.bias_terms
    for layer in range(3):
        through = [np.zeros_like(O) for _ in range(2)]
        for term in terms:
            head = term.head_in(layer)
            if head is not None:
                through[head] += term.value
        for h in range(2):
            row = heads.filter(layer=layer + 1, head=h).row(0, named=True)
            assert row["share"] == pytest.approx((through[h] * O).sum() / (O * O).sum(), rel=1e-7, abs=1e-10)
            share = (through[h] * centred).sum() / (centred**2).sum()
            assert row["residual_share"] == pytest.approx(share, rel=1e-7, abs=1e-10)
        row = layers.filter(layer=layer + 1, part="heads").row(0, named=True)
        total = sum(through)
        assert row["norm"] == pytest.approx(np.linalg.norm(total), rel=1e-8, abs=1e-11)
        assert row["share"] == pytest.approx((total * O).sum() / (O * O).sum(), rel=1e-7, abs=1e-10)


class WithoutMLP(WholeNetwork):
    """The frozen network less the MLP branch of one layer."""

    def __init__(self, frozen: Frozen, index: int) -> None:
        super().__init__(frozen)
        self.index = index

    def takes(self, block: Block, half: Half, branch: Branch) -> bool:
        return block.index != self.index or branch.part != "mlp"


def test_the_mlp_of_a_layer_carries_what_passes_through_it() -> None:
    """Without its MLP branch, everything else frozen, the output lacks just that term."""
    for case in ("post-norm", "pre-norm with a last norm", "sandwich", "parallel", "rms, rotary, grouped, causal"):
        net, X = network(CASES[case]), tokens()
        d = decompose(net, X)
        rows = d.by_layer()
        for index in range(3):
            lacking = (d.frozen.output - WithoutMLP(d.frozen, index).run()).numpy()[0]
            row = rows.filter(layer=index + 1, part="mlp").row(0, named=True)
            assert row["norm"] == pytest.approx(np.linalg.norm(lacking), rel=1e-8)


SMALL = Architecture(layers=3, width=6, heads=2, head_width=4, mlp="none", norm="none", biases=False)


def test_contraction_is_at_most_what_dobrushin_allows() -> None:
    """`mu(P Z) <= sqrt(n / 2) delta(P) mu(Z)`: column by column, `osc(P z) <= delta osc(z)`, with
    `osc(z) <= sqrt 2 |z - mean|` and `|P z - mean| <= sqrt n / 2 osc(P z)`."""
    d = decompose(network(CASES["post-norm"]), tokens(samples=3))
    heads = d.by_head()
    assert len(heads) == 3 * 3 * 2
    assert all(row["averaging"] <= math.sqrt(4 / 2) * row["dobrushin"] + 1e-12 for row in heads.iter_rows(named=True))


def test_silent_heads_say_nothing_and_uniform_tokens_contract_no_more() -> None:
    heads = decompose(network({}).variant(heads={2: [0]}), tokens()).by_head()
    silent = heads.filter(layer=2, head=1).row(0, named=True)
    assert [silent[name] for name in ("norm", "share", "residual_share", "contraction")] == [0.0] * 4
    assert heads.filter(pl.col("norm") > 0).height == 5
    alike = tokens()[:, :1].expand(1, 4, 6)
    noise = decompose(network({}), alike).by_head()
    assert noise["contraction"].is_nan().all() and noise["averaging"].is_nan().all()
    assert noise["share"].is_finite().all() and noise["residual_share"].is_nan().all()
    assert decompose(network({}), alike).by_layer()["residual_share"].is_nan().all()
