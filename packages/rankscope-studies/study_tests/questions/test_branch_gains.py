"""What branches do to differences, and what noise does to a network: against slow references and closed forms."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.deviation import State
from rankscope.lab import Recipe, Training
from rankscope.nets import Architecture, Transformer
from rankscope_studies.questions.branch_gains import (
    accuracies_under_noise,
    branch_numbers,
    log_sizes,
    mlp_steepness,
    sensitivities,
    tolerance,
)


def sizes(X: Tensor) -> tuple[float, float]:
    """(D, C) of tokens `[token, width]`, by their definition."""
    mean = X.mean(0, keepdim=True)
    return float((X - mean).norm()), float(mean.expand_as(X).norm())


def random_tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_sizes_are_those_of_the_mean_and_the_rest() -> None:
    X, mask = random_tokens(2, 5, 8) + 1, torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    for k, (tokens, found) in enumerate(zip(X, log_sizes(State.of(X, mask)), strict=True)):
        D, C = sizes(tokens[mask[k]])
        assert (10**found.differences, 10**found.common) == pytest.approx((D, C), rel=1e-12)
        assert 10**found.ratio == pytest.approx(D / C, rel=1e-12)
        assert 10**found.length == pytest.approx(float(tokens[mask[k]].norm()), rel=1e-12)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_numbers_of_branches_are_those_of_a_block_by_hand(weight: float) -> None:
    """One pre-norm layer, its parts computed one after the other with torch's own functions."""
    arch = Architecture(layers=1, width=8, heads=2, norm_place="pre", norm_eps=1e-5, attention_skip=weight,
                        mlp_skip=weight, mlp_width=12)  # fmt: skip
    net = Transformer.random(arch, seed=1, init="xavier")
    X = random_tokens(2, 6, 8) + 0.5
    layer = net.weights.layers[0]
    w, mlp = layer.attention, layer.mlp
    assert mlp is not None
    found = {(n.sample, n.part, n.quantity): n.value for n in branch_numbers(net, X)}
    for k, x in enumerate(X):
        z = F.layer_norm(x, (8,), eps=1e-5)
        q, key, v = (torch.einsum("td,dhk->htk", z, part.weight) for part in (w.query, w.key, w.value))
        P = (q @ key.mT / 2).softmax(-1)
        a = torch.einsum("htk,hkd->td", P @ v, w.output.weight)
        s = weight * x + a
        y = F.layer_norm(s, (8,), eps=1e-5)
        m = F.gelu(y @ mlp.up.weight) @ mlp.down.weight
        for part, before, inside, out in (("attention", x, z, a), ("mlp", s, y, m)):
            (d_in, c_in), (d_out, c_out) = sizes(inside), sizes(out)
            after = weight * before + out
            (d_x, c_x), (d_s, c_s) = sizes(before), sizes(after)
            expected = {
                "differences": d_out / d_in, "common": c_out / c_in, "stream": (d_s / c_s) / (d_x / c_x),
                "growth": float(after.norm() / before.norm()),
            }  # fmt: skip
            for quantity, value in expected.items():
                assert 10 ** found[k, part, quantity] == pytest.approx(value, rel=1e-9), (part, quantity)
        norms = [torch.linalg.matrix_norm(part.weight, 2) for part in (mlp.up, mlp.down)]
        assert 10 ** found[k, "mlp", "bound"] == pytest.approx(1.12891 * float(norms[0] * norms[1]), rel=1e-9)
        steepest = max(
            float(torch.linalg.matrix_norm(jacobian, 2))
            for jacobian in (torch.func.jacrev(lambda t: F.gelu(t @ mlp.up.weight) @ mlp.down.weight)(row) for row in y)
        )
        assert 10 ** found[k, "mlp", "steepest"] == pytest.approx(steepest, rel=1e-6)
        assert found[k, "mlp", "bound"] >= found[k, "mlp", "steepest"]


def test_norms_on_sums_and_whole_layers_are_those_of_a_block_by_hand() -> None:
    """One post-norm layer: what both norms do, and that all parts together are the layer."""
    arch = Architecture(layers=1, width=8, heads=2, norm_place="post", norm_eps=1e-5, mlp_width=12)
    net = Transformer.random(arch, seed=1, init="xavier")
    layer = net.weights.layers[0]
    w, mlp = layer.attention, layer.mlp
    assert mlp is not None
    X = random_tokens(2, 6, 8) + 0.5
    found = {(n.sample, n.part): n.value for n in branch_numbers(net, X) if n.quantity == "stream"}

    def log_ratio(tokens: Tensor) -> float:
        D, C = sizes(tokens)
        return math.log10(D / C)

    for k, x in enumerate(X):
        q, key, v = (torch.einsum("td,dhk->htk", x, part.weight) for part in (w.query, w.key, w.value))
        s = x + torch.einsum("htk,hkd->td", (q @ key.mT / 2).softmax(-1) @ v, w.output.weight)
        y = F.layer_norm(s, (8,), eps=1e-5)
        t = y + F.gelu(y @ mlp.up.weight) @ mlp.down.weight
        z = F.layer_norm(t, (8,), eps=1e-5)
        norms = log_ratio(y) - log_ratio(s) + log_ratio(z) - log_ratio(t)
        assert abs(norms) > 0.01 and found[k, "norms"] == pytest.approx(norms, abs=1e-9)
        assert found[k, "layer"] == pytest.approx(log_ratio(z) - log_ratio(x), abs=1e-9)
        assert found[k, "layer"] == pytest.approx(
            sum(found[k, part] for part in ("attention", "mlp", "norms")), abs=1e-9
        )


