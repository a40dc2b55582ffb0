"""The peers at watch's job, each in an environment of its own: what a run that keeps activations costs.

    python -m venv /tmp/lens && /tmp/lens/bin/pip install torch==2.13.0 transformers transformer-lens
    /tmp/lens/bin/python -m benchmarks.peers lens
    (likewise nnsight)

GPT-2's size, random weights, 4 x 128 tokens, float32: time over the peer's own plain forward pass, in one
process; and how far the peak of resident memory rises above that of a plain pass.
"""

import sys
from typing import Any

import torch

from benchmarks.timing import least_seconds, rise_of_memory

IDS = torch.randint(0, 50257, (4, 128), generator=torch.Generator().manual_seed(0))


def gpt2() -> Any:
    """transformers' own, with its usual attention."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    kind: Any = GPT2Model
    return kind(GPT2Config()).eval()


def lens() -> dict[str, Any]:
    """TransformerLens: its bridge around transformers' GPT-2, everything cached, and the blocks alone."""
    from tempfile import TemporaryDirectory

    from transformer_lens.model_bridge import TransformerBridge
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    kind: Any = GPT2LMHeadModel
    whole = kind(GPT2Config()).eval()
    with TemporaryDirectory() as folder:
        whole.config.save_pretrained(folder)
        whole.config.architectures = ["GPT2LMHeadModel"]
        model = TransformerBridge.boot_transformers(folder, hf_model=whole, device="cpu", tokenizer=None)
    stream = [f"blocks.{layer}.hook_resid_post" for layer in range(12)]
    return {
        "plain": lambda: model(IDS),
        "run_with_cache, everything": lambda: model.run_with_cache(IDS),
        "run_with_cache, blocks alone": lambda: model.run_with_cache(IDS, names_filter=stream),
    }


def nnsight() -> dict[str, Any]:
    """nnsight around transformers' GPT-2: the output of every block saved."""
    from nnsight import NNsight

    plain = gpt2()
    model = NNsight(plain)

    def traced() -> Any:
        saved = []
        with model.trace(IDS):
            for block in model.h:
                saved.append(block.output.save())
        return saved

    return {"plain": lambda: plain(IDS), "trace, every block saved": traced}


def main(peer: str) -> None:
    """Print time and memory of each case."""
    with torch.no_grad():
        cases = {"lens": lens, "nnsight": nnsight}[peer]()
        seconds = least_seconds(cases, rounds=7)
        print(f"{peer}, torch {torch.__version__}, plain forward {seconds['plain']:.2f} s")
        for name in cases:
            if name != "plain":
                rise = rise_of_memory("benchmarks.peers", peer, name)
                print(f"  {name:34} time {seconds[name] / seconds['plain']:.2f}   memory +{rise:.1f} MB")


def once(peer: str, name: str) -> None:
    """One case after a plain pass, for `rise_of_memory`."""
    from benchmarks.timing import report_rise

    with torch.no_grad():
        cases = {"lens": lens, "nnsight": nnsight}[peer]()
        report_rise(cases["plain"], cases[name])


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) == 2 else once(*sys.argv[1:])
