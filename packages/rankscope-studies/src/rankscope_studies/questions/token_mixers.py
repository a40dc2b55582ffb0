"""Networks that mix positions in other ways than attention, in plain torch, for the question whether collapse is
attention's alone (`beyond_attention.py`).

A `MixingNetwork` is an embedding of pixels, a stack `blocks` of one kind of block, and a head that reads the mean
of all positions. A mixer takes and gives `[batch, position, width]`:

| mixer          | what it does to X                                                       | initial weights          |
|----------------|-------------------------------------------------------------------------|--------------------------|
| `attention`    | softmax attention of four heads, every position sees every other        | N(0, 1 / inputs)         |
| `lstm`, `gru`  | torch's recurrent layer, along the positions                            | torch's own              |
| `ssm`          | a diagonal state space model (S4D, Gu et al. 2022), GELU, a linear map  | S4D-Lin, N(0, 1 / inputs)|
| `mixer`        | MLP-Mixer: `W2 gelu(W1 X)`, W1 and W2 over positions                    | N(0, 1 / inputs)         |
| `gcn ring`     | graph convolution `relu(A X W)`, A the mean of neighbours on a ring     | N(0, 2 / inputs)         |
| `gcn path`     | the same on a path                                                      | N(0, 2 / inputs)         |
| `gcn complete` | the same where all positions are neighbours: uniform attention          | N(0, 2 / inputs)         |
| `conv`         | a 3 x 3 convolution of the image, ReLU                                  | N(0, 2 / inputs)         |

and a block puts it into one of three forms: `bare` (`mix(X)`), `norm` (`norm(mix(X))`) and `whole`
(`X + mix(norm(X))`, then `X + mlp(norm(X))`: pre-norm, as they are used). No map has a bias but recurrent layers, which
have torch's. S4D's feed-through `D x` is a skip and left out: `whole` has one.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankscope.errors import StudyError, one_of
from rankscope.shapes import Float

Positions = Float[Tensor, "batch position width"]
FORMS = ("bare", "norm", "whole")
HEADS = 4
STATES = 8  # Complex states of each channel of a state space model
STEPS = (1e-3, 1e-1)  # The least and the largest first step size of a state space model


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    """A linear map without a bias, of normal entries with variance `gain / inputs`."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=math.sqrt(gain / inputs))
    return layer


class AttentionMixer(nn.Module):
    """Softmax attention over all positions."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (linear(width, width) for _ in range(4))

    def forward(self, X: Positions) -> Positions:
        """The outputs of all heads at every position, projected to the width."""
        q, k, v = (part(X).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed: Tensor = self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return mixed


class RecurrentMixer(nn.Module):
    """A recurrent layer of torch, from the first position to the last."""

    def __init__(self, width: int, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(width, width, batch_first=True)  # type: ignore[call-arg,arg-type]

    def forward(self, X: Positions) -> Positions:
        """The hidden state at every position."""
        hidden: Tensor = self.layer(X)[0]
        return hidden


class StateSpaceMixer(nn.Module):
    """A diagonal state space model: a causal convolution along positions, of its own for each channel.

    `K_l = 2 Re sum_n C_n B_n exp(l dt A_n)`, `B_n = (exp(dt A_n) - 1) / A_n`, `A_n = -1/2 + i pi n` (S4D-Lin).
    """

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        low, high = (math.log(step) for step in STEPS)
        self.log_step = nn.Parameter(low + (high - low) * torch.rand(width))
        self.log_decay = nn.Parameter(torch.full((width, STATES), math.log(0.5)))
        self.frequency = nn.Parameter(math.pi * torch.arange(STATES).float().repeat(width, 1))
        self.readout = nn.Parameter(torch.randn(width, STATES, 2) / math.sqrt(2))
        self.output = linear(width, width)

    def kernel(self, length: int) -> Tensor:
        """The kernel K of every channel, `[channel, position]`, at this many positions."""
        A = torch.complex(-self.log_decay.exp(), self.frequency)
        dtA = A * self.log_step.exp()[:, None]
        C = torch.view_as_complex(self.readout.contiguous()) * (dtA.exp() - 1) / A
        powers = (dtA[..., None] * torch.arange(length, device=A.device)).exp()
        return 2 * (C[..., None] * powers).sum(1).real

    def forward(self, X: Positions) -> Positions:
        """Convolve every channel with its kernel, then GELU and a linear map."""
        n = X.shape[1]
        K = torch.fft.rfft(self.kernel(n), 2 * n)
        Y = torch.fft.irfft(torch.fft.rfft(X.mT, 2 * n) * K, 2 * n)[..., :n].mT
        mixed: Tensor = self.output(F.gelu(Y))
        return mixed


class PositionMLP(nn.Module):
    """MLP-Mixer's mixing of positions (Tolstikhin et al. 2021): an MLP along positions, the same for all channels."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.first, self.second = linear(positions, 2 * positions), linear(2 * positions, positions)

    def forward(self, X: Positions) -> Positions:
        """Mix the positions of every channel."""
        mixed: Tensor = self.second(F.gelu(self.first(X.mT))).mT
        return mixed


