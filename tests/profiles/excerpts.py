"""A small network, forty excerpts, and their summary, for tests of corpora."""

import torch

from rankscope.nets import Architecture, Transformer
from rankscope.profiles import CorpusRows, Profile, Summary, measure

NET = Transformer.random(Architecture(layers=3, width=16, heads=2), init="xavier")
X = torch.randn(40, 7, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def both(X: torch.Tensor, arithmetic: str = "float64", layers: int = 3) -> Profile:
    nets = {name: NET.variant(layers=layers).variant(name) for name in ("san", "transformer")}
    metrics = ["mu", "relative_residual", "entropy"]
    return Profile.join(
        [measure(net, X, variant=name, metrics=metrics, arithmetic=arithmetic) for name, net in nets.items()]
    )


def summed(*profiles: Profile) -> Summary:
    gathered = CorpusRows()
    for profile in profiles:
        gathered.add(profile)
    return gathered.summary()
