"""Networks with and without skips, each trained at every learning rate, and the noise that they tolerate: plain torch.

    python noise_at_equal_rates.py cuda    # writes noise_at_equal_rates.csv beside this file

The networks are those of the study `what-skips-pay` on digits, written again from its page: 6 pre-norm layers of width
64 with 4 heads, hidden layers of MULTIPLES widths, 1000 steps of AdamW on batches of 32. The study reports each kind
at one rate of its own; here all kinds have all rates, so that a pair at equal rates can be taken. Noise is in units by
which embedded tokens differ with their positions (the study: without), so sizes are smaller; ratios can be compared.
Trained on one GPU, in three minutes; another device sums in another order, so that digits differ.
"""

import csv
import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

CSV = Path(__file__).with_suffix(".csv")
LAYERS, WIDTH, HEADS, STEPS, BATCH, HELD = 6, 64, 4, 1000, 32, 360
SKIPS, MULTIPLES, RATES, SEEDS = (0.0, 1.0), (1, 2, 4, 8, 16), (3e-4, 1e-3, 3e-3, 1e-2), range(5)
NOISE = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
DRAWS = 4


def images() -> tuple[Tensor, Tensor]:
    """The digits of scikit-learn as 16 patches of 4 numbers, and which digit each is."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images).float() / 8 - 1
    patches = pixels.reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
    return patches, torch.from_numpy(bunch.target).long()


def drawn(multiple: int, seed: int) -> dict[str, Tensor]:
    """Weights of one network: variance 1 / inputs, embedding and positions of variance 1, biases 0."""
    draw, hidden = torch.Generator().manual_seed(1000 + seed), multiple * WIDTH

    def matrix(inputs: int, outputs: int, layers: tuple[int, ...] = (LAYERS,)) -> Tensor:
        return torch.randn(*layers, inputs, outputs, generator=draw) / math.sqrt(inputs)

    weights = {name: matrix(WIDTH, WIDTH) for name in "QKVO"}
    weights |= {"up": matrix(WIDTH, hidden), "down": matrix(hidden, WIDTH)}
    weights |= {"patch": matrix(4, WIDTH, ()), "head": matrix(WIDTH, 10, ())}
    weights |= {"place": torch.randn(16, WIDTH, generator=draw), "up_bias": torch.zeros(LAYERS, 1, hidden)}
    weights |= {f"{name}_bias": torch.zeros(LAYERS, 1, WIDTH) for name in ("Q", "K", "V", "O", "down")}
    weights |= {"gain_a": torch.ones(LAYERS, 1, WIDTH), "gain_m": torch.ones(LAYERS, 1, WIDTH)}
    weights |= {"shift_a": torch.zeros(LAYERS, 1, WIDTH), "shift_m": torch.zeros(LAYERS, 1, WIDTH)}
    weights |= {"gain": torch.ones(1, WIDTH), "shift": torch.zeros(1, WIDTH)}
    return weights | {"patch_bias": torch.zeros(1, WIDTH), "head_bias": torch.zeros(10)}


def embedded(w: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """`[network, batch, token, number]` as tokens: all tensors of `w` have networks as their first axis."""
    return inputs @ w["patch"][:, None] + w["patch_bias"][:, None] + w["place"][:, None]


def logits(w: dict[str, Tensor], X: Tensor, skip: Tensor) -> Tensor:
    """The classes of tokens `[network, batch, token, width]`; `skip` is the weight of both skips of each network."""

    def affine(Y: Tensor, name: str, layer: int) -> Tensor:
        return torch.einsum("nbti,nio->nbto", Y, w[name][:, layer]) + w[f"{name}_bias"][:, layer, None]

    def heads(Y: Tensor) -> Tensor:
        return Y.unflatten(-1, (HEADS, -1)).transpose(2, 3)

    weight = skip[:, None, None, None]
    for layer in range(LAYERS):
        Z = F.layer_norm(X, (WIDTH,)) * w["gain_a"][:, layer, None] + w["shift_a"][:, layer, None]
        Q, K, V = (heads(affine(Z, name, layer)) for name in "QKV")
        P = (Q @ K.mT / math.sqrt(WIDTH // HEADS)).softmax(-1)
        X = weight * X + affine((P @ V).transpose(2, 3).flatten(-2), "O", layer)
        Z = F.layer_norm(X, (WIDTH,)) * w["gain_m"][:, layer, None] + w["shift_m"][:, layer, None]
        X = weight * X + affine(F.gelu(affine(Z, "up", layer)), "down", layer)
    Y = F.layer_norm(X, (WIDTH,)) * w["gain"][:, None] + w["shift"][:, None]
    return torch.einsum("nbi,nio->nbo", Y.mean(2), w["head"]) + w["head_bias"][:, None]


def scale(step: int) -> float:
    """A warm-up of a tenth of the steps, then half a cosine."""
    rise = STEPS // 10
    return (step + 1) / rise if step < rise else 0.5 * (1 + math.cos(math.pi * (step - rise) / (STEPS - rise)))


class Networks:
    """Networks of one size of MLP that train side by side: every skip, rate and seed."""

    def __init__(self, multiple: int, device: str) -> None:
        self.kinds = [(skip, rate, seed) for skip in SKIPS for rate in RATES for seed in SEEDS]
        start = [drawn(multiple, seed) for _, _, seed in self.kinds]
        self.weights = {name: torch.stack([w[name] for w in start]).to(device) for name in start[0]}
        self.skip = torch.tensor([skip for skip, _, _ in self.kinds], device=device)
        self.rate = torch.tensor([rate for _, rate, _ in self.kinds], device=device)

    def train(self, tokens: Tensor, labels: Tensor) -> None:
        """AdamW with decay 0.01 of matrices, gradients of each network cut to length 1."""
        weights = self.weights
        moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
        draws = [torch.Generator().manual_seed(seed) for seed in SEEDS]
        for step in range(STEPS):
            picks = [torch.randint(len(tokens) - HELD, (BATCH,), generator=draw) for draw in draws]
            chosen = torch.stack([picks[seed] for _, _, seed in self.kinds]).to(tokens.device)
            for w in weights.values():
                w.requires_grad_()
            losses = F.cross_entropy(
                logits(weights, embedded(weights, tokens[chosen]), self.skip).flatten(0, 1), labels[chosen].flatten(),
                reduction="none",
            )  # fmt: skip
            gradients = torch.autograd.grad(losses.sum() / BATCH, list(weights.values()))
            norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
            cut = (1 / norm.clamp(min=1.0)).nan_to_num()
            for (name, w), gradient in zip(weights.items(), gradients, strict=True):
                per = (-1, *[1] * (w.ndim - 1))
                g, (first, second) = gradient * cut.view(per), moments[name]
                first.mul_(0.9).add_(g, alpha=0.1)
                second.mul_(0.999).addcmul_(g, g, value=0.001)
                update = first / (1 - 0.9 ** (step + 1)) / ((second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
                decay = 0.01 if name in {*"QKVO", "up", "down", "patch", "head"} else 0.0
                w = w.detach()
                weights[name] = w - (self.rate * scale(step)).view(per) * (update + decay * w)

    @torch.no_grad()
    def accuracies(self, tokens: Tensor, labels: Tensor) -> list[list[float]]:
        """By network, for each size of NOISE at the embedding: in units by which embedded tokens differ."""
        X = embedded(self.weights, tokens[-HELD:].expand(len(self.kinds), -1, -1, -1))
        unit = (X - X.mean(2, keepdim=True)).square().mean((1, 2, 3), keepdim=True).sqrt()
        draw = torch.Generator().manual_seed(0)
        changes = [torch.randn(X.shape[1:], generator=draw).to(X) for _ in range(DRAWS)]
        right = torch.stack([
            torch.stack([
                (logits(self.weights, X + size * unit * change, self.skip).argmax(-1) == labels[-HELD:]).float().mean(1)
                for change in changes
            ]).mean(0)
            for size in NOISE
        ])  # fmt: skip
        return right.T.tolist()


def main(device: str) -> None:
    """Train all and write the table."""
    tokens, labels = (tensor.to(device) for tensor in images())
    with CSV.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["multiple", "skip", "rate", "seed", *(f"noise_{size:g}" for size in NOISE)])
        for multiple in MULTIPLES:
            networks = Networks(multiple, device)
            networks.train(tokens, labels)
            for kind, accuracies in zip(networks.kinds, networks.accuracies(tokens, labels), strict=True):
                writer.writerow([multiple, *kind, *(f"{accuracy:.4f}" for accuracy in accuracies)])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
