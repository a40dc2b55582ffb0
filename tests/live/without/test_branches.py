"""Skips that are left out: the sum `x + f(x)` becomes `f(x)`; and branches on their way to the sum."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live import watch
from tests.live.gpt import Block, words
from tests.live.without.parts import BLOCKS, edited, random_gpt, without, zeroed
from tests.raising import raises

Forward = Callable[[Any, Tensor], Tensor]


def block(forward: Forward) -> type[Block]:
    """A block that computes this of its parts."""

    class Written(Block):
        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x)

    return Written


def attn(self: Any, x: Tensor) -> Tensor:
    return self.attn(self.ln_1(x))


def mlp(self: Any, x: Tensor) -> Tensor:
    return self.mlp(self.ln_2(x))


def usual(self: Any, x: Tensor) -> Tensor:
    h = x + attn(self, x)
    return h + mlp(self, h)


def branch_first(self: Any, x: Tensor) -> Tensor:
    h = torch.add(attn(self, x), x)
    return mlp(self, h) + h


def in_place(self: Any, x: Tensor) -> Tensor:
    x = x.clone()
    alias = x
    x += attn(self, x)
    alias.add_(mlp(self, alias))
    return x


def into_the_branch(self: Any, x: Tensor) -> Tensor:
    h = attn(self, x)
    h += x
    return mlp(self, h).add_(h)


def without_attention_skip(self: Any, x: Tensor) -> Tensor:
    h = attn(self, x)
    return h + mlp(self, h)


def without_mlp_skip(self: Any, x: Tensor) -> Tensor:
    return mlp(self, x + attn(self, x))


@pytest.mark.parametrize("forward", [usual, branch_first, in_place, into_the_branch])
@pytest.mark.parametrize(("part", "expected"), [("attn", without_attention_skip), ("mlp", without_mlp_skip)])
def test_a_sum_becomes_its_branch(forward: Forward, part: str, expected: Forward) -> None:
    output, w = without(random_gpt(block(forward)), skips=f"{BLOCKS}.{part}")
    reference, v = without(random_gpt(block(expected)))
    assert torch.equal(output, reference)
    assert torch.equal(w.profile().curve("mu"), v.profile().curve("mu"))


@pytest.mark.parametrize("forward", [usual, branch_first, in_place, into_the_branch])
@pytest.mark.parametrize("part", ["attn", "mlp"])
def test_a_branch_is_followed_to_its_sum(forward: Forward, part: str) -> None:
    model = random_gpt(block(forward))
    output, _ = without(model, branches=f"{BLOCKS}.{part}")
    other = edited(model, lambda copy: [zeroed(getattr(each, part).c_proj) for each in copy.transformer["h"]])
    assert torch.equal(output, without(other)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_skip_leaves_no_rounding(dtype: torch.dtype) -> None:
    """After x + branch - x the branch would have lost digits; here the block gives it to the bit."""
    model = random_gpt().to(dtype)
    given: list[Tensor] = []
    model.transformer["h"][1].mlp.register_forward_hook(lambda module, args, output: given.append(output))  # type: ignore[index]
    with torch.no_grad(), watch(model, "mu", keep="states").without(skips="transformer.h.1.mlp") as w:
        model(words())
    assert torch.equal(w.states[2][0].to(dtype), given[0])


def parallel(self: Any, x: Tensor) -> Tensor:
    return attn(self, x) + mlp(self, x) + x


def test_parallel_branches_share_a_skip() -> None:
    """Of `attention + mlp + x` the skip is x, whichever branch it is named by; each branch goes by itself."""
    model = random_gpt(block(parallel))
    reference, _ = without(random_gpt(block(lambda self, x: attn(self, x) + mlp(self, x))))
    for part in ("attn", "mlp"):
        assert torch.equal(without(model, skips=f"{BLOCKS}.{part}")[0], reference)
        other = edited(model, lambda copy, part=part: [zeroed(getattr(b, part).c_proj) for b in copy.transformer["h"]])
        assert torch.equal(without(model, branches=f"{BLOCKS}.{part}")[0], without(other)[0])


def test_a_scaled_branch_goes_with_its_scale() -> None:
    scaled = random_gpt(block(lambda self, x: x + 0.5 * attn(self, x)))
    reference, _ = without(random_gpt(block(lambda self, x: 0.5 * attn(self, x))))
    assert torch.equal(without(scaled, skips=f"{BLOCKS}.attn")[0], reference)
    assert torch.equal(without(scaled, branches=f"{BLOCKS}.attn")[0], without(random_gpt(block(lambda self, x: x)))[0])


def test_gradients_pass_a_skip_that_is_left_out() -> None:
    model, other = random_gpt().train(), random_gpt(block(without_mlp_skip)).train()
    with watch(model, "mu").without(skips=f"{BLOCKS}.mlp"):
        model(words()).square().sum().backward()
    other(words()).square().sum().backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("forward", "parts"),
    [
        (usual, {"branches": f"{BLOCKS}.attn.c_attn"}),  # attention of zeros still adds its output's bias
        (usual, {"branches": "transformer.h.1"}),  # a whole block, whose skip is inside
        (usual, {"branches": f"{BLOCKS}.ln_1"}),
        (usual, {"skips": "lm_head"}),
        (usual, {"skips": "transformer.h.2"}),
        (lambda self, x: torch.stack([x, attn(self, x)]).sum(0), {"skips": f"{BLOCKS}.attn"}),
        (lambda self, x: torch.add(x, attn(self, x), alpha=2.0), {"skips": f"{BLOCKS}.attn"}),
        (lambda self, x: x + attn(self, x) + mlp(self, x), {"skips": f"{BLOCKS}.mlp"}),  # added to x + attention
    ],
)
def test_what_is_no_such_sum_is_refused(forward: Forward, parts: dict[str, Any]) -> None:
    with raises(WatchError, next(iter(parts))):
        without(random_gpt(block(forward)), **parts)


class Listed(nn.Module):
    """Layers are lists of branches, whose skips are outside of them, as in vit-pytorch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = partial(nn.Sequential, nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())
        self.layers = nn.ModuleList(nn.ModuleList([make(nn.Linear(4, 4)), make(nn.Linear(4, 4))]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.layers
        for layer in layers:
            x = layer[0](x) + x
            x = layer[1](x) + x
        return x


@pytest.mark.parametrize("part", [0, 1])
def test_branches_of_lists_can_go_and_their_skips_cannot(part: int) -> None:
    """Of such a layer the watch takes what its last part took and gave together for its output."""
    model, x = Listed().double(), torch.randn(2, 5, 4, dtype=torch.float64)
    output, w = without(model, "mu", x, branches=f"layers.1.{part}")
    expected, v = without(edited(model, lambda copy: zeroed(copy.layers[1][part][-1])), "mu", x)
    assert torch.equal(output, expected) and torch.equal(w.profile().curve("mu"), v.profile().curve("mu"))
    with raises(WatchError, "skips"):
        without(model, "mu", x, skips=f"layers.2.{part}")
