"""What watching a live model costs: transformers' GPT-2 at its size, 4 x 128 tokens, float32; and one of 4
layers of width 64, where finding the blocks and calling the hooks count."""

import sys
from typing import Any

import torch

from benchmarks.peers import gpt2, token_ids
from benchmarks.timing import Row, ratios, report_rise, rise_of_memory


def cases(small: bool = False) -> dict[str, Any]:
    """The plain pass, and each way of looking at it."""
    from rankscope import watch

    ids, model, eager = token_ids(small), gpt2(small), gpt2(small)
    eager.set_attn_implementation("eager")

    def watched(metrics: Any) -> Any:
        with watch(model, *([] if metrics is None else [metrics])) as w:
            model(ids)
        return w

    return {
        "plain": lambda: model(ids),
        "plain, eager attention": lambda: eager(ids),
        "watch, 4 metrics of tokens": lambda: watched(None),
        "watch, and entropy of attention": lambda: watched(
            ["relative_residual", "residual", "relative_mu", "mu", "entropy"]
        ),
        "output_hidden_states": lambda: model(ids, output_hidden_states=True).hidden_states,
    }


def rows(small: bool = False) -> list[Row]:
    """(what, against what, ratio of times)."""
    with torch.no_grad():
        found = ratios("plain forward", cases(small), rounds=1 if small else 7)
        return found + ratios("plain forward, 4 layers of width 64", tiny(), rounds=1 if small else 200)


def tiny() -> dict[str, Any]:
    """A small model: watched anew for one call, and by one watch for many."""
    from rankscope import watch

    ids, model = token_ids(), gpt2(n_layer=4, n_embd=64, n_head=4)
    again = watch(model)

    def watched() -> None:
        with watch(model):
            model(ids)

    def entered() -> None:
        with again:
            model(ids)

    return {
        "plain": lambda: model(ids),
        "watch, 4 metrics of tokens, small model": watched,
        "the same watch entered again": entered,
    }


def memory() -> list[tuple[str, float]]:
    """(what, MB above the peak of a plain pass)."""
    names = [name for name in cases() if name != "plain"]
    return [(name, rise_of_memory("-m", "benchmarks.watching", name)) for name in names]


if __name__ == "__main__":
    with torch.no_grad():
        found = cases()
        report_rise(found["plain"], found[sys.argv[1]])
