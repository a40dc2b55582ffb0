"""The canonical network as a module: the numbers of plain rules, the gradients of the originals, and sigmaReparam."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertModel

import rankscope
from rankscope.errors import LabError
from rankscope.lab import Interface, Model, SigmaReparam, Trainable, reparametrise
from rankscope.live import watch
from rankscope.nets import Architecture, Dropout, Transformer, training_states
from rankscope.profiles import measure
from rankscope.sources import FAMILIES, MINILM, lifted, load
from tests.raising import raises
from tests.sources.models import model_of

ARCH = Architecture(layers=3, width=8, heads=2, length=9)
KINDS: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": {"norm_place": "pre", "final_norm": True, "mask": "causal", "positions": "absolute"},
    "rotary": {"positions": "rotary", "mlp": "gated", "norm": "rms", "norm_place": "pre", "key_heads": 1},
    "bias": {"positions": "bias", "shared": True},
    "none": {"norm": "none", "mlp": "none", "biases": False, "attention_skip": 0.0},
}
PADDING = torch.arange(6)[None] < torch.tensor([0, 2])[:, None]  # on the left


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [None, PADDING])
def test_its_numbers_are_those_of_the_plain_rules(kind: str, padding: Tensor | None) -> None:
    net = Transformer.random(ARCH.replace(**KINDS[kind]), init="xavier").with_remedy("attnscale", w=0.3)
    module, run = Trainable(net), net.run(tokens(), padding)
    assert set(module.state_dict()) == set(net.state_dict())
    assert torch.equal(module(tokens(), padding), run.output)
    for mine, theirs in zip(module.states(tokens(), padding), run.states, strict=True):
        assert torch.equal(mine, theirs)
    noise = (Dropout.seeded(0.3, 0, "cpu") for _ in range(2))
    dropped = module.states(tokens(), padding, next(noise))
    for mine, theirs in zip(dropped, training_states(net, tokens(), next(noise), padding), strict=True):
        assert torch.equal(mine, theirs)


def test_a_decoder_reads_its_memory_in_any_dtype() -> None:
    net = Transformer.random(ARCH.replace(cross_attention=True, mask="causal"), init="xavier")
    net = net.with_memory(tokens(3)[:, :4])
    module = Trainable(net)
    assert torch.equal(module(tokens()), net.run(tokens()).output)
    narrow = module.float()(tokens().float())
    assert torch.equal(narrow, net.to(torch.float32).run(tokens().float()).output)
    assert torch.equal(module.network().run(tokens().float()).output, narrow)


def test_what_is_learnt_is_saved_and_loads_again(tmp_path: Path) -> None:
    """Tensors of a remedy are trained with the rest; the network that was given stays as it was."""
    net = Transformer.random(ARCH, init="xavier").with_remedy("attnscale", w=0.0)
    before = {name: each.clone() for name, each in net.state_dict().items()}
    module = Trainable(net)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    (module(tokens()) * tokens(2)).sum().backward()
    assert all(each.grad is not None for each in module.parameters())
    optimizer.step()
    learnt = module.network()
    again = rankscope.load(learnt.save(tmp_path / "net"))
    assert again.fingerprint == learnt.fingerprint and again.arch == net.arch
    assert torch.equal(again.run(tokens()).output, module(tokens()))
    for name, tensor in again.state_dict().items():
        moved = not torch.equal(tensor, before[name])
        assert moved or name.endswith("key.bias")  # of a softmax it changes nothing
        assert torch.equal(net.state_dict()[name], before[name])
    assert bool((again.state_dict()["layers.1.parts.attnscale.w"] != 0).all())


@pytest.mark.parametrize("remedy", ["attnscale:w=0.3", "centred", None])
def test_a_watch_sees_in_it_what_is_measured_of_its_network(remedy: str | None) -> None:
    """Attention too, which a remedy has changed."""
    net = Transformer.random(ARCH.replace(mask="causal", norm_place="pre"), init="xavier")
    net = net if remedy is None else net.with_remedy(remedy)
    names = ["relative_residual", "mu", "entropy", "dobrushin", "head_mu"]
    names = names if remedy is None else [*names[:2], "head_mu"]
    module = Trainable(net)
    with torch.no_grad(), watch(module, names) as seen:
        module(tokens())
    expected = measure(net, tokens(), metrics=names, arithmetic="float64")
    for name in names:
        torch.testing.assert_close(
            seen.profile().curve(name), expected.curve(name), rtol=1e-12, atol=1e-12, equal_nan=True
        )
    assert not any(layer.attention_listeners for layer in module.layers)


def gradients(model: Any, net: Transformer, ids: Tensor, padding: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """(name, theirs, ours) of every weight of the original's blocks and last norm, for a random linear
    function of the output at real tokens. Ours are gradients at canonical tensors, taken back to the
    original's weights through the map that makes the ones of the others."""
    family = FAMILIES[net.origin.family]  # type: ignore[union-attr]
    weight = torch.randn(*ids.shape, net.arch.width, dtype=torch.float64).masked_fill(padding[..., None], 0)
    core = family.core(model)
    with lifted():
        out = core(input_ids=ids, attention_mask=(~padding).long()).last_hidden_state
    core.zero_grad()
    (out * weight).sum().backward()
    module = Trainable(net)
    (module(*net.encode(ids, padding=padding)) * weight).sum().backward()
    mapped = dict(family.other_tensors(core))
    for index, block in enumerate(family.blocks(core)):
        mapped |= {f"layers.{index}.{name}": each for name, each in family.layer(block, net.arch).items()}
    mine = {name: each.grad for name, each in module.named_parameters()}
    assert mapped.keys() == mine.keys()
    inside = {id(each) for block in family.blocks(core) for each in block.parameters()}
    last = [each for name, each in core.named_parameters() if name.startswith(family.final_norm or "-")]
    inside |= {id(each) for each in last}
    original = {name: each for name, each in core.named_parameters() if id(each) in inside}
    back = torch.autograd.grad(
        list(mapped.values()), list(original.values()), [mine[name] for name in mapped], allow_unused=True
    )
    return [(name, each.grad, ours) for (name, each), ours in zip(original.items(), back, strict=True)]


