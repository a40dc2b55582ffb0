"""Networks whose layers are read from their files one at a time: the same numbers, bit for bit."""

import gc
import json
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rankscope import certify, decompose, load, measure
from rankscope.errors import ArchitectureError, FileError, PathError, SourceError, TooLargeError
from rankscope.nets import Architecture, StreamedLayers, Transformer, devices
from rankscope.profiles import measure_together
from rankscope.sources import FAMILIES as KNOWN
from rankscope.sources import streamed_checkpoint
from tests.raising import raises
from tests.sources.models import model_of

FAMILIES = [
    ("llama", "llama"),
    ("gpt2", "scores by layer"),
    ("bert", "encoder"),
    ("albert", "groups"),
    ("mixtral", "qwen 2"),
    ("deepseek", "v2"),
    ("gemma3", "text"),
    ("t5", "gated"),
    ("xlnet", None),
    ("opt", None),
    ("vit", "image"),
    ("deepseek", "v3 with experts"),
    ("gpt_oss", "text"),
    ("deberta_v2", "v3"),
    ("wav2vec2", "pre-norm"),
    ("esm", "rotary"),
    ("phi", "half"),
]
"""Of each kind of tensor one: as they lie, fused, scaled, shared by layers, stacked of experts in the files,
made of a latent, shifted by one, with a table in the first block, in float32 whatever is asked for; buffers among
them, every other column, through a norm, of a direction and a length, angles that are saved, one norm of both."""


QUICK = ("llama", "albert", "t5", "xlnet", "vit")
"""Families whose tensors lie in ways that the others' do as well."""


