"""Where a model may come from, and what is said of a bad one. Real files, real transformers, no network."""

import json
import math
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from rankscope.errors import ArchitectureError, FileError, MissingExtraError, SourceError, TokensError
from rankscope.extras import EXTRAS
from rankscope.nets import Architecture, Transformer
from rankscope.sources import FAMILIES, bundled_excerpts, fresh, load, locate
from rankscope.sources.checkpoint import answers
from tests.raising import raises
from tests.sources.models import model_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT on disk, as `save_pretrained` writes it."""
    folder = tmp_path_factory.mktemp("bert")
    model_of("bert", "encoder").float().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture(scope="module")
def minilm() -> Transformer:
    """The embedded model, loaded once for the tests that read it."""
    return load("minilm")


def refused(subject: str, *given: Any, by: Callable[..., Any] = load, **options: Any) -> None:
    """Loading, or what else it is `by`, ends with an error about this subject, which has all of these `names`."""
    kind, names = options.pop("kind", SourceError if by is load else TokensError), options.pop("names", ())
    with raises(kind, subject) as caught:
        by(*given, **options)
    assert all(name in str(caught.value) for name in names), str(caught.value)


def configure(folder: Path, **fields: Any) -> None:
    """Change the config."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def put(weights: dict[str, torch.Tensor], folder: Path) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def same(one: Transformer, other: Transformer) -> bool:
    return one.fingerprint == other.fingerprint


def test_a_directory_and_the_model_in_memory_are_the_same_network(saved: Path) -> None:
    from transformers import BertModel

    model: Any = BertModel.from_pretrained(saved)
    assert same(load(saved), load(model)) and same(load(str(saved)), load(model.double()))


def test_dtype_and_device(saved: Path) -> None:
    net = load(saved, dtype=torch.float32, device="cpu")
    assert net.dtype == torch.float32 and net.encode(torch.tensor([[5, 6]])).X.dtype == torch.float32


