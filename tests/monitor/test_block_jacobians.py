"""Norms and alignments of the Jacobians of blocks, against Jacobians that are formed and taken apart."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from transformers import AlbertConfig, AlbertModel, GPT2Config, GPT2LMHeadModel

from rankscope import Monitor, read
from rankscope.errors import MonitorError
from rankscope.monitor import leading_vectors
from rankscope.monitor.block_jacobians import ALIGNMENT, FIRST, NORM
from tests.monitor.small import encoder, tokens
from tests.monitor.training import gpt2, probed, train
from tests.raising import raises

Block = Callable[[Tensor], Tensor]


def measured(model: nn.Module, probe: Any, **options: Any) -> pl.DataFrame:
    """The rows of Jacobians of a monitor's first measurement."""
    with Monitor(
        model, "mu", every=1, probe=probe, run=tempfile.mkdtemp(), jacobians=True, alarms=(), **options
    ) as monitor:
        pass
    return read(monitor.run).tables["training"].filter(pl.col("metric").str.starts_with("jacobian"))


def exact(blocks: list[Block], X: Tensor, valid: Tensor | None = None) -> tuple[dict[int, float], dict[int, float]]:
    """(Norms, alignments) by layer, means over samples: each Jacobian formed of one sample, with its singular vectors.

    Blocks take `[batch, token, width]`, and are asked for one sample at a time with padding held."""
    valid = torch.ones(X.shape[:2], dtype=torch.bool) if valid is None else valid
    norms, alignments = {}, {}
    left: list[Tensor] = []
    for layer, block in enumerate(blocks, start=1):
        lefts, rights, largest = [], [], []
        for sample in range(len(X)):

            def of_one(x: Tensor, X: Tensor = X, sample: int = sample, block: Block = block) -> Tensor:
                whole = torch.cat([X[:sample], x[None], X[sample + 1 :]])
                return block(whole)[sample]

            entries = int(valid[sample].sum()) * X.shape[2]
            J = jacobian(of_one, X[sample])[valid[sample]][:, :, valid[sample]].reshape(entries, entries)
            U, S, Vh = torch.linalg.svd(J)
            assert S[1] < 0.999 * S[0]  # else the vectors are not defined
            lefts.append(U[:, 0])
            rights.append(Vh[0])
            largest.append(float(S[0]))
        norms[layer] = sum(largest) / len(largest)
        if left:
            cosines = [abs(float(v @ u)) for v, u in zip(rights, left, strict=True)]
            alignments[layer - 1] = sum(cosines) / len(cosines)
        left, X = lefts, block(X).detach()
    return norms, alignments


def by_layer(rows: pl.DataFrame, metric: str) -> dict[int, float]:
    found = rows.filter(metric=metric)
    return dict(zip(found["layer"].to_list(), found["value"].to_list(), strict=True))


def agrees(rows: pl.DataFrame, truth: tuple[dict[int, float], dict[int, float]], within: float = 1e-3) -> None:
    """Norms from below, alignments to within their floor, which is small."""
    norms, alignments = truth
    found = by_layer(rows, NORM)
    assert found.keys() == norms.keys()
    assert all(norms[k] * (1 - within) <= found[k] <= norms[k] * (1 + 1e-6) for k in norms)
    floors = rows.filter(metric=ALIGNMENT)
    found = by_layer(rows, ALIGNMENT)
    assert found.keys() == alignments.keys()
    for k, floor in zip(floors["layer"].to_list(), floors["floor"].to_list(), strict=True):
        assert abs(found[k] - alignments[k]) <= floor + 1e-9 and floor < 0.1


@pytest.fixture(scope="module")
def small_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=12, n_head=3, vocab_size=16, n_positions=6, initializer_range=0.2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double().eval()


@pytest.mark.slow
def test_an_encoder_of_torch_has_the_exact_numbers() -> None:
    model, X = encoder().eval(), tokens(0, 3)
    agrees(measured(model, X), exact([*model.layers], X))


def test_token_first_hidden_states_have_the_same_numbers() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight)
    X = torch.randn(5, 2, 8, dtype=torch.float64)  # [token, batch, width]
    agrees(measured(model, X), exact([_turned(block) for block in model.layers], X.transpose(0, 1)))