@pytest.mark.parametrize(
    "which", [pytest.param("minilm", marks=pytest.mark.slow), "gpt2/decoder", "gpt2/scores by layer"]
)
def test_gradients_are_those_of_the_original(which: str) -> None:
    """Of every weight that is mapped, within 1e-9 of its largest entry; where a gradient is zero but for
    rounding (a key's bias), of the largest of its layer's."""
    torch.manual_seed(0)
    if which == "minilm":
        folder = Path(str(files(MINILM))) / "model"
        model = BertModel.from_pretrained(folder, attn_implementation="eager").double()
        net = rankscope.load("minilm")
    else:
        name, label = which.split("/")
        model = model_of(name, label)
        net = load(model)
    model.eval()
    ids = torch.randint(5, 60, (2, 7))
    padding = torch.arange(7) >= torch.tensor([7, 5])[:, None]
    compared = gradients(model, net, ids.masked_fill(padding, 0), padding)
    largest = max(float(theirs.abs().max()) for _, theirs, _ in compared)
    assert len(compared) >= net.arch.layers * 12
    for name, theirs, ours in compared:
        size = float(theirs.abs().max())
        if size < 1e-10 * largest:
            assert name.endswith("key.bias") and float(ours.abs().max()) < 1e-10 * largest
        else:
            assert float((theirs - ours).abs().max()) < 1e-9 * size, name


GATED = Architecture(layers=2, width=8, heads=2, mlp="gated", positions="absolute", length=6)
NAMES = ("query", "key", "value", "output", "up", "gate", "down")


def network() -> Transformer:
    return Transformer.random(GATED, init="xavier")


def flat(name: str, weight: torch.Tensor) -> np.ndarray:
    """`[in, out]`; heads times their width are 8."""
    return weight.detach().reshape(32 if ".down." in name else 8, -1).numpy()


@pytest.mark.parametrize("start", ["sigma", "one"])
def test_at_first(start: str) -> None:
    """From sigma the network is the one that was given; from one, each matrix has norm one."""
    net, module = network(), Trainable(network())
    reparametrise(module, start)
    assert sum(isinstance(part, SigmaReparam) for part in module.modules()) == 2 * len(NAMES)
    for name, weight in module.network().state_dict().items():
        before = net.state_dict()[name]
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
