"""A tiny GPT-2 with dropout, texts of random tokens, and the losses that a training of it has."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

WORDS, LENGTH = 32, 12


def model(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "vocab_size": WORDS,
        "n_positions": LENGTH,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
    }
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


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """To the last bit."""
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