class GraphConvolution(nn.Module):
    """`relu(A X W)`: A takes the mean of a position and its neighbours, so its rows sum to one as attention's do."""

    average: Tensor

    def __init__(self, positions: int, width: int, graph: str) -> None:
        super().__init__()
        self.register_buffer("average", averaging_matrix(graph, positions))
        self.weight = linear(width, width, gain=2.0)

    def forward(self, X: Positions) -> Positions:
        """Average over neighbours, then a linear map and ReLU."""
        return F.relu(self.weight(self.average @ X))


def averaging_matrix(graph: str, n: int) -> Tensor:
    """The matrix that takes the mean of a position and its neighbours, on a ring, a path or a complete graph.

    >>> averaging_matrix("path", 3)[0].tolist()
    [0.5, 0.5, 0.0]
    """
    apart = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    near = {"path": apart <= 1, "ring": (apart <= 1) | (apart == n - 1), "complete": apart >= 0}[graph].float()
    return near / near.sum(-1, keepdim=True)


class ImageConvolution(nn.Module):
    """A 3 x 3 convolution of a square image whose pixels are the positions, and ReLU."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.side = math.isqrt(positions)
        self.layer = nn.Conv2d(width, width, 3, padding=1, bias=False)
        nn.init.normal_(self.layer.weight, std=math.sqrt(2 / (9 * width)))

    def forward(self, X: Positions) -> Positions:
        """The image after its convolution and ReLU, as positions again."""
        image = X.mT.reshape(len(X), -1, self.side, self.side)
        return F.relu(self.layer(image)).flatten(2).mT


MIXERS: dict[str, Callable[[int, int], nn.Module]] = {
    "attention": AttentionMixer,
    "lstm": lambda positions, width: RecurrentMixer(width, nn.LSTM),
    "gru": lambda positions, width: RecurrentMixer(width, nn.GRU),
    "ssm": StateSpaceMixer,
    "mixer": PositionMLP,
    "gcn ring": lambda positions, width: GraphConvolution(positions, width, "ring"),
    "gcn path": lambda positions, width: GraphConvolution(positions, width, "path"),
    "gcn complete": lambda positions, width: GraphConvolution(positions, width, "complete"),
    "conv": ImageConvolution,
}


class MixingBlock(nn.Module):
    """A mixer alone, with a norm after it, or as it is used: pre-norm, with skips and an MLP."""

    def __init__(self, mixer: str, form: str, positions: int, width: int) -> None:
        super().__init__()
        self.form, self.mix = form, MIXERS[mixer](positions, width)
        if form != "bare":
            self.norm = nn.LayerNorm(width)
        if form == "whole":
            self.mlp_norm = nn.LayerNorm(width)
            self.mlp = nn.Sequential(linear(width, 4 * width), nn.GELU(), linear(4 * width, width))

    def forward(self, X: Positions) -> Positions:
        """Mix positions, in the block's form."""
        if self.form == "whole":
            X = X + self.mix(self.norm(X))
            return X + self.mlp(self.mlp_norm(X))
        mixed: Tensor = self.mix(X)
        return self.norm(mixed) if self.form == "norm" else mixed


