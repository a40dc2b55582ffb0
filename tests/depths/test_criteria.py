"""Scores of layers and heads, against slow computations of the same written here, and the loss of a language model
through its own head, against the loss that transformers computes."""

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.depths.criteria import CRITERIA, Sample, next_token_loss, set_shares
from rankscope.errors import PathError
from rankscope.nets import Architecture, Transformer
from rankscope.paths import decompose
from rankscope.sources import load
from tests.builders import awake, normal
from tests.depths.test_cut import headed
from tests.raising import raises

KINDS: dict[str, dict[str, Any]] = {
    "pre-norm": {"norm_place": "pre", "final_norm": True, "mask": "causal"},
    "post-norm": {},
    "parallel": {"parallel": True, "norm_place": "pre"},
    "grouped, rotary": {"norm_place": "pre", "norm": "rms", "key_heads": 1, "positions": "rotary", "mlp": "gated"},
}
PADDING = torch.arange(6)[None] >= torch.tensor([6, 4, 3])[:, None]


def made(kind: str, layers: int = 3) -> tuple[Transformer, Sample]:
    return awake(Architecture(layers=layers, width=8, heads=2, **KINDS[kind])), Sample(normal(3, 6, 8), PADDING)


def centred(Y: Tensor) -> Tensor:
    """Each sample minus the mean of its valid tokens; zero at padding."""
    valid = ~PADDING[..., None]
    return (Y - (Y * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True)) * valid


def test_the_share_of_a_set_is_that_of_all_its_paths_one_by_one() -> None:
    """Attention and skips alone, without biases: paths can be listed, and those that meet a layer added up."""
    arch = Architecture(layers=3, width=8, heads=2, mlp="none", norm="none", biases=False)
    net, X = Transformer.random(arch, init="xavier"), normal(2, 5, 8)
    parts = decompose(net, X)
    Y = parts.output
    for layers in ((1,), (3,), (1, 3), (1, 2, 3)):
        met = torch.zeros_like(Y)
        for path in product((None, 0, 1), repeat=3):
            if any(path[layer - 1] is not None for layer in layers):
                met += parts.path(path).term
        for residual in (False, True):
            target = Y - Y.mean(1, keepdim=True) if residual else Y
            expected = (met * target).sum((1, 2)) / (target * target).sum((1, 2))
            got = set_shares(net, Sample(X), [layers], residual)[0]
            assert got == pytest.approx(float(expected.abs().mean()), rel=1e-10)


@pytest.mark.parametrize("kind", ["pre-norm", "parallel"])
def test_a_set_of_all_layers_leaves_the_embedding_alone(kind: str) -> None:
    """Past all layers of a pre-norm network goes the embedding, through the frozen final norm."""
    net, sample = made(kind)
    Y = net.run(sample.X, PADDING).output * ~PADDING[..., None]
    past = sample.X * ~PADDING[..., None]
    if net.arch.final_norm:
        last = net.run(sample.X, PADDING).states[-1]
        middle = last - last.mean(-1, keepdim=True)
        scale = (middle.square().mean(-1, keepdim=True) + net.arch.norm_eps).sqrt()
        w: Any = net.weights.final_norm
        past = ((past - past.mean(-1, keepdim=True)) / scale * w.gain + w.bias) * ~PADDING[..., None]
    expected = ((Y - past) * Y).sum((1, 2)) / (Y * Y).sum((1, 2))
    assert set_shares(net, sample, [(1, 2, 3)])[0] == pytest.approx(float(expected.abs().mean()), rel=1e-9)
    shares = (((Y - past) * centred(Y)).sum((1, 2)) / centred(Y).square().sum((1, 2))).abs().mean()
    assert set_shares(net, sample, [(1, 2, 3)], residual=True)[0] == pytest.approx(float(shares), rel=1e-9)


def test_a_share_of_the_residual_needs_tokens_that_differ() -> None:
    net = made("pre-norm")[0]
    with raises(PathError, "residual_share"):
        CRITERIA["residual_share"].layers(net.variant(mask="complete"), Sample(normal(1, 1, 8).expand(2, 4, 8)))