def _turned(block: Any) -> Block:
    return lambda x: block(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.slow
def test_padding_has_no_part_in_it_and_a_cache_does_no_harm(small_gpt2: GPT2LMHeadModel) -> None:
    assert small_gpt2.config.use_cache
    ids, mask = torch.randint(16, (2, 6), generator=torch.Generator().manual_seed(1)), torch.ones(2, 6).long()
    mask[0, 4:] = 0
    rows = measured(small_gpt2, {"input_ids": ids, "attention_mask": mask})
    seen = (mask[:, None, None, :] == 1) & torch.ones(6, 6, dtype=torch.bool).tril()
    added = torch.where(seen, 0.0, -torch.inf).double()
    blocks: list[Block] = [_masked(block, added) for block in small_gpt2.transformer.h]
    X = small_gpt2.transformer.wte(ids) + small_gpt2.transformer.wpe(torch.arange(6))
    agrees(rows, exact(blocks, X.detach(), mask == 1))
    whole = by_layer(measured(small_gpt2, {"input_ids": ids}), NORM)
    assert any(abs(whole[layer] - norm) > 1e-3 for layer, norm in by_layer(rows, NORM).items())


def _masked(block: Any, mask: Tensor) -> Block:
    def called(x: Tensor) -> Tensor:
        output = block(x, attention_mask=mask)
        return output if isinstance(output, Tensor) else output[0]

    return called


def test_one_block_that_is_called_many_times_is_many_layers() -> None:
    torch.manual_seed(3)
    config = AlbertConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, vocab_size=20,
        embedding_size=8, initializer_range=0.3,
    )  # fmt: skip
    model = AlbertModel(config).double().eval()
    ids = torch.randint(20, (2, 5))
    (group,) = model.encoder.albert_layer_groups
    X = model.encoder.embedding_hidden_mapping_in(model.embeddings(ids)).detach()
    agrees(measured(model, {"input_ids": ids}), exact([_masked(group.albert_layers[0], None)] * 3, X))  # type: ignore[arg-type]


class Writing(nn.Module):
    """A block that writes into what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.linear(self.norm(x.clone())).tanh())


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList(blocks), between

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for block in self.blocks:
            x = self.between(block(x))
        return x


def blocks_of(kind: type[nn.Module], count: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind().double() for _ in range(count)]


X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def test_a_block_may_write_into_what_it_takes() -> None:
    model = Stack(*blocks_of(Writing))
    truth = exact([lambda x, block=block: block(x * 1.0) for block in model.blocks], X)
    agrees(measured(model, X, layout="batch first"), truth)


def test_chosen_layers_have_the_numbers_that_they_have_among_all() -> None:
    model, X = encoder().eval(), tokens(0, 3)
    whole, some = measured(model, X), measured(model, X, layers=[2])
    assert by_layer(some, NORM) == {2: by_layer(whole, NORM)[2]}
    assert by_layer(some, ALIGNMENT) == {2: by_layer(whole, ALIGNMENT)[2]}


def test_where_something_stands_between_blocks_there_is_no_alignment() -> None:
    model = Stack(*blocks_of(Writing), between=lambda x: 0.5 * x)
    with Monitor(
        model, "mu", probe=X, run=tempfile.mkdtemp(), jacobians=True, alarms=(), layout="batch first"
    ) as monitor:
        pass
    metrics = read(monitor.run).tables["training"]["metric"].unique().to_list()
    assert NORM in metrics and ALIGNMENT not in metrics
    assert any("takes other than the last one gave: 1, 2" in note for note in monitor.notes)


@pytest.mark.slow
def test_later_measurements_go_on_from_the_last_and_follow_the_weights(tmp_path: Path) -> None:
    model, X = encoder().eval(), tokens(0, 2)
    with Monitor(model, "mu", every=1, probe=X, run=tmp_path, jacobians=True, alarms=()) as monitor:
        for _ in range(3):
            with torch.no_grad():
                for weight in model.parameters():
                    weight += 0.003 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            monitor.step()
    rows = read(tmp_path).tables["training"]
    agrees(rows.filter(pl.col("metric").str.starts_with("jacobian"), step=3), exact([*model.layers], X))


@pytest.mark.slow
def test_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    seen: list[Any] = []
    plain = train()
    assert plain.same(train(probed(tmp_path / "run", jacobians=True), seen=seen))
    (monitor,) = seen
    rows = read(monitor.run).tables["training"].filter(metric=ALIGNMENT)
    assert rows["step"].unique().sort().to_list() == [0, 10, 20]
    assert not any("Jacobian" in note for note in monitor.notes)
    assert rows["value"].is_between(0.0, 1.0).all() and rows["floor"].is_between(0.0, 1.0).all()


def test_weights_that_are_no_numbers_are_rows_without_numbers(tmp_path: Path) -> None:
    model = gpt2()
    with Monitor(
        model, "mu", every=1, probe=torch.randint(30, (2, 8)), run=tmp_path, jacobians=True, alarms=()
    ) as monitor:
        with torch.no_grad():
            model.get_parameter("transformer.h.1.mlp.c_fc.weight").fill_(math.nan)
        monitor.step()
    rows = read(tmp_path).tables["training"].filter(step=1)
    assert rows.filter(metric=NORM, layer=1)["broken"].item() == 0
    assert rows.filter(metric=NORM, layer=2)["broken"].item() == 2
    assert rows.filter(metric=ALIGNMENT, layer=1)["broken"].item() == 2
    assert not monitor.notes


class Counting(Writing):
    """A block that gives something else each time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls * self.linear(x)


