"""Models of transformers with layers taken out: written, and read again by transformers and sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.depths import cut
from rankscope.errors import FileError, SourceError
from rankscope.sources import load
from rankscope.sources.families import FAMILIES
from rankscope.sources.load import random_model
from rankscope.sources.shortened import original, write_shortened
from tests.raising import raises
from tests.sources.models import CASES

REFUSED = {
    ("albert", "groups", 2): "blocks are shared by groups",
    ("gpt2", "scores by layer", 2): "scores are divided by the number of the layer",
    ("mixtral", "qwen 3", 2): "no layer with experts is left, in a model of experts",
}
"""Models that no config describes without a layer, and why."""
FIRST_OUT = [("deepseek", "v2"), ("mixtral", "qwen 2"), ("mixtral", "qwen 3"), ("qwen3_next", "with biases"),
             ("gpt_neo", "local and global"), ("dinov2", "gated"), ("esm", "rotary"), ("smollm3", "text")]  # fmt: skip
"""Models whose config says something of each layer, which moves up when the first goes."""


def inputs(family: Any, net: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if family.continuous_inputs:
        shape = (2, *net.origin.embedding.shape)
        return {family.input_name: torch.randn(shape, generator=generator, dtype=torch.float64)}
    return {"input_ids": torch.randint(5, len(net.origin.embedding.words), (2, 9), generator=generator)}


def passing_by(blocks: list[nn.Module], index: int) -> None:
    """Hooks by which a block gives what it was given."""
    calls: list[Any] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        calls.append(args[0] if args else kwargs["hidden_states"])

    def after(module: Any, args: Any, output: Any) -> Any:
        if (len(calls) - 1) % len(blocks) != index:
            return None
        return (calls[-1], *output[1:]) if isinstance(output, tuple) else calls[-1]

    for block in dict.fromkeys(blocks):
        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "label", "layer"), [*((*case, 2) for case in CASES), *((*case, 1) for case in FIRST_OUT)]
)
def test_every_family_loses_a_layer_and_transformers_reads_the_rest(
    name: str, label: str, layer: int, tmp_path: Path
) -> None:
    """The whole model with hooks that pass the layer by gives the same output as what was written."""
    family, model = FAMILIES[name], random_model(name, label)
    net = load(model, family=name if family.side else None)
    if (name, label, layer) in REFUSED:
        with raises(SourceError, "layers"):
            write_shortened(model, net, [layer], tmp_path / "small")
        return
    write_shortened(model, net, [layer], tmp_path / "small")
    again = type(model).from_pretrained(tmp_path / "small", dtype=torch.float64).eval()
    whole, short = (family.prepare_for_float64(family.core(one)) for one in (model, again))
    passing_by(family.blocks(whole), layer - 1)
    with torch.no_grad():
        expected, got = (core(**inputs(family, net)).last_hidden_state for core in (whole, short))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
