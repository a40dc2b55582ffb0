"""A network that is trained on paths of chosen lengths: its terms and gradients, against every path walked alone."""

import copy
import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.errors import LabError, PathError
from rankscope.lab import Initialisation, Interface, Model, NextCharacter, Recipe, Training
from rankscope.nets import Architecture, Dropout, Transformer
from rankscope.paths import decompose
from rankscope_studies.dong2021.tasks import Sort
from rankscope_studies.path_model import EPS, PathModel
from tests.builders import awake
from tests.lab.test_steps import CpuUse

ATTENTION = {"mlp": "none", "norm": "layer", "norm_place": "post", "biases": ("query", "key")}
WHOLE = {"norm_place": "pre", "final_norm": True, "mask": "causal", "positions": "absolute", "length": 8}
TASK = Interface(classes=5, symbols=7)
SYMBOLS = torch.tensor([[0, 3, 1, 6, 2], [5, 5, 2, 0, 4]])
LAYERS = 3


def model(lengths: tuple[float, ...], fields: dict[str, Any], remedy: str = "", detached: bool = False) -> PathModel:
    """A model in float64 whose weights and biases are all of a size that shows."""
    net = awake(Architecture(layers=LAYERS, width=8, heads=2, **fields), seed=3)
    net = net.with_remedy(remedy) if remedy else net
    return PathModel(net, TASK, 1.0, seed=4, lengths=lengths, detached=detached)


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [(ATTENTION, ""), (ATTENTION, "contranorm"), (ATTENTION, "shaped"), (ATTENTION, "centred"), (WHOLE, "")],
)
def test_terms_are_those_of_decompose(fields: dict[str, Any], remedy: str) -> None:
    one = model((1, 1, 1, 1), fields, remedy)
    exact = decompose(one.network(), one.tokens(SYMBOLS).detach()).by_length()
    terms = one.terms(SYMBOLS)
    torch.testing.assert_close(terms, exact.embedding + exact.bias, rtol=1e-10, atol=1e-12)
    assert terms.requires_grad and bool(exact.bias.any()) == (fields is WHOLE)
    whole = F.layer_norm(exact.output, (8,), eps=EPS)
    torch.testing.assert_close(one(SYMBOLS), one.head(whole), rtol=1e-9, atol=1e-9)


def test_padding_has_no_terms_and_changes_none() -> None:
    one = model((0, 1, 0, 1), ATTENTION)
    padded = torch.cat([torch.zeros(2, 2, dtype=torch.long), SYMBOLS], 1)
    padding = torch.arange(7).expand(2, 7) < 2
    terms = one.terms(padded, padding)
    torch.testing.assert_close(terms[:, :, 2:], one.terms(SYMBOLS), rtol=1e-10, atol=1e-12)
    assert not terms[:, :, :2].any()
    torch.testing.assert_close(one(padded, padding)[:, 2:], one(SYMBOLS), rtol=1e-10, atol=1e-12)


def walked(one: PathModel, length: int) -> Tensor:
    """Logits of all paths of a length, each walked alone by code of its own: attention and post-norms from formulas."""
    heads = 2
    state: dict[str, Tensor] = dict(one.net.named_parameters())
    X = F.layer_norm(F.embedding(SYMBOLS, one.embed.table), (8,), eps=one.net.arch.norm_eps)
    first, patterns, scales = X, [], []
    for layer in range(LAYERS):
        q, k = (
            torch.einsum("btd,dhc->bhtc", X, state[f"layers.{layer}.attention.{name}.weight"])
            + state[f"layers.{layer}.attention.{name}.bias"][None, :, None]
            for name in ("query", "key")
        )
        P = ((q @ k.mT) / math.sqrt(8 / heads)).softmax(-1)
        mixed = [P[:, h] @ X @ _product(state, layer, h) for h in range(heads)]
        Y = X + sum(mixed)
        centred = Y - Y.mean(-1, keepdim=True)
        scale = 1 / (centred.square().mean(-1, keepdim=True) + one.net.arch.norm_eps).sqrt()
        patterns.append(P)
        scales.append(scale)
        X = centred * scale * state[f"layers.{layer}.attention_norm.gain"]
    total = torch.zeros_like(first)
    for path in product([None, *range(heads)], repeat=LAYERS):
        if sum(head is not None for head in path) != length:
            continue
        term = first
        for layer, head in enumerate(path):
            term = term if head is None else patterns[layer][:, head] @ term @ _product(state, layer, head)
            term = (term - term.mean(-1, keepdim=True)) * scales[layer] * state[f"layers.{layer}.attention_norm.gain"]
        total = total + term
    return one.head(F.layer_norm(total, (8,), eps=EPS))


def _product(state: dict[str, Tensor], layer: int, head: int) -> Tensor:
    value, output = (state[f"layers.{layer}.attention.{name}.weight"] for name in ("value", "output"))
    return value[:, head] @ output[head]


@pytest.mark.parametrize("length", range(LAYERS + 1))
def test_gradients_are_those_of_every_path_walked_alone(length: int) -> None:
    one = model(tuple(float(k == length) for k in range(LAYERS + 1)), ATTENTION)
    labels = torch.tensor([[0, 1, 2, 3, 4], [4, 0, 0, 1, 3]]).flatten()
    named = dict(one.named_parameters())
    losses = [F.cross_entropy(logits.flatten(0, 1), labels) for logits in (one(SYMBOLS), walked(one, length))]
    ours, theirs = (torch.autograd.grad(loss, [*named.values()], allow_unused=True) for loss in losses)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-10, atol=1e-12)
    for name, mine, reference in zip(named, ours, theirs, strict=True):
        reference = torch.zeros_like(named[name]) if reference is None else reference
        mine = torch.zeros_like(named[name]) if mine is None else mine
        torch.testing.assert_close(mine, reference, rtol=1e-8, atol=1e-10, msg=name)
        if "query.weight" in name and "layers.0" in name:
            assert bool(mine.abs().max() > 1e-6) == (length > 0)  # the path past all heads reads no attention