class MixingNetwork(nn.Module):
    """An embedding of pixels and positions, a stack of blocks, and a head on the mean of all positions.

    Args:
        mixer: One of `MIXERS`.
        form: One of `FORMS`.
        depth: How many blocks there are.
        positions: How many pixels an image has: a square number.
        width: The width of a position.
        classes: How many classes the head tells apart.
        seed: What all weights are drawn from, on the CPU; torch's own generator is left as it was.

    Raises:
        StudyError: There is no such mixer or form.

    >>> MixingNetwork("conv", "bare", 2, 16, 8, 10, seed=0)(torch.zeros(3, 16, 1)).shape
    torch.Size([3, 10])
    """

    def __init__(self, mixer: str, form: str, depth: int, positions: int, width: int, classes: int, seed: int) -> None:
        super().__init__()
        if mixer not in MIXERS:
            raise StudyError(one_of("mixer", mixer, MIXERS), subject="mixer")
        if form not in FORMS:
            raise StudyError(one_of("form", form, FORMS), subject="form")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.pixel, self.table = linear(1, width), nn.Parameter(torch.randn(positions, width))
            self.blocks = nn.ModuleList(MixingBlock(mixer, form, positions, width) for _ in range(depth))
            self.last_norm = nn.LayerNorm(width) if form == "whole" else nn.Identity()
            self.head = nn.Linear(width, classes)

    def embed(self, images: Float[Tensor, "batch position 1"]) -> Positions:
        """What the first block takes: `pixel * a + position`."""
        embedded: Tensor = self.pixel(images) + self.table
        return embedded

    def forward(self, images: Float[Tensor, "batch position 1"]) -> Float[Tensor, "batch class"]:
        """The logits of every image."""
        X = self.embed(images)
        for block in self.blocks:
            X = block(X)
        logits: Tensor = self.head(self.last_norm(X).mean(1))
        return logits


@torch.no_grad()
def averaging_ratio(network: MixingNetwork, X: Positions, draws: int = 4, seed: int = 0) -> float:
    """By how much the first block weakens differences between positions, against what positions have in common.

    `||J D|| / ||D||` over `||J C|| / ||C||`, with J the block's derivative at X (central differences in float64), D
    random with mean zero over positions, and C random and the same at all positions; of outputs, differences are what
    is left after their mean, and what is common is their mean. A block that takes averages with weights that sum to
    one has a ratio below 1 at any width; one that mixes positions by free weights has no reason to.

    Args:
        network: The network, in float64.
        X: Where the derivative is taken, `[batch, position, width]`.
        draws: Over how many random directions gains are averaged.
        seed: What directions are drawn from.
    """
    block, draw = network.blocks[0], torch.Generator().manual_seed(seed)
    small = 1e-4 * float(X.square().mean().sqrt())
    gains: list[list[float]] = [[], []]
    for _ in range(draws):
        common = torch.randn(1, 1, X.shape[-1], generator=draw, dtype=X.dtype).to(X.device).expand(X.shape)
        free = torch.randn(X.shape, generator=draw, dtype=X.dtype).to(X.device)
        for kind, direction in enumerate((common, free - free.mean(1, keepdim=True))):
            moved = (block(X + small * direction) - block(X - small * direction)) / (2 * small)
            mean = moved.mean(1, keepdim=True).expand(moved.shape)
            part = mean if kind == 0 else moved - mean
            gains[kind].append(float(part.square().mean() / direction.square().mean()))
    shared, apart = (math.sqrt(sum(squares) / len(squares)) for squares in gains)
    return apart / shared if shared else math.inf
