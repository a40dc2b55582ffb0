"""Which attention in a block counts, and what is said where none does."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import rankscope
from rankscope.errors import WatchError
from rankscope.live import AttentionCall, watch
from rankscope.live.attention import OnAttention, WatchedBlocks
from tests.live.attention.test_observer import KernelBlock, KernelObserver
from tests.live.encoders import Loop
from tests.live.families import WIDTH, made
from tests.live.gpt import GPT, words
from tests.raising import raises


def test_attention_that_cannot_be_seen() -> None:
    model = Loop()
    with raises(WatchError, subject="attention"), rankscope.watch(model, "entropy", blocks=["first"]):
        model(torch.randn(2, 6, WIDTH))


def test_attention_that_did_not_take() -> None:
    model, batch = made("bert")
    watching = rankscope.watch(model, "entropy", blocks=["encoder.layer.0.intermediate"])
    with raises(WatchError, subject="attention"), watching:
        model(**batch)


@pytest.mark.parametrize("known", [None, True])
def test_cross_attention_that_an_observer_knows_is_left_out(known: bool | None) -> None:
    """An observer that cannot tell has its first attention taken; one that can, the one it says."""

    class Twice(KernelObserver):
        @contextmanager
        def attach(self, blocks: WatchedBlocks, on_attention: OnAttention) -> Iterator[str | None]:
            def both(call: AttentionCall) -> None:
                if known:
                    on_attention(AttentionCall(pattern=call.pattern, self_attention=False, remark="cross-attention"))
                on_attention(AttentionCall(pattern=call.pattern, self_attention=known))
                if known is None:
                    on_attention(AttentionCall(pattern=call.pattern))

            with super().attach(blocks, both):
                yield None

    model = GPT(block=KernelBlock).double().eval()
    with torch.no_grad(), watch(model, "entropy", attention=[Twice()]) as w:
        model(words())
    assert w.profile().curve("entropy")[:, 1:].isfinite().all()
    assert any("were left out" in note or "was left out" in note for note in w.notes)
