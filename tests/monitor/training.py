"""A small GPT-2 that learns, with whatever a loop may have about it; and the same loop under a monitor."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from rankscope import Monitor

TOKENS = 12


class Trained(NamedTuple):
    losses: list[float]
    weights: list[Tensor]
    generator: Tensor
    """The state of torch's generator at the end."""

    def same(self, other: "Trained") -> bool:
        return (
            self.losses == other.losses
            and all(map(torch.equal, self.weights, other.weights))
            and torch.equal(self.generator, other.generator)
        )


def gpt2(dropout: float = 0.1, layers: int = 2, seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=30, n_positions=TOKENS, n_embd=16, n_layer=layers, n_head=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def batch(step: int, samples: int = 4) -> Tensor:
    return torch.randint(30, (samples, TOKENS), generator=torch.Generator().manual_seed(step))


def probe(samples: int = 3) -> dict[str, Tensor]:
    return {"input_ids": batch(10**6, samples)}


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(
    monitor: Callable[[nn.Module], Monitor] | None = None,
    steps: int = 20,
    *,
    model: nn.Module | None = None,
    accumulate: int = 1,
    autocast: bool = False,
    compiled: str = "",
    inside: bool = False,
    first: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    seen: list[Any] | None = None,
) -> Trained:
    """`inside`: the whole loop lies inside one autocast, as some have it."""
    model = gpt2().train() if model is None else model
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    watching = None if monitor is None else monitor(model)
    called = torch.compile(model, backend=compiled, fullgraph=True) if compiled else model
    torch.manual_seed(7)
    losses = []
    region = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with region if inside else nullcontext():
        for step in range(first, first + steps):
            for part in range(accumulate):
                with nullcontext() if inside else region:
                    ids = batch(step * accumulate + part)
                    loss = loss_of(called(input_ids=ids).logits, ids)
                (loss / accumulate).backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if watching is not None:
                watching.step(loss=loss)
    if watching is not None:
        watching.close()
        if seen is not None:
            seen.append(watching)
    weights = [each.detach().clone() for each in model.parameters()]
    return Trained(losses, weights, torch.get_rng_state())


def probed(run: Path, **options: Any) -> Callable[[nn.Module], Monitor]:
    return lambda model: Monitor(model, probe=probe(), run=run, **{"every": 10, **options})
