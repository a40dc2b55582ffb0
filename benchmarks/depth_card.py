"""Time and memory of a depth card of a random Llama of a billion numbers, whose layers stay in their files.

    python -m benchmarks.depth_card [--layers 16] [--tokens 64] [--heads]

The checkpoint is written to a temporary folder in bfloat16. The card, and one forward pass to compare it with, are
made in processes of their own, in float64 with layers read one at a time; memory is Linux's VmHWM.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

CODE = """
import json, sys, time, torch
from pathlib import Path
from rankscope import depth, load

folder, tokens, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
net = load(folder, stream=True)
X, padding = net.encode(torch.arange(1, tokens + 1)[None])
start = time.perf_counter()
card = None
if what == "forward":
    for step in net.steps(X, padding):
        pass
else:
    card = depth(net, X, padding, heads=what == "heads")
seconds = time.perf_counter() - start
status = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(json.dumps([seconds, peak / 2**20, card and card.sentence]))
"""


class Shape(NamedTuple):
    """The size of a Llama; those left out are of Llama 3.2 1B, with fewer words."""

    layers: int = 16
    width: int = 2048
    mlp: int = 8192
    heads: int = 32
    key_heads: int = 8
    words: int = 32_000


def write_llama(folder: Path, shape: Shape) -> int:
    """Write a random Llama, a file for each layer, and return how many numbers it has."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=shape.words, hidden_size=shape.width, intermediate_size=shape.mlp, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads, dtype="bfloat16",
        architectures=["LlamaModel"],
    ).save_pretrained(folder)  # fmt: skip
    generator, numbers = torch.Generator().manual_seed(0), 0
    index: dict[str, str] = {}
    d, m, narrow = shape.width, shape.mlp, shape.key_heads * shape.width // shape.heads
    matrices = {
        "self_attn.q_proj": (d, d), "self_attn.k_proj": (narrow, d), "self_attn.v_proj": (narrow, d),
        "self_attn.o_proj": (d, d), "mlp.gate_proj": (m, d), "mlp.up_proj": (m, d), "mlp.down_proj": (d, m),
    }  # fmt: skip

    def drawn(*size: int) -> torch.Tensor:
        return (0.02 * torch.randn(size, generator=generator)).bfloat16()

    files = {"words": {"embed_tokens.weight": drawn(shape.words, d), "norm.weight": torch.ones(d).bfloat16()}}
    for layer in range(-1, shape.layers):
        name, tensors = ("words", files["words"]) if layer < 0 else (f"layer{layer}", {})
        if layer >= 0:
            tensors |= {f"layers.{layer}.{part}.weight": drawn(*size) for part, size in matrices.items()}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"layers.{layer}.{norm}.weight"] = torch.ones(d).bfloat16()
        save_file(tensors, folder / f"{name}.safetensors", {"format": "pt"})
        index |= dict.fromkeys(tensors, f"{name}.safetensors")
        numbers += sum(tensor.numel() for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return numbers


def measured(folder: Path, tokens: int, what: str) -> tuple[float, float, str | None]:
    """(seconds, GB at most, the sentence of the card) of `forward`, `layers` or `heads`, in a process of its own."""
    command = [sys.executable, "-c", CODE, str(folder), str(tokens), what]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak, sentence = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak, sentence


def main() -> None:
    """Print time and memory."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--layers", type=int, default=Shape().layers)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--heads", action="store_true", help="also without each head, which takes long")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, shape = Path(name), Shape(layers=given.layers)
        numbers = write_llama(folder, shape)
        print(f"{shape}: {numbers / 1e9:.2f} billion numbers, {8 * numbers / 2**30:.1f} GB in float64")
        for what in ("forward", "layers", *(["heads"] if given.heads else [])):
            seconds, peak, sentence = measured(folder, given.tokens, what)
            print(f"{what:8} {given.tokens} tokens: {seconds:7.1f} s, {peak:5.2f} GB at most  {sentence or ''}")


if __name__ == "__main__":
    main()
