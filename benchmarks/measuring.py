"""What measuring costs over a plain forward pass, and the reference network beside torch's own encoder."""

import torch
from torch import nn

from benchmarks.timing import Row, forward, least_seconds
from rankscope.nets import Transformer
from rankscope.profiles import measure
from rankscope.sources import preset


def rows(small: bool = False) -> list[Row]:
    """(what, against what, ratio) at BERT-base size, 4 x 128 tokens, float32."""
    arch = preset("bert-tiny" if small else "bert-base")
    net = Transformer.random(arch, dtype=torch.float32)
    layer = nn.TransformerEncoderLayer(
        arch.width, arch.heads, arch.mlp_width, dropout=0.0, activation="gelu", batch_first=True
    )
    torchs = nn.TransformerEncoder(layer, arch.layers, enable_nested_tensor=False).eval()
    X = torch.randn(4, 8 if small else 128, arch.width)

    def encoder() -> object:
        with torch.no_grad():
            return torchs(X)

    seconds = least_seconds(
        {
            "plain": lambda: forward(net, X),
            "encoder": encoder,
            "measure": lambda: measure(net, X, arithmetic="float32"),
            "float64": lambda: measure(net, X),
        },
        rounds=1 if small else 5,
    )
    return [
        ("reference forward", "nn.TransformerEncoder", seconds["plain"] / seconds["encoder"]),
        ("measure, 4 metrics, float32", "reference forward, float32", seconds["measure"] / seconds["plain"]),
        ("measure, 4 metrics, float64", "reference forward, float32", seconds["float64"] / seconds["plain"]),
    ]
