"""`Plan`: a training that has not begun, of any network on a task of the lab; what forecasts are made of.

`planned` makes the plan of whatever `forecast` is given, as a `Design` says. `changes` lists changed plans that may let
the network train, which `forecasting.py` forecasts.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rankscope.errors import ArchitectureError, LabError, RankscopeError, SourceError, require, require_one_of
from rankscope.forecasts.readings import architecture_numbers, readings
from rankscope.lab import UNLABELLED, Initialisation, Model, Recipe, Task, Training
from rankscope.lab import task as task_named
from rankscope.nets import Architecture, Mask, MaskLike, Transformer, chosen_layers, with_layers
from rankscope.nets import mask_matrix as matrix
from rankscope.remedies import Remedy

GIVEN = "weights are those given: a forecast is of networks that were not trained"
FORMS = ("kernel", "mask", "positions", "mlp", "activation", "experts", "norm", "norm_place", "final_norm", "parallel",
         "shared", "query_norm", "head_gate")  # fmt: skip
"""Fields of an architecture that say what form its parts have."""


@dataclass(frozen=True)
class Plan:
    """A network, what it is to learn, and how."""

    arch: Architecture  # The network
    task: Task  # What it learns
    recipe: Recipe = field(default_factory=Recipe)  # Steps, learning rate, batch and seed of its training
    initialisation: Initialisation = field(default_factory=Initialisation)  # How its weights are drawn
    remedies: Sequence[str | Remedy] = ()  # Put onto it
    net: Transformer | None = None
    """The network itself, where its weights are given; nothing is drawn then but embedding and head."""

    @property
    def layers(self) -> int:
        """How many layers the network has."""
        return self.arch.layers

    @property
    def task_name(self) -> str:
        """What is learnt, by name."""
        return self.task.name

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by which trained designs are compared with this one: sizes, the training, and kinds of parts."""
        remedies = "+".join(remedy if isinstance(remedy, str) else remedy.name for remedy in self.remedies)
        forms = {name: getattr(self.arch, name) for name in FORMS}
        return {
            "layers": self.arch.layers, "width": self.arch.width, "heads": self.arch.heads, "steps": self.recipe.steps,
            "rate": self.recipe.lr, "batch": self.recipe.batch_size, "attention_skip": float(self.arch.attention_skip),
            "mlp_skip": float(self.arch.mlp_skip), "remedy": remedies,
            **{name: form if isinstance(form, bool | None) else str(form) for name, form in forms.items()},
        }  # fmt: skip

    @property
    def description(self) -> dict[str, Any]:
        """The network as its fields, for JSON."""
        return self.arch.to_dict()

    def training(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, capture: bool = True
    ) -> Training:
        """The training, not begun yet, of weights that are drawn; the arguments are those of `Training`."""
        return Training(
            self.task, self.arch, self.recipe, remedies=self.remedies, initialisation=self.initialisation,
            device=device, dtype=dtype, capture=capture,
        )  # fmt: skip

    def model(self) -> Model:
        """Embedding, network and head before the first step."""
        if self.net is None:
            asked, recipe = self.task.interface, self.recipe
            return self.initialisation.model(self.arch, asked, recipe.seed, self.remedies, recipe.frozen)
        std = self.initialisation.embedding_std
        return Model(self.net.to(torch.float32, "cpu"), self.task.interface, std, seed=self.recipe.seed + 1)

    def changed(self, remedy: str | Remedy | None = None, lr: float | None = None, **fields: Any) -> "Plan":
        """A plan that differs in some fields of its architecture; its weights are drawn.

        Args:
            remedy: One more remedy.
            lr: Another learning rate.
            fields: Fields of the architecture, or `initialisation`.
        """
        initialisation = fields.pop("initialisation", self.initialisation)
        arch = with_layers(self.arch, chosen_layers(fields.pop("layers", None), self.arch.layers))
        return replace(
            self, arch=arch.replace(**fields), initialisation=initialisation, net=None,
            remedies=(*self.remedies, *([] if remedy is None else [remedy])),
            recipe=self.recipe if lr is None else replace(self.recipe, lr=lr),
        )  # fmt: skip


