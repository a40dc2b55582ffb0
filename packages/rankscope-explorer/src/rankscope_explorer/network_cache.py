"""The networks that a page can choose from, with the remedies that it puts on them.

Networks are those named on the command line, and random ones of any shape. A page names a network of the
cache; it cannot make the server load anything else.

Depth comes first, then remedies in their order, then all other controls: a remedy that depends on the depth
takes the one shown, and it can be seen with skips, MLP or norms taken out.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

from rankscope.errors import SettingError, require, require_one_of
from rankscope.nets import Architecture, Transformer
from rankscope.remedies import REMEDIES, Remedy, remedy
from rankscope.sources import fresh, is_drawn, named_network
from rankscope.theory import WeightNorms
from rankscope_explorer.controls import RANDOM, Controls, RandomShape

MOST_RANDOM = 3  # random networks, and networks with remedies, that are kept: those of the page and of two pins
MOST_REMEDIES = 4  # at a time
LARGEST_OPTION = 100.0  # of a remedy, in size: rounds of Sinkhorn, for one, take time


class NetworkCache:
    """Networks by name; one that is not loaded yet is loaded when a page first asks for it.

    Args:
        nets: Loaded networks by name.
        later: Names of further networks, which are loaded on demand.
    """

    def __init__(self, nets: Mapping[str, Transformer], later: Iterable[str] = ()) -> None:
        self._nets = dict(nets)
        self._later = [name for name in later if name not in self._nets]
        self._random: OrderedDict[str, Transformer] = OrderedDict()
        self._with_remedies: OrderedDict[Controls, Transformer] = OrderedDict()
        self._norms: WeakKeyDictionary[Transformer, WeightNorms] = WeakKeyDictionary()
        self._lock = threading.RLock()  # measurements and forecasts take networks in threads of their own
        self.forecasting = threading.Lock()
        """Held by a forecast: loading changes torch's default dtype for all threads, so the two take turns."""
        self.load_waits = threading.Event()
        """Set while a network is to be loaded: a forecast then ends, and is asked for again."""

    @property
    def names(self) -> list[str]:
        """What the control `model` may be, random networks last."""
        return [*self._nets, *self._later, RANDOM]

    def network(self, controls: Controls) -> Transformer:
        """The network of these controls, with only its remedies put on and, for them, its depth.

        Remedies may draw weights or divide them, which takes too long to be done at every move of a slider:
        such networks are kept.
        """
        with self._lock:
            net = self.bare(controls)
            if controls.remedies is None:
                return net
            key = _with_remedies_alone(controls)
            if key not in self._with_remedies:
                net = net if controls.layers is None else net.variant(layers=controls.layers)
                for chosen in chosen_remedies(controls):
                    net = net.with_remedy(chosen)
                self._with_remedies[key] = net
                while len(self._with_remedies) > MOST_RANDOM:
                    self._with_remedies.popitem(last=False)
            self._with_remedies.move_to_end(key)
            return self._with_remedies[key]

    def norms(self, net: Transformer) -> WeightNorms:
        """Norms of a network's weights that theorems have computed; kept as long as the network is."""
        return self._norms.setdefault(net, WeightNorms())

    def holds(self, controls: Controls) -> bool:
        """True unless the controls name a random network, or one with remedies, that is no longer kept."""
        drawn = controls.model != RANDOM or controls.shape.model_dump_json() in self._random
        return drawn and (controls.remedies is None or _with_remedies_alone(controls) in self._with_remedies)

    def described(self) -> list[dict[str, Any]]:
        """For the page: each network's name, and what is known of it without loading it."""
        return [{"name": name, "drawn": is_drawn(name), **_description(self._nets.get(name))} for name in self.names]

    def bare(self, controls: Controls) -> Transformer:
        """The network that these controls name, of the depth that it has of its own and without remedies."""
        with self._lock:
            if controls.model == RANDOM:
                return self._random_network(controls.shape)
            require_one_of("model", controls.model, self.names, SettingError)
            if controls.model not in self._nets:
                self._nets[controls.model] = self._load(controls.model)
            return self._nets[controls.model]

    def _load(self, name: str) -> Transformer:
        """Load a network while no forecast is computed; one that is under way gives way."""
        self.load_waits.set()
        try:
            with self.forecasting:
                return named_network(name)
        finally:
            self.load_waits.clear()

    def _random_network(self, shape: RandomShape) -> Transformer:
        """The random network of a shape; when one is drawn, the one that was used longest ago is dropped."""
        key = shape.model_dump_json()
        if key not in self._random:
            self._random[key] = fresh(shape.architecture(), shape.seed, shape.init, name=RANDOM)
            while len(self._random) > MOST_RANDOM:
                self._random.popitem(last=False)
            for dropped in [kept for kept in self._with_remedies if not self.holds(kept)]:
                del self._with_remedies[dropped]
        self._random.move_to_end(key)
        return self._random[key]


def _with_remedies_alone(controls: Controls) -> Controls:
    """These controls with all that do not decide the network and its remedies set to the defaults of the page."""
    return Controls(model=controls.model, shape=controls.shape, layers=controls.layers, remedies=controls.remedies)


def described_remedies() -> list[dict[str, Any]]:
    """For the page: every remedy, what it does, and its numbers as published."""
    remedies = []
    for name, kind in REMEDIES.items():
        numbers = {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]
        remedies.append({"name": name, "says": kind.formula, "source": kind.citation, "numbers": numbers})
    return remedies


def chosen_remedies(controls: Controls) -> list[Remedy]:
    """The remedies of these controls; too many, or one with too large a number, are refused."""
    specs = [] if controls.remedies is None else controls.remedies.split(";")
    sentence = f"remedies must be {MOST_REMEDIES} at most; got {len(specs)}"
    require(len(specs) <= MOST_REMEDIES, sentence, SettingError, "remedies")
    chosen: list[Remedy] = [remedy(spec) for spec in specs]
    options = [(built, field.name, getattr(built, field.name)) for built in chosen for field in fields(built)]  # type: ignore[arg-type]
    for built, name, value in options:
        must = f"{name} of {built.name} must be from {-LARGEST_OPTION:g} to {LARGEST_OPTION:g} here; got {value:g}"
        require(abs(value) <= LARGEST_OPTION, must, SettingError, "remedies")
    return chosen


def _description(net: Transformer | None) -> dict[str, Any]:
    if net is None:
        return {}
    return {**sizes(net.arch), "mlp": net.arch.mlp, "norm": net.arch.norm, "drawn": weights_drawn(net)}


def weights_drawn(net: Transformer) -> bool:
    """True if the weights of a network were drawn at random, and not trained."""
    return net.origin is not None and net.origin.described().get("weights") == "random"


def sizes(arch: Architecture) -> dict[str, Any]:
    """What the page shows of every architecture."""
    shown = {name: getattr(arch, name) for name in ("layers", "width", "heads", "mask", "divisor")}
    return {**shown, "skip": arch.attention_skip}
