"""Rules whose results are moved in their last digits, as if another machine had rounded them.

Every entry of the result of a rule is moved by a few units in its last place, x and R each by its own share; zeros stay
zero. Digits on which two passes then agree do not depend on rounding; where they differ, rounding decided.
`second_pass.py` runs these rules beside deviation arithmetic, `dissect.py` beside its own pass.

`Perturbation` draws the shares. `PerturbedPlain` (float64), `PerturbedDeviation` and `PerturbedRows` (deviation
arithmetic, attention whole or by rows) are the arithmetics of those names with every result perturbed.

`NormLosses` looks for what a perturbation cannot show. Norms of one entry, or of two about their mean, leave no more
than a sign: a token, query or key that is zero but for rounding gets a sign from rounding, and two passes that differ
agree on it by chance every second time. And a token that is zero, or nearly, beside others when it enters a norm may
have left float64's range in both. `WatchedDeviation` is deviation arithmetic with nothing perturbed that looks for the
same, for doubled precision.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation.by_rows import PatternByRows, RowMaker, StreamedDeviation
from rankscope.deviation.comparison import SHORTEST
from rankscope.deviation.decisions import keep, must_compute
from rankscope.deviation.rules import Deviation
from rankscope.deviation.scores import ScoreParts, Scores
from rankscope.deviation.state import LOWEST, STEEPEST, Scaled, State, spread
from rankscope.doubled import precision
from rankscope.nets import Architecture, Block, Half, Linear, PassSettings, Plain, Transformer, norm_of

CACHED = {"cpu": 2**22}
"""The longest random row that is kept for later passes, by device; 2^27 elsewhere, where drawing takes long."""
CALLS_PER_LAYER = 1000  # by how much the count of calls at the start of a layer exceeds that of the layer before
APART = 0x9E3779B1  # by how much the seeds of two copies' rows differ; torch's generator takes 32 bits of a seed
UNITS = 4  # by how much an entry is moved at most, in units of its last place


class Perturbation:
    """Moves the last digits of tensors, by another stretch of one long random row at each call."""

    def __init__(
        self, largest_share: float | None = None, units: int = UNITS, copies: int = 0, in_place: bool = False
    ) -> None:
        """An entry is moved by at most `largest_share` of itself; if left out, by `units` in its last place.

        With `copies`, tensors hold so many copies of all samples after the samples themselves, along the first axis,
        and the copies alone are moved, each in another way. With `in_place` they are moved where they lie."""
        self.largest_share, self.units, self.calls = largest_share, units, 0
        self.copies, self.in_place = copies, in_place
        self.row = torch.zeros(1, 0, dtype=torch.float64)

    def perturb(self, t: Tensor, copy: bool = False) -> Tensor:
        """The tensor with every entry moved by a share of its own, the same in all samples; always a `copy` of a tensor
        that others read as well."""
        if not t.numel():
            return t
        share, size = self._shares(t)
        share = share.view(-1, 1, *t.shape[1:])  # [1 + copies, 1, ...], or [1, 1, ...]
        of_each = t.reshape(len(share), -1, *t.shape[1:]) if self.copies else t[None]
        if self.in_place and not copy and t.is_contiguous():
            moved = slice(1, None) if self.copies else slice(None)
            of_each[moved].addcmul_(of_each[moved], share[moved], value=size)
            return t
        return torch.addcmul(of_each, of_each, share, value=size).flatten(0, 1)

    def _shares(self, t: Tensor) -> tuple[Tensor, float]:
        """(shares `[1 + copies, number]`, or `[1, number]`, for the entries of a sample of t, what multiplies them)."""
        count = t[0].numel()
        length = _length(count)
        if self.row.shape[1] < length or self.row.device != t.device:
            self.row = (_kept if is_cached(count, t.device) else _row)(self.copies, length, t.device)
        keep(self.row)
        self.calls += 1
        start = self.calls * 1009 % (length - count)
        size = self.units * precision(t) if self.largest_share is None else self.largest_share
        return self.row[:, start : start + count], size

    def of(self, result: Any) -> Any:
        """The result of a rule, perturbed: a tensor, or x and R of what deviation arithmetic has in its place."""
        if isinstance(result, Tensor):
            return self.perturb(result)
        return replace(result, x=self.scaled(result.x), R=self.scaled(result.R))

    def scaled(self, part: Scaled) -> Scaled:
        """Values and logs perturbed: a log of 1e5 is rounded by 1e-11, and so is the number it is the log of."""
        # First the logs, but for that of zero: shares are drawn in this order.
        log = torch.where(part.log > LOWEST, self.perturb(part.log, copy=True), part.log)
        return Scaled(self.perturb(part.value), log)


def is_cached(count: int, device: torch.device) -> bool:
    """True if the random row for tensors of `count` entries is kept for later passes."""
    return _length(count) <= CACHED.get(device.type, 2**27)


def _length(count: int) -> int:
    """The length of the random row for tensors of `count` entries."""
    return 2 * count + 8192


def _row(copies: int, length: int, device: torch.device) -> Tensor:
    """Random numbers between -1 and 1, the same on every device; with copies a row for each of them, below a row of
    zeros for the samples themselves."""
    # Each row is drawn by itself, so that of two lengths the shorter rows are the beginnings of the longer ones.
    sources = [torch.Generator().manual_seed(k * APART % 2**32) for k in range(max(1, copies))]
    rows = 2 * torch.stack([torch.rand(length, generator=source, dtype=torch.float64) for source in sources]) - 1
    return (torch.cat([torch.zeros_like(rows[:1]), rows]) if copies else rows).to(device)


_longest: dict[tuple[int, torch.device], Tensor] = {}  # by copies: shorter rows are their beginnings
MOST_ROWS = 8  # rows that are kept, the latest


def _kept(copies: int, length: int, device: torch.device) -> Tensor:
    """The random rows of `_row`, from the cache if they are there."""
    rows = _longest.get((copies, device))
    if rows is None or rows.shape[1] < length:
        rows = _longest[copies, device] = _row(copies, length, device)
        if len(_longest) > MOST_ROWS:
            _longest.pop(next(iter(_longest)), None)  # another thread may have removed it
    return rows[:, :length]


NEGLIGIBLE = math.log(1e-20)  # the log of a token's length after a norm below which it is nothing beside the others
TORN = 1e-11  # a token shorter than this share of the terms that it is the sum of may be zero but for rounding


class NormLosses:
    """Notes where a norm met a token that rounding may have decided.

    `summed`, `met` and `met_heads` are called during a pass; `torn` and `short` are the results."""

    def __init__(self, arch: Architecture, torn: float = TORN) -> None:
        """Tokens shorter than the share `torn` of the terms that they are the sum of may be zero but for rounding."""
        self.norm, self.share = norm_of(arch.norm), torn
        self.narrow = self.norm is not None and arch.width - self.norm.centred <= 1
        self.narrow_heads = arch.query_norm and not arch.query_norm_across and arch.head_width == 1
        self.least = 0.5 * math.log(arch.norm_eps) if arch.norm_eps > 0 else -math.inf
        self.terms: Tensor | float = -math.inf
        self.torn: Tensor | bool = False  # True for samples where a norm gave a sign to such a token, query or key
        self.short: dict[str, Tensor] = {}
        """By norm, the tokens `[batch, token]` that were zero, or nearly, when it met them in this layer."""

    def summed(self, *parts: Any) -> None:
        """Note the sizes of terms that were added up."""
        for part in parts if self.narrow or self.narrow_heads else ():
            size = part.log_size() if isinstance(part, State) else part.abs().flatten(1).amax(1).log()
            self.terms = size if isinstance(self.terms, float) else torch.maximum(self.terms, size)

    def met(self, name: str, tokens: Any, valid: Tensor) -> None:
        """Look at the input of the norm of that name; `valid` says which positions are tokens."""
        if self.norm is None or not valid.shape[1]:
            return
        if self._can_lengthen(tokens):
            size = _in_units(tokens)[0].abs().amax(-1)
            longest = size.masked_fill(~valid, 0.0).amax(-1, keepdim=True)
            self.short[name] = ((size < SHORTEST * longest) | (size == 0)) & valid
        if not self.narrow:
            return
        self.summed(tokens)
        X, log = _in_units(tokens)
        sizes = self.norm.centre(X).abs().amax(-1).masked_fill(~valid, math.inf).amin(-1)
        limit = self.terms + math.log(self.share)
        self.torn = self.torn | (sizes.log() + log <= limit) & (self.least < limit)

    def _can_lengthen(self, tokens: Any) -> bool:
        """True if the norm may give length to a token that is nothing beside the others: without eps, or where tokens
        are so long that eps is nothing beside the shortest. Those of plain rules are not that long."""
        if self.least == -math.inf:
            return True
        reach = self.least - math.log(SHORTEST) + NEGLIGIBLE
        return isinstance(tokens, State) and must_compute("perturbation.long", (tokens.log > reach))

    def met_heads(self, rules: Any, block: Block, tokens: Any, valid: Tensor) -> None:
        """Look at queries and keys of one entry, of which their norm leaves the sign; one that is zero because its
        token is zero has none."""
        if not self.narrow_heads or not valid.shape[1]:
            return
        w, log_share = block.weights.attention, math.log(self.share)
        self.summed(tokens)
        for linear, latent in ((w.query, w.query_latent), (w.key, w.key_latent)):
            X, log = _in_units(rules.latent(tokens, latent))
            W = linear.weight.flatten(1)
            sums, terms = X @ W, X.abs() @ W.abs()  # [batch, token, head]
            if linear.bias is not None:
                bias = spread((-log).clamp(max=STEEPEST).exp(), sums) * linear.bias.flatten()
                sums, terms = sums + bias, terms + bias.abs()
            before = (self.terms - log)[:, None, None] + W.abs().amax(0).log()
            limit = torch.maximum(terms.log(), before) + log_share
            torn = (sums.abs().log() <= limit) & (terms > 0) & (limit + log[:, None, None] > self.least)
            self.torn = self.torn | (torn.any(-1) & valid).any(-1)


def _in_units(tokens: State | Tensor) -> tuple[Tensor, Tensor]:
    """(tokens as an ordinary tensor in units of e^log, log) of a state or a tensor."""
    return (tokens.scaled_tokens, tokens.log) if isinstance(tokens, State) else (tokens, tokens.new_zeros(len(tokens)))


class _Watched:
    """Shows what goes into norms of the arithmetic that it is mixed into to its `losses`."""

    losses: NormLosses
    settings: PassSettings

    def norm(self, block: Block, name: str, state: Any) -> Any:
        self.losses.met(name, state, self.settings.valid)
        return super().norm(block, name, state)

    def pattern(self, block: Block, state: Any) -> Any:
        self.losses.met_heads(self, block, state, self.settings.valid)
        return super().pattern(block, state)

    def add(self, block: Block, half: Half, state: Any, branches: dict[str, Any]) -> Any:
        self.losses.summed(state, *branches.values())
        return super().add(block, half, state, branches)


class WatchedDeviation(_Watched, Deviation):
    """Deviation arithmetic as it is, with an eye on what goes into norms."""

    def __init__(self, arch: Architecture, settings: PassSettings, torn: float = TORN) -> None:
        super().__init__(arch, settings)
        self.losses = NormLosses(arch, torn)


def _perturbing(name: str) -> Callable[..., Any]:
    """The rule of that name, whose result is perturbed."""
    return lambda self, *arguments: self.noise.of(getattr(super(_Perturbed, self), name)(*arguments))


class _Perturbed(_Watched):
    """Perturbs the result of every rule of the arithmetic that it is mixed into."""

    noise: Perturbation
    values, mix, gate = map(_perturbing, ("values", "mix", "gate"))
    norm, output, mlp, add = map(_perturbing, ("norm", "output", "mlp", "add"))


def _with_perturbed_memory(settings: PassSettings, noise: Perturbation) -> PassSettings:
    """The same settings with the memory of a decoder perturbed: a key of it that is zero but for rounding is the same
    in two passes that multiply the same numbers."""
    if settings.memory is None:
        return settings
    return replace(settings, memory=replace(settings.memory, tokens=noise.perturb(settings.memory.tokens, copy=True)))


def repeated(settings: PassSettings, times: int) -> PassSettings:
    """The settings of a batch that holds all samples so many times, one after the other; a mask may be one for all."""

    def many(t: Tensor) -> Tensor:
        return torch.cat([t] * times)

    visible, memory = settings.visible, settings.memory
    return replace(
        settings,
        visible={mask: t if len(t) == 1 else many(t) for mask, t in visible.items()},
        valid=many(settings.valid),
        memory=memory and replace(memory, tokens=many(memory.tokens), valid=many(memory.valid)),
    )


class PerturbedPlain(_Perturbed, Plain):
    """The plain arithmetic in float64, every result perturbed."""

    def __init__(self, arch: Architecture, settings: PassSettings, copies: int = 0) -> None:
        self.noise, self.losses = Perturbation(copies=copies), NormLosses(arch)
        super().__init__(arch, _with_perturbed_memory(settings, self.noise))

    def through(self, X: Tensor, linear: Linear) -> Tensor:
        """The product `X W + b`, perturbed before it is used."""
        return self.noise.perturb(super().through(X, linear))


class PerturbedDeviation(_Perturbed, Deviation):
    """Deviation arithmetic, every result perturbed. Scores are moved by more: rules take differences of them,
    and what is left of two may be one unit in the last place, the same in two passes by chance."""

    def __init__(
        self, arch: Architecture, settings: PassSettings, copies: int = 0, times: int = 1, in_place: bool = False
    ) -> None:
        """Move entries by `times` as much as usual; the other arguments are those of a `Perturbation`."""
        super().__init__(arch, settings)
        self._set_up(copies, times, in_place)

    def _set_up(self, copies: int = 0, times: int = 1, in_place: bool = False) -> None:
        """Draw the perturbations, of all samples or of `copies` of them."""
        self.noise = Perturbation(units=times * UNITS, copies=copies, in_place=in_place)
        self.losses = NormLosses(self.arch)
        self.of_scores = Perturbation(units=16 * times * UNITS, copies=copies, in_place=in_place)
        self.perturb_tensor = self.of_scores.perturb
        self.settings = _with_perturbed_memory(self.settings, self.noise)

    def begin(self, block: Block) -> None:
        """Start a layer: its perturbation does not depend on what was computed before."""
        self.noise.calls = self.of_scores.calls = (block.index + 1) * CALLS_PER_LAYER

    def scores(self, parts: ScoreParts) -> Scores:
        """The scores of self-attention or cross-attention, perturbed."""
        return Scores(*map(self.of_scores.scaled, super().scores(parts)))

    def perturb(self, part: Scaled) -> Scaled:
        """A product with a matrix or an activation, perturbed before the product that follows."""
        return self.noise.scaled(part)

    def tidy(self, state: State) -> State:
        """The state perturbed, then tidy: the subtraction of the mean comes after the rounding."""
        return self.noise.of(state).tidy()


class PerturbedRows(PerturbedDeviation, StreamedDeviation):
    """Deviation arithmetic with attention by rows, every result perturbed."""

    def __init__(self, net: Transformer, settings: PassSettings, block_bytes: int | None, times: int) -> None:
        StreamedDeviation.__init__(self, net, settings, block_bytes)
        self._set_up(times=times)

    def rows(self, maker: RowMaker) -> PatternByRows:
        """The pattern of perturbed scores, every row perturbed in the same way each time it is made."""
        noise, calls = Perturbation(units=self.of_scores.units), self.of_scores.calls

        def perturb(t: Tensor, start: int) -> Tensor:
            noise.calls = calls + start
            return noise.perturb(t)

        maker = replace(maker, perturb=perturb, block_bytes=self.block_bytes)
        return PatternByRows.of(maker, self.of_scores.scaled)
