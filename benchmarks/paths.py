"""What the exact sum over all paths costs, beside a plain pass and beside one pass per path.

BERT-base size, 4 x 128 tokens, float64: `by_length` over 13^12 paths. And the way of the 2021 code, one
forward pass for each path, on 6 layers of 2 heads: all 729 of them.
"""

import torch

from benchmarks.timing import Row, forward, least_seconds, ratios
from rankscope.nets import Architecture, Transformer
from rankscope.paths import all_paths, decompose, freeze, length_terms
from rankscope.sources import preset


def rows(small: bool = False) -> list[Row]:
    """(what, against what, ratio)."""
    return [*_sums(small), *_one_by_one(2 if small else 6)]


def _sums(small: bool) -> list[Row]:
    arch = preset("bert-tiny" if small else "bert-base")
    fresh = Transformer.random(arch)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if name.endswith(".bias")
        else tensor
        for name, tensor in fresh.state_dict().items()
    }
    biased = Transformer.from_weights(arch, tensors)
    X = torch.randn(4, 8 if small else 128, arch.width, generator=generator, dtype=torch.float64)
    return ratios(
        "float64 forward",
        {
            "plain": lambda: forward(biased, X),
            "by_length, biases zero": lambda: length_terms(freeze(fresh, X)),
            "by_length, biases": lambda: length_terms(freeze(biased, X)),
            "by_head": lambda: decompose(biased, X).by_head(),
        },
        rounds=1 if small else 2,
    )


def _one_by_one(layers: int) -> list[Row]:
    arch = Architecture(layers=layers, width=32, heads=2, mlp="none", norm="none", biases=False)
    net = Transformer.random(arch, init="xavier")
    X = torch.randn(4, 32, arch.width, dtype=torch.float64)
    paths = list(all_paths(layers, 2))

    def each(attention: str = "own") -> torch.Tensor:
        d = decompose(net, X)
        return torch.stack([d.path(path, attention).term for path in paths]).sum(0)

    def prefixes() -> torch.Tensor:
        return decompose(net, X).keep(paths=paths, attention="own")

    def summed() -> torch.Tensor:
        return decompose(net, X).by_length().embedding.sum(0)

    torch.testing.assert_close(each(), prefixes(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(each("shared"), summed(), rtol=1e-9, atol=1e-9)
    cases = {"own": each, "prefixes": prefixes, "shared": lambda: each("shared"), "summed": summed}
    seconds = least_seconds(cases, rounds=3)
    names = {"prefixes": "beginnings shared", "summed": "by_length"}
    return [
        (f"{len(paths)} paths, {kind} attention, each", names[other], seconds[kind] / seconds[other])
        for kind, other in (("own", "prefixes"), ("shared", "summed"), ("own", "summed"))
    ]
