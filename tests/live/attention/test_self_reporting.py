"""Blocks that report their attention themselves."""

import torch
from torch import Tensor, nn

from rankscope.live import AttentionCall, watch
from rankscope.live.attention import OnAttention

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
