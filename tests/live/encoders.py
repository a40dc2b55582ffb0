"""Small models that are no Hugging Face models: torch's own encoder, and a plain loop of blocks."""

import torch
from torch import Tensor, nn

from tests.live.families import HEADS, LAYERS, WIDTH


def encoder(*, batch_first: bool = True, norm_first: bool = False, nested: bool = False) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 24, dropout=0.1, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=nested).eval()
    for weight in model.parameters():  # torch's layers are copies of one another
        nn.init.normal_(weight, std=0.4)
    return model


def padded() -> tuple[Tensor, Tensor]:
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    return torch.randn(2, 6, WIDTH, dtype=torch.float64), padding


class Mixer(nn.Module):
    """A block of no known kind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"length": torch.tensor(x.shape[1]), "x": x + self.down(self.up(x).relu())}


class Loop(nn.Module):
    """Blocks that are plain attributes, the second called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mixer(), Mixer()
        self.spare = Mixer()

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        for block in (self.first, self.second, self.second):
            x = block(x)["x"]
        return x
