"""Singular values of the residual by layer."""

import torch

from rankscope.metrics import singular_values
from rankscope.nets import Architecture, Transformer
from rankscope.profiles.spectra import spectra

NET = Transformer.random(Architecture(layers=4, width=16, heads=2), init="xavier")
X = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_spectra_are_singular_values_of_the_residual() -> None:
    table = spectra({"transformer": NET}, X)
    for step in NET.steps(X):
        values = singular_values(step.state - step.state.mean(1, keepdim=True))
        sizes = torch.linalg.vector_norm(step.state, dim=(1, 2))
        for sample in range(2):
            rows = table.filter(sample=sample, layer=step.layer).sort("index")
            found = 10 ** torch.tensor(rows["log10"].to_list(), dtype=torch.float64)
            assert len(found) == 8  # nine tokens about their mean
            assert torch.allclose(found, values[sample, :8] / sizes[sample], rtol=1e-8)
