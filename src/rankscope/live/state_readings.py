"""Hidden states and routing of one call, reduced to numbers on the device where they are.

`call_follower.py` makes a `TokenBatch` of the first hidden states of a call, and hands each layer's to
`StateReadings.read`. Small states are copied and
wait, since reading several together is faster; `flush` reads them with `profiles.readers.read_tensor`. On a
CPU, metrics that ask for no more (`from_norms`) are computed for all layers together from four norms of each
state (`StateNorms`), since for small states calling each metric costs more than computing it:

    ||X||_F,  ||X||_{1,inf},  ||res X||_F,  ||res X||_{1,inf}

`RoutingReadings` reads metrics where a router of a mixture of experts returns. transformers' routers return the scores
of all experts, the weights of those that a token goes through, and which these are, row by row of tokens, sample by
sample: `[row, expert]`, `[row, k]`, `[row, k]`. So whatever module in a block returns three such tensors is taken for a
router, whoever wrote it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError, require
from rankscope.live.hooks import float64_device, isolated, to_float64_device
from rankscope.live.modules import describe_inner_stacks, submodules
from rankscope.live.plan import WatchPlan
from rankscope.metrics import Metric, Reading, Tokens, memo_of_norms, unit_of, valid_tokens
from rankscope.profiles import Readings, read_tensor
from rankscope.shapes import Float

TOGETHER = 2**24  # entries of states that wait on an accelerator, which is done with a layer by the next
ARITHMETICS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # from the finest to the coarsest
PIECE = 2**16  # entries whose norms are taken together: the buffer for them takes a megabyte
LARGEST_SAMPLE = 2**20  # entries of a sample up to which its norms are taken here


@dataclass
class TokenBatch:
    """The tokens of one call of the model."""

    shape: torch.Size  # [batch, token]
    device: torch.device  # of the first block
    all_valid: bool  # there is no padding
    unit: float  # the eps of the arithmetic that the model ran in
    valid: dict[torch.device, Tensor]  # [batch, token], False at padding; by device, filled by `valid_on`

    @classmethod
    def of(cls, hidden: Tensor, padding: Tensor | None, arithmetic: torch.dtype) -> "TokenBatch":
        """The batch whose first block takes `hidden` `[batch, token, width]`, in a model of this dtype."""
        shape = hidden.shape[:2]
        valid = {} if padding is None else {hidden.device: valid_tokens(shape, padding, hidden.device)}
        return cls(shape, hidden.device, padding is None, unit_of(arithmetic), valid)

    def valid_for(self, x: Tensor) -> Tensor:
        """Which tokens are valid, `[batch, token]`, on the device where x is measured."""
        return self.valid_on(float64_device(x.device))

    def valid_on(self, device: torch.device) -> Tensor:
        """Which tokens are valid, `[batch, token]`, on a device."""
        if device not in self.valid:
            known = next(iter(self.valid.values()), None)
            self.valid[device] = valid_tokens(self.shape, None, device) if known is None else known.to(device)
        return self.valid[device]


@dataclass
class StateNorms:
    """Norms of the hidden states of one call."""

    valid: Tensor  # [batch, token], False at padding
    all_valid: bool  # there is known to be no padding
    unit: float  # the eps of the arithmetic that the model ran in
    # Layers with states of one shape and dtype, with these, and with their norms as `_norms` gives them.
    taken: list[tuple[Sequence[int], torch.Size, torch.dtype, list[Tensor]]] = field(default_factory=list)
    buffer: Tensor | None = None

    def __post_init__(self) -> None:
        self.all_valid = self.all_valid or bool(self.valid.all())

    def take(self, layers: Sequence[int], states: Sequence[Tensor]) -> bool:
        """Take the norms of states of one shape and dtype; False if some leave float64's range or are NaN."""
        shape, dtype = states[0].shape, states[0].dtype
        if several := PIECE // shape.numel():
            pieces = [self._norms(states[k : k + several], self.valid) for k in range(0, len(states), several)]
        else:
            samples = max(1, PIECE // shape[1:].numel())
            splits = zip(*(torch.split(x, samples) for x in (self.valid, *states)), strict=True)
            pieces = [self._norms(parts, valid) for valid, *parts in splits]
        sizes = [torch.cat(parts, 1 if several else 2) for parts in zip(*pieces, strict=True)]
        length, deviation = sizes[0].flatten(1).tolist()
        if dtype != torch.float64:  # squares of such numbers stay in range
            within = all(map(math.isfinite, length))
        else:
            within = all(1e-140 < size < 1e140 for size in (*length, *deviation))
        if within:
            self.taken.append((layers, shape, dtype, sizes))
        return within

    def _norms(self, states: Sequence[Tensor], valid: Tensor) -> list[Tensor]:
        """Frobenius norms, largest column and largest row sums of X and res X, `[2, state, sample]`, in one buffer."""
        shape = torch.Size((2, len(states), *states[0].shape))
        if self.buffer is None or len(self.buffer) < shape.numel():
            self.buffer = torch.empty(shape.numel(), dtype=torch.float64)
        both = self.buffer[: shape.numel()].view(shape)  # X and res X side by side, for one call of each norm
        X, R = both.unbind()
        for target, state in zip(X.unbind(), states, strict=True):
            target.copy_(state)
        if self.all_valid:
            torch.sub(X, X.mean(-2, keepdim=True), out=R)
        else:
            padding = ~valid[..., None]
            X.masked_fill_(padding, 0.0)
            torch.sub(X, X.sum(-2, keepdim=True) / valid.sum(-1).clamp(min=1)[:, None, None], out=R)
            R.masked_fill_(padding, 0.0)
        norms = torch.linalg.vector_norm(both, dim=(-2, -1))
        both.abs_()
        return [norms, both.sum(-2).amax(-1), both.sum(-1).amax(-1)]

    def readings(self, metrics: Sequence[Metric]) -> list[tuple[int, Readings]]:
        """(layer, readings) of every state, computed by the metrics from its norms."""
        of_tokens = [metric for metric in metrics if metric.of == "tokens"]
        by_layer: list[tuple[int, Readings]] = []
        for layers, shape, dtype, sizes in self.taken:
            norms, columns, rows = (size.flatten(1) for size in sizes)
            composite = columns.sqrt() * rows.sqrt()
            # No metric looks at the entries themselves: `Tokens.memo` has all that is asked of them.
            memo = memo_of_norms({"frobenius": (norms[0], norms[1]), "composite": (composite[0], composite[1])})
            X = norms.new_full((), torch.nan).expand(norms.shape[1], *shape[1:])
            valid = self.valid.repeat(len(layers), 1)
            tokens = Tokens(X, valid, unit_of(dtype), self.all_valid, memo)
            measured = [metric.read(tokens, unit=self.unit) for metric in of_tokens]
            parts = torch.stack([part for row in measured for part in (row.value, row.log10, row.floor)])
            for layer, numbers in zip(layers, parts.view(-1, 3, len(layers), shape[0]).unbind(2), strict=True):
                rows_of_layer = [Reading(*row.unbind()) for row in numbers]
                by_layer.append((layer, list(zip(of_tokens, rows_of_layer, strict=True))))
        return by_layer


class StateReadings:
    """Reads the metrics of tokens off the hidden states of one call into `readings`."""

    def __init__(self, plan: WatchPlan, batch: TokenBatch) -> None:
        self.plan, self.batch = plan, batch
        self.readings: list[tuple[int, Readings]] = []
        self.has_metrics, self.norms_suffice = plan.wants("tokens"), plan.norms_suffice
        self.norms: StateNorms | None = None  # norms of states from which the metrics are not computed yet
        self.waiting: list[tuple[int, Tensor]] = []  # (layer, copy of its hidden states) to be read together
        self.waiting_entries = 0  # of all states that wait
        self.broken: list[tuple[int, Tensor]] = []  # (layer, whether a sample holds NaN or infinity)
        self.kept: list[tuple[int, Tensor]] = []  # (layer, states on the CPU) where the plan keeps them
        self.means: list[tuple[int, Tensor]] = []  # (layer, mean token of each sample) where the plan keeps embeddings
        self.numbers: dict[int, int] = {}  # of layers that were given others when the call ended

    def number(self, layer: int) -> int:
        """The number of a layer in the end."""
        return self.numbers.get(layer, layer)

    def read(self, layer: int, hidden: Tensor) -> None:
        """Measure a layer's hidden states `[batch, token, width]` now, or keep a copy until `flush`."""
        plan, entries = self.plan, hidden.numel()
        if not plan.measures(layer):
            return
        if hidden.shape[:2] != self.batch.shape:
            inner = describe_inner_stacks(plan.stack, plan.blocks)
            has = f"{tuple(self.batch.shape)}; layer {layer} has {tuple(hidden.shape[:2])}"
            finer = f"name blocks that merge and split no tokens{inner and f': {inner}'}"
            raise WatchError(f"every layer must have the first one's tokens {has}: {finer}", subject="blocks")
        if "states" in plan.keep:
            self.kept.append((layer, hidden.to("cpu", copy=True)))
        if "embeddings" in plan.keep:
            self.means.append((layer, self._mean_tokens(hidden)))
        on_cpu = hidden.is_cpu
        if not self.has_metrics or (on_cpu and not (self.norms_suffice and entries <= PIECE)):
            self.flush()
            self._read_alike([(layer, hidden)])
            return
        self.waiting.append((layer, hidden.clone()))
        self.waiting_entries += entries
        if self.waiting_entries >= (4 * PIECE if on_cpu else TOGETHER):
            self.flush()

    def _mean_tokens(self, hidden: Tensor) -> Float[Tensor, "sample width"]:
        """The mean of each sample's valid tokens, float32 or wider; samples without one are left out."""
        with isolated(hidden.device):
            wide = torch.promote_types(hidden.dtype, torch.float32)
            if self.batch.all_valid:
                return hidden.mean(1, dtype=wide)
            valid = self.batch.valid_on(hidden.device)
            count = valid.sum(1)
            sums = hidden.masked_fill(~valid[..., None], 0.0).sum(1, dtype=wide)
            return sums[count > 0] / count[count > 0, None]

    def flush(self) -> None:
        """Read the states that wait."""
        waiting, self.waiting, self.waiting_entries = self.waiting, [], 0
        for _, alike in groupby(waiting, key=lambda pair: (pair[1].shape, pair[1].dtype, pair[1].device)):
            self._read_alike(list(alike))

    def all_readings(self) -> list[tuple[int, Readings]]:
        """(layer, readings) of all states so far, those included that wait."""
        self.flush()
        readings = self.readings + ([] if self.norms is None else self.norms.readings(self.plan.metrics))
        return [(self.number(layer), rows) for layer, rows in readings]

    def _read_alike(self, states: Sequence[tuple[int, Tensor]]) -> None:
        """Read states of one shape, dtype and device, the samples of each layer following those of the last."""
        layers, (first, *rest) = zip(*states, strict=True)
        batch = len(first)
        small = first.device.type == "cpu" and 0 < first.numel() <= LARGEST_SAMPLE * batch
        with isolated(first.device):
            valid = self.batch.valid_for(first)
            if self.norms_suffice and small:
                if self.norms is None:
                    self.norms = StateNorms(valid, self.batch.all_valid, self.batch.unit)
                if self.norms.take(layers, [first, *rest]):
                    return
            hidden = torch.cat([first, *rest]) if rest else first
            valid, hidden = valid.repeat(len(layers), 1) if rest else valid, to_float64_device(hidden)
            unit, all_valid = self.batch.unit, self.batch.all_valid
            measured, broken = read_tensor("tokens", hidden, valid, self.plan.metrics, unit, all_valid)
        for k, layer in enumerate(layers):
            samples = slice(k * batch, (k + 1) * batch)
            self.readings.append((layer, [(metric, rows.of_samples(samples)) for metric, rows in measured]))
            self.broken.append((layer, broken[samples].any()))


def routing_in(output: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """(scores, weights, chosen), detached, if a module returned a tuple that begins with these, as a router does; else
    None. An expert of -1 is none, as routers write it for a token that they drop; its weight is then 0."""
    if not isinstance(output, tuple) or len(output) < 3 or not all(isinstance(x, Tensor) for x in output[:3]):
        return None
    scores, weights, chosen = (x.detach() for x in output[:3])
    alike = weights.shape == chosen.shape and scores.shape[:-1] == chosen.shape[:-1] and scores.ndim > 1
    floating = scores.is_floating_point() and weights.is_floating_point()
    indices = chosen.dtype in (torch.int64, torch.int32)
    if not (alike and floating and indices) or bool(((chosen < -1) | (chosen >= scores.shape[-1])).any()):
        return None
    return scores, weights.masked_fill(chosen < 0, 0.0), chosen.clamp(min=0)


class RoutingReadings:
    """Reads the metrics of routing in one call; `readings` takes what is read."""

    def __init__(self, plan: WatchPlan, batch: TokenBatch, readings: list[tuple[int, Readings]]) -> None:
        self.plan, self.batch, self.readings = plan, batch, readings
        self.layers: set[int] = set()  # layers whose routing was seen
        self.other_shapes: list[tuple[int, ...]] = []  # shapes of routing that is not of the block's tokens

    def read(self, layer: int, output: Any) -> None:
        """Measure what a module in this layer returned, if it is a router."""
        if (routing := routing_in(output)) is None:
            return
        scores, weights, chosen = routing
        batch, token = self.batch.shape
        fault = f"a second came in block {layer}: name finer blocks with blocks=, or watch metrics of tokens"
        sentence = f"a block must have one router for its routing to be read; {fault}"
        require(layer not in self.layers, sentence, WatchError, "blocks")
        if chosen.shape[:-1].numel() != batch * token:
            self.other_shapes.append(tuple(chosen.shape))
            return
        self.layers.add(layer)
        if not self.plan.measures(layer):
            return
        with isolated(scores.device):
            shares = torch.zeros_like(scores).scatter_add(-1, chosen.long(), weights.to(scores.dtype))
            if self.plan.layout == "token first":
                shares = shares.reshape(token, batch, -1).transpose(0, 1)
            wide, valid = to_float64_device(shares.reshape(batch, token, -1)), self.batch.valid_for(shares)
            measured, _ = read_tensor("routing", wide, valid, self.plan.metrics, self.batch.unit)
        self.readings.append((layer, measured))

    def check(self) -> None:
        """Refuse a call in which metrics of routing were asked for and no router was seen."""
        fault = f"one of rows {self.other_shapes[0]}" if self.other_shapes else "none"
        expected = f"a router of the blocks' {tuple(self.batch.shape)} tokens must return scores, weights and experts"
        sentence = f"{expected}; {fault} came: watch metrics of tokens"
        require(self.layers or not self.plan.wants("routing"), sentence, WatchError, "routing")


def arithmetic_of(weights: Iterable[Tensor], hidden: Tensor) -> torch.dtype:
    """The coarsest of the dtypes at work: that of the hidden states, of the weights in the blocks, and of autocast."""
    device = hidden.device.type
    dtypes = {hidden.dtype, *map(attrgetter("dtype"), weights)}
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    return max(dtypes & set(ARITHMETICS), key=ARITHMETICS.index)


def dropout_of(block: nn.Module) -> float:
    """The largest probability of dropout in a block, among modules in train mode."""
    names = ("p", "dropout", "attention_dropout", "dropout_prob", "drop_prob")
    training = [module for module in submodules(block) if module.training]
    values = [getattr(module, name, 0.0) for module in training for name in names]
    return max([p for p in values if isinstance(p, float)], default=0.0)
