"""sigmaReparam: W is trained as g W / sigma, with one step of the power method in each pass."""

import numpy as np
import pytest
import torch

from rankscope.errors import LabError
from rankscope.lab import Interface, Model, SigmaReparam, Trainable, reparametrise
from rankscope.nets import Architecture, Transformer
from tests.raising import raises

ARCH = Architecture(layers=2, width=8, heads=2, mlp="gated", positions="absolute", length=6)
NAMES = ("query", "key", "value", "output", "up", "gate", "down")


def network() -> Transformer:
    return Transformer.random(ARCH, init="xavier")


def flat(name: str, weight: torch.Tensor) -> np.ndarray:
    """`[in, out]`; heads times their width are 8."""
    return weight.detach().reshape(32 if ".down." in name else 8, -1).numpy()


@pytest.mark.parametrize("start", ["sigma", "one"])
def test_at_first(start: str) -> None:
    """From sigma the network is the one that was given; from one, each matrix has norm one."""
    net, module = network(), Trainable(network())
    reparametrise(module, start)
    assert sum(isinstance(part, SigmaReparam) for part in module.modules()) == 2 * len(NAMES)
    for name, weight in module.network().state().items():
        before = net.state()[name]
        if name.endswith(".weight"):
            norm = np.linalg.svd(flat(name, before), compute_uv=False)[0]
            expected = before if start == "sigma" else before / norm
            torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-14)
        else:
            assert torch.equal(weight, before)


def test_as_published_step_by_step() -> None:
    """The published order, written out with numpy: u and v, then sigma, stored in training alone."""
    draw = np.random.default_rng(0)
    W, moved = draw.normal(size=(5, 7)), draw.normal(size=(5, 7))
    given = torch.from_numpy(W).clone()
    part = SigmaReparam(given, 1, "one")
    u = np.linalg.svd(W)[0][:, 0]
    now = torch.from_numpy(W + 0.3 * moved).requires_grad_()
    for training in (True, False, True, True):
        part.train(training)
        v = now.detach().numpy().T @ u
        v /= np.linalg.norm(v)
        after = now.detach().numpy() @ v
        after /= np.linalg.norm(after)
        sigma = after @ now.detach().numpy() @ v
        found = part(now)
        np.testing.assert_allclose(found.detach().numpy(), now.detach().numpy() / sigma, rtol=1e-12)
        u = after if training else u
    assert sigma < np.linalg.svd(now.detach().numpy(), compute_uv=False)[0]
    # d/dW of sum(C * W / sigma), sigma = u^T W v with u and v held
    C = torch.from_numpy(draw.normal(size=(5, 7)))
    (found * C).sum().backward()
    W = now.detach().numpy()
    expected = C.numpy() / sigma - (C.numpy() * W).sum() / sigma**2 * np.outer(after, v)
    assert now.grad is not None
    np.testing.assert_allclose(now.grad.numpy(), expected, rtol=1e-10)


def test_one_step_in_each_pass_of_a_training_and_none_to_look() -> None:
    module = Trainable(network())
    reparametrise(module, "one")
    with torch.no_grad():
        for each in module.parameters():
            each.add_(0.1 * torch.randn_like(each))
    X = torch.randn(1, 6, 8, dtype=torch.float64)

    def vectors() -> torch.Tensor:
        return torch.cat([each.clone() for name, each in module.named_buffers()])

    before = vectors()
    module.eval()
    module(X)
    module.train()
    baked = module.network()
    assert module.training and torch.equal(vectors(), before)
    module.eval()
    torch.testing.assert_close(module(X), baked.run(X).output, rtol=1e-12, atol=1e-12)
    module.train()
    module(X)
    assert not torch.equal(vectors(), before)


def test_of_a_model_the_head_has_it_and_tables_do_not() -> None:
    model = Model(network(), Interface(classes=3, symbols=5))
    reparametrise(model)
    names = {name for name, _ in model.named_parameters()}
    assert {"head.parametrizations.weight.original", "embed.table", "net.positions"} <= names
    model = Model(network(), Interface(classes=3, coordinates=2))
    reparametrise(model)
    names = {name for name, _ in model.named_parameters()}
    assert {f"embed.{each}.parametrizations.weight.0.g" for each in ("first", "second")} <= names
    with raises(LabError, subject="sigma_reparam"):
        reparametrise(model, "two")
