"""A way to see attention of one's own is used as the built-in ones are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankscope import read
from rankscope.errors import WatchError
from rankscope.live import OBSERVERS, AttentionCall, watch
from rankscope.live.attention import OnAttention, WatchedBlocks
from rankscope.monitor import Monitor
from tests.live.families import seen
from tests.live.gpt import GPT, HEADS, METRICS, WIDTH, Block, SelfAttention, same, words
from tests.raising import raises

torch.library.define("test_observer::kernel", "(Tensor q, Tensor k, Tensor v) -> Tensor")


@torch.library.impl("test_observer::kernel", "CPU")
def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention inside an operator, which no built-in observer sees into."""
    return pattern(q, k) @ v


def pattern(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)


class KernelAttention(SelfAttention):
    """Keeps queries and keys of its last call, for whoever observes it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).split(WIDTH, 2))
        self.last = q, k, (y := torch.ops.test_observer.kernel(q, k, v))
        return self.c_proj(y.transpose(1, 2).flatten(2))


class KernelBlock(Block):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.attn = KernelAttention(dropout)


class KernelObserver:
    """Reports the kernel above after each call of its module."""

    def __init__(self, parts: tuple[str, ...] = ("head_outputs",)) -> None:
        self.parts = parts

    def applies(self, model: nn.Module, blocks: WatchedBlocks) -> bool:
        return all(isinstance(block, KernelBlock) for block in blocks)

    @contextmanager
    def attach(self, blocks: WatchedBlocks, on_attention: OnAttention) -> Iterator[str | None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            assert isinstance(module, KernelAttention)
            q, k, y = module.last
            weight = module.c_proj.weight.unflatten(1, (HEADS, -1))  # [width, head, d]
            known: dict[str, Any] = {
                "head_outputs": lambda: y.transpose(1, 2),
                "contributions": lambda: torch.einsum("bhtd,whd->bhtw", y, weight),
            }
            on_attention(AttentionCall(pattern=lambda: pattern(q, k), **{part: known[part] for part in self.parts}))

        handles = [block.get_submodule("attn").register_forward_hook(hook) for block in blocks]
        try:
            yield "Attention was seen in a kernel of my own."
        finally:
            for handle in handles:
                handle.remove()


def test_a_kernel_of_ones_own() -> None:
    model, plain = GPT(block=KernelBlock).double().eval(), GPT().double().eval()
    model.load_state_dict(plain.state_dict())
    with raises(WatchError, subject="attention"):
        seen(model, "entropy", words())
    mine = [KernelObserver(("contributions",)), *OBSERVERS]
    with torch.no_grad(), watch(model, METRICS, attention=mine) as w:
        model(words())
    same(w, seen(plain, METRICS, words()))
    assert "Attention was seen in a kernel of my own." in w.notes
    assert not any(part._forward_hooks for part in model.modules())


def test_a_monitor_takes_it_too(tmp_path: Path) -> None:
    model = GPT(block=KernelBlock)
    options: dict[str, Any] = {"attention": [KernelObserver()], "run": tmp_path, "alarms": ()}
    with Monitor(model, "entropy", every=1, probe=words(), **options):
        pass
    rows = read(tmp_path).tables["training"].filter(metric="entropy")
    assert rows["layer"].unique().sort().to_list() == [1, 2, 3]


def test_heads_need_what_the_observer_does_not_give() -> None:
    model = GPT(block=KernelBlock).double().eval()
    with raises(WatchError, subject="heads"), watch(model, "head_mu", attention=[KernelObserver(())]):
        model(words())


def test_the_first_that_applies_is_used_and_one_must() -> None:
    model = GPT().double().eval()
    with torch.no_grad(), watch(model, METRICS, attention=[KernelObserver(), *OBSERVERS]) as w:
        model(words())
    same(w, seen(model, METRICS, words()))
    for none in ((), [KernelObserver()]):
        with raises(WatchError, subject="attention"), watch(model, "entropy", attention=none):
            pass


PATTERN = torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=torch.float64).expand(1, 2, 2, 2)


class Reporting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_listeners: list[OnAttention] = []
        self.inner = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        call = AttentionCall(pattern=lambda: PATTERN, contributions=lambda: torch.stack([x, 2 * x], 1))
        for listener in self.attention_listeners:
            listener(call)
        return x + self.inner(x)


def test_what_blocks_report_is_what_is_read() -> None:
    model, X = nn.Sequential(Reporting(), Reporting()), torch.randn(1, 2, 4, dtype=torch.float64)
    with torch.no_grad(), watch(model, ["mu", "first_token_mass", "head_mu"], keep="attention") as w:
        model(X)
    assert torch.equal(w.attention[1][0], PATTERN)
    mu = w.profile().curve("mu")[0, 0]
    torch.testing.assert_close(w.profile().curve("head_mu")[0, 1], torch.stack([mu, 2 * mu]))
    assert not any(block.attention_listeners for block in model)
