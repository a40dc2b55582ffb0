"""Numbers that positions add to scores; whole schemes are held against other libraries in `test_parity.py`."""

import math

import pytest
import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from rankscope.errors import TokensError
from rankscope.nets import Architecture, Linear
from rankscope.nets.positions import alibi_slopes, buckets
from rankscope.profiles import measure
from tests.builders import awake, normal
from tests.raising import raises


@pytest.mark.parametrize(("heads", "first"), [(8, 0.5), (4, 0.25), (6, 0.25)])
def test_alibi_slopes_are_the_papers(heads: int, first: float) -> None:
    """Press et al. 2022: for 8 heads 1/2, 1/4, ..., 1/256; else the lower power of two's, then between."""
    slopes = alibi_slopes(heads).tolist()
    assert slopes[0] == first and len(set(slopes)) == heads
    if heads == 8:
        assert slopes == [2.0**-k for k in range(1, 9)]
    if heads == 6:
        assert slopes == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


@pytest.mark.parametrize(("buckets", "reach"), [(3, 1), (8, 12)])
def test_disentangled_scores_are_the_papers(buckets: int, reach: int) -> None:
    """He et al. 2021, equation 4: content to content, content to position, position to content."""
    arch = Architecture(layers=1, width=8, heads=2, positions="disentangled", bias_buckets=buckets, bias_reach=reach)
    net, X = awake(arch), normal(1, 14, 8)
    w, table = net.weights.layers[0].attention, net.weights.relative_table
    assert w.relative_key is not None and w.relative_query is not None and table is not None

    def heads(rows: Tensor, linear: Linear) -> Tensor:
        assert linear.bias is not None
        return torch.einsum("td,dhc->htc", rows, linear.weight) + linear.bias[:, None]

    q, k = heads(X[0], w.query), heads(X[0], w.key)
    r, t = heads(table, w.relative_key), heads(table, w.relative_query)

    def bucket(distance: int) -> int:
        """The distance itself up to half of the buckets of a side; beyond it, logarithmic."""
        half, size = buckets // 2, abs(distance)
        if reach > 1 and size > half:
            size = math.ceil(math.log(size / half) / math.log((reach - 1) / half) * (half - 1)) + half
        return min(max(int(math.copysign(size, distance)) + buckets, 0), 2 * buckets - 1)

    scores = torch.stack([
        torch.tensor([[float(q[h, i] @ k[h, j] + q[h, i] @ r[h, bucket(i - j)] + k[h, j] @ t[h, bucket(i - j)])
                       for j in range(14)] for i in range(14)], dtype=torch.float64)
        for h in range(2)
    ])  # fmt: skip
    P = net.run(X, attention=True).attention[0][0]
    torch.testing.assert_close(P, (scores / arch.divisor).softmax(-1), rtol=1e-12, atol=1e-15)
    assert measure(net, X).arithmetics == ["float64"]


def test_patches_are_rotated_by_their_row_and_column() -> None:
    """DINOv3: a score of two patches depends on their places through products of complex numbers."""
    arch = Architecture(
        layers=1, width=8, heads=1, positions="rotary", rotary_grid=(2, 3, 1), norm="none", mlp="none",
        rotary_frequencies=((0.9, 0.2, 0.9, 0.2),),
    )  # fmt: skip
    net, X = awake(arch), normal(1, 7, 8)
    w = net.weights.layers[0].attention
    assert w.query.bias is not None and w.key.bias is not None
    q, k = (X[0] @ part.weight[:, 0] + part.bias[0] for part in (w.query, w.key) if part.bias is not None)
    places = [(0.0, 0.0)] + [
        ((2 * row + 1) / 2 - 1, (2 * column + 1) / 3 - 1) for row in range(2) for column in range(3)
    ]
    angles = torch.tensor([[0.9 * y, 0.2 * y, 0.9 * x, 0.2 * x] for y, x in places], dtype=torch.float64)
    turns = torch.polar(torch.ones_like(angles), angles)
    q, k = (torch.complex(part[:, :4], part[:, 4:]) * turns for part in (q, k))
    P = net.run(X, attention=True).attention[0][0, 0]
    torch.testing.assert_close(P, ((q @ k.conj().T).real / arch.divisor).softmax(-1), rtol=1e-12, atol=1e-15)
    with raises(TokensError, "rotary_grid"):
        net.run(normal(1, 8, 8))


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("number", "reach"), [(8, 6), (32, 128), (12, 20), (9, 10)])
def test_buckets_are_those_of_transformers(number: int, reach: int, both: bool) -> None:
    """Also of an odd number, of which T5 leaves the last one empty when there are two sides."""
    ahead = torch.arange(-150, 151)[None, :]
    theirs = T5Attention._relative_position_bucket(ahead, both, number, reach)
    found = buckets(ahead if both else ahead.clamp(max=0), number, reach, both)
    assert torch.equal(found, theirs)
    assert int(found.min()) == 0 and int(found.max()) == (number // 2 * 2 if both else number) - 1