@dataclass(frozen=True)
class Design:
    """What a network is to learn, and what is changed of it before: `planned` makes a plan of both.

    Raises:
        LabError: A sample has fewer than two tokens.
    """

    task: str | Task = "next-character"  # What is to be learnt: a name or a `Task` of the lab
    tokens: int | None = None  # Tokens of a sample (of copying, of what is copied); those of the task if left out
    depth: int | None = None  # Layers, in place of the network's own
    remedies: Sequence[str | Remedy] = ()  # Put onto the network
    init: str | Initialisation = "xavier"
    """How weights of an `Architecture` are drawn: a scheme (`"bert"`, `"xavier/sqrt(L)"`), or an `Initialisation`."""

    def __post_init__(self) -> None:
        fits = self.tokens is None or (isinstance(self.tokens, int) and 2 <= self.tokens < 2**31)
        require(fits, f"tokens must be a whole number from 2 on; got {self.tokens!r}", LabError, "tokens")

    @property
    def chosen_task(self) -> Task:
        """The task, with samples of so many tokens."""
        task = task_named(self.task) if isinstance(self.task, str) else self.task
        if self.tokens is None:
            return task
        for size in ("context", "length"):
            if size in getattr(task, "__dataclass_fields__", {}):
                return replace(task, **{size: self.tokens})  # type: ignore[type-var]
        raise LabError(f"samples of {task.name} have tokens of their own; leave tokens out", subject="tokens")


def planned(subject: Any, design: Design, recipe: Recipe) -> tuple[Plan, list[str]]:
    """(The plan of whatever `forecast` is given, sentences on what was changed of it).

    Raises:
        ArchitectureError: The subject is no network of which a plan can be made.
        LabError: The task is not known, or samples of so many tokens have no label.
    """
    task, (arch, net, notes) = design.chosen_task, _network(subject, recipe.seed)
    first = task.batch(recipe.batch_size, recipe.seed, 0)
    sentence = f"samples of {first.inputs.shape[1]} tokens have no label in {task.name}"
    require((first.labels != UNLABELLED).any(), sentence, LabError, "tokens")
    if design.depth is not None:
        layers = chosen_layers(design.depth, arch.layers)
        arch, net = with_layers(arch, layers), None if net is None else net.variant(layers=design.depth)
        if net is not None and len(layers) > len(set(layers)):
            notes.append("layers are repeated, with the same weights")
    arch, changed = adapted_to_task(arch, task, first.inputs.shape[1])
    if net is not None:
        if arch != net.arch:  # another mask, or a longer table of positions, which starts at zero
            tensors = net.state_dict()
            if arch.positions == "absolute" and len(tensors.get("positions", ())) < arch.length:
                tensors["positions"] = net.weights.like.new_zeros(arch.length, arch.width)
            net = Transformer.from_weights(arch, tensors)
        for remedy in design.remedies:
            net = net.with_remedy(remedy)
    start = design.init if isinstance(design.init, Initialisation) else Initialisation(design.init)
    return Plan(arch, task, recipe, start, tuple(design.remedies), net), [*notes, *changed]


