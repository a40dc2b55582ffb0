"""Singular values and angles of a network's tokens by layer: what Figures 4 and 8 are drawn from."""

import polars as pl
import torch
from torch import Tensor

from rankscope.metrics import mean_abs_cosine, singular_values
from rankscope.nets import Transformer
from rankscope.sources import fresh
from rankscope.studies.study import Setup
from rankscope.studies.wu2024.networks import excerpts, of_network, part, tokens_of, trained

UNTRAINED = {"BERT": "bert-base", "GPT-2": "gpt2", "T5": "t5-base", "ALBERT": "albert-base"}
"""The paper's four models, as `fresh` names them."""


def networks(setup: Setup) -> dict[str, Transformer]:
    """What is at hand trained, then the paper's four untrained: those could not be had otherwise."""
    random = {f"{name} untrained": fresh(preset, device=setup.device) for name, preset in UNTRAINED.items()}
    return {**trained(setup), **random}


def spectra(setup: Setup, number: int) -> pl.DataFrame:
    """Of every network, one row per sample, layer and singular value; `size` is the larger of n and d."""
    found = []
    for name, net in networks(setup).items():
        X = tokens_of(net, excerpts(number))
        table = setup.cached(part(name), lambda net=net, X=X: spectrum(net, X), excerpts=number)
        found.append(of_network(name, table))
    return pl.concat(found)


def spectrum(net: Transformer, X: Tensor, batch: int = 4) -> pl.DataFrame:
    """Every singular value of the tokens at every layer, in float64, and their mean |cosine|."""
    tables = []
    for start in range(0, len(X), batch):
        for step in net.steps(X[start : start + batch]):
            values = singular_values(step.state).cpu()
            angles = mean_abs_cosine(step.state).cpu()
            samples, many = values.shape
            tables.append(
                pl.DataFrame(
                    {
                        "sample": torch.arange(start, start + samples).repeat_interleave(many).numpy(),
                        "layer": [step.layer] * values.numel(),
                        "index": torch.arange(1, many + 1).repeat(samples).numpy(),
                        "singular_value": values.flatten().numpy(),
                        "size": [max(X.shape[1:])] * values.numel(),
                        "mean_abs_cosine": angles.repeat_interleave(many).numpy(),
                    }
                )
            )
    return pl.concat(tables)
