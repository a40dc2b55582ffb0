"""A module of one's own and the family that maps it: parity, gradients, padding, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from rankscope import Architecture, Transformer
from rankscope.errors import ParityError, SourceError
from rankscope.sources import FAMILIES, Family, load
from tests.raising import raises

WIDTH, HEADS = 16, 4


class Block(nn.Module):
    """Post-norm, with a window; keeps the weights of its attention."""

    P: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.after1, self.after2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.mT / (WIDTH / HEADS) ** 0.5).masked_fill(~visible, -torch.inf)
        self.P = scores.softmax(-1).nan_to_num(0.0)
        x = self.after1(x + self.o((self.P @ v).transpose(1, 2).flatten(2)))
        return self.after2(x + self.down(F.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.words = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        near = (at[:, None] - at).abs() <= self.window
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, near & attention_mask.bool()[:, None, None])
        return self.head(x)


class Own(Family):
    name, stack = "own", "blocks"
    embedding_parts: ClassVar = {"words": "words"}
    parts: ClassVar = {
        "attention.query": "q", "attention.key": "k", "attention.value": "v", "attention.output": "o",
        "attention_norm": "after1", "mlp.up": "up", "mlp.down": "down", "mlp_norm": "after2",
    }  # fmt: skip
    window: ClassVar[int | None] = None

    def architecture(self, config: Any) -> Architecture:
        return Architecture(
            layers=3, width=WIDTH, heads=HEADS, mlp_width=24, activation="relu", norm_eps=1e-5,
            mask=f"window:{self.window or config.window}",
        )  # fmt: skip


class Handing(Own):
    """Gives the attention as well."""

    def call(self, model: Any, given: Mapping[str, Any], attention: bool) -> tuple[Tensor | None, list[Tensor]]:
        super().call(model, given, attention)
        return None, [block.P for block in model.blocks] if attention else []


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net(window=40)


def test_states_gradients_and_padding_are_the_modules(model: Net) -> None:
    net: Any = load(model, family=Own())
    parity = net.origin.parity
    assert parity.states < 1e-12 and parity.attention is None and parity.tokens > 40
    assert "attention" not in repr(net.origin) and net.arch.biases == ("mlp", "norm")
    wide = model.double()
    ids = torch.randint(0, 50, (2, 60))
    padding = torch.arange(60)[None] >= torch.tensor([60, 51])[:, None]
    X = net.encode(ids, padding=padding, max_length=60).X.requires_grad_()
    theirs = wide.words(ids).detach().requires_grad_()
    at = torch.arange(60)
    x = theirs
    for block in wide.blocks:
        x = block(x, ((at[:, None] - at).abs() <= 40) & ~padding[:, None, None])
    mine = net.run(X, padding).output
    torch.testing.assert_close(mine[~padding], x[~padding], rtol=0, atol=1e-12)
    for each in (mine, x):
        each[~padding].square().sum().backward()
    torch.testing.assert_close(X.grad[~padding], theirs.grad[~padding], rtol=1e-10, atol=1e-12)


def test_attention_is_compared_where_the_family_gives_it(model: Net) -> None:
    net: Any = load(model, family=Handing())
    assert net.origin.parity.attention < 1e-12

    class Turned(Handing):
        parts: ClassVar = Own.parts | {"attention.query": "k", "attention.key": "q"}

    with raises(ParityError, "states"):
        Turned.name = "turned"
        load(model, family=Turned())


def test_a_window_that_is_wrong_by_one_is_found(model: Net) -> None:
    """It is longer than a usual probe: the module names it, and the probe goes beyond."""

    class Wider(Own):
        window: ClassVar = 41

    with raises(ParityError, "states"):
        load(model, family=Wider())


def test_it_is_saved_and_read_and_is_no_model_of_transformers(model: Net, tmp_path: Path) -> None:
    net = load(model, family=Own())
    net.save(tmp_path)
    again: Transformer = load(tmp_path)
    assert again.fingerprint == net.fingerprint and again.origin.family == "own"  # type: ignore[union-attr]
    with raises(SourceError, "family"):
        net.to_hf()


def test_without_its_family_it_is_refused(model: Net) -> None:
    with raises(SourceError, "source"):
        load(model)


def test_a_checkpoint_for_a_family_without_small_configs(tmp_path: Path) -> None:
    class Mine(type(FAMILIES["bert"])):
        name, types = "mine", ()
        tiny_fields: ClassVar[dict[str, Any]] = {}

    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = BertModel(BertConfig(**sizes, intermediate_size=24, vocab_size=60))
    bert.save_pretrained(tmp_path)
    assert load(tmp_path, family=Mine()).fingerprint == load(bert).fingerprint