def _network(subject: Any, seed: int) -> tuple[Architecture, Transformer | None, list[str]]:
    """(Architecture, network if weights are given, notes) of whatever was passed."""
    if isinstance(subject, Architecture):
        return subject, None, []
    if isinstance(subject, Transformer):
        drawn = subject.origin is not None and subject.origin.described().get("weights") == "random"
        return subject.arch, subject, [] if drawn else [GIVEN]
    from rankscope.sources import load

    notes = [GIVEN]
    if not isinstance(subject, nn.Module) and hasattr(subject, "model_type"):
        from transformers import AutoModel

        with torch.random.fork_rng():
            torch.manual_seed(seed)
            eager = {"attn_implementation": "eager"}  # a config may name a kernel, which would be fetched from the hub
            subject, notes = AutoModel.from_config(subject, **eager), []  # type: ignore[no-untyped-call]
    if not isinstance(subject, nn.Module):
        sentence = "forecast takes an Architecture, a Transformer, a Hugging Face config or a model in memory"
        raise ArchitectureError(f"{sentence}; got {type(subject).__name__}", subject="subject")
    try:
        net = load(subject)
    except SourceError as error:
        sentence = f"{type(subject).__name__} is not a model that load reads ({error}); to forecast it as it is"
        advice = "give two batches and a loss: forecast(model, module=ModuleInputs([first, second], loss=function))"
        raise ArchitectureError(f"{sentence}, {advice}", subject="module") from error
    arch = net.arch
    if arch.positions == "none" and getattr(getattr(net.origin, "embedding", None), "positions", None) is not None:
        arch = arch.replace(positions="absolute", length=1)  # its table is part of its embedding, which is drawn anew
    return arch, net, notes


