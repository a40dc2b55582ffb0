"""Rules whose answers are shaken in their last digits, as if another machine had rounded them.

Every entry of what a rule gives is moved by a few units in its last place, of x and of R each on its own.
What two passes then agree on does not hang on rounding; what they differ by is what rounding did. Zeros stay
zero.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation.blocks import PatternByRows, RowMaker
from rankscope.deviation.rules import Deviation
from rankscope.deviation.scaled import LOWEST, Scaled
from rankscope.deviation.scores import Scores
from rankscope.deviation.signs import SignLosses
from rankscope.deviation.state import State
from rankscope.deviation.streaming import StreamedDeviation
from rankscope.doubled import precision
from rankscope.nets.architecture import Architecture
from rankscope.nets.order import Half
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.plain import Plain
from rankscope.nets.streaming import Asked, Numbers, Streamed
from rankscope.nets.transformer import Transformer
from rankscope.nets.traversal import Block
from rankscope.nets.weights import Linear

KEPT = {"cpu": 2**22}
"""Entries of a row up to which it is kept for the next pass, 2^25 elsewhere: drawing it takes long there."""
A_LAYER = 1000
"""Calls by which the noise of a layer is apart from that of the one before."""
UNITS = 4
"""The most that an entry is moved by, in units of its last place."""


class Perturbation:
    """Small shares, another stretch of one long row at each call."""

    def __init__(self, seed: int = 0, most: float | None = None, units: int = UNITS) -> None:
        """`most` is the largest share that an entry is moved by; if left out, so many units of its last
        place."""
        self.seed, self.most, self.units, self.calls = seed, most, units, 0
        self.row = torch.zeros(0, dtype=torch.float64)
        self.rows: list[Tensor] = []
        """All so far: a recorded pass reads them where they are."""

    def perturb(self, t: Tensor) -> Tensor:
        """Every entry moved, each by its own share."""
        number, length = t.numel(), _length(t.numel())
        if len(self.row) < length or self.row.device != t.device:
            self.row = (_kept if is_cached(number, t.device) else _row)(self.seed, length, t.device)
            self.rows.append(self.row)
        self.calls += 1
        start = self.calls * 1009 % (length - number)
        share = self.row[start : start + number].view(t.shape)
        share = share * (self.units * precision(t) if self.most is None else self.most)
        return torch.addcmul(t, t, share)

    def of(self, found: Any) -> Any:
        """Tensors, and the parts of what deviation arithmetic has in their place."""
        if isinstance(found, Tensor):
            return self.perturb(found)
        return replace(found, x=self.scaled(found.x), R=self.scaled(found.R))

    def scaled(self, part: Scaled) -> Scaled:
        """Values, and logs: one of 1e5 is rounded by 1e-11, and so is what it is the log of."""
        log = torch.where(part.log > LOWEST, self.perturb(part.log), part.log)
        return Scaled(self.perturb(part.value), log)


def is_cached(number: int, device: torch.device) -> bool:
    """Whether a row for so many entries is drawn once."""
    return _length(number) <= KEPT.get(device.type, 2**25)


def _length(number: int) -> int:
    return 2 * number + 8192


def _row(seed: int, length: int, device: torch.device) -> Tensor:
    """Shares between -1 and 1, the same for the same seed and length wherever they are."""
    drawn = torch.rand(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (2 * drawn - 1).to(device)


_longest: dict[tuple[int, torch.device], Tensor] = {}
"""Of a seed: a shorter row is the beginning of a longer one."""
SEEDS = 8
"""Whose rows are kept, the latest."""


def _kept(seed: int, length: int, device: torch.device) -> Tensor:
    row = _longest.get((seed, device))
    if row is None or len(row) < length:
        row = _longest[seed, device] = _row(seed, length, device)
        if len(_longest) > SEEDS:
            del _longest[next(iter(_longest))]
    return row[:length]


class _Perturbed:
    """Asks the rules, and shakes what they say."""

    noise: Perturbation
    signs: SignLosses
    settings: PassSettings

    def norm(self, block: Block, name: str, state: Any) -> Any:
        self.signs.met(state, self.settings.valid)
        return self.noise.of(super().norm(block, name, state))

    def values(self, block: Block, state: Any) -> Any:
        return self.noise.of(super().values(block, state))

    def mix(self, block: Block, weights: Any, values: Any) -> Any:
        return self.noise.of(super().mix(block, weights, values))

    def gate(self, block: Block, heads: Any, state: Any) -> Any:
        return self.noise.of(super().gate(block, heads, state))

    def output(self, block: Block, heads: Any) -> Any:
        return self.noise.of(super().output(block, heads))

    def mlp(self, block: Block, state: Any) -> Any:
        return self.noise.of(super().mlp(block, state))

    def add(self, block: Block, half: Half, state: Any, branches: dict[str, Any]) -> Any:
        self.signs.summed(state, *branches.values())
        return self.noise.of(super().add(block, half, state, branches))


class _PerturbedTokens(_Perturbed):
    def through(self, X: Tensor, linear: Linear) -> Tensor:
        """`X W + b`."""
        return self.noise.perturb(super().through(X, linear))


class PerturbedPlain(_PerturbedTokens, Plain):
    """The plain arithmetic, shaken."""

    def __init__(self, arch: Architecture, settings: PassSettings, seed: int = 0) -> None:
        super().__init__(arch, settings)
        self.noise, self.signs = Perturbation(seed), SignLosses(arch)


class PerturbedStreamed(_PerturbedTokens, Streamed):
    """The same, attention by rows, which can be made again."""

    def __init__(self, net: Transformer, settings: PassSettings, asked: Asked, seed: int = 0) -> None:
        super().__init__(net, settings, asked)
        self.noise, self.signs = Perturbation(seed), SignLosses(net.arch)

    def mix(self, block: Block, P: Numbers, V: Tensor) -> Tensor:  # type: ignore[override]
        """What each head says; what rows are made of is kept."""
        rows = P.rows
        said: Tensor = super().mix(block, P, V)
        P.rows = rows
        return said


class PerturbedDeviation(_Perturbed, Deviation):
    """Deviation arithmetic, shaken; scores too, since rules on them take differences, and by more: what is
    left of two scores may be a unit in the last place, and two such units the same by chance."""

    def __init__(self, arch: Architecture, settings: PassSettings, seed: int = 0) -> None:
        super().__init__(arch, settings)
        self._shake(seed)

    def _shake(self, seed: int) -> None:
        self.noise, self.signs = Perturbation(seed), SignLosses(self.arch)
        self.wide = Perturbation(seed, units=16 * UNITS)
        self.rounding = self.wide.perturb

    def begin(self, block: Block) -> None:
        """Noise of a layer is its own, whatever was asked of others before."""
        self.noise.calls = self.wide.calls = (block.index + 1) * A_LAYER

    def scores(self, block: Block, state: State) -> Scores:
        """What all rows share, and what they do not."""
        ref, D = super().scores(block, state)
        return Scores(self.wide.scaled(ref), self.wide.scaled(D))

    def cross_scores(self, there: Block, state: State) -> Scores:
        """The same of cross-attention."""
        ref, D = super().cross_scores(there, state)
        return Scores(self.wide.scaled(ref), self.wide.scaled(D))

    def touch(self, part: Scaled) -> Scaled:
        """What comes of a product with a matrix or of an activation: another product follows."""
        return self.noise.scaled(part)

    def tidy(self, state: State) -> State:
        """What is about to be taken from a mean is rounded before that."""
        return self.noise.of(state).tidy()


class PerturbedRows(PerturbedDeviation, StreamedDeviation):
    """The same, attention by rows."""

    def __init__(self, net: Transformer, settings: PassSettings, seed: int = 0) -> None:
        StreamedDeviation.__init__(self, net.arch, settings, net.weights)
        self._shake(seed)

    def rows(self, maker: RowMaker) -> PatternByRows:
        """Of scores that are shaken, every row in the same way each time it is made."""
        noise, first = Perturbation(self.wide.seed, units=self.wide.units), self.wide.calls

        def perturb(t: Tensor, start: int) -> Tensor:
            noise.calls = first + start
            return noise.perturb(t)

        return PatternByRows.of(replace(maker, perturb=perturb), self.wide.scaled)
