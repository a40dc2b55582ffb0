"""The pattern of torch's attention function, computed a second time."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.errors import WatchError
from rankscope.live.attention.scaled_dot_product import ScaledDotProduct
from tests.raising import raises


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


SEES = torch.tensor([[1, 0, 0, 1, 0], [1, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 1, 0]]).bool()


CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 4, 8), (2, 3, 5, 8), {}),
    "causal": ((2, 3, 4, 8), (2, 3, 4, 8), {"is_causal": True}),
    "causal, more keys": ((2, 3, 4, 8), (2, 3, 5, 8), {"is_causal": True}),
    "a boolean mask": ((2, 3, 4, 8), (2, 3, 5, 8), {"attn_mask": SEES}),
    "an added mask": ((2, 3, 4, 8), (2, 3, 5, 8), {"attn_mask": rand(2, 1, 4, 5)}),
    "a scale": ((2, 3, 4, 8), (2, 3, 5, 8), {"scale": 0.9}),
    "grouped heads": ((2, 6, 4, 8), (2, 3, 5, 8), {"enable_gqa": True}),
    "no heads": ((2, 4, 8), (2, 5, 8), {}),
    "one sequence": ((4, 8), (5, 8), {}),
    "heads in groups": ((2, 3, 2, 4, 8), (2, 3, 2, 5, 8), {"attn_mask": SEES}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_pattern_is_as_torch_documents_it(name: str) -> None:
    """Row by row: exp of what is seen over its sum, and that pattern gives what the call gave."""
    shape, of_keys, given = CALLS[name]
    q, k, v = rand(*shape), rand(*of_keys), rand(*of_keys[:-1], 6)
    output = F.scaled_dot_product_attention(q, k, v, **given)
    call = ScaledDotProduct(output, q, k, v, **given)
    P, head_outputs = call.pattern(), call.head_outputs()
    groups = shape[-3] // of_keys[-3] if given.get("enable_gqa") else 1
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    L, S = shape[-2], of_keys[-2]
    mask = given.get("attn_mask", torch.ones(L, S).bool())
    mask = mask.expand(*shape[:-2], L, S).reshape(-1, L, S)
    flat = P.reshape(-1, L, S)
    for one in range(len(q)):
        for i in range(L):
            score = (k[one // groups] @ q[one, i]).numpy() * given.get("scale", 8**-0.5)
            if mask.dtype == torch.bool:
                here = mask[one, i].numpy() & ((np.arange(S) <= i) | ("is_causal" not in given))
            else:
                here, score = np.ones(S, bool), score + mask[one, i].numpy()
            expected = np.where(here, np.exp(score), 0.0)
            np.testing.assert_allclose(flat[one, i], expected / expected.sum(), rtol=1e-12, atol=1e-15)
    v = v.repeat_interleave(groups, 0).reshape(*P.shape[:2], S, 6)
    torch.testing.assert_close(P @ v, head_outputs.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_a_query_that_sees_no_key_has_zeros() -> None:
    q, sees = rand(1, 2, 3, 4), torch.ones(3, 3).bool()
    sees[1] = False
    P = ScaledDotProduct(F.scaled_dot_product_attention(q, q, q, sees), q, q, q, sees).pattern()
    assert torch.equal(P[:, :, 1], torch.zeros(1, 2, 3, dtype=torch.float64))
    torch.testing.assert_close(P[:, :, [0, 2]].sum(-1), torch.ones(1, 2, 2, dtype=torch.float64))


def test_a_pattern_that_does_not_give_the_output_is_refused() -> None:
    q = rand(1, 2, 3, 4)
    with raises(WatchError, subject="pattern"):
        ScaledDotProduct(F.scaled_dot_product_attention(q, q, q), q, q, q, is_causal=True).pattern()
