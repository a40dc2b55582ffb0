"""Small encoder-decoders that learn to write a sequence backwards, with padding of each side's own."""

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

WORDS, LONGEST = 12, 6  # 0 is padding, 1 the end
SIZES: dict[str, Any] = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32}


def sequences(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """(Sequences of 2 to 6 words, the same backwards with an end): `[sample, 6]` and `[sample, 6]`, 0 at padding. The
    end comes in place of the last word of the longest, so that both sides have as many tokens, padded otherwise."""
    draw = torch.Generator().manual_seed(seed)
    source, target = (torch.zeros(samples, LONGEST, dtype=torch.long) for _ in range(2))
    for k, length in enumerate(torch.randint(2, LONGEST + 1, (samples,), generator=draw).tolist()):
        words = torch.randint(2, WORDS, (length,), generator=draw)
        backwards = torch.cat([words.flip(0), torch.ones(1, dtype=torch.long)])[:LONGEST]
        source[k, :length], target[k, : len(backwards)] = words, backwards
    return source, target


def t5(decoder_layers: int = 3) -> Any:
    """Two blocks that read, and three that write."""
    torch.manual_seed(0)
    special: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = hf.T5Config(**SIZES, **special, num_layers=2, num_decoder_layers=decoder_layers, dropout_rate=0.0)
    return hf.T5ForConditionalGeneration(config).double()


def t5_batch(source: Tensor, target: Tensor) -> dict[str, Tensor]:
    """What T5 is called with."""
    masks = {"attention_mask": (source != 0).long(), "decoder_attention_mask": (target != 0).long()}
    return {"input_ids": source, **masks, "labels": target.masked_fill(target == 0, -100)}


class Translator(nn.Module):
    """As people write it: embeddings around torch's `nn.Transformer`, masks made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(LONGEST, 16)
        self.transformer = nn.Transformer(16, 2, 2, 3, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        written = torch.cat([torch.ones_like(target[:, :1]), target[:, :-1]], 1)
        unwritten = torch.cat([torch.zeros_like(target[:, :1], dtype=torch.bool), target[:, :-1] == 0], 1)
        later = torch.ones(LONGEST, LONGEST, dtype=torch.bool).triu(1)
        X, Y = (self.words(x) + self.places.weight for x in (source, written))
        missing = source == 0
        out = self.transformer(
            X, Y, tgt_mask=later, src_key_padding_mask=missing, tgt_key_padding_mask=unwritten,
            memory_key_padding_mask=missing,
        )  # fmt: skip
        scores: Tensor = self.out(out)
        return scores


def translator() -> Translator:
    """A `Translator` with weights of its own."""
    torch.manual_seed(0)
    return Translator().double()


def translator_loss(scores: Tensor, target: Tensor) -> Tensor:
    """The mean over words that are there."""
    return nn.functional.cross_entropy(scores.transpose(1, 2), target.masked_fill(target == 0, -100))