@pytest.mark.parametrize(
    ("fields", "remedy"), [(ATTENTION, ""), (ATTENTION, "contranorm"), pytest.param(WHOLE, "", marks=pytest.mark.slow)]
)
def test_gradients_are_differences_of_the_loss(fields: dict[str, Any], remedy: str) -> None:
    """Along a random direction in all parameters, MLPs, biases and a remedy included: central differences."""
    one = model((0.5, 0, 2, 1), fields, remedy)
    generator = torch.Generator().manual_seed(0)

    def loss(moved: PathModel) -> Tensor:
        return moved(SYMBOLS).square().mean()

    parameters = [parameter for parameter in one.parameters() if parameter.requires_grad]
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    gradients = torch.autograd.grad(loss(one), parameters)
    along = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
    ends = []
    for step in (1e-5, -1e-5):
        moved = copy.deepcopy(one)
        with torch.no_grad():
            for parameter, d in zip(moved.parameters(), direction, strict=True):
                parameter += step * d
            ends.append(float(loss(moved)))
    assert along == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)


def test_detached_gradients_leave_queries_and_keys_alone() -> None:
    one, held = (model((0, 0, 1, 0), ATTENTION, detached=detached) for detached in (False, True))
    torch.testing.assert_close(one(SYMBOLS), held(SYMBOLS))
    held(SYMBOLS).square().sum().backward()
    one(SYMBOLS).square().sum().backward()
    for (name, mine), theirs in zip(one.named_parameters(), held.parameters(), strict=True):
        if "query" in name or "key" in name:
            assert theirs.grad is None or not theirs.grad.any()
            assert (mine.grad is not None and mine.grad.any()) or "key.bias" in name  # the softmax ignores a key bias
        elif "value.weight" in name:
            assert theirs.grad is not None and theirs.grad.any()


def test_networks_learn_alone_as_they_learn_together() -> None:
    task = Sort(64, 16)
    make = partial(PathModel, lengths=(0.0, 0.0, 1.0))
    arch = task.architecture(2, 8, 2)
    recipe = Recipe(steps=4, batch_size=16, lr=1e-2)
    settings: dict[str, Any] = {"initialisation": Initialisation("kaiming", 1.0), "dtype": torch.float64, "model": make}
    together = Training(task, arch, recipe, seeds=[0, 1], **settings).finish()
    for k, seed in enumerate((0, 1)):
        alone = Training(task, arch, recipe, seeds=[seed], **settings).finish()
        expected = torch.stack(together.losses)[:, k]
        torch.testing.assert_close(torch.stack(alone.losses)[:, 0], expected, rtol=1e-9, atol=1e-9)
        assert alone.evaluate(8)[0].loss == pytest.approx(together.evaluate(8)[k].loss, rel=1e-9)
    assert together.learner.refusal is None  # type: ignore[union-attr]


def test_weights_of_lengths_may_change_between_steps() -> None:
    """Networks that are stacked read the lengths that each model was given last."""
    task = NextCharacter(context=8)
    arch = task.architecture(2, 8, 2, mlp="none", biases=())

    def made(*lengths: float) -> Training:
        make = partial(PathModel, lengths=lengths)
        return Training(task, arch, Recipe(steps=1, batch_size=4), seeds=[0, 1], model=make, dtype=torch.float64)

    changed, first, second = made(1, 0, 0), made(0, 1, 0), made(0, 0, 1)
    for one, lengths in zip(changed.models, ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0]), strict=True):
        assert isinstance(one, PathModel)
        one.lengths.copy_(torch.tensor(lengths))
    losses = [training.finish().losses[0] for training in (changed, first, second)]
    torch.testing.assert_close(losses[0], torch.stack([losses[1][0], losses[2][1]]), rtol=1e-10, atol=1e-10)
    assert abs(losses[1][0] - losses[2][0]) > 1e-3


def test_bad_lengths_dropout_and_parts_are_refused() -> None:
    with pytest.raises(LabError, match="lengths must have 4 weights"):
        model((1, 0), ATTENTION)
    with pytest.raises(LabError, match="not all zero"):
        model((0, 0, 0, 0), ATTENTION)
    with pytest.raises(LabError, match="without dropout"):
        model((1, 0, 0, 0), ATTENTION)(SYMBOLS, None, Dropout.seeded(0.1, 0, torch.device("cpu")))
    arch = Architecture(layers=2, width=8, heads=2, key_latent=4)
    with pytest.raises(PathError, match="latent"):
        PathModel(Transformer.random(arch), TASK, lengths=(1, 0, 0))
    assert type(Training(Sort(8, 4), Sort(8, 4).architecture(1, 8, 2), Recipe(steps=1)).models[0]) is Model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("detached", [False, True])
def test_a_step_waits_for_nothing(detached: bool) -> None:
    """On torch's device without numbers, where a question has no answer, as when a step is recorded on a GPU."""
    task = Sort(16, 4)
    make = partial(PathModel, lengths=(0.0, 1.0, 1.0), detached=detached)
    training = Training(
        task, task.architecture(2, 8, 2), Recipe(steps=1, batch_size=4), seeds=[0, 1], remedies=["contranorm"],
        device="meta", model=make,
    )  # fmt: skip
    batches = training._batches(0)
    training._batch_losses(batches)  # masks are made in the first
    with CpuUse() as use:
        training._batch_losses(batches).sum().backward()
        training._clip()
    assert use.calls > 100 and use.waited == [] and training.learner.refusal is None  # type: ignore[union-attr]