def test_norms_within_branches_are_no_part_of_the_stream() -> None:
    net = Transformer.random(Architecture(layers=2, width=8, heads=2, norm_place="pre"), seed=1, init="xavier")
    found = {number[:4]: number.value for number in branch_numbers(net, random_tokens(1, 6, 8))}
    assert {part for _, _, part, _ in found} == {"attention", "mlp", "layer"}
    for layer in (1, 2):
        both = sum(found[0, layer, part, "stream"] for part in ("attention", "mlp"))
        assert found[0, layer, "layer", "stream"] == pytest.approx(both, abs=1e-9)


def test_padding_is_in_no_number() -> None:
    net = Transformer.random(Architecture(layers=2, width=8, heads=2), seed=1, init="xavier")
    X = random_tokens(2, 6, 8)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    padded = {number[:4]: number.value for number in branch_numbers(net, X, padding)}
    alone = {(1, *number[1:4]): number.value for number in branch_numbers(net, X[1:, :4])}
    assert {number[0] for number in padded} == {0, 1}
    for key, value in alone.items():
        assert padded[key] == pytest.approx(value, abs=1e-10)


def test_a_gated_mlp_has_no_steepness() -> None:
    net = Transformer.random(Architecture(layers=1, width=8, heads=2, mlp="gated", activation="silu"))
    mlp = net.weights.layers[0].mlp
    assert mlp is not None and math.isnan(mlp_steepness(net.arch, mlp, random_tokens(1, 3, 8))[0])


@pytest.mark.parametrize("padded", [0, 2])
def test_sensitivities_of_a_linear_network_have_a_closed_form(padded: int) -> None:
    """Even attention with `W_V W_O = a I`: differences are multiplied by the skip's weight, the common part by the
    weight plus a."""
    arch = Architecture(layers=1, width=4, heads=1, kernel="uniform", norm="none", mlp="none", attention_skip=0.5,
                        biases=False)  # fmt: skip
    net = Transformer.random(arch)
    eye = torch.eye(4, dtype=torch.float64)
    tensors = net.state_dict()
    tensors["layers.0.attention.value.weight"] = eye[:, None] * 3.0
    tensors["layers.0.attention.output.weight"] = eye[None]
    net = Transformer.from_weights(arch, tensors)
    X = random_tokens(3, 5, 4)
    padding = torch.zeros(3, 5 + padded, dtype=torch.bool)
    padding[:, 5:] = True
    found = sensitivities(net, F.pad(X, (0, 0, 0, padded), value=7.0), 2, padding if padded else None)
    Y = 0.5 * X + 3.0 * X.mean(1, keepdim=True)
    ratio = (X.flatten(1).norm(dim=1) / Y.flatten(1).norm(dim=1)).square().mean().sqrt()
    assert 10 ** found["jacobian differences"] == pytest.approx(0.5 * float(ratio), rel=1e-9)
    assert 10 ** found["jacobian common"] == pytest.approx(3.5 * float(ratio), rel=1e-9)


@pytest.mark.slow
def test_accuracy_without_noise_is_that_of_the_network_and_noise_takes_it_away() -> None:
    pytest.importorskip("sklearn")
    from rankscope.lab import Digits

    task = Digits(patch=4)
    recipe = Recipe(steps=120, batch_size=32, lr=1e-2)
    training = Training(task, task.architecture(1, 16, 2), recipe, seeds=[0]).finish()
    accuracy = training.evaluate(200)[0].accuracy
    for place in ("embedding", "inputs"):
        found = accuracies_under_noise(training.models[0], task, task.held_out(200), (0.0, 0.3, 100.0), 2, place)
        assert found[0] == pytest.approx(accuracy) and accuracy > 0.4
        assert found[1] > 0.8 * accuracy and found[2] < 0.25
    random, along = (accuracies_under_noise(training.models[0], task, task.held_out(200), (0.0, 0.3), 2, place)
                     for place in ("embedding", "gradient"))  # fmt: skip
    assert along[0] == random[0] and along[1] < random[1] - 0.1  # a step against the network does more


def test_a_step_along_the_gradient_is_as_large_as_noise_in_every_sample() -> None:
    pytest.importorskip("sklearn")
    from rankscope.lab import Digits

    task = Digits(patch=4)
    model = Training(task, task.architecture(1, 8, 2), Recipe(steps=1), seeds=[0]).models[0]
    batch, seen = task.held_out(5), list[Tensor]()
    handle = model.net.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    accuracies_under_noise(model, task, batch, (0.0, 0.5), 1, "gradient")
    handle.remove()
    X = model.tokens(batch.inputs).detach()
    unit = float((X - X.mean(1, keepdim=True)).square().mean().sqrt())
    step = (seen[-1] - seen[-2]).square().mean((1, 2)).sqrt()
    assert step.tolist() == pytest.approx([0.5 * unit] * 5, rel=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.9, 0.9, 0.5, 0.1], 2.0),  # halfway at a size itself
        ([0.9, 0.9, 0.7, 0.3], 2.0 * math.sqrt(2)),  # halfway between 2 and 4, over the logarithm
        ([0.9, 0.5, 0.1, 0.1], 1.0),  # halfway at the first size
        ([0.9, 0.1, 0.1, 0.1], math.nan),  # before the first size
        ([0.9, 0.9, 0.9, 0.6], math.nan),  # never
    ],
)
def test_tolerance_is_where_half_is_lost(accuracies: list[float], expected: float) -> None:
    assert tolerance([0, 1, 2, 4], accuracies, 0.1) == pytest.approx(expected, nan_ok=True)


def test_a_network_that_guesses_has_nothing_to_lose() -> None:
    assert math.isnan(tolerance([0, 1], [0.1, 0.1], 0.1))