def saved(folder: Path, name: str, label: str | None, dtype: torch.dtype = torch.bfloat16) -> Path:
    model = model_of(name, label or next(iter(KNOWN[name].tiny_configs()))).to(dtype)
    model.save_pretrained(folder, max_shard_size="3KB")
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in several files."""
    folder = saved(tmp_path_factory.mktemp("llama"), "llama", "llama")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def inputs(net: Transformer, samples: int = 3) -> Any:
    shape = samples, 9, net.arch.width
    X = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    padding = torch.zeros(shape[:2], dtype=torch.bool)
    padding[0, 6:] = True
    return X, padding


def equal(one: Transformer, other: Transformer) -> None:
    """Layers, tensor by tensor, and what the networks compute."""
    assert one.streamed and not other.streamed and one.arch == other.arch
    assert (one.dtype, one.device) == (other.dtype, other.device)
    assert one.fingerprint == other.fingerprint
    X, padding = inputs(one)
    X = X.to(one.dtype)
    mine, theirs = (net.run(X, padding, attention=True) for net in (one, other))
    for a, b in zip([*mine.states, *mine.attention], [*theirs.states, *theirs.attention], strict=True):
        assert torch.equal(a, b)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "label", "dtype"),
    [(*case, torch.bfloat16) for case in FAMILIES if case[0] in QUICK]
    + [pytest.param(*case, torch.bfloat16, marks=pytest.mark.slow) for case in FAMILIES if case[0] not in QUICK]
    + [(*FAMILIES[1], torch.float32), pytest.param(*FAMILIES[0], torch.float32, marks=pytest.mark.slow)],
)
def test_the_same_bits_as_in_memory(name: str, label: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(tmp_path, name, label, dtype)
    one, other = load(folder, stream=True), load(folder, stream=False)
    equal(one, other)
    equal(one.to(torch.float32), other.to(torch.float32))
    equal(load(folder, torch.bfloat16, stream=True), other.to(torch.bfloat16))
    # Read whole by transformers.
    model = getattr(transformers, KNOWN[name].loader).from_pretrained(folder, dtype=torch.float32)
    assert load(model).fingerprint == one.fingerprint
    assert one.origin.parity == other.origin.parity  # type: ignore[union-attr]
    assert one.origin.fingerprint() == other.origin.fingerprint()  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", ["san+skip+norm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("transformer", "san"))]
)
def test_what_is_measured_proved_and_taken_apart(llama: Path, variant: str) -> None:
    one, other = (load(llama, stream=stream).variant(variant) for stream in (True, False))
    X, padding = inputs(one)
    for arithmetic in ("deviation", "float64", "bfloat16"):
        a, b = (measure(net, X, padding, ["mu", "entropy"], arithmetic) for net in (one, other))
        assert a.table.equals(b.table)
        assert a.manifest.networks[0].fingerprint == b.manifest.networks[0].fingerprint
    c, d = (certify(net, X[:1, :4]) for net in (one, other))
    assert c.table.equals(d.table)
    e, f = (decompose(net, X, padding).by_length() for net in (one, other))
    assert torch.equal(e.embedding, f.embedding) and torch.equal(e.bias, f.bias)
    assert (e.counts, e.bias_counts, e.closure) == (f.counts, f.bias_counts, f.closure)


def test_biases_are_found_where_layers_are_read_one_by_one(tmp_path: Path) -> None:
    folder = saved(tmp_path, "gpt2", "decoder", torch.float32)
    one, other = load(folder, stream=True), load(folder)
    X, padding = inputs(one)
    e, f = (decompose(net, X, padding).by_length() for net in (one, other))
    assert torch.equal(e.bias, f.bias) and bool(f.bias.any())
    assert one.fingerprint == other.fingerprint


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"lengths": True}, {"sizes": True}])
def test_shares_by_source_token_need_one_layer_at_a_time(tmp_path: Path, options: dict[str, bool]) -> None:
    folder = saved(tmp_path, "gpt2", "decoder", torch.float32)
    one, other = load(folder, stream=True), load(folder, stream=False)
    assert one.streamed and not other.streamed
    X, padding = inputs(one)
    e, f = (decompose(net, X, padding).by_position(**options).table for net in (one, other))
    assert e.equals(f) and bool((f["share"] != 0).any())


@pytest.mark.slow
def test_a_decoder_reads_its_memory(tmp_path: Path) -> None:
    folder = saved(tmp_path, "t5_decoder", "plain")
    M = torch.randn(3, 5, 16, dtype=torch.float64)
    one, other = (load(folder, family="t5_decoder", stream=stream).with_memory(M) for stream in (True, False))
    X, padding = inputs(one)
    assert measure(one, X, padding).table.equals(measure(other, X, padding).table)


def counted(net: Transformer) -> Counter[int]:
    """How often each layer is read from now on."""
    layers = net.weights.layers
    assert isinstance(layers, StreamedLayers)
    reads: Counter[int] = Counter()
    read = layers.source._read

    def counting(place: int) -> Any:
        reads[place] += 1
        return read(place)

    layers.source._read = counting
    return reads


@pytest.mark.slow
def test_batches_share_one_sweep_and_variants_one_fingerprint(llama: Path) -> None:
    net, other = load(llama, stream=True), load(llama)
    told: list[tuple[int, int]] = []
    reads = counted(net)
    X, padding = inputs(net, samples=5)
    found = measure(net, X, padding, batch_size=2, progress=lambda done, every: told.append((done, every)))
    assert reads == {0: 1, 1: 1, 2: 1}  # the fingerprint, too, is of layers as they came by
    assert found.table.equals(measure(other, X, padding, batch_size=2).table)
    layers, batches = 3, 3
    assert [done for done, _ in told if done] == list(range(1, layers * batches + 1))
    assert {every for _, every in told} == {layers * batches}
    reads.clear()
    assert net.variant("san").fingerprint == other.variant("san").fingerprint
    assert not reads


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arithmetic", ["deviation", "float32"])
def test_variants_share_one_sweep(llama: Path, arithmetic: str) -> None:
    """In the dtype of the files and converted to another; the numbers are those of each alone."""
    net, whole = load(llama, stream=True, dtype=torch.bfloat16), load(llama, stream=False)
    X, padding = inputs(net)
    names = ["san", "san+skip", "transformer"]
    alone = [
        measure(whole.to(torch.bfloat16).variant(each), X, padding, arithmetic=arithmetic, batch_size=2)
        for each in names
    ]
    reads = counted(net)
    heard: list[tuple[int, int]] = []
    found = measure_together(
        {name: (net.variant(name), X, padding) for name in names},
        arithmetic=arithmetic, batch_size=2, progress=lambda *each: heard.append(each),
    )  # fmt: skip
    assert reads == dict.fromkeys(range(net.arch.layers), 1)
    assert heard == sorted(heard) and heard[-1] == (3000, 3000)
    for name, one, other in zip(names, found, alone, strict=True):
        assert one.variants == [name] and one.curve("mu").equal(other.curve("mu"))


@pytest.mark.slow
def test_one_layer_at_a_time_is_in_memory(llama: Path) -> None:
    net = load(llama, stream=True)
    alive: list[weakref.ref[Any]] = []
    most = 0
    layers = net.weights.layers
    assert isinstance(layers, StreamedLayers)
    read = layers.source._read

    def watching(place: int) -> Any:
        nonlocal most
        most = max(most, sum(each() is not None for each in alive))
        layer = read(place)
        alive.append(weakref.ref(layer.attention.query.weight))
        return layer

    layers.source._read = watching
    X, padding = inputs(net)
    measure(net, X, padding, confirm=True)
    measure(net, X, padding)
    decompose(net, X, padding).by_length()
    certify(net.variant("san"), X[:1])
    assert len(alive) > 20 and most <= 2


def test_what_is_converted_is_let_go_at_once() -> None:
    """And not when garbage is next collected: nothing tells Python how large a tensor is."""
    net = Transformer.random(Architecture(layers=1, width=8, heads=2))
    gc.disable()
    try:
        moved = net.to(torch.float32)
        left = weakref.ref(moved.weights.layers[0].attention.query.weight)
        assert left() is not None
        del moved
        assert left() is None
    finally:
        gc.enable()


def test_it_reaches_other_depths_and_devices(llama: Path) -> None:
    one, other = load(llama, stream=True), load(llama)
    again = one.variant(layers=[3, 1, 1, 2])
    equal(again, other.variant(layers=[3, 1, 1, 2]))
    assert "read one at a time" in repr(again.weights) and "one at a time" in repr(one.origin)
    held = one.held()
    assert not held.streamed and held.held() is held and held.fingerprint == one.fingerprint


def test_what_cannot_be_streamed(llama: Path, tmp_path: Path) -> None:
    model = model_of("llama", "llama")
    with raises(SourceError, "stream"):
        load(model, stream=True)
    pickled = tmp_path / "bin"
    model.config.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    with raises(SourceError, "stream"):
        load(pickled, stream=True)
    assert not load(pickled).streamed
    load(llama).save(tmp_path / "net")
    with raises(SourceError, "stream"):
        load(tmp_path / "net", stream=True)
    net = load(llama, stream=True)
    parts = decompose(net, *inputs(net))
    with raises(PathError, "stream"):
        parts.by_head()
    assert parts.by_layer().equals(decompose(net.held(), *inputs(net)).by_layer())
    for act in (net.state_dict, lambda: net.save(tmp_path / "other"), net.to_hf):
        with raises(ArchitectureError, "stream"):
            act()
    assert not (tmp_path / "other").exists()


def test_quantised_weights_are_read_whole(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    for path in llama.glob("*.safetensors*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with raises(SourceError, "stream"):
        load(tmp_path, stream=True)


def test_files_that_change_meanwhile_are_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    model_of("llama", "llama").save_pretrained(folder)
    net = load(folder, stream=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "norm.weight": 2 * tensors["norm.weight"]}, path, {"format": "pt"})
    with raises(FileError, "files"):
        net.run(inputs(net)[0])
    path.unlink()
    with raises(FileError, "files"):
        net.run(inputs(net)[0])


def test_a_network_in_memory_does_not_hold_its_files(tmp_path: Path) -> None:
    """What a file is overwritten with must not become the network's weights."""
    model_of("gpt2", "decoder").save_pretrained(tmp_path)  # in float64: nothing had to be converted
    net = load(tmp_path)
    X, padding = inputs(net)
    before, ids = net.run(X, padding).output, torch.arange(1, 9)[None]
    embedding_parts = net.encode(ids).X
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 8)
        file.write(bytes(path.stat().st_size - path.stat().st_size // 8))
    assert torch.equal(net.run(X, padding).output, before) and torch.equal(net.encode(ids).X, embedding_parts)


def test_what_does_not_fit_is_streamed_by_itself_or_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_checkpoint, "free_memory", lambda device: 10_000)
    assert load(llama).streamed
    with raises(TooLargeError, "memory"):
        load(llama, dtype=torch.float32, stream=False)
    monkeypatch.setattr(streamed_checkpoint, "free_memory", devices.free_memory)
    assert not load(llama).streamed


def test_a_remedy_goes_onto_a_network_in_memory(llama: Path) -> None:
    with raises(ArchitectureError, "stream"):
        load(llama, stream=True).with_remedy("attnscale")
