"""Files of weights that other trainers leave: read without running code, and what is loaded computes the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, BertConfig, BertForMaskedLM

from rankscope import load
from rankscope.errors import FileError
from rankscope.sources.weight_files import training_step, write_folder
from tests.monitor.loops import nanogpt
from tests.raising import raises

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def read_back(folder: Path) -> Any:
    """The model that transformers reads from a folder."""
    return AutoModel.from_pretrained(folder, local_files_only=True).double().eval()


@pytest.mark.parametrize(
    ("name", "content", "step"),
    [
        ("epoch=1-step=200.ckpt", {}, 200),
        ("ckpt_300.pt", {}, 300),
        ("ckpt.pt", {"iter_num": 250}, 250),
        ("last.ckpt", {"global_step": 40}, 40),
        ("best.pt", {"model": {}}, None),
    ],
)
def test_the_step_is_in_the_name_or_in_the_file(name: str, content: Any, step: int | None, tmp_path: Path) -> None:
    torch.save(content, tmp_path / name)
    assert training_step(tmp_path / name) == step


@pytest.mark.parametrize("before", ["", "model.", "module.", "_orig_mod.module.", "lit.net."])
def test_weights_are_found_under_whatever_name_stands_before_them(before: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(vocab_size=20, **SMALL)).double().eval()
    model.config.save_pretrained(tmp_path / "config")
    weights = {before + name: x for name, x in model.state_dict().items()}
    torch.save(weights, tmp_path / "a.pt")
    write_folder(tmp_path / "a.pt", tmp_path / "config", tmp_path / "out")
    ids = torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(read_back(tmp_path / "out")(ids).last_hidden_state, model.bert(ids).last_hidden_state)
    assert load(str(tmp_path / "out")).arch.layers == 2


@pytest.mark.parametrize("bias", [False, True])
def test_a_file_of_nanogpt_needs_no_config(bias: bool, tmp_path: Path) -> None:
    """Its matrices lie the other way round, some are square, and it may have no biases."""
    torch.manual_seed(0)
    model = nanogpt.GPT(dropout=0.0, bias=bias).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    arguments: dict[str, Any] = {
        "n_layer": nanogpt.LAYERS,
        "n_head": nanogpt.HEADS,
        "n_embd": nanogpt.WIDTH,
        "bias": bias,
    }
    arguments |= {"block_size": nanogpt.BLOCK_SIZE, "vocab_size": nanogpt.WORDS, "dropout": 0.0}
    weights = {f"_orig_mod.{name}": x for name, x in model.state_dict().items()}
    torch.save({"model": weights, "model_args": arguments, "iter_num": 30}, tmp_path / "ckpt.pt")
    write_folder(tmp_path / "ckpt.pt", None, tmp_path / "out")
    ids = torch.randint(nanogpt.WORDS, (2, 6), generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []
    model.double().transformer["ln_f"].register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        model(ids)
        assert torch.allclose(read_back(tmp_path / "out")(ids).last_hidden_state, seen[0], rtol=0, atol=1e-12)
    assert load(str(tmp_path / "out")).arch.layers == nanogpt.LAYERS


def test_nothing_in_a_file_is_run_and_what_is_none_is_refused(tmp_path: Path) -> None:
    for name, content, words in (
        ("pickled.pt", {"model": torch.nn.Linear(2, 2)}, "would run code: save its state_dict"),
        ("list.pt", [torch.ones(2)], "it holds a list"),
        ("numbers.pt", {"loss": 1.0}, "it holds loss"),
        ("deeper.pt", {"encoder.layer.0.output.dense.bias": torch.ones(2),
                       "encoder.layer.2.output.dense.bias": torch.ones(2)}, "more layers than"),
        ("other.pt", {"unlike": torch.ones(2)}, "none has such a name"),
    ):  # fmt: skip
        torch.save(content, tmp_path / name)
        BertConfig(vocab_size=20, **SMALL).save_pretrained(tmp_path)
        with raises(FileError, subject=str(tmp_path / name)) as caught:
            write_folder(tmp_path / name, tmp_path, tmp_path / "out")
        assert words in str(caught.value)
    (tmp_path / "cut.pt").write_bytes(b"cut off")
    with raises(FileError, subject=str(tmp_path / "cut.pt")):
        training_step(tmp_path / "cut.pt")
