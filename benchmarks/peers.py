"""The peers at watch's job, each in an environment of its own: what a run that keeps activations costs.

    python -m venv /tmp/lens && /tmp/lens/bin/pip install torch==2.13.0 transformers transformer-lens
    /tmp/lens/bin/pip install -e .    # for watch beside them; they run without
    /tmp/lens/bin/python -m benchmarks.peers lens
    (likewise nnsight)

GPT-2's size, random weights, 4 x 128 tokens, float32: time over the peer's own plain forward pass, in one
process; and how far the peak of resident memory rises above that of a plain pass.
"""

import sys
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.timing import Row, ratios, report_rise, rise_of_memory


def token_ids(small: bool = False) -> torch.Tensor:
    """Random ones, of words that GPT-2 has."""
    shape = (1, 8) if small else (4, 128)
    return torch.randint(0, 50257, shape, generator=torch.Generator().manual_seed(0))


def gpt2(small: bool = False, kind: str = "GPT2Model", **other: Any) -> Any:
    """transformers' own, with its usual attention; `other` sizes than GPT-2's."""
    import transformers

    torch.manual_seed(0)
    size: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 2} if small else {}
    return getattr(transformers, kind)(transformers.GPT2Config(**{**size, **other})).eval()


def lens(small: bool = False) -> dict[str, Any]:
    """TransformerLens: its bridge around transformers' GPT-2, everything cached, and the blocks alone."""
    from tempfile import TemporaryDirectory

    from transformer_lens.model_bridge import TransformerBridge

    ids, whole, bare = token_ids(small), gpt2(small, "GPT2LMHeadModel"), gpt2(small)
    with TemporaryDirectory() as folder:
        whole.config.save_pretrained(folder)
        whole.config.architectures = ["GPT2LMHeadModel"]
        model = TransformerBridge.boot_transformers(folder, hf_model=whole, device="cpu", tokenizer=None)
    stream = [f"blocks.{layer}.hook_resid_post" for layer in range(whole.config.n_layer)]
    layers = ["blocks.0.hook_resid_pre", *stream]

    def measured() -> list[Any]:
        cache = model.run_with_cache(ids, names_filter=layers)[1]
        return [four_metrics(cache[name]) for name in layers]

    def watched() -> None:
        from rankscope import watch

        with watch(bare):
            bare(ids)

    ours = {"transformers' forward": lambda: bare(ids), "transformers' forward, watched": watched}
    return {
        "plain": lambda: model(ids),
        "run_with_cache, everything": lambda: model.run_with_cache(ids),
        "run_with_cache, blocks alone": lambda: model.run_with_cache(ids, names_filter=stream),
        "run_with_cache, and 4 metrics by hand": measured,
        **(ours if find_spec("rankscope") else {}),
    }


def four_metrics(X: torch.Tensor) -> list[list[float]]:
    """What `watch` reads by default of tokens `[batch, token, width]`, by the papers' formulas, in their own dtype:
    residual, relative residual, mu and relative mu of each sample."""

    def composite(M: torch.Tensor) -> torch.Tensor:
        return (M.abs().sum(1).amax(1) * M.abs().sum(2).amax(1)).sqrt()

    R = X - X.mean(1, keepdim=True)
    residual, mu = composite(R), R.flatten(1).norm(dim=1)
    values = residual, residual / composite(X), mu, mu / X.flatten(1).norm(dim=1)
    return [value.tolist() for value in values]


def nnsight(small: bool = False) -> dict[str, Any]:
    """nnsight around transformers' GPT-2: the output of every block saved."""
    from nnsight import NNsight

    ids, plain = token_ids(small), gpt2(small)
    model = NNsight(plain)

    def traced() -> Any:
        saved = []
        with model.trace(ids):
            for block in model.h:
                saved.append(block.output.save())
        return saved

    return {"plain": lambda: plain(ids), "trace, every block saved": traced}


PEERS = {"lens": lens, "nnsight": nnsight}


def rows(peer: str, small: bool = False) -> list[Row]:
    """(what, against what, ratio of times)."""
    with torch.no_grad():
        return ratios("plain forward", PEERS[peer](small), rounds=1 if small else 7)


def main(peer: str) -> None:
    """Print time and memory of each case."""
    print(f"{peer}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, against, ratio in rows(peer):
        rise = rise_of_memory("-m", "benchmarks.peers", peer, name)
        print(f"  {name:37} / {against} time {ratio:.2f}   memory +{rise:.1f} MB")


def once(peer: str, name: str) -> None:
    """One case after a plain pass, for `rise_of_memory`."""
    with torch.no_grad():
        cases = PEERS[peer]()
        report_rise(cases["plain"], cases[name])


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) == 2 else once(*sys.argv[1:])
