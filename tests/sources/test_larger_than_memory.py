"""A random Llama of three gigabytes: how much memory it takes to load and to measure, in processes of their
own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

LAYERS, WIDTH, MLP, HEADS, KEYS, WORDS = 20, 2560, 6912, 20, 4, 32_000
SHAPES = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (KEYS * WIDTH // HEADS, WIDTH),
    "self_attn.v_proj": (KEYS * WIDTH // HEADS, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (MLP, WIDTH),
    "mlp.up_proj": (MLP, WIDTH),
    "mlp.down_proj": (WIDTH, MLP),
    "input_layernorm": (WIDTH,),
    "post_attention_layernorm": (WIDTH,),
}
LAYER = sum(torch.Size(shape).numel() for shape in SHAPES.values())
"""Numbers of a layer."""
MARGIN = 400_000_000
"""Bytes for activations and what an allocator keeps."""

HEAD = """
import json, sys, torch
from transformers import AutoModel
from rankscope import load, measure

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

folder, ids, before = sys.argv[1], torch.arange(1, 9)[None], peak()  # bfloat16 is slow on many CPUs

def curves(net):
    X, padding = net.encode(ids)
    nets = {name: net.variant(name) for name in ("transformer", "san")}
    found = {
        f"{name} {how}": measure(net, X, padding, "mu", how, check=False).curve("mu").tolist()
        for name, net in nets.items() for how in ("bfloat16", "deviation")
    }
    return {**found, **{f"{name} fingerprint": net.fingerprint for name, net in nets.items()}}
"""
WAYS = {
    "plain": """
model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
with torch.no_grad():
    model(ids)
print(json.dumps([before, peak(), {}]))
""",
    "in memory": """
net = load(folder, torch.bfloat16, stream=False)
loaded = peak()
print(json.dumps([before, loaded, curves(net)]))
""",
    "streamed": """
found = curves(load(folder, torch.bfloat16, stream=True))
print(json.dumps([before, peak(), found]))
""",
}


def written(folder: Path) -> Path:
    """The model, a file at a time: writing takes no more memory than a layer."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEYS, dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return (0.02 * torch.randn(shape, generator=generator)).bfloat16()

    for number in range(LAYERS + 1):
        shapes = {f"layers.{number}.{name}": shape for name, shape in SHAPES.items()}
        shapes = shapes if number < LAYERS else {"embed_tokens": (WORDS, WIDTH), "norm": (WIDTH,)}
        name = f"model-{number + 1:05}-of-{LAYERS + 1:05}.safetensors"
        save_file({f"{part}.weight": drawn(shape) for part, shape in shapes.items()}, folder / name)
        index |= {f"{part}.weight": name for part in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def ran(way: str, folder: Path) -> tuple[int, int, dict[str, object]]:
    """(peak of the imports, peak in all, what was measured)."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + WAYS[way], str(folder)], capture_output=True, text=True, check=True
    )
    before, peak, found = json.loads(done.stdout.splitlines()[-1])
    return before, peak, found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read where Linux has them")
def test_memory_of_a_model_of_several_gigabytes(tmp_path: Path) -> None:
    folder = written(tmp_path)
    words, layer = 2 * WORDS * WIDTH, 8 * LAYER  # in bfloat16; in float64
    assert 2 * (LAYERS * LAYER + WORDS * WIDTH) > 2.5e9
    _, plain, _ = ran("plain", folder)
    _, loaded, whole = ran("in memory", folder)
    before, peak, streamed = ran("streamed", folder)
    assert loaded <= 1.3 * plain
    assert peak - before <= words + 2 * layer + MARGIN
    assert streamed == whole and len(whole) == 6