@dataclass(frozen=True)
class DescribedPlan:
    """A training that is known by a description alone, without an architecture to change and a task to ask: of a
    person's own module, or of a forecast that was read from a folder."""

    description: dict[str, Any]
    """The network as its fields; the class of a module and its sizes, None where one is not known."""
    recipe: Recipe
    """Steps, learning rate and batch of its training, and the seed of weights, or of the drift of a module's."""
    task_name: str = "its own loss"  # What is learnt, by name or in words
    verdict: tuple[str, ...] = ()  # What is expected, in sentences, where the forecast was read from a folder
    learnt_below: float = math.nan
    """The final loss below which the network has learnt something; NaN where that is not known."""

    @property
    def layers(self) -> int:
        """How many layers the network has, or how many blocks are called."""
        return int(self.description["layers"])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by which a module is compared with trained designs, by name; unknown ones are left out."""
        told = {name: self.description[name] for name in ("layers", "width", "heads")}
        told |= {"steps": self.recipe.steps, "rate": self.recipe.lr, "batch": self.recipe.batch_size}
        return {name: value for name, value in told.items() if value is not None}


def adapted_to_task(arch: Architecture, task: Task, tokens: int) -> tuple[Architecture, list[str]]:
    """(The architecture changed to what the task needs, a sentence for each change).

    A network that is asked for the next token gets a causal mask, and a table of positions gets a row for every one of
    the `tokens` of a sample.

    Raises:
        ArchitectureError: The network has cross-attention.
    """
    sentence = "a forecast is of one stack of blocks; this network reads the output of another"
    advice = "forecast its encoder, or a decoder without cross-attention"
    require(not arch.cross_attention, f"{sentence}: {advice}", ArchitectureError, "cross_attention")
    notes = []
    if task.architecture(1, 8, 2).mask == "causal":
        mask = _causal(arch, tokens)
        if mask is not None:
            arch = arch.replace(mask=mask)
            notes.append(f"the mask is made causal: {task.name} asks for what comes next")
    if arch.positions == "absolute" and arch.length < tokens:
        arch = arch.replace(length=tokens)
        notes.append(f"the table of positions has {tokens} rows, one for each token")
    if arch.positions == "none":
        notes.append("the network has no positions: it sees the order of tokens by its mask alone")
    return arch, notes


def _causal(arch: Architecture, tokens: int) -> MaskLike | None:
    """The mask without what lies ahead; None if nothing does."""

    def sees_ahead(mask: MaskLike) -> bool:
        return bool(matrix(mask, tokens).triu(1).any())

    if not any(sees_ahead(arch.mask_of(layer)) for layer in range(arch.layers)):
        return None
    mask: Any = arch.mask
    if not isinstance(mask, str):
        return Mask("causal", lambda n: matrix(mask, n).tril())
    parts = [part if not sees_ahead(part) else "causal" if part == "complete" else f"causal&{part}"
             for part in mask.split(";")]  # fmt: skip
    return ";".join(parts)


def point_of(model: Model, task: Task, recipe: Recipe) -> dict[str, float]:
    """What the predictor is asked with: the readings of a model, and the numbers of its architecture.

    Args:
        model: Embedding, network and head before the first step.
        task: What it is to learn.
        recipe: How.
    """
    return architecture_numbers(model.net.arch, recipe.lr) | readings(model, task, recipe)


def goes_onto(arch: Architecture, remedy: str | Remedy) -> bool:
    """Whether a network of one layer takes the remedy."""
    try:
        Transformer.random(with_layers(arch, [0])).with_remedy(remedy)
    except RankscopeError:
        return False
    return True


GAINS = (0.25, 0.5, 2.0, 4.0)
REMEDIES = ("rezero", "skipinit", "lnscale", "shaped", "attnscale", "neutreno", "featscale", "gate")
PARTS = ("norm", "skips", "gains", "temperature", "initialisation", "remedies", "rate", "depth")


def changes(plan: Plan, parts: tuple[str, ...] = PARTS) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Yield (what is changed, a function that makes the changed plan, which may refuse) of all that can be tried.

    Args:
        plan: The network that is to be mended.
        parts: What may be changed, of `PARTS`.

    Raises:
        LabError: A part is none of those.
    """
    for part in parts:
        require_one_of("parts", part, PARTS, LabError)
    arch, start = plan.arch, plan.initialisation
    if "norm" in parts:
        if arch.norm == "none":
            normed = partial(plan.changed, norm="layer", norm_place="pre", final_norm=True)
            yield "a LayerNorm before each branch", normed
        elif arch.norm_place == "post":
            yield "norms before branches, and a last one", partial(plan.changed, norm_place="pre", final_norm=True)
        else:
            yield "norms after skips", partial(plan.changed, norm_place="post", final_norm=False)
    if "skips" in parts and (arch.attention_skip < 1 or arch.mlp_skip < 1):
        yield "skips of weight 1", partial(plan.changed, attention_skip=1.0, mlp_skip=1.0)
    if "gains" in parts:
        for gain in GAINS:
            yield f"queries and keys drawn {gain:g} times as large", partial(with_gain, ("query", "key"), plan, gain)
            yield f"values drawn {gain:g} times as large", partial(with_gain, ("value",), plan, gain)
    if "temperature" in parts:
        for factor in (0.25, 4.0):
            yield f"a temperature {factor:g} times as high", partial(plan.changed, divisor=arch.divisor * factor)
    if "initialisation" in parts:
        for scheme in ("xavier", "xavier/sqrt(L)", "bert/sqrt(L)", "orthogonal"):
            if scheme != start.scheme:
                change = f"weights drawn by {scheme} instead of {start.scheme}"
                yield change, partial(plan.changed, initialisation=replace(start, scheme=scheme))
    if "remedies" in parts and not plan.remedies:
        for remedy in REMEDIES:
            if goes_onto(plan.arch, remedy):
                yield f"the remedy {remedy}", partial(plan.changed, remedy)
    if "rate" in parts:
        for factor in (1 / 3, 3.0):
            yield f"a learning rate of {plan.recipe.lr * factor:.2g}", partial(plan.changed, lr=plan.recipe.lr * factor)
    if "depth" in parts and arch.layers > 3:
        for layers in sorted({max(2, arch.layers // 2), max(2, arch.layers // 4)}, reverse=True):
            yield f"{layers} layers", partial(plan.changed, layers=layers)


def with_skips(plan: Plan, weight: float) -> Plan:
    """The plan with skips of this weight; blocks whose branches are parallel have one skip, that of attention."""
    skips: dict[str, Any] = {"attention_skip": weight} | ({} if plan.arch.parallel else {"mlp_skip": weight})
    return plan.changed(**skips)


def with_gain(names: Sequence[str], plan: Plan, gain: float) -> Plan:
    """The plan with the weights of these parts of attention drawn so many times as large."""
    start = plan.initialisation
    scaled = tuple((f"attention.{name}.weight", gain) for name in names)
    return plan.changed(initialisation=replace(start, gains=(*start.gains, *scaled)))