@pytest.mark.parametrize("kind", KINDS)
def test_influence_is_one_minus_the_cosine_of_input_and_output(kind: str) -> None:
    net, sample = made(kind)
    states = net.run(sample.X, PADDING).states
    expected = []
    for before, after in pairwise(states):
        by_sample = []
        for b, a, padded in zip(before, after, PADDING, strict=True):
            pairs = [(x, y) for x, y, pad in zip(b, a, padded, strict=True) if not pad]
            by_sample.append(sum(1 - float(x @ y / (x.norm() * y.norm())) for x, y in pairs) / len(pairs))
        expected.append(sum(by_sample) / len(by_sample))
    assert CRITERIA["influence"].layers(net, sample) == pytest.approx(expected, rel=1e-10)


def test_magnitude_is_the_frobenius_norm_of_matrices() -> None:
    net, sample = made("grouped, rotary")
    state = net.state_dict()
    squares = [0.0, 0.0, 0.0]
    for name, tensor in state.items():
        if name.startswith("layers.") and name.endswith(".weight"):
            squares[int(name.split(".")[1])] += float((tensor**2).sum())
    assert CRITERIA["magnitude"].layers(net, sample) == pytest.approx([s**0.5 for s in squares], rel=1e-12)
    heads = CRITERIA["magnitude"].heads
    assert heads is not None
    w = {part: state[f"layers.1.attention.{part}.weight"] for part in ("query", "key", "value", "output")}
    one = torch.cat([w["query"][:, 1].flatten(), w["key"].flatten(), w["value"].flatten(), w["output"][1].flatten()])
    assert heads(net, sample)[1][1] == pytest.approx(float(one.norm()), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["pre-norm", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "pre-norm")]
)
def test_gradient_is_first_order_taylor_by_finite_differences(kind: str) -> None:
    """By central differences of a loss, weight by weight."""
    net, _ = made(kind, layers=2)
    sample = Sample(normal(1, 4, 8), loss=lambda Y: (Y * torch.arange(8)).sum() + (Y**3).sum())
    state, step = net.state_dict(), 1e-6

    def loss(changed: dict[str, Tensor]) -> float:
        assert sample.loss is not None
        return float(sample.loss(Transformer.from_weights(net.arch, state | changed).run(sample.X).output))

    expected = 0.0
    for name, tensor in state.items():
        if not name.startswith("layers.1."):
            continue
        for index in range(tensor.numel()):
            moved = [tensor.clone(), tensor.clone()]
            for sign, each in zip((1, -1), moved, strict=True):
                each.view(-1)[index] += sign * step
            slope = (loss({name: moved[0]}) - loss({name: moved[1]})) / (2 * step)
            expected += abs(slope * float(tensor.reshape(-1)[index]))
    assert CRITERIA["gradient"].layers(net, sample)[1] == pytest.approx(expected, rel=1e-5)


def test_the_gradient_of_a_head_is_that_of_a_factor_on_its_output() -> None:
    net, sample = made("pre-norm")
    sample = Sample(sample.X, PADDING, loss=lambda Y: (Y**3).sum())
    heads = CRITERIA["gradient"].heads
    assert heads is not None
    name, step = "layers.1.attention.output.weight", 1e-6
    slopes = []
    for index in range(3):
        values = []
        for factor in (1 + step, 1 - step):
            changed = net.state_dict()[name].clone()
            changed[0] *= factor
            other = Transformer.from_weights(net.arch, net.state_dict() | {name: changed})
            one = other.run(sample.X[index : index + 1], PADDING[index : index + 1]).output
            values.append(float((one**3).sum()))
        slopes.append(abs(values[0] - values[1]) / (2 * step))
    assert heads(net, sample)[1][0] == pytest.approx(sum(slopes) / 3, rel=1e-5)


def test_layers_that_share_weights_have_gradients_of_their_own() -> None:
    """They are those of the same layers stored apart."""
    net = awake(Architecture(layers=3, width=8, heads=2, shared=True))
    apart = {
        f"layers.{k}.{name.removeprefix('layers.0.')}": tensor
        for k in range(3)
        for name, tensor in net.state_dict().items()
    }
    sample = Sample(normal(1, 4, 8), loss=lambda Y: (Y**3).sum())
    scores = CRITERIA["gradient"].layers(net, sample)
    unshared = Transformer.from_weights(net.arch.replace(shared=False), apart)
    assert scores == pytest.approx(CRITERIA["gradient"].layers(unshared, sample), rel=1e-12)
    assert len({round(score, 9) for score in scores}) == 3


