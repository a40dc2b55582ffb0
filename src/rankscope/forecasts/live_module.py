"""`read_module`: what can be read off any torch module before it is trained, without knowing its architecture.

`forecasting.py` calls it for modules that `load` does not know. In order: the two batches go through the module under
`watch`, for the residuals of tokens and the entropy of attention, in float64 where the module computes in that; their
losses are differentiated (`live_passes.py`), by kinds of weights as far as names tell them (`weight_kinds.py`); and
after the drift all of it is read once more. The numbers are made by `readings.py`, the same as of networks of the lab;
a reading that would not be the same quantity is left out, and a sentence says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from rankscope.errors import ArchitectureError, LabError, WatchError, require
from rankscope.forecasts.layers import filled_table
from rankscope.forecasts.live_passes import LiveBatch, LivePass, ModuleInputs, NarrowingNoticed, in_dtype, passed
from rankscope.forecasts.plan import DescribedPlan
from rankscope.forecasts.readings import (
    HIGHEST,
    IN_BLOCKS,
    LOWEST,
    SAMPLES,
    WeightKinds,
    curvature_readings,
    drifted,
    gradient_of,
    gradient_readings,
    input_loss,
    norms_by_layer,
    output_readings,
    profile_readings,
    trained_weights,
    weight_readings,
)
from rankscope.forecasts.weight_kinds import weight_kinds
from rankscope.lab import Recipe
from rankscope.live import is_sharded, make_plan, rows_and_columns, sizes_in, submodules, unwrapped, watch
from rankscope.monitor import GRADIENT_METRIC, TokenGradients, preserved_training_state, token_gradients
from rankscope.profiles import Profile

METRICS = ("relative_residual", "entropy")
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TokenCurves:
    """What a watch read of the first samples, by layer."""

    residual: Tensor  # log10 of the relative residual, `[sample, layer]`; where rounding decided it, that is below
    marked: Tensor  # Where rounding decided it
    entropy: Tensor | None
    """`[sample, layer, head]`, NaN at layer 0 and in layers that do not attend; None where it is not known."""
    samples: int  # How many the batch has
    padded: bool  # Whether some of its tokens are padding
    arithmetic: str  # What the module computed in
    layout: str | None  # Whether blocks take the batch first or the token first; None where nothing showed it

    @property
    def attends(self) -> list[int]:
        """Layers in which attention was seen."""
        if self.entropy is None:
            return []
        return [layer for layer in range(self.entropy.shape[1]) if not bool(self.entropy[:, layer].isnan().all())]


def read_module(
    model: nn.Module, given: ModuleInputs, recipe: Recipe
) -> tuple[DescribedPlan, dict[str, float], pl.DataFrame, list[str]]:
    """Read everything that can be read off a module, and leave the module as it was, bit for bit.

    Args:
        model: Any torch module with a stack of blocks, at its initialisation.
        given: Two batches, the loss, and the blocks where they are not found by themselves.
        recipe: Steps and the largest learning rate of the training that is asked about; its seed is what the drift is
            drawn from.

    Returns:
        The module and its training; every reading that is known, by name, as the predictor takes them; the table of a
        `Forecast`; what is not known and why, each a sentence.

    Raises:
        ArchitectureError: The model is no module.
        LabError: The module cannot be called with the batches, there is no loss, or the recipe names what a module
            decides itself.
        MonitorError: The loss is not one number with a gradient, or the module cannot be left as it was.
        WatchError: The blocks are not found, or cannot be watched.
    """
    if not isinstance(model, nn.Module):
        sentence = f"module is of a torch module; got a {type(model).__name__}: leave module out"
        raise ArchitectureError(sentence, subject="subject")
    for name, decides in {"batch_size": "the inputs decide", "frozen": "requires_grad of its weights decides"}.items():
        sentence = f"{name} of a recipe is of networks that are drawn; of a module {decides}: leave {name} out"
        require(getattr(recipe, name) == getattr(Recipe(), name), sentence, LabError, name)
    refusal = ""
    if is_sharded(model):
        refusal = "are sharded or split over devices (FSDP, ZeRO-3, DTensor): forecast it before that"
    elif any(weight.is_meta or is_lazy(weight) for weight in model.parameters()):
        refusal = "are not drawn yet, or on the meta device: draw them first"
    elif any(type(part).__name__ == "DistributedDataParallel" for part in submodules(unwrapped(model))):
        refusal = "are partly wrapped in DDP, which counts their calls: forecast it before that"
    sentence = f"a module must have its weights to itself; those of {type(model).__name__} {refusal}"
    require(not refusal, sentence, LabError, "model")
    model = unwrapped(model)
    batches = given.batches(model)
    sentence = f"{type(model).__name__} has no weights to train: none requires a gradient"
    require(trained_weights(model), sentence, LabError, "model")
    dtype = torch.float32 if any(weight.dtype in HALF for weight in model.parameters()) else None
    reader = ModuleReader(model, batches, given, recipe, dtype)
    with in_dtype(model, dtype):
        with preserved_training_state(model), torch.enable_grad():
            curves, start = reader.start()
            table = reader.table(curves)
        drift = drifted(model, recipe)
        with drift, preserved_training_state(model), torch.enable_grad():
            later = reader.look(reader.watched())
    if dtype is not None:
        reader.note("half-precision weights were read in float32")
    point = start | {f"drift_{name}": value for name, value in later.items()} | reader.architecture_numbers(curves)
    heads = None if curves.entropy is None else curves.entropy.shape[2]
    layers = curves.residual.shape[1] - 1
    described = {"module": type(model).__name__, "layers": layers, "width": reader.width, "heads": heads}
    return DescribedPlan(described, replace(recipe, batch_size=curves.samples)), point, table, reader.notes


@dataclass
class ModuleReader:
    """Takes readings of a module as it is now: called before the drift, and within it."""

    model: nn.Module
    batches: Sequence[LiveBatch]
    given: ModuleInputs
    recipe: Recipe
    dtype: torch.dtype | None  # What half precision is read in; None of a module that has its own

    def __post_init__(self) -> None:
        self.plan = make_plan(self.model, METRICS[:1], blocks=self.given.blocks)
        self.given_weights = trained_weights(self.model)
        self.kinds: WeightKinds = {}
        self.width: int | None = None
        self.notes: list[str] = []
        if names := sorted({name for batch in self.batches for name in batch.for_loss}):
            self.note(f"the loss alone was given {', '.join(names)}: the module's forward does not take it")

    @property
    def weights(self) -> dict[str, Tensor]:
        """The trainable weights that the module holds now, by name: copies, while the module is read."""
        return trained_weights(self.model)

    def note(self, sentence: str) -> None:
        """Add a sentence to the notes, unless it is there."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def start(self) -> tuple[TokenCurves, dict[str, float]]:
        """(What was watched, every reading at initialisation)."""
        first = self._pass(0)
        weights = self.given_weights  # copies stand in their place: what still reaches them is kept elsewhere
        reached = torch.autograd.grad(first.loss, list(weights.values()), retain_graph=True, allow_unused=True)
        if kept := [name for name, gradient in zip(weights, reached, strict=True) if gradient is not None]:
            where = f"{type(self.model).__name__} keeps {kept[0]} in another place too (a closure, a dictionary)"
            raise LabError(f"a module must take its weights from its attributes, to be read; {where}", subject="model")
        self.kinds = weight_kinds(self.model, self.plan.blocks, self.weights, first.head)
        self._note_loss(first)
        unknown = [kind for kind, parts in self.kinds.items() if parts is None]
        if unknown:
            self.note(f"weights of {', '.join(unknown)} are not known: names do not tell them, or they are shared")
        del first
        curves = self.watched()
        readings = self.look(curves) | self._curvature()
        return curves, readings | weight_readings(self.weights, self.kinds, self.recipe)

    def look(self, curves: TokenCurves) -> dict[str, float]:
        """What is read again after the drift: shares of the output, input gradients of two batches, residuals and
        entropy."""
        readings: dict[str, float] = {}
        gradients = []
        for k in (0, 1):
            made = self._pass(k)
            if made.logits is None:
                break
            if k == 0:
                readings |= self._output(made, curves)
            gradients.append(gradient_of(input_loss(made.rows, made.labels), self.weights))
            del made
        if len(gradients) == 2:
            readings |= gradient_readings(gradients, self.kinds, self.recipe)
        return readings | self._profile(curves)

    def _pass(self, k: int) -> LivePass:
        made = passed(self.model, self.batches[k], self.given.loss, self.dtype)
        if made.head_input is not None:
            self.width = made.head_input.shape[-1]
        return made

    def _note_loss(self, made: LivePass) -> None:
        """Say what the loss is not."""
        value = float(made.loss.detach())
        if not math.isfinite(value):
            self.note(f"the loss of the first batch is {value}")
        if made.logits is None:
            self.note(
                "the loss is not the mean cross-entropy of a tensor that the module returns: logits, the size of the "
                "loss and gradients of what hangs on inputs are not known"
            )
            return
        alone = float(made.trained_loss.detach())
        if abs(value - alone) > 1e-3 * max(1.0, abs(value)):
            self.note(f"the loss is {value:.4g}, of which {alone:.4g} are cross-entropy: readings are of that part")

    def _output(self, made: LivePass, curves: TokenCurves) -> dict[str, float]:
        """What is read off the output, if no token is padding: the lab's have none."""
        assert made.logits is not None
        if curves.padded:
            self.note("some tokens are padding: readings of the output are left out")
            return {}
        taken, symbols = made.head_input, None
        if taken is not None:
            square = taken.shape[0] == taken.shape[1] and curves.layout != "batch first"
            if taken.shape[0] != curves.samples or square:  # the token may come first
                taken = None
            else:
                symbols = self.batches[0].symbols(self.model, taken.shape[:2])
        readings = output_readings(taken, made.logits, symbols)
        if symbols is None:
            readings.pop("share_current", None)
        return readings

    def _curvature(self) -> dict[str, float]:
        """The readings of the loss along the signs of its gradient; of a loss that is no cross-entropy, those that do
        not change with the unit it is in."""
        try:
            with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
                made = self._pass(0)
                readings = curvature_readings(made.trained_loss, list(self.weights.values()), self.recipe)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.note("the loss cannot be differentiated twice: its curvature is not known")
            made = self._pass(0)
            return {} if made.logits is None else {"start_loss": float(made.trained_loss.detach())}
        return readings if made.logits is not None else {"edge": readings["edge"]}

    def _profile(self, curves: TokenCurves) -> dict[str, float]:
        """Residuals and entropy after whole layers: an attention block and the MLP block after it are one layer."""
        # The input, what each layer that attends takes but for the first, and the output.
        last, attends = curves.residual.shape[1] - 1, self._attending(curves)
        full_layers = [0, *(layer - 1 for layer in attends[1:]), last] if attends else list(range(last + 1))
        residual, marked = curves.residual[:, full_layers], curves.marked[:, full_layers].any(0)
        entropy = None if curves.entropy is None else curves.entropy[:, curves.attends]
        readings = profile_readings(residual, entropy)
        if not bool(marked.any()):
            return readings
        if curves.arithmetic == "float64":
            floor = 10 ** float(residual[:, marked].max())
            self.note(f"tokens differ by less than rounding shows: readings of that are cut at {floor:.0e}")
            return readings
        self.note(f"tokens differ by less than {curves.arithmetic} shows: readings of that are left out")
        decided = {"last": bool(marked[-1]), "middle": bool(marked[len(marked) // 2]), "worst": True}
        return {name: value for name, value in readings.items() if not decided.get(name.removeprefix("residual_"))}

    def _attending(self, curves: TokenCurves) -> list[int]:
        """Layers that attend: as seen, else as names say; none where neither is known."""
        if curves.attends:
            return curves.attends
        parts = self.kinds.get("query") or ()
        called_once = len(set(map(id, self.plan.blocks))) == curves.residual.shape[1] - 1
        return sorted({part.layer for part in parts if part.layer is not None}) if called_once else []

    def architecture_numbers(self, curves: TokenCurves) -> dict[str, float]:
        """The numbers of `readings.architecture_numbers` that can be known: the rate, whether there are MLPs, and
        the depth where blocks that do not attend are MLPs."""
        attends, numbers = self._attending(curves), {"rate": math.log10(self.recipe.lr)}
        if attends and (len(attends) == curves.residual.shape[1] - 1 or self.kinds["mlp"]):
            numbers["depth"] = math.log2(len(attends))
        if self.kinds["mlp"] is not None:
            numbers["no_mlp"] = float(not self.kinds["mlp"])
        return numbers

    def watched(self) -> TokenCurves:
        """Residuals and entropy of the first samples of the first batch: in float64, or as the module computes where it
        does not; without entropy where attention cannot be seen."""
        wide = torch.float64 if self._computes_in_float64 else self.dtype
        profile, entropy, failure = self._watch(METRICS[0], wide), None, None
        layers = sorted(profile.rows(METRICS[0])["layer"].unique().to_list())
        for dtype in dict.fromkeys((wide, self.dtype)):  # a mask in float32 may go with tokens, not with a pattern
            try:
                entropy, failure = self._entropy(self._watch(METRICS[1], dtype), layers), None
                break
            except (WatchError, LabError) as error:
                failure = error
        if failure is not None:
            self.note(f"attention was not seen, and its entropy is not known: {failure}")
        columns = {name: profile.curve(METRICS[0], name)[:SAMPLES, layers] for name in ("log10", "floor")}
        marked = profile.curve(METRICS[0], "below_floor")[:SAMPLES, layers] == 1
        network = profile.manifest.networks[0]
        return TokenCurves(
            residual=torch.where(marked, columns["floor"].log10(), columns["log10"]),
            marked=marked,
            entropy=entropy,
            samples=int(profile.rows(METRICS[0])["sample"].n_unique()),
            padded=bool(network.checks["padded_tokens"]),
            arithmetic=network.arithmetic,
            layout=network.checks["layout"],
        )

    @cached_property
    @torch.no_grad()
    def _computes_in_float64(self) -> bool:
        """True if the module can be called in float64, and rounds nothing to less on the way."""
        noticed = NarrowingNoticed()
        try:
            with in_dtype(self.model, torch.float64), noticed:
                self.batches[0].called(self.model, torch.float64)
        except (LabError, RuntimeError, TypeError):  # dtypes that do not go together; devices that have no float64
            return False
        return not noticed.narrowed

    @torch.no_grad()
    def _watch(self, metric: str, dtype: torch.dtype | None) -> Profile:
        """What is read of one call in this dtype, None for the module's own."""
        with in_dtype(self.model, dtype), watch(self.model, [metric], blocks=self.given.blocks) as w:
            self.batches[0].called(self.model, dtype)
        return w.profile()

    def _entropy(self, profile: Profile, layers: Sequence[int]) -> Tensor | None:
        """`[sample, layer, head]` of the same layers; None where layers have different numbers of heads."""
        rows, curve = profile.rows(METRICS[1]), profile.curve(METRICS[1])
        attend = rows["layer"].n_unique()
        if len(rows) != rows["sample"].n_unique() * attend * curve.shape[2]:
            self.note("layers have different numbers of heads: the entropy of attention is left out")
            return None
        by_layer = torch.full((len(curve), max(layers) + 1, curve.shape[2]), math.nan, dtype=curve.dtype)
        by_layer[:, : curve.shape[1]] = curve
        return by_layer[:SAMPLES, layers]

    def table(self, curves: TokenCurves) -> pl.DataFrame:
        """By layer: the residual, NaN where rounding decided; entropy; gradients of the loss at tokens and at kinds of
        weights, NaN where they are zero, which small ones are rounded to."""
        layers = curves.residual.shape[1]
        columns: dict[str, Any] = {"layer": list(range(layers))}
        columns["residual"] = curves.residual.masked_fill(curves.marked, math.nan).mean(0).tolist()
        if curves.entropy is not None:
            columns["entropy"] = curves.entropy.nanmean((0, 2)).tolist()
        tokens = TokenGradients(self.plan)
        try:
            with tokens.attached():
                made = self._pass(0)
        except RuntimeError as error:  # blocks that are lists of parts, which are not called themselves
            if isinstance(error, WatchError | torch.OutOfMemoryError):
                raise
            tokens.edges, made = {}, self._pass(0)
        if tokens.shape is not None:
            self.width = tokens.shape[-1]
            per_token = (self.batches[0].symbols(self.model, tokens.shape[:2]), made.logits)
            if len(tokens.shape) == 4:
                # Raises if the axes are [batch, token, stream, width].
                rows_and_columns(tokens.shape, sizes_in(per_token), self.plan.blocks[0])
        gradient = gradient_of(made.loss, self.weights, keep=True)
        at_tokens = {
            layer: torch.cat([value / len(value) for value, _ in parts]).norm().log10().item()
            for (layer, metric, _), parts in token_gradients(made.loss, {"": tokens})[""].parts.items()
            if metric == GRADIENT_METRIC and layer is not None
        }
        finite = {layer: log for layer, log in at_tokens.items() if math.isfinite(log)}
        columns["gradient"] = [finite.get(layer, math.nan) for layer in range(layers)]
        if len(set(map(id, self.plan.blocks))) == layers - 1:
            for kind in IN_BLOCKS:
                parts = [part for part in self.kinds[kind] or () if self.weights[part.name].ndim > 1]
                logs = {k: log for k, log in norms_by_layer(gradient, parts).items() if LOWEST < log < HIGHEST}
                columns[kind] = [logs.get(layer, math.nan) for layer in range(layers)]
        return filled_table(columns)
