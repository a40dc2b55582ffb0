"""Where the hidden states are in what blocks take and return, and which tensor the next block takes."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import rankscope
from rankscope.errors import WatchError
from rankscope.live.hidden_states import BlockChain, hidden_states_in, layout_in_attention, layout_of
from rankscope.monitor import Monitor
from tests.live import reference
from tests.live.encoders import Loop
from tests.live.families import FAMILIES, WIDTH, checks, seen
from tests.raising import raises


def test_layout_can_be_forced() -> None:
    model = Loop()
    X = torch.randn(2, 6, WIDTH)
    with rankscope.watch(model, "mu", blocks=["first", "second"], layout="token first") as w:
        model(X.transpose(0, 1))
    expected = reference.mu(X, torch.ones(2, 6, dtype=torch.bool))
    torch.testing.assert_close(w.profile().curve("mu")[:, 0], expected, rtol=1e-6, atol=0)


def test_states_that_are_no_tokens() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1)), nn.Sequential(nn.Conv2d(3, 3, 1)))
    with raises(WatchError, subject="blocks"):
        seen(model, "mu", torch.randn(1, 3, 4, 4))


REAL = torch.ones(2, 6, dtype=torch.bool)


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 4, 24, 0.0, batch_first=True)


class Wordy(nn.Module):
    """Returns its weights, or tensors of the tokens' own shape, before its tokens."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.inner, self.first = layer(), first

    def forward(self, x: Tensor) -> Any:
        first = {"weights": (x @ x.mT).softmax(-1), "noise": torch.randn_like(x), "tokens": x + 1}[self.first]
        return first, self.inner(x)


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers, self.states = nn.ModuleList(blocks), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.states = [x]
        for block in self.layers:
            x = self.step(block, x)
            self.states.append(x)
        return x

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        found = block(x)
        return found if isinstance(found, Tensor) else found[-1]


def tokens(width: int = WIDTH) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 6, width, dtype=torch.float64)


def expected(model: Model) -> Tensor:
    return torch.stack([reference.mu(state, REAL) for state in model.states], 1)


@pytest.mark.parametrize("first", ["weights", "noise", "tokens"])
def test_the_state_is_what_the_next_block_takes(first: str) -> None:
    model = Model([Wordy(first) for _ in range(3)]).double().eval()
    w = seen(model, "mu", tokens())
    torch.testing.assert_close(w.profile().curve("mu"), expected(model), rtol=1e-12, atol=0)
    assert not any("several tensors" in note for note in w.notes)


def test_one_block_alone_cannot_say_which_tensor_is_its_state() -> None:
    w = seen(Model([Wordy("noise")]).double().eval(), "mu", tokens())
    assert any("return several tensors like tokens: 1; nothing says which is the state" in note for note in w.notes)
    w = seen(Model([Wordy("weights")]).double().eval(), "mu", tokens())  # its shape says it
    assert not any("several tensors" in note for note in w.notes)


class Branches(nn.Module):
    """Attention and MLPs in lists of their own, and the stream outside: as XLM is written."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention() for _ in range(3))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for attend, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + attend(self.norm(x))
            x = x + mlp(self.norm(x))
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x, x, x)[0]
        return found


def test_branches_are_no_layers() -> None:
    model = Branches().double().eval()
    with raises(WatchError, subject="blocks"):
        seen(model, "mu", tokens())
    named = [f"{kind}.{k}" for k in range(3) for kind in ("attentions", "mlps")]
    with raises(WatchError, subject="blocks"), rankscope.watch(model, "mu", blocks=named):
        model(tokens())
    gpt2, batch = FAMILIES["gpt2"].model(), FAMILIES["gpt2"].batch()
    with (
        raises(WatchError, subject="blocks"),
        rankscope.watch(gpt2, "mu", blocks=["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"]),
    ):
        gpt2(**batch)


def test_a_stack_that_is_found_and_holds_branches() -> None:
    """XLM keeps attention and MLPs in lists of their own."""
    model = hf.XLMModel(hf.XLMConfig(vocab_size=40, emb_dim=16, n_layers=3, n_heads=4)).eval()
    with raises(WatchError, subject="blocks"):
        seen(model, "mu", torch.randint(3, 40, (2, 8)))


class Positioned(Model):
    """Adds positions before every block, in place or not, or norms in between."""

    def __init__(self, how: str) -> None:
        super().__init__([layer() for _ in range(3)])
        self.how, self.norm = how, nn.LayerNorm(WIDTH)

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.how == "in place":
            x += 0.1
        return super().step(block, x + 0.1 if self.how == "added" else self.norm(x))


@pytest.mark.parametrize("how", ["added", "in place", "norm"])
def test_what_stands_between_is_said(how: str) -> None:
    w = seen(Positioned(how).double().eval(), "mu", tokens())
    assert checks(w)["layers_not_taken_as_they_were"] == [1, 2]
    sentence = "Something stands between layers 1 and 2: what the second takes is not what the first gave."
    assert sentence in w.notes


@pytest.mark.parametrize("name", FAMILIES)
def test_families_chain(name: str) -> None:
    w = seen(FAMILIES[name].model(), "mu", **FAMILIES[name].batch())
    assert checks(w)["layers_not_taken_as_they_were"] == [] == checks(w)["layers_of_several_tensors"]


class Streams(nn.Module):
    """Four copies of the hidden states beside each other, as in hyper-connections: no grid of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)[:, :, None].expand(-1, -1, 4, -1)
        for block in self.layers:
            x = block(x)
        return x.mean(2)


