"""ViTs in the layout of vit-pytorch, written here as it writes them today (late) and as it did (early)."""

from typing import Any

import torch
from torch import Tensor, nn

DIM, WIDE, HEADS, PATCH, SIDE, CHANNELS = 16, 24, 2, 4, 12, 2


class Rearrange(nn.Module):
    """What einops' layer does here: images `[b, c, (h p1), (w p2)]` into patches `[b, (h w), (p1 p2 c)]`."""

    def __init__(self) -> None:
        super().__init__()
        self.axes_lengths = {"p1": PATCH, "p2": PATCH}

    def forward(self, images: Tensor) -> Tensor:
        cut = images.unflatten(2, (-1, PATCH)).unflatten(4, (-1, PATCH))  # [b, c, h, p1, w, p2]
        return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


class Attention(nn.Module):
    """With its norm inside (late) or without (early)."""

    def __init__(self, head_width: int, late: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.scale = HEADS, head_width**-0.5
        self.norm = nn.LayerNorm(DIM) if late else nn.Identity()
        self.to_qkv = nn.Linear(DIM, 3 * HEADS * head_width, bias=False)
        out = nn.Linear(HEADS * head_width, DIM, bias=bias)
        self.to_out = nn.Sequential(out, nn.Dropout(0.1)) if bias else out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.to_qkv(self.norm(x)).chunk(3, -1))
        return self.to_out(((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2))


class PreNorm(nn.Module):
    """Early: a norm, and the branch behind it."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(DIM), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x))


class FeedForward(nn.Module):
    def __init__(self, late: bool) -> None:
        super().__init__()
        first = [nn.LayerNorm(DIM)] if late else []
        act = nn.GELU() if late else nn.ReLU()
        self.net = nn.Sequential(
            *first, nn.Linear(DIM, WIDE), act, nn.Dropout(0.1), nn.Linear(WIDE, DIM), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Transformer(nn.Module):
    """Layers are lists of two parts, or, without MLPs, attention alone."""

    def __init__(self, late: bool, mlp: bool, bias: bool) -> None:
        super().__init__()
        self.late = late
        if late:
            self.norm = nn.LayerNorm(DIM)
        wrapped = (lambda branch: branch) if late else PreNorm
        parts = lambda: [wrapped(Attention(6, late, bias)), wrapped(FeedForward(late))]  # noqa: E731
        self.layers = nn.ModuleList(nn.ModuleList(parts()) if mlp else parts()[0] for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for part in layer if isinstance(layer, nn.ModuleList) else [layer]:
                x = part(x) + x
        return self.norm(x) if self.late else x


class ViT(nn.Module):
    """`vit_pytorch.ViT` of today (late) or of 2021; `SimpleViT` without a class token and biases of attention."""

    def __init__(self, late: bool = True, mlp: bool = True, simple: bool = False) -> None:
        super().__init__()
        pixels, count = CHANNELS * PATCH**2, (SIDE // PATCH) ** 2
        linear: list[nn.Module] = [nn.Linear(pixels, DIM)]
        norms = [nn.LayerNorm(pixels), *linear, nn.LayerNorm(DIM)]
        self.to_patch_embedding = nn.Sequential(Rearrange(), *(norms if late else linear))
        self.simple, places = simple, count + (not simple)
        if simple:
            self.pos_embedding = torch.randn(count, DIM)
        else:
            self.cls_token = nn.Parameter(torch.randn(1, DIM) if late else torch.randn(1, 1, DIM))
            self.pos_embedding = nn.Parameter(torch.randn(places, DIM) if late else torch.randn(1, places, DIM))
        self.transformer = Transformer(late, mlp, bias=not simple)
        self.mlp_head = nn.Linear(DIM, 3) if late else nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 3))

    def forward(self, images: Tensor) -> Tensor:
        x = self.to_patch_embedding(images)
        if not self.simple:
            x = torch.cat([self.cls_token.reshape(1, 1, DIM).expand(len(x), -1, -1), x], 1)
        x = self.transformer(x + self.pos_embedding.to(x))
        return self.mlp_head(x.mean(1) if self.simple else x[:, 0])


VITS: dict[str, dict[str, bool]] = {
    "late": {},
    "early": {"late": False},
    "early, attention alone": {"late": False, "mlp": False},
    "simple": {"simple": True},
}


def vit(label: str) -> ViT:
    """One of them, every parameter moved off its initial value, in float64."""
    torch.manual_seed(3)
    return moved(ViT(**VITS[label]))


def moved(model: Any) -> Any:
    """The model in float64, every parameter moved off its initial value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.double().eval()
