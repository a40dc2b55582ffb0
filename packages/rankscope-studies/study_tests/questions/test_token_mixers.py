"""Networks that mix positions in other ways than attention: each against its definition."""

import math

import pytest
import torch
from torch import Tensor

from rankscope.errors import StudyError
from rankscope_studies.questions.token_mixers import (
    FORMS,
    MIXERS,
    AttentionMixer,
    GraphConvolution,
    ImageConvolution,
    MixingBlock,
    MixingNetwork,
    PositionMLP,
    StateSpaceMixer,
    averaging_matrix,
    averaging_ratio,
)  # fmt: skip

N, WIDTH = 16, 8


def positions(seed: int = 0) -> Tensor:
    return torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_mixes_positions_and_keeps_samples_apart(mixer: str) -> None:
    network = MixingNetwork(mixer, "bare", 1, N, WIDTH, 3, seed=0).double()
    X = positions()
    changed = X.clone()
    changed[0, 0] += 1.0
    with torch.no_grad():
        before, after = network.blocks[0](X), network.blocks[0](changed)
    assert before.shape == X.shape
    assert not torch.equal(before[0, 1], after[0, 1])  # the neighbour hears of it
    assert torch.equal(before[1], after[1])  # the other sample does not


@pytest.mark.parametrize("form", FORMS)
def test_a_network_is_drawn_from_its_seed_alone(form: str) -> None:
    before = torch.random.get_rng_state()
    first, same, other = (MixingNetwork("gru", form, 2, N, WIDTH, 3, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    images = torch.randn(2, N, 1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first(images), same(images)) and not torch.equal(first(images), other(images))


def test_forms_are_what_they_say() -> None:
    bare, norm, whole = (MixingBlock("conv", form, N, WIDTH).double() for form in FORMS)
    X = positions()
    mixed = bare(X)
    torch.testing.assert_close(norm(X), torch.nn.functional.layer_norm(norm.mix(X), (WIDTH,)))
    inner = X + whole.mix(torch.nn.functional.layer_norm(X, (WIDTH,)))
    torch.testing.assert_close(whole(X), inner + whole.mlp(torch.nn.functional.layer_norm(inner, (WIDTH,))))
    assert torch.equal(mixed, bare.mix(X))


def test_state_space_layer_is_its_recurrence() -> None:
    """The convolution with K is `s_t = exp(dt A) s_{t-1} + B x_t`, `y_t = 2 Re C s_t`, step by step."""
    torch.manual_seed(0)
    mixer = StateSpaceMixer(N, WIDTH).double()
    X = positions()
    A = torch.complex(-mixer.log_decay.exp(), mixer.frequency)
    step = mixer.log_step.exp()[:, None]
    B, C = ((step * A).exp() - 1) / A, torch.view_as_complex(mixer.readout.contiguous())
    state = torch.zeros(2, *A.shape, dtype=A.dtype)
    outputs = []
    for t in range(N):
        state = (step * A).exp() * state + B * X[:, t, :, None]
        outputs.append(2 * (C * state).sum(-1).real)
    expected = mixer.output(torch.nn.functional.gelu(torch.stack(outputs, 1)))
    torch.testing.assert_close(mixer(X), expected)


def test_attention_is_softmax_of_scaled_products() -> None:
    torch.manual_seed(0)
    mixer, X = AttentionMixer(N, WIDTH).double(), positions()
    q, k, v = (part(X).reshape(2, N, 4, 2).transpose(1, 2) for part in (mixer.query, mixer.key, mixer.value))
    pattern = (q @ k.mT / math.sqrt(2)).softmax(-1)
    torch.testing.assert_close(mixer(X), mixer.output((pattern @ v).transpose(1, 2).reshape(2, N, WIDTH)))


def test_graph_convolution_on_the_complete_graph_is_uniform_attention() -> None:
    torch.manual_seed(0)
    mixer, X = GraphConvolution(N, WIDTH, "complete").double(), positions()
    expected = torch.relu(mixer.weight(X.mean(1, keepdim=True))).expand(X.shape)
    torch.testing.assert_close(mixer(X), expected)


@pytest.mark.parametrize(("graph", "neighbours"), [("ring", 3), ("complete", N)])
def test_averages_are_over_neighbours(graph: str, neighbours: int) -> None:
    A = averaging_matrix(graph, N)
    torch.testing.assert_close(A.sum(-1), torch.ones(N))
    assert bool(((A > 0).sum(-1) == neighbours).all()) and torch.equal(A, A.mT)


def test_a_convolution_sees_the_eight_neighbours_of_a_pixel() -> None:
    torch.manual_seed(0)
    mixer = ImageConvolution(N, WIDTH)
    X = torch.randn(1, N, WIDTH)
    changed = X.clone()
    changed[0, 5] += 1.0  # row 1, column 1 of 4 x 4
    moved = (mixer(X) != mixer(changed)).any(-1)[0].nonzero().flatten().tolist()
    assert {*moved} <= {0, 1, 2, 4, 5, 6, 8, 9, 10} and len(moved) > 5


def test_a_mixer_moves_differences_that_averages_lose() -> None:
    torch.manual_seed(0)
    mixer = PositionMLP(N, WIDTH).double()
    X = positions()
    assert not torch.allclose(mixer(X), mixer(X).mean(1, keepdim=True), atol=1e-3)


def test_averaging_ratio_is_that_of_a_linear_mixer() -> None:
    """Of `A X W` the ratio is `||A D|| / ||D||` for D of mean zero: here of a matrix that halves all differences."""
    network = MixingNetwork("gcn ring", "bare", 1, N, WIDTH, 3, seed=0).double()
    mixer = network.blocks[0].mix
    assert isinstance(mixer, GraphConvolution)
    J = torch.full((N, N), 1 / N, dtype=torch.float64)
    mixer.average = J + 0.5 * (torch.eye(N, dtype=torch.float64) - J)
    with torch.no_grad():
        mixer.weight.weight.copy_(torch.eye(WIDTH))
    X = positions().abs() + 1  # far from the bend of ReLU
    assert averaging_ratio(network, X) == pytest.approx(0.5, rel=1e-6)


def test_unknown_mixers_and_forms_are_refused() -> None:
    with pytest.raises(StudyError, match="mixer"):
        MixingNetwork("magic", "bare", 1, N, WIDTH, 3, seed=0)
    with pytest.raises(StudyError, match="form"):
        MixingNetwork("conv", "magic", 1, N, WIDTH, 3, seed=0)