class Once(torch.autograd.Function):
    """A kernel whose backward pass cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Fused(Writing):
    """A block of which a branch alone has no second derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return x + Once.apply(self.linear(x))


class AllFused(Writing):
    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(self.linear(x))


class TwoStreams(Writing):
    def forward(self, x: Any) -> Any:
        x = x[0] if isinstance(x, tuple) else x
        return super().forward(1.0 * x), 2.0 * x


class TwoStack(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)[0]
        return x


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList(blocks_of(Writing, 2)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = 1.0 * x
        for layer in self.layers:
            for part in layer:  # type: ignore[attr-defined]
                x = part(x)
        return x


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Stack(*blocks_of(Counting)), "must give the same when it runs again"),
        (Stack(*blocks_of(Fused)), "blocks must be differentiable twice; OnceBackward"),
        (Stack(*blocks_of(AllFused)), "blocks must be differentiable twice; OnceBackward"),
        (TwoStack(*blocks_of(TwoStreams)), "must be one tensor"),
        (Parts(), "lists of parts"),
    ],
)
def test_where_they_cannot_be_had_a_sentence_says_why(model: nn.Module, words: str) -> None:
    with raises(MonitorError, subject="jacobians") as raised:
        measured(model, X, layout="batch first")
    assert words in str(raised.value) and "leave jacobians out" in str(raised.value)


def test_they_need_a_probe() -> None:
    with raises(MonitorError, subject="jacobians"):
        Monitor(encoder(), "mu", run=tempfile.mkdtemp(), jacobians=True)


def test_what_fails_later_is_a_note_and_the_rest_is_measured(tmp_path: Path) -> None:
    model = Stack(*blocks_of(Writing))
    with Monitor(
        model, "mu", every=1, probe=X, run=tmp_path, jacobians=True, alarms=(), layout="batch first"
    ) as monitor:
        model.blocks[1].forward = lambda x: Once.apply(1.0 * x)
        monitor.step()
        monitor.step()
    rows = read(tmp_path).tables["training"]
    assert rows.filter(metric=NORM)["step"].unique().to_list() == [0]
    assert rows.filter(metric="mu")["step"].unique().sort().to_list() == [0, 1, 2]
    (note,) = monitor.notes
    assert note.startswith("Jacobians of blocks are not measured")


@pytest.mark.parametrize("shape", [(40, 40), (1, 1), (2, 2)])
def test_leading_vectors_are_those_of_the_singular_value_decomposition(shape: tuple[int, int]) -> None:
    J = torch.randn(3, *shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    start = torch.randn(2, 3, shape[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def product(v: Tensor) -> Tensor:
        return torch.einsum("smn,sn->sm", J, v)

    def transposed(u: Tensor) -> Tensor:
        return torch.einsum("smn,sm->sn", J, u)

    for steps in (8, FIRST, 40):
        found = leading_vectors(product, transposed, start, steps)
        U, S, Vh = torch.linalg.svd(J)
        for sample in range(3):
            assert float(found.norm[sample]) <= float(S[sample, 0]) * (1 + 1e-12)
            for vector, true in ((found.right, Vh[sample, 0]), (found.left, U[sample, :, 0])):
                cosine = min(1.0, abs(float(vector[sample] @ true)))
                assert math.sqrt(1 - cosine**2) <= float(found.error[sample]) + 1e-7
    assert float(found.error.max()) < 1e-6


def test_directions_that_are_stretched_alike_are_not_told_apart() -> None:
    J = torch.diag(torch.tensor([2.0, 2.0, 1.0, 0.5], dtype=torch.float64))
    start = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = leading_vectors(lambda v: v @ J, lambda u: u @ J, start, 10)
    assert float(found.norm) == pytest.approx(2.0) and float(found.error) > 0.01


def test_a_jacobian_of_zeros_or_of_no_numbers_is_one() -> None:
    start = torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(7))
    nothing = leading_vectors(torch.zeros_like, torch.zeros_like, start, 3)
    assert nothing.norm.tolist() == [0.0, 0.0] and nothing.error.tolist() == [1.0, 1.0]
    broken = leading_vectors(lambda v: v * torch.tensor([[math.nan], [1.0]]), lambda u: u, start, 3)
    assert broken.norm.isnan().tolist() == [True, False]