def test_a_bin_file_is_read_without_unpickling(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    torch.save(weights, copied / "pytorch_model.bin")
    expected = load(copied)
    assert expected.origin is not None

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (copied / "sprung",))

    (copied / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    refused("weights", copied)
    torch.save({"embeddings.word_embeddings.weight": Trap()}, copied / "pytorch_model.bin")
    refused("weights", copied)
    assert not (copied / "sprung").exists()


def test_safetensors_come_first(copied: Path) -> None:
    expected = load(copied)
    (copied / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    assert same(load(copied), expected)


def test_damaged_and_truncated_weights(copied: Path) -> None:
    whole = (copied / "model.safetensors").read_bytes()
    for bad in (whole[: len(whole) // 2], b"\xff" * 100, b""):
        (copied / "model.safetensors").write_bytes(bad)
        refused("weights", copied)


def test_weights_that_do_not_fit_their_config(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    configure(copied, num_hidden_layers=5)
    refused("weights", copied, names=("encoder.layer.3",))
    configure(copied, num_hidden_layers=2)
    refused("weights", copied, names=("encoder.layer.2",))
    configure(copied, num_hidden_layers=3, hidden_size=32)
    refused("weights", copied, names=("(16,)", "(32,)"))
    configure(copied, hidden_size=16)
    # What the network does not read may be missing: a pooler never trained.
    put({k: v for k, v in weights.items() if "pooler" not in k}, copied)
    load(copied)
    put({k: v for k, v in weights.items() if "layer.1.output.dense.bias" not in k}, copied)
    refused("weights", copied, names=("encoder.layer.1",))


def test_a_config_that_does_not_say_its_model_type(copied: Path) -> None:
    expected = load(copied)
    fields = json.loads((copied / "config.json").read_text())
    del fields["model_type"]
    (copied / "config.json").write_text(json.dumps(fields))
    refused("model_type", copied)
    assert same(load(copied, family="bert"), expected)
    refused("family", copied, family="brt", names=("'bert'",))


def test_damaged_and_missing_configs(copied: Path, tmp_path: Path) -> None:
    (copied / "config.json").write_text("{")
    refused("config.json", copied, kind=FileError)
    (copied / "config.json").write_text("[]")
    refused("config.json", copied, kind=FileError)
    (copied / "config.json").unlink()
    refused("config.json", copied, kind=FileError)
    refused("source", copied / "model.safetensors", kind=FileError)


def test_unknown_model_types_and_code_that_comes_along(copied: Path) -> None:
    configure(copied, model_type="funnel")
    refused("model_type", copied, names=("'funnel'",))
    for name in ("modeling_own.py", "configuration_own.py"):
        (copied / name).write_text("raise RuntimeError('ran')\n")
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    configure(copied, model_type="own", auto_map=own)
    refused("trust_remote_code", copied)


@pytest.mark.slow
def test_an_id_on_the_hub_from_the_cache_with_its_revision(saved: Path, tmp_path: Path) -> None:
    """The layout of the cache of huggingface_hub, filled by hand: what a user has after a download."""
    home = tmp_path / "models--someone--small"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(saved, home / "snapshots" / commit)
    other = model_of("bert", "encoder", seed=6).float()
    other.save_pretrained(home / "snapshots" / ("b" * 40))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("a" * 40)
    (home / "refs" / "other").write_text("b" * 40)
    cached: Any = {"cache_dir": str(tmp_path), "local_files_only": True}
    assert same(load("someone/small", **cached), load(saved))
    assert same(load("someone/small", revision="other", **cached), load(other))
    refused("local_files_only", "someone/big", **cached, names=("someone/big",))


def test_a_name_that_only_fresh_knows(tmp_path: Path) -> None:
    nowhere: Any = {"cache_dir": str(tmp_path), "local_files_only": True}
    refused("source", "bert-tiny", **nowhere, names=("fresh('bert-tiny')",))
    refused("local_files_only", "gpt2", **nowhere, names=("fresh('gpt2')",))
    refused("source", "minilmm", **nowhere, names=("load('minilm')",))
    refused("source", "./models/mine", **nowhere, names=("./models/mine",))
    assert fresh("Bert_Tiny").fingerprint == fresh("bert-tiny").fingerprint
    assert locate("MiniLM", {}).name == "minilm"


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A port of this machine on which nobody listens is a hub without a network."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert not answers()
        refused("hub", "someone/small", cache_dir=str(tmp_path), names=("127.0.0.1:", "someone/small"))
        taken.listen()
        assert answers()


def test_what_is_no_model() -> None:
    refused("source", torch.nn.Linear(2, 2))
    refused("source", 3)


def test_a_missing_extra_names_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.sources.checkpoint.MINILM", "a_package_that_is_not_there")
    monkeypatch.setitem(EXTRAS, "a_package_that_is_not_there", "demo")
    refused("", "minilm", {}, by=locate, kind=MissingExtraError, names=("rankscope[demo]",))


def test_without_a_tokenizer_ids_do(saved: Path) -> None:
    net = load(saved)
    ids = torch.tensor([[4, 5, 6], [7, 8, 9]])
    refused("tokenizer", "Call me", by=net.encode, kind=SourceError)
    X, padding = net.encode(ids, padding=torch.tensor([[False, False, False], [False, True, True]]))
    assert X.shape == (2, 3, 16) and padding.sum() == 2 and not X[padding].any()
    assert net.encode(ids, max_length=2).X.shape == (2, 2, 16)
    refused("input_ids", torch.tensor([[4, 60]]), by=net.encode, names=("0..59", "4..60"))
    refused("tokens", torch.zeros(1, 33, dtype=torch.long), by=net.encode, names=("32", "33"))
    refused("input_ids", torch.zeros(1, 3), by=net.encode)
    refused("padding", ids, padding=torch.tensor([True]), by=net.encode)
    memory = load(model_of("gpt2", "decoder"))
    refused("tokenizer", "Call me", by=memory.encode, kind=SourceError)


def test_images_only_where_the_network_sees() -> None:
    net = load(model_of("vit", "image"))
    refused("texts", "Call me Ishmael.", by=net.encode)
    other = torch.zeros(1, 3, 13, 12)
    refused("images", other, by=net.encode, names=("[batch, 3, 12, 12]",))


def test_padding_anywhere_counts_positions_of_real_tokens(saved: Path) -> None:
    net = load(saved)
    ids = torch.tensor([[4, 5, 6, 0, 0]])
    right = torch.tensor([[False, False, False, True, True]])
    X = net.encode(ids, padding=right).X
    left = net.encode(ids.roll(2, 1), padding=right.roll(2, 1)).X
    assert torch.equal(left.roll(-2, 1), X)


def test_minilm_is_a_trained_english_bert(minilm: Transformer) -> None:
    """Its last hidden state, averaged over tokens, is the sentence embedding it was trained for: sentences
    that mean the same lie closer than sentences that do not."""
    net = minilm
    assert (net.arch.layers, net.arch.heads, net.arch.width) == (6, 12, 384)
    parity: Any = net.origin
    assert parity.parity.states < 1e-12 and parity.parity.attention < 1e-12
    texts = ["A man is eating food.", "Someone has a meal.", "The stock market fell sharply today."]
    X, padding = net.encode(texts)
    real = (~padding).double()[..., None]
    pooled = (net.run(X, padding).output * real).sum(1) / real.sum(1)
    cosine = torch.nn.functional.cosine_similarity(pooled[:, None], pooled[None], dim=-1)
    assert cosine[0, 1] > 0.5 > 0.2 > cosine[0, 2]
    assert parity.words(texts[:1], 128) == [["[CLS]", "a", "man", "is", "eating", "food", ".", "[SEP]"]]
    assert net.encode(bundled_excerpts(128)[0], max_length=100).X.shape == (1, 100, 384)
    assert net.variant(skip=False).origin is net.origin


def test_models_that_only_look_like_one_of_a_family(saved: Path) -> None:
    refused("family", saved, family="roberta")
    bert = model_of("bert", "encoder")
    refused("source", bert.encoder)
    refused("weights", model_of("bert", "encoder").to("meta"))
    refused("family", bert, family="roberta")
    refused("tokenizer", bert, tokenizer="bert")


def test_parts_and_kinds_of_a_family_that_are_not_mapped() -> None:
    from transformers import Dinov2Backbone, T5Model

    decoder = T5Model(FAMILIES["t5"].tiny_configs()["plain"]).decoder
    refused("is_decoder", decoder, family="t5")
    config = next(iter(FAMILIES["dinov2"].tiny_configs().values()))
    refused("family", Dinov2Backbone(config))


def test_weights_that_are_no_numbers(copied: Path) -> None:
    """Parity cannot judge them: NaN differs from NaN."""
    weights = load_file(copied / "model.safetensors")
    places = ("embeddings.word_embeddings.weight", "encoder.layer.1.output.dense.bias")
    for key, bad in zip(places, (math.nan, math.inf), strict=True):
        damaged = {**weights, key: weights[key].clone()}
        damaged[key][3] = bad
        put(damaged, copied)
        refused("weights", copied)


def test_a_sharded_checkpoint(saved: Path, tmp_path: Path) -> None:
    model_of("bert", "encoder").float().save_pretrained(tmp_path, max_shard_size="4KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and same(load(tmp_path), load(saved))
    shards[1].unlink()
    refused("source", tmp_path)


def test_a_revision_is_recorded_only_where_there_are_revisions(saved: Path) -> None:
    origin: Any = load(saved, revision="v7").origin
    assert "revision" not in origin.described()


def test_a_length_without_room_for_special_tokens(minilm: Transformer) -> None:
    """Tokenizers cut nothing where the special tokens alone are longer; the text would come whole."""
    assert minilm.encode("the whale " * 50, max_length=2).X.shape[1] == 2
    refused("max_length", "the whale " * 50, max_length=1, by=minilm.encode)


def test_a_config_that_asks_for_more_layers_than_memory_holds(copied: Path) -> None:
    """Before a module is built for each: this once ran until memory was full."""
    for fields in ({}, {"model_type": "albert"}, {"model_type": "qwen2"}):
        configure(copied, num_hidden_layers=10**9, **fields)
        refused("memory", copied, names=("1000000000",))
    refused("layers", Architecture(layers=10**6, width=4096, heads=2), by=fresh, kind=ArchitectureError)


def test_ids_come_whole(minilm: Transformer) -> None:
    net = load(model_of("llama", "llama"))
    ids = torch.randint(1, 60, (1, 300))
    assert net.encode(ids).X.shape == (1, 300, 16)
    assert net.encode(ids, 128).X.shape == (1, 128, 16)
    padding = torch.arange(300)[None] >= 290
    assert net.encode(ids, padding=padding).padding.sum() == 10
    refused("tokens", torch.full((1, 600), 5), by=minilm.encode, names=("512", "600"))
    assert minilm.encode("the whale " * 200).X.shape[1] == 128


def test_texts_that_cannot_be_tokenised(saved: Path, minilm: Transformer) -> None:
    net = minilm
    refused("texts", ["a", "a \ud800"], by=net.encode)
    refused("padding", ["a"], padding=torch.zeros(1, 3, dtype=torch.bool), by=net.encode)
    refused("input_ids", torch.tensor([4, 5, 6]), by=load(saved).encode)


def test_scores_upcast_to_float32_are_the_usual_ones() -> None:
    """Stanford's GPT-2 models. transformers' upcast cannot run in float64; in float32 it says what we say."""
    from transformers import GPT2Model

    torch.manual_seed(0)
    config = FAMILIES["gpt2"].tiny_configs()["scores by layer"]
    config.reorder_and_upcast_attn = True
    model: Any = GPT2Model._from_config(config, attn_implementation="eager").eval()
    net, ids = load(model), torch.randint(1, 60, (2, 9))
    assert all(block.attn.reorder_and_upcast_attn for block in model.h)  # the user's own is left as it is
    with torch.no_grad():
        theirs = model(ids).last_hidden_state.double()
    assert torch.allclose(net.run(*net.encode(ids)).output, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "hint"),
    [
        ("falcon_mamba", "recurrent"),
        ("funnel", "'funnel': watch"),
        ("fnet", "Fourier"),
        ("llama9", "'llama9': watch"),
        ("layoutlmv3", "page"),
        ("deepseek_v32", "indexer"),
        ("swin", "windows"),
        ("wavlm", "gate"),
        ("llama4_text", "chunks"),
        ("lama", "'llama'"),
    ],
)
def test_an_unknown_model_type_gets_no_misleading_hint(copied: Path, model_type: str, hint: str) -> None:
    """A type that transformers has is never taken for a slip of another."""
    configure(copied, model_type=model_type)
    refused("model_type", copied, names=(repr(model_type), hint))


@pytest.mark.slow
def test_a_type_that_is_built_like_a_known_one_names_it(copied: Path) -> None:
    """ERNIE is a BERT by another name; RoBERTa with norms before has BERT's parts and one norm more."""
    from transformers import ErnieModel, RobertaPreLayerNormModel

    configure(copied, model_type="ernie")
    ernie: Any = ErnieModel.from_pretrained(copied)
    for source in (copied, ernie):
        refused("model_type", source, names=("family='bert' or 'roberta' or 'electra'",))
        assert load(source, family="bert").arch.layers == 3
    fields = json.loads(json.dumps(FAMILIES["bert"].tiny_configs()["encoder"].to_dict()))
    config: Any = RobertaPreLayerNormModel.config_class(**{**fields, "model_type": "roberta-prelayernorm"})
    refused("model_type", RobertaPreLayerNormModel(config), names=("'roberta-prelayernorm': watch",))


def test_a_folder_without_a_tokenizer_is_not_read_with_one_that_knows_no_word(tmp_path: Path) -> None:
    """transformers makes one of special tokens and a mark for spaces for it, which encoded all texts alike."""
    model_of("mt5", "gated").save_pretrained(tmp_path)
    with raises(SourceError, "tokenizer"):
        load(tmp_path).encode(["Call me Ishmael."])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["marian", "marian_decoder"])
def test_tables_that_a_model_computes_may_be_missing(family: str, tmp_path: Path) -> None:
    """Published Marians come without their sinusoids; cosines are in the second half of a row."""
    model = model_of(family, "plain")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    put({name: part for name, part in weights.items() if "embed_positions" not in name}, tmp_path)
    net: Any = load(tmp_path, family=family)
    angle = torch.arange(32)[:, None] / 10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    sinusoids = torch.cat([angle.sin(), angle.cos()], -1)
    torch.testing.assert_close(net.origin.embedding.positions, sinusoids, rtol=0, atol=1e-7)  # float32 there
    put({name: part for name, part in weights.items() if "layers.1.fc1.weight" not in name}, tmp_path)
    refused("weights", tmp_path, family=family)


def test_a_family_by_a_name_that_there_is_not_gets_none_either() -> None:
    model = model_of("bart", "plain")
    for name, hint in (("mamba", "'mamba'"), ("bart_decode", "'bart_decoder'")):
        with raises(SourceError, "family") as caught:
            load(model, family=name)
        assert hint in str(caught.value)
    assert load(model, family="bart_encoder").fingerprint == load(model).fingerprint


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_a_model_of_two_towers_is_loaded_as_one_of_them(kind: str, tmp_path: Path) -> None:
    import transformers

    name = kind.lower()
    towers = {part: FAMILIES[f"{name}_{part}"].tiny_configs() for part in ("text", "vision")}
    configs = {f"{part}_config": next(iter(tiny_configs.values())).to_dict() for part, tiny_configs in towers.items()}
    model: Any = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**configs))
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        refused("model_type", source, names=(f"{name}_text", f"{name}_vision"))
    for part in towers:
        family = f"{name}_{part}"
        net, own = load(model, family=family), load(getattr(model, f"{part}_model"))
        assert same(net, own) and same(load(tmp_path, family=family), own)


def test_a_model_of_texts_and_images_is_loaded_as_its_text_model() -> None:
    """Mistral 3 goes by a type of its own, Qwen3-VL by that of both."""
    from transformers import Mistral3Config, Mistral3Model, Qwen3VLConfig, Qwen3VLModel

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
    pixtral = {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
    images = {"depth": 1, "num_heads": 2, "out_hidden_size": 16, "deepstack_visual_indexes": [0]}
    mistral, qwen = FAMILIES["llama"].tiny_configs()["mistral"], FAMILIES["qwen2_vl"].tiny_configs()["qwen 3"]
    torch.manual_seed(0)
    models: tuple[Any, ...] = (
        Mistral3Model(Mistral3Config(text_config=mistral.to_dict(), vision_config=sizes | pixtral)),
        Qwen3VLModel(Qwen3VLConfig(text_config=qwen.to_dict(), vision_config=sizes | images)),
    )
    for model, family in zip(models, ("llama", "qwen2_vl"), strict=True):
        net: Any = load(model)
        assert net.origin.family == family and same(net, load(model.language_model))


def test_an_unknown_option_is_a_sentence_that_names_those_there_are() -> None:
    with raises(SourceError, "revison") as caught:
        load("minilm", revison="main")  # type: ignore[call-arg]
    assert "did you mean 'revision'?" in str(caught.value) and "trust_remote_code" in str(caught.value)
