"""Spectral norms and stable ranks of weights, against singular values."""

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from rankscope import Monitor, read
from rankscope.live.monitor.weight_gradients import ParameterSlice, parameter_groups
from rankscope.live.monitor.weight_spectra import WeightSpectra, matrices, spectral_norms


@pytest.mark.parametrize("shape", [(64, 64), (256, 64), (20, 300), (3, 3), (1, 7), (4, 40, 30), (512, 512)])
def test_norms_come_from_below_to_within_a_part_in_a_thousand(shape: tuple[int, ...]) -> None:
    W = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact = torch.linalg.matrix_norm(W.double(), 2)
    found, V = spectral_norms(W)
    assert bool((found <= exact * (1 + 1e-6)).all()) and bool((found >= exact * (1 - 1e-3)).all())
    moved = W + 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(2))
    exact = torch.linalg.matrix_norm(moved.double(), 2)
    found, _ = spectral_norms(moved, V, 2)
    assert bool((found <= exact * (1 + 1e-6)).all()) and bool((found >= exact * (1 - 5e-3)).all())


def test_the_matrices_of_fused_weights_are_those_of_queries_and_keys() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=24, n_head=3, vocab_size=16, n_positions=8)
    block: Any = GPT2LMHeadModel(config).transformer.h[0]
    groups, _ = parameter_groups([block])
    fused = block.attn.c_attn.weight.detach()  # [input, queries then keys then values]
    (query_key,) = groups[1, "query_key"]
    assert torch.equal(matrices(query_key), fused[:, :48].mT)
    assert any(torch.equal(matrices(part), fused[:, 48:].mT) for part in groups[1, "value_output"])


@pytest.mark.parametrize(("heads", "outputs", "axis"), [(3, (8, 16), 0), (3, (8, 16), 1), (1, (None, None), 1)])
def test_a_slice_is_cut_out_of_every_head_and_a_stack_is_left_whole(
    heads: int, outputs: tuple[int | None, int | None], axis: int
) -> None:
    """Fused weights come head by head, each with its queries, keys and values (BLOOM, GPT-NeoX)."""
    owner = nn.Module()
    fused = torch.randn(3 * 3 * 8, 10, generator=torch.Generator().manual_seed(0))
    owner.weight = nn.Parameter(fused if axis == 0 else fused.mT.contiguous())
    rows = fused.numpy().reshape(heads, -1, 10)[:, slice(*outputs)].reshape(-1, 10)
    found = spectral_norms(matrices(ParameterSlice(owner, "weight", axis, heads, outputs)))[0]
    assert float(found) == pytest.approx(np.linalg.norm(rows, 2), rel=1e-3)
    owner.weight = nn.Parameter(torch.stack([fused, 2 * fused]))  # experts
    found = spectral_norms(matrices(ParameterSlice(owner, "weight")))[0]
    exact = np.linalg.norm(fused.numpy(), 2)
    assert found.tolist() == pytest.approx([exact, 2 * exact], rel=1e-3)


def test_a_zero_weight_has_rank_zero_and_stacks_give_their_extremes() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    with torch.no_grad():
        layer.linear1.weight.zero_()
        layer.linear2.weight.copy_(torch.eye(8, 16))
    found = WeightSpectra(parameter_groups([layer])[0]).values()
    numbers = {key.metric: float(value) for key, value in zip(found.keys(), found.sums()[:, 1], strict=True)}
    assert numbers["spectral_norm_mlp"] == pytest.approx(1.0) and numbers["stable_rank_mlp"] == 0.0


def test_a_monitor_writes_them_and_training_is_the_same_to_the_last_bit() -> None:
    def trained(spectra: bool) -> tuple[list[torch.Tensor], str]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=24, n_head=3, vocab_size=16, n_positions=8))
        optimizer, folder = torch.optim.AdamW(model.parameters(), lr=1e-2), tempfile.mkdtemp()
        ids = torch.randint(0, 16, (4, 8))
        with Monitor(model, "relative_mu", every=2, probe=ids, run=folder, spectra=spectra, alarms=()) as monitor:
            for _ in range(4):
                loss = model(ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss=loss)
        return [weight.detach() for weight in model.parameters()], folder

    plain, _ = trained(False)
    weights, folder = trained(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True))
    table = read(folder).table("training").filter(metric="spectral_norm_mlp", layer=2, step=4)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=24, n_head=3, vocab_size=16, n_positions=8))
    for weight, value in zip(model.parameters(), weights, strict=True):
        weight.data.copy_(value)
    mlp: Any = model.transformer.h[1].mlp
    exact = max(float(torch.linalg.matrix_norm(part.weight.detach(), 2)) for part in (mlp.c_fc, mlp.c_proj))
    assert table["value"].item() == pytest.approx(exact, rel=1e-3)
