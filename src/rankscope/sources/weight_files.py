"""Files of weights that other trainers leave, as folders that `load` reads: Lightning's `.ckpt`, `.pt` of plain loops.

`rankscope checkpoints` calls `training_step` to put files in order and `write_folder` before it loads one. A file says
which weights there are, not what is computed with them: the `config.json` of a model says that, or, in nanoGPT's files,
the arguments that they hold. Files are read with `weights_only=True`: nothing in them is run.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import FileError
from rankscope.sources.checkpoint import empty_model

ENDINGS = (".ckpt", ".pt", ".pth")  # Of the names of files of weights
STEPS = ("global_step", "iter_num", "step")  # what trainers call the step in a file
WEIGHTS = ("state_dict", "model_state_dict", "model")  # what they call the weights
WRAPPERS = re.compile(r"(^|\.)(_orig_mod|module|_fsdp_wrapped_module)(?=\.)")  # parts of names that wrappers add
NANOGPT = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions",
           "vocab_size": "vocab_size"}  # fmt: skip
TURNED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # [out, in] in nanoGPT, [in, out] in transformers


def training_step(path: Path) -> int | None:
    """The step at which a file was written: of its name (`epoch=1-step=200.ckpt`, `ckpt_200.pt`), or of its content;
    None if neither has it."""
    named = re.search(r"(?:step|iter)[=_-]?(\d{1,15})", path.stem) or re.search(r"[-_=](\d{1,15})$", path.stem)
    if named:
        return int(named[1])
    content = _read(path)
    steps = [content.get(name) for name in STEPS]
    return next((step for step in steps if isinstance(step, int)), None)


def write_folder(path: Path, config: Path | None, folder: Path) -> None:
    """Write the weights of a file, and a config, to a folder that `load` reads.

    Args:
        path: The file.
        config: The folder of a model of transformers that has the same architecture; None for a file of nanoGPT.
        folder: Where `config.json` and `model.safetensors` are written.

    Raises:
        FileError: The file cannot be read without running code, or has no weights of that architecture.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig, GPT2Config

    content = _read(path)
    held = next((content[name] for name in WEIGHTS if isinstance(content.get(name), Mapping)), content)
    weights = {WRAPPERS.sub("", str(name)).lstrip("."): x for name, x in held.items() if isinstance(x, Tensor)}
    if not weights:
        expected = f"{path} must hold weights by name, or under {' or '.join(WEIGHTS)}"
        raise FileError(f"{expected}; it holds {', '.join(map(str, content)) or 'nothing'}", subject=str(path))
    arguments = content.get("model_args")
    if isinstance(arguments, Mapping) and set(NANOGPT) <= set(arguments):
        described: Any = GPT2Config(
            **{ours: arguments[name] for name, ours in NANOGPT.items()}, activation_function="gelu",
            bos_token_id=None, eos_token_id=None, architectures=["GPT2Model"],
        )  # fmt: skip
        weights = {name: x.T if name.endswith(TURNED) else x for name, x in weights.items()}
        if not arguments.get("bias", True):
            biased = [name for name in weights if re.search(r"(ln_\w+|c_\w+)\.weight$", name)]
            weights |= {f"{name[:-6]}bias": weights[name].new_zeros(weights[name].shape[-1]) for name in biased}
    elif config is None:
        expected = "files of weights do not say what is computed with them"
        raise FileError(f"{expected}: give --config, a folder with the config.json of the model", subject=str(path))
    else:
        described = AutoConfig.from_pretrained(str(config), local_files_only=True)
    kept = _of_model(weights, described, path)
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**described.to_dict(), "architectures": None}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    save_file({name: x.detach().clone().contiguous() for name, x in kept.items()}, folder / "model.safetensors")


def _of_model(weights: Mapping[str, Tensor], config: Any, path: Path) -> dict[str, Tensor]:
    """The weights of the model itself, without heads, by their names in transformers: what stands before these names is
    what most of them share (`model.bert.` in a module of Lightning)."""
    names = set(empty_model(config).state_dict())
    before = Counter(
        weight[: -len(name)]
        for weight in weights
        for name in (weight[match.end() :] for match in re.finditer(r"^|\.", weight))
        if name in names
    )
    if not before:
        expected = f"{path} must hold weights of a {config.model_type}"
        first = f"as {next(iter(weights), 'none')}"
        raise FileError(f"{expected}; none has such a name ({first}): give the config of its model", subject=str(path))
    prefix = before.most_common(1)[0][0]
    shapes = {re.sub(r"\d+", "N", name) for name in names}
    unknown = [name[len(prefix) :] for name in weights if name.startswith(prefix) and name[len(prefix) :] not in names]
    if beyond := next((name for name in unknown if re.sub(r"\d+", "N", name) in shapes), None):
        sentence = f"{path} holds more layers than its config says, as {beyond}: give the config of its model"
        raise FileError(sentence, subject=str(path))
    return {name: weights[prefix + name] for name in names if prefix + name in weights}


def _read(path: Path) -> Mapping[Any, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        kind = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"an object of {kind[1]}" if kind else "objects"
        expected = f"{path} must hold tensors and numbers"
        sentence = f"{expected}; it holds {what}, and reading it would run code: save its state_dict by itself"
        raise FileError(sentence, subject=str(path)) from error
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        reason = str(error).partition("\n")[0]
        raise FileError(f"{path} must be a file that torch.save wrote; {reason}", subject=str(path)) from error
    if not isinstance(content, Mapping):
        message = f"{path} must hold weights by name; it holds a {type(content).__name__}: save its state_dict"
        raise FileError(message, subject=str(path))
    return content