def test_streams_are_no_tokens() -> None:
    with raises(WatchError, subject="blocks"):
        seen(Streams(), "mu", torch.ones(2, 5, dtype=torch.long))


def test_a_tensor_that_is_handed_on_unchanged_is_a_link() -> None:
    x, y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    chain = BlockChain()
    assert not chain.handed_on(x)  # nothing is held
    chain.gave(1, [x], x.shape)
    assert not chain.handed_on(x.clone()) and chain.held is not None and not chain.linked
    assert chain.handed_on(x) and chain.held is None and chain.linked == 1
    chain.gave(2, [x], x.shape)
    x.add_(1)
    assert not chain.handed_on(x) and chain.took([x]) is None and [*chain.broken] == [2]
    chain.gave(3, [x, y], x.shape)
    assert not chain.handed_on(x)  # of several, `took` says which is the hidden states
    settled = chain.took([x])
    assert settled is not None and settled[1] is x and chain.linked == 2


def test_a_single_tensor_is_read_as_several_are() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    for values in (x.detach(), x, x.detach().double(), nn.Parameter(x.detach())):
        for layout, tokens in (("batch first", values), ("token first", values.transpose(0, 1))):
            (alone,), (first, _) = (hidden_states_in(v, layout, "it") for v in (values, (values, values)))  # type: ignore[arg-type]
            assert torch.equal(alone, tokens) and torch.equal(first, tokens) and not alone.requires_grad
    with pytest.raises(WatchError):
        hidden_states_in(torch.zeros(2, 3, 4, dtype=torch.long), "batch first", "it")


@pytest.mark.parametrize(
    ("package", "name", "layout"),
    [
        ("transformers.models.xlnet.modeling_xlnet", "XLNetLayer", "token first"),
        ("transformers.models.fsmt.modeling_fsmt", "EncoderLayer", "token first"),
        ("transformers.models.other.modeling_other", "EncoderLayer", "batch first"),
        ("mine", "EncoderLayer", "batch first"),
    ],
)
def test_classes_that_take_the_token_first_are_known_by_name_and_package(package: str, name: str, layout: str) -> None:
    made = type(name, (nn.Module,), {"__module__": package})()
    assert layout_of([made], [made], None)[0] == layout


