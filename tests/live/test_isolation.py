"""What is computed inside hooks leaves autograd, autocast, modes and random numbers alone."""

import torch
from torch import nn

from rankscope.live.isolation import float64_device, isolated, without_dropout


def test_isolated_from_autograd_and_autocast() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), isolated(x.device):
        y = x @ x
    assert y.dtype == torch.float32 and not y.requires_grad


def test_without_dropout_restores_the_mode_of_every_part() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)))
    model[1].eval()
    before, state = [part.training for part in model.modules()], torch.get_rng_state()
    with without_dropout(model):
        assert torch.equal(model(torch.ones(4)), torch.ones(4))
    assert [part.training for part in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_device_without_float64_hands_over_to_the_cpu() -> None:
    assert float64_device(torch.device("mps")) == torch.device("cpu")
    assert float64_device(torch.device("cuda:1")) == torch.device("cuda:1")