def test_without_a_loss_the_gradient_is_of_a_random_direction() -> None:
    net, sample = made("pre-norm")
    score = CRITERIA["gradient"].layers
    assert score(net, sample) == score(net, sample) != score(net, Sample(sample.X, PADDING, seed=1))


@pytest.mark.parametrize("kind", KINDS)
def test_error_is_what_the_output_loses(kind: str) -> None:
    net, sample = made(kind)
    valid = ~PADDING[..., None]
    Y = net.run(sample.X, PADDING).output * valid
    Z = net.variant(layers=[1, 3]).run(sample.X, PADDING).output * valid
    by_sample = [float((z - y).norm() / y.norm()) for y, z in zip(Y, Z, strict=True)]
    assert CRITERIA["error"].layers(net, sample)[1] == pytest.approx(sum(by_sample) / 3, rel=1e-10)


def test_shares_of_heads_are_those_of_paths() -> None:
    net, sample = made("pre-norm")
    table = decompose(net, sample.X, PADDING).by_head()
    for name, column in (("path_share", "share"), ("residual_share", "residual_share")):
        heads = CRITERIA[name].heads
        assert heads is not None
        one = table.filter(layer=2, head=1)[column].to_list()
        assert heads(net, sample)[1][1] == pytest.approx(sum(map(abs, one)) / 3, rel=1e-12)


def test_random_scores_come_from_the_seed() -> None:
    net, sample = made("post-norm")
    score = CRITERIA["random"].layers
    assert score(net, sample) == score(net, sample)
    assert score(net, sample) != score(net, Sample(sample.X, seed=1))


def test_padding_adds_nothing_to_the_loss_of_an_output() -> None:
    """The loss in a random direction is `sum of +-Y` over valid tokens, whatever stands at padding."""
    Y = normal(3, 6, 8)
    sample = Sample(normal(3, 6, 8), PADDING)
    size = sample.loss_of(Y)
    assert torch.equal(size, sample.loss_of(torch.where(PADDING[..., None], 1e9, Y)))
    one = torch.zeros_like(Y)
    one[1, 2, 3] = 2.0  # a valid token: its sign alone is left
    assert abs(float(sample.loss_of(one))) == 2.0 and float(sample.loss_of(torch.zeros_like(Y))) == 0.0


@pytest.mark.parametrize(
    ("family", "label", "kind"), [("gpt2", "decoder", "GPT2LMHeadModel"), ("opt", None, "OPTForCausalLM")]
)
def test_it_is_the_loss_that_transformers_computes(family: str, label: str | None, kind: str) -> None:
    model = headed(family, label, kind)
    net = load(model)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    padding = torch.arange(9)[None] >= torch.tensor([9, 6])[:, None]
    loss = next_token_loss(model, ids, padding)
    assert loss is not None
    X, padded = net.encode(ids, padding=padding)
    labels = ids.masked_fill(padding, -100)
    with torch.no_grad():
        theirs = model(input_ids=ids, attention_mask=(~padding).long(), labels=labels).loss
    assert float(loss(net.run(X, padded).output)) == pytest.approx(float(theirs), rel=1e-5)


def test_a_model_whose_logits_are_made_otherwise_has_none() -> None:
    ids = torch.randint(3, 60, (1, 9))
    assert next_token_loss(headed("bert", "encoder", "BertForMaskedLM"), ids) is None
    assert next_token_loss(headed("gpt2", "decoder", "GPT2Model"), ids) is None
    capped = headed("gpt2", "decoder", "GPT2LMHeadModel")
    capped.lm_head.register_forward_hook(lambda module, args, output: output)  # a hook changes nothing
    assert next_token_loss(capped, ids) is not None
    forward = capped.forward

    def halved(*args: object, **kwargs: object) -> object:
        told = forward(*args, **kwargs)
        told.logits = told.logits / 2
        return told

    capped.forward = halved
    assert next_token_loss(capped, ids) is None
