"""Networks written and read again, bit for bit."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope.errors import ArchitectureError, FileError, SourceError, TokensError
from rankscope.nets import Architecture, Experts, Transformer
from rankscope.sources import fresh, load
from rankscope.sources.origin import CheckpointOrigin
from tests.builders import awake, normal
from tests.raising import raises
from tests.sources.models import model_of

ARCH = Architecture(layers=3, width=8, heads=2, mlp="experts", activation="silu",
                    experts=Experts(number=3, chosen=1, width=4, dense_layers=(2,)))  # fmt: skip


def same(one: Transformer, other: Transformer) -> None:
    assert one.arch == other.arch and one.fingerprint == other.fingerprint and one.dtype == other.dtype
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_network_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    net = awake(ARCH).to(dtype)
    for variant in (net, net.variant(skip=0.5, mask="causal", heads={2: [0]}), net.variant(mlp=False, norm=False)):
        assert variant.save(tmp_path) == tmp_path  # over the one before
        again = load(tmp_path)
        same(variant, again)
        X = normal(2, 5, 8).to(dtype)
        assert torch.equal(variant.run(X).output, again.run(X).output)
    assert load(tmp_path, torch.float64).dtype == torch.float64


def test_layers_that_come_again_are_kept_once(tmp_path: Path) -> None:
    net = awake(Architecture(layers=1, width=8, heads=2))
    net.save(tmp_path / "one")
    net.variant(layers=6).save(tmp_path / "many")
    sizes = [(tmp_path / each / "network.safetensors").stat().st_size for each in ("one", "many")]
    assert sizes[0] == sizes[1]
    again = load(tmp_path / "many")
    same(net.variant(layers=6), again)
    assert again.weights.layers[0].attention.key.weight is again.weights.layers[5].attention.key.weight


@pytest.mark.parametrize(("name", "label"), [("bert", "encoder"), ("opt", "post-norm, narrow"), ("vit", "image")])
def test_a_loaded_network_keeps_its_embedding(name: str, label: str, tmp_path: Path) -> None:
    net = load(model_of(name, label))
    net.variant(skip=False).save(tmp_path)
    again = load(tmp_path)
    given: Any = torch.randint(3, 60, (2, 6))
    if name == "vit":
        given = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(net.encode(given).X, again.encode(given).X)
    origin: Any = again.origin
    assert isinstance(origin, CheckpointOrigin) and origin.described() == net.origin.described()  # type: ignore[union-attr]
    if name == "bert":
        with raises(SourceError, "tokenizer"):
            again.encode("no words")


@pytest.mark.slow
def test_text_is_encoded_as_before(tmp_path: Path) -> None:
    net = load("minilm").variant(layers=2)
    net.save(tmp_path / "trained")
    drawn = fresh("bert-tiny", seed=3)
    drawn.save(tmp_path / "drawn")
    for one, folder in ((net, "trained"), (drawn, "drawn")):
        again = load(tmp_path / folder)
        assert torch.equal(again.encode("Call me Ishmael.").X, one.encode("Call me Ishmael.").X)
        assert again.origin is not None and again.origin.fingerprint() == one.origin.fingerprint()  # type: ignore[union-attr]
    other = load(tmp_path / "trained", tokenizer=lambda texts, **_: {"input_ids": [[7] for _ in texts]})
    assert other.encode("Call me Ishmael.").X.shape == (1, 1, 384)


def test_a_network_without_origin_has_none_again(tmp_path: Path) -> None:
    awake(ARCH).save(tmp_path)
    with raises(TokensError, "texts"):
        load(tmp_path).encode("text")


def test_what_is_damaged_is_a_sentence(tmp_path: Path) -> None:
    net = awake(ARCH)
    net.save(tmp_path)
    about, tensors = tmp_path / "rankscope.json", tmp_path / "network.safetensors"
    whole, fields = tensors.read_bytes(), json.loads(about.read_text())
    tensors.write_bytes(whole[:-40])
    with raises(FileError, str(tensors)):
        load(tmp_path)
    awake(ARCH, seed=1).save(tmp_path / "other")
    tensors.write_bytes((tmp_path / "other" / "network.safetensors").read_bytes())
    with raises(FileError, "files"):
        load(tmp_path)
    about.write_text(json.dumps({**fields, "format": 99}))
    with raises(FileError, str(tmp_path)) as caught:
        load(tmp_path)
    assert "99" in str(caught.value)
    about.write_text("{")
    with raises(FileError, str(tmp_path)):
        load(tmp_path)
    (tmp_path / "file").write_text("")
    with raises(FileError, str(tmp_path / "file")):
        net.save(tmp_path / "file")


@dataclass(frozen=True)
class Still:
    """A part that does nothing."""

    name: str = "still"
    place: str = "mlp"

    def plain(self, x: Any, block: Any, rules: Any, inside: Any) -> Any:
        return x


def test_parts_of_ones_own_cannot_come_from_a_file(tmp_path: Path) -> None:
    arch = Architecture(layers=1, width=8, heads=2, parts=(Still(),))  # type: ignore[arg-type]
    Transformer.random(arch).save(tmp_path)
    with raises(ArchitectureError, "still"):
        load(tmp_path)
