"""A tiny GPT-2 with dropout, texts of random tokens, and the losses that a training of it has."""

from collections.abc import Iterable
from typing import Any

import polars
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

WORDS, LENGTH = 32, 12


def model(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropped: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    model = GPT2LMHeadModel(GPT2Config(**size, **dropped, bos_token_id=0, eos_token_id=0))
    return model.train()


class Texts(Dataset[dict[str, Tensor]]):
    def __init__(self, number: int) -> None:
        self.ids = torch.randint(0, WORDS, (number, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def probe() -> dict[str, Tensor]:
    return {"input_ids": Texts(3).ids.flip(1)}


class Steps:
    """Every step of an optimiser, measured by hand: of the MLP of a block, the gradient's size and the share
    by which the weights moved."""

    def __init__(self, blocks: Iterable[torch.nn.Module]) -> None:
        self.weights: list[list[torch.nn.Parameter]] = [
            [each for each in block.get_submodule("mlp").parameters() if each.ndim > 1] for block in blocks
        ]
        self.before: list[Tensor] = []
        self.gradients: list[list[float]] = []
        """By step and block."""
        self.updates: list[list[float]] = []

    def begins(self) -> None:
        self.before = [_flat(weights) for weights in self.weights]

    def ends(self) -> None:
        grads = [_flat([each.grad for each in weights if each.grad is not None]) for weights in self.weights]
        self.gradients.append([float(each.norm()) for each in grads])
        after = [_flat(weights) for weights in self.weights]
        pairs = zip(self.before, after, strict=True)
        self.updates.append([float((new - old).norm() / old.norm()) for old, new in pairs])

    def hold(self, rows: polars.DataFrame, every: int) -> None:
        """The table has the numbers of the steps that were looked at, each once."""
        for name, found in {"grad_mlp": self.gradients, "update_mlp": self.updates}.items():
            mine = rows.filter(metric=name).sort("step", "layer")
            steps = range(every, len(found) + 1, every)
            expected = [each for step in steps for each in found[step - 1]]
            assert mine["step"].to_list() == [step for step in steps for _ in self.weights]
            assert mine["value"].to_list() == pytest.approx(expected, rel=1e-6) and min(expected) > 0
        for name in ("loss", "lr"):
            assert rows.filter(metric=name)["step"].is_unique().all()


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([each.detach().double().reshape(-1) for each in tensors])


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """To the last bit."""
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
