"""Hidden states of one call, reduced to numbers on the device where they are.

`recorder.py` makes a `TokenBatch` of the first hidden states of a call, and hands each layer's to
`StateReadings.read`; `monitor/inline.py` does the same for training batches. Small states are copied and
wait, since reading several together is faster; `flush` reads them. On a CPU, metrics that need norms alone
are read by `state_norms.py`; all others, and other devices, by `profiles.readings.read_tensor`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live.isolation import float64_device, isolated, to_float64_device
from rankscope.live.modules import own_parameters, submodules
from rankscope.live.plan import WatchPlan
from rankscope.live.state_norms import LARGEST_SAMPLE, PIECE, StateNorms
from rankscope.metrics.tokens import unit_of, valid_tokens
from rankscope.profiles.readings import Readings, read_tensor

TOGETHER = 2**24
"""Entries of states that wait on an accelerator, which is done with a layer before its next call is made."""
ARITHMETICS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""From the finest to the coarsest."""


@dataclass
class TokenBatch:
    """The tokens of one call of the model."""

    shape: torch.Size  # [batch, token]
    valid: dict[torch.device, Tensor]  # [batch, token], False at padding; by device, filled by `valid_for`
    all_valid: bool  # there is no padding
    unit: float  # the eps of the arithmetic that the model ran in

    @classmethod
    def of(cls, hidden: Tensor, padding: Tensor | None, arithmetic: torch.dtype) -> "TokenBatch":
        """The batch whose first block takes `hidden` `[batch, token, width]`, in a model of this dtype."""
        shape = hidden.shape[:2]
        valid = {hidden.device: valid_tokens(shape, padding, hidden.device)}
        return cls(shape, valid, padding is None, unit_of(arithmetic))

    def valid_for(self, x: Tensor) -> Tensor:
        """Which tokens are valid, `[batch, token]`, on the device where x is measured."""
        device = float64_device(x.device)
        if device not in self.valid:
            self.valid[device] = next(iter(self.valid.values())).to(device)
        return self.valid[device]

    @property
    def padded_tokens(self) -> Tensor:
        """The number of padded tokens, a tensor of one number."""
        return (~next(iter(self.valid.values()))).sum()


class StateReadings:
    """Reads the metrics of tokens off the hidden states of one call; `readings` takes what is read."""

    def __init__(
        self, plan: WatchPlan, batch: TokenBatch, readings: list[tuple[int, Readings]] | None = None
    ) -> None:
        self.plan, self.batch = plan, batch
        self.readings = [] if readings is None else readings
        self.norms: StateNorms | None = None  # norms of states from which the metrics are not computed yet
        self.waiting: list[tuple[int, Tensor]] = []  # (layer, copy of its hidden states) to be read together
        self.broken: list[tuple[int, Tensor]] = []  # (layer, whether a sample holds NaN or infinity)
        self.kept: list[tuple[int, Tensor]] = []
        """(layer, hidden states on the CPU) where the plan keeps states."""

    def read(self, layer: int, hidden: Tensor) -> None:
        """Measure a layer's hidden states `[batch, token, width]` now, or keep a copy until `flush`."""
        plan = self.plan
        if not plan.measures(layer):
            return
        if hidden.shape[:2] != self.batch.shape:
            inner = plan.describe_inner_stacks()
            raise WatchError(
                f"every layer must have the tokens of the first {tuple(self.batch.shape)}; layer {layer} has "
                f"{tuple(hidden.shape[:2])}: name blocks between which tokens are neither merged nor split"
                + (f": {inner}" if inner else ""),
                subject="blocks",
            )
        if "states" in plan.keep:
            self.kept.append((layer, hidden.to("cpu", copy=True)))
        on_cpu = hidden.device.type == "cpu"
        if on_cpu and not (plan.reads_norms_only and hidden.numel() <= PIECE):
            self.flush()
            self._read_alike([(layer, hidden)])
            return
        self.waiting.append((layer, hidden.detach().clone()))
        if self.waiting_entries >= (4 * PIECE if on_cpu else TOGETHER):
            self.flush()

    @property
    def waiting_entries(self) -> int:
        """The number of entries of all states that wait."""
        return sum(hidden.numel() for _, hidden in self.waiting)

    def flush(self) -> None:
        """Read the states that wait."""
        waiting, self.waiting = self.waiting, []
        for _, alike in groupby(waiting, key=lambda pair: (pair[1].shape, pair[1].dtype, pair[1].device)):
            self._read_alike(list(alike))

    def all_readings(self) -> list[tuple[int, Readings]]:
        """(layer, readings) of all states so far, those included that wait."""
        self.flush()
        return self.readings + ([] if self.norms is None else self.norms.readings(self.plan.metrics))

    def _read_alike(self, states: Sequence[tuple[int, Tensor]]) -> None:
        """Read states of one shape, dtype and device."""
        if not self._norms_taken(states):
            self._read_as_samples(states)

    def _norms_taken(self, states: Sequence[tuple[int, Tensor]]) -> bool:
        """Take the norms of the states if these say all that is asked; False if they do not."""
        first = states[0][1]
        if first.device.type != "cpu" or not self.plan.reads_norms_only:
            return False
        if not 0 < first.numel() <= LARGEST_SAMPLE * len(first):
            return False
        with isolated(first.device):
            if self.norms is None:
                batch = self.batch
                self.norms = StateNorms(batch.valid_for(first), batch.all_valid, batch.unit)
            return self.norms.take(*zip(*states, strict=True))

    def _read_as_samples(self, states: Sequence[tuple[int, Tensor]]) -> None:
        """Read all metrics of the states at once, the samples of each layer following those of the last."""
        layers, (first, *rest) = zip(*states, strict=True)
        batch = len(first)
        with isolated(first.device):
            valid = self.batch.valid_for(first)
            hidden = torch.cat([first, *rest]) if rest else first
            measured, broken = read_tensor(
                "tokens", to_float64_device(hidden), valid.repeat(len(layers), 1) if rest else valid,
                self.plan.metrics, self.batch.unit, self.batch.all_valid,
            )  # fmt: skip
        for k, layer in enumerate(layers):
            samples = slice(k * batch, (k + 1) * batch)
            self.readings.append((layer, [(metric, rows.of_samples(samples)) for metric, rows in measured]))
            self.broken.append((layer, broken[samples].any()))


def arithmetic_of(blocks: Sequence[nn.Module], hidden: Tensor) -> torch.dtype:
    """The coarsest of the dtypes at work: that of the hidden states, of the weights, and of autocast."""
    device = hidden.device.type
    dtypes = {hidden.dtype} | {weight.dtype for weight in own_parameters(submodules(*blocks))}
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    return max(dtypes & set(ARITHMETICS), key=ARITHMETICS.index)


def dropout_of(block: nn.Module) -> float:
    """The largest probability of dropout in a block, among modules in train mode."""
    names = ("p", "dropout", "attention_dropout", "dropout_prob", "drop_prob")
    training = [module for module in submodules(block) if module.training]
    values = [getattr(module, name, 0.0) for module in training for name in names]
    return max([p for p in values if isinstance(p, float)], default=0.0)
