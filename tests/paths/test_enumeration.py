"""Every sum over paths against every path, walked one at a time by independent code."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.nets import Architecture, Experts, Transformer
from rankscope.nets.order import Branch, Half
from rankscope.nets.traversal import Block
from rankscope.paths import Decomposition, decompose
from rankscope.paths.frozen import Frozen
from rankscope.paths.terms import WholeNetwork
from tests.builders import awake, normal
from tests.paths.enumeration import Enumeration, Term

BASE: dict[str, Any] = {"layers": 3, "width": 6, "heads": 2, "head_width": 4, "mlp_width": 5, "length": 8}
CASES: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm with a last norm": {"norm_place": "pre", "final_norm": True},
    "sandwich": {"norm_place": "sandwich", "final_norm": True},
    "no norm": {"norm": "none"},
    "scale-only, gated": {"norm": "scale", "mlp": "gated", "norm_place": "pre"},
    "rms, rotary, grouped, causal": {
        "norm": "rms", "positions": "rotary", "key_heads": 1, "mask": "causal", "norm_place": "pre",
        "mlp": "gated", "activation": "silu", "query_norm": True,
    },
    "parallel": {"parallel": True, "norm_place": "pre", "activation": "relu"},
    "parallel, post": {"parallel": True},
    "pure attention": {"norm": "none", "mlp": "none", "attention_skip": 0.0},
    "attention and skips": {"norm": "none", "mlp": "none", "attention_skip": 0.7},
    "no skip past heads": {"attention_skip": 0.0, "mlp_skip": 0.5},
    "no skip past the MLP": {"mlp_skip": 0.0},
    "shared, windowed, relative": {"shared": True, "mask": "window:1", "positions": "relative"},
    "bias positions, no biases": {"positions": "bias", "biases": False, "divisor": 1.0},
    "sigmoid": {"kernel": "sigmoid"},
    "linformer": {"kernel": "linformer:2", "positions": "absolute"},
    "mixture of experts": {
        "norm_place": "pre", "mlp": "experts",
        "experts": Experts(number=4, chosen=2, width=3, renormalised=True, dense_layers=(1,)),
    },
    "shared expert, no skip past the MLP": {
        "mlp": "experts", "mlp_skip": 0.0, "activation": "silu",
        "experts": Experts(number=3, chosen=1, width=3, shared_width=5, shared_gate=True),
    },
    "capped": {"score_cap": 0.5},
    "gated heads": {"norm_place": "pre", "head_gate": True, "key_heads": 1},
    "bare first layer": {"norm_place": "pre", "bare_layers": (0,)},
}  # fmt: skip


def network(fields: dict[str, Any], seed: int = 0) -> Transformer:
    return awake(Architecture(**{**BASE, **fields}), seed, 0.4)


def tokens(seed: int = 1, samples: int = 1) -> torch.Tensor:
    return normal(samples, 4, BASE["width"], seed=seed)


@cache
def both(case: str) -> tuple[Decomposition, Enumeration]:
    net, X = network(CASES[case]), tokens()
    return decompose(net, X), Enumeration(net, X[0])


def sums(terms: list[Term], lengths: int, like: Any) -> Any:
    total = [np.zeros_like(like) for _ in range(lengths)]
    for term in terms:
        total[term.length] += term.value
    return np.stack(total)


def close(mine: torch.Tensor, theirs: Any, scale: Any) -> None:
    np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-10, atol=1e-11 * max(np.abs(scale).max(), 1e-300))


@pytest.mark.parametrize("case", CASES)
def test_lengths_are_the_sums_of_their_paths(case: str) -> None:
    d, reference = both(case)
    found = d.by_length()
    embedding, bias = reference.embedding_terms, reference.bias_terms
    close(found.embedding[:, 0], sums(embedding, 4, reference.output), reference.output)
    close(found.bias[:, 0], sums(bias, 4, reference.output), reference.output)
    assert found.counts == [sum(t.length == k for t in embedding) for k in range(4)]
    assert found.bias_counts == [sum(t.length == k for t in bias) for k in range(4)]
    assert found.closure < 1e-12
    whole = sum(t.value for t in embedding) + sum((t.value for t in bias), np.zeros(1))
    np.testing.assert_allclose(whole, reference.output, rtol=1e-9, atol=1e-11)


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


@pytest.mark.parametrize("case", CASES)
def test_every_single_path(case: str) -> None:
    d, reference = both(case)
    for term in reference.embedding_terms:
        found = d.path(term.choices)
        close(found.term[0], term.value, reference.output)
        assert found.path == term.choices


def test_paths_of_pure_attention_are_the_theorems() -> None:
    """`P_path X W_path`, Dong et al. 2021, Thm 2.1; skips are identities with their weight."""
    for case in ("pure attention", "attention and skips"):
        net, X = network(CASES[case] | {"biases": False}), tokens()
        d = decompose(net, X)
        for path in ((0, 1, 1), (1, 0, 0)) + (((None, 1, None),) if "skips" in case else ()):
            found = d.path(path)
            torch.testing.assert_close(found.term, found.P @ X @ found.W, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(found.P.sum(-1), torch.ones(1, 4, dtype=torch.float64))


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
    close(d.keep(heads=only, biases=False)[0], sum((t.value for t in through), zero), reference.output)


BY_TURNS = [
    pytest.param(case, by, marks=[pytest.mark.slow] if (number + turn) % 2 else [])
    for number, case in enumerate(CASES)
    for turn, by in enumerate(["norm", "residual"])
]
"""Half of them here, the others with what is slow."""


@pytest.mark.parametrize(("case", "by"), BY_TURNS)
def test_top_is_the_sorted_enumeration(case: str, by: Any) -> None:
    d, reference = both(case)
    terms = reference.embedding_terms

    def weight(value: Any) -> float:
        return float(np.linalg.norm(value - value.mean(0) if by == "residual" else value))

    expected = sorted((weight(t.value) for t in terms), reverse=True)
    found = d.top(len(terms), by=by)
    assert found.proved == len(terms)
    np.testing.assert_allclose(found.weights, expected, rtol=1e-8, atol=1e-11)
    assert len(set(found.paths)) == len(terms)
    by_path = {t.choices: weight(t.value) for t in terms}
    np.testing.assert_allclose([by_path[p] for p in found.paths], found.weights, rtol=1e-8, atol=1e-11)
    few = d.top(3, by=by)
    assert few.proved == min(3, len(terms)) and few.next_bound <= few.weights[-1] * (1 + 1e-8)
    hurried = d.top(3, by=by, budget=4)
    assert hurried.proved < len(hurried.paths) <= 3
    np.testing.assert_allclose([by_path[p] for p in hurried.paths], hurried.weights, rtol=1e-8, atol=1e-11)
    # Whatever is not listed weighs no more than the bound says.
    rest = [by_path[p] for p in by_path if p not in hurried.paths]
    assert max(rest, default=0.0) <= max(hurried.next_bound, *hurried.weights, 0.0) * (1 + 1e-8)


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


@given(
    st.fixed_dictionaries({
        "layers": st.integers(1, 5),
        "heads": st.sampled_from([1, 2, 3]),
        "norm": st.sampled_from(["layer", "rms", "scale", "none"]),
        "norm_place": st.sampled_from(["pre", "post", "sandwich"]),
        "mlp": st.sampled_from(["plain", "gated", "none"]),
        "activation": st.sampled_from(["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "tanh"]),
        "kernel": st.sampled_from(["softmax", "gaussian", "uniform", "sigmoid", "linear"]),
        "mask": st.sampled_from(["complete", "causal", "window:1"]),
        "positions": st.sampled_from(["none", "absolute", "rotary"]),
        "attention_skip": st.sampled_from([0.0, 0.5, 1.0, -0.3]),
        "parallel": st.booleans(),
        "final_norm": st.booleans(),
        "shared": st.booleans(),
    }),
    st.integers(0, 10**6),
    st.integers(0, 3),
)  # fmt: skip
def test_lengths_add_up_to_the_output(fields: dict[str, Any], seed: int, padded: int) -> None:
    """`sum over lengths = output`, for whatever network, padding included."""
    net = network(fields, seed)
    X = tokens(seed + 1, samples=2)
    padding = torch.arange(4)[None] >= torch.tensor([[4], [4 - padded]])
    d = decompose(net, X, padding)
    found = d.by_length()
    expected = net.run(X, padding).output
    total = (found.embedding + found.bias).sum(0)
    torch.testing.assert_close(total[~padding], expected[~padding], rtol=1e-8, atol=1e-9)
    assert found.closure < 1e-9 and not total[padding].any()
    assert d.by_length() is found