class Residual(nn.Module):
    """A block without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class HyperConnected(nn.Module):
    """A network whose blocks pass on `[batch, token, stream, width]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = x if x.is_floating_point() else self.embedding(x)
        h = h if h.ndim == 4 else h[:, :, None].repeat(1, 1, 3, 1)
        for block in self.blocks:
            h = block(h)
        return h


@pytest.mark.parametrize("x", [torch.arange(8).view(2, 4), torch.randn(2, 4, WIDTH)], ids=["ids", "embeddings"])
def test_streams_are_refused(x: Tensor, tmp_path: Path) -> None:
    model = HyperConnected()
    with raises(WatchError, subject="blocks") as caught, rankscope.watch(model, "mu"):
        model(x)
    assert "(2, 4, 3, 16)" in str(caught.value) and "4 tokens in 3 streams" in str(caught.value)
    options: dict[str, Any] = {"every": 1, "alarms": ()}
    with raises(WatchError, subject="blocks"), Monitor(model, "mu", run=tmp_path / "a", **options) as monitor:
        model(x)
        monitor.step()
    with raises(WatchError, subject="blocks"):
        Monitor(model, "mu", run=tmp_path / "b", probe=x, **options)


def test_four_axes_of_which_nothing_is_known_are_said(tmp_path: Path) -> None:
    model, x = HyperConnected(), torch.randn(2, 4, 3, WIDTH)
    with rankscope.watch(model, "mu") as w:
        model(x)
    with Monitor(model, "mu", run=tmp_path, every=1, alarms=()) as monitor:
        model(x)
        monitor.step()
    read = (
        "Hidden states of four axes were read as tokens in rows and columns, [batch, row, column, width]: (2, 4, 3, 16)"
    )
    assert f"{read}." in w.notes and read in monitor.notes


class Stage(nn.Module):
    """Takes `[batch, channel, row, column]` without a convolution, as the stages of timm's swinv2_cr."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x.movedim(1, -1)).movedim(-1, 1)


def test_channels_before_rows_are_refused(tmp_path: Path) -> None:
    model, x = nn.Sequential(Stage(), Stage()), torch.randn(2, WIDTH, 6, 7)
    with raises(WatchError, subject="blocks") as caught, rankscope.watch(model, "mu"):
        model(x)
    assert f"(2, {WIDTH}, 6, 7)" in str(caught.value)
    options: dict[str, Any] = {"every": 1, "alarms": (), "run": tmp_path}
    with raises(WatchError, subject="blocks"), Monitor(model, "mu", **options) as monitor:
        model(x)
        monitor.step()


class TwoStreams(nn.Module):
    """A block of TNT's kind: takes and returns pixels and patches."""

    def __init__(self) -> None:
        super().__init__()
        self.pixel, self.patch = nn.Linear(6, 6), nn.Linear(WIDTH, WIDTH)

    def forward(self, pixels: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        return pixels + self.pixel(pixels), patches + self.patch(patches)


class TransformerInTransformer(nn.Module):
    """Blocks that hand on two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoStreams() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        pixels, patches = x[..., :6].repeat(3, 1, 1), x[:, :3]
        for block in self.blocks:
            pixels, patches = block(pixels, patches)
        return patches


def test_it_is_said_which_of_two_streams_is_measured(tmp_path: Path) -> None:
    model, x = TransformerInTransformer(), torch.randn(2, 5, WIDTH)
    with rankscope.watch(model, "mu") as w:
        model(x)
    with Monitor(model, "mu", run=tmp_path, every=9, probe=x, alarms=()) as monitor:
        pass
    of_width = f"5 tokens of each sample were measured, not the 3 of width {WIDTH}"
    assert f"Blocks hand on two streams of tokens: {of_width}." in w.notes
    assert f"Blocks hand on two streams of tokens: {of_width}" in monitor.notes


def test_layouts_by_attention_are_those_that_its_numbers_allow() -> None:
    """All small shapes and numbers: samples of attention are those of the states, or several of each."""
    wanted = set()
    for shape in product(range(4), repeat=3):
        for samples, queries, keys in product(range(1, 5), range(1, 4), range(1, 4)):
            found = layout_in_attention(shape, (samples, queries, keys))
            fits = {
                "batch first": shape[1] == queries and samples in range(shape[0], 5, max(1, shape[0])),
                "token first": shape[0] == queries and samples in range(shape[1], 5, max(1, shape[1])),
                "width second": shape[2] == queries and samples == shape[0],
            }
            told = queries == keys and all(shape[:2]) and shape[0] != shape[1]
            expected = next((name for name, fit in fits.items() if fit), None) if told else None
            assert found == expected, (shape, samples, queries, keys)
            wanted.add(expected)
            assert layout_in_attention(shape, None) is None
    assert wanted == {"batch first", "token first", "width second", None}


def test_a_block_that_returns_fewer_tensors_than_the_one_before() -> None:
    """The second of two was taken before; of one, of which the next block takes nothing, that one is read."""
    a, b, c, other = torch.randn(4, 2, 3, 5).unbind()
    chain = BlockChain()
    chain.gave(1, [a, b], a.shape)
    found = chain.took([b])
    assert found is not None and found[0] == 1 and found[1] is b
    chain.gave(2, [c], c.shape)
    assert chain.took([other]) is None
    cosine = float(torch.cosine_similarity(c.double(), other.double(), dim=-1).mean())
    assert chain.broken == {2: pytest.approx(cosine)} and chain.linked == 1 and chain.unsure == []
    chain.gave(3, [a, b], a.shape)
    last = chain.ended()
    assert last is not None and last[1] is b
