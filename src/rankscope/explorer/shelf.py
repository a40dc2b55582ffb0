"""The networks that a page can choose from: those named on the command line, and random ones of any shape.

A page names a network of the shelf; it cannot make the server load anything else.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from rankscope.errors import SettingError, one_of
from rankscope.explorer.remedies import remedied
from rankscope.explorer.settings import RANDOM, Setting
from rankscope.nets import Architecture, Transformer
from rankscope.sources import named_network
from rankscope.sources.fresh import untrained
from rankscope.sources.network_names import is_drawn
from rankscope.theory.weight_norms import WeightNorms

DRAWN = 3
"""Random networks that are kept, and networks with remedies: that of the page, and of two settings pinned
beside it."""


class Shelf:
    """Networks by name. What is not there yet is loaded when it is first asked for."""

    def __init__(self, nets: Mapping[str, Transformer], later: Iterable[str] = ()) -> None:
        self._nets = dict(nets)
        self._later = [name for name in later if name not in self._nets]
        self._drawn: OrderedDict[str, Transformer] = OrderedDict()
        self._remedied: OrderedDict[Setting, Transformer] = OrderedDict()
        self._norms: dict[int, WeightNorms] = {}

    @property
    def names(self) -> list[str]:
        """What a setting may call a model, random ones last."""
        return [*self._nets, *self._later, RANDOM]

    def network(self, setting: Setting) -> Transformer:
        """The network of a setting, with nothing turned yet but its remedies put on, and for them its depth:
        some draw weights or divide them, which takes too long to be done at every move of a slider."""
        net = self._own(setting)
        if setting.remedies is None:
            return net
        key = Setting(
            model=setting.model, shape=setting.shape, layers=setting.layers, remedies=setting.remedies
        )
        if key not in self._remedied:
            self._remedied[key] = remedied(net, setting)
            while len(self._remedied) > DRAWN:
                self._let_go(self._remedied.popitem(last=False)[1])
        self._remedied.move_to_end(key)
        return self._remedied[key]

    def _own(self, setting: Setting) -> Transformer:
        if setting.model == RANDOM:
            return self._draw(setting)
        if setting.model not in self.names:
            raise SettingError(one_of("model", setting.model, self.names))
        if setting.model not in self._nets:
            self._nets[setting.model] = named_network(setting.model)
        return self._nets[setting.model]

    def norms(self, net: Transformer) -> WeightNorms:
        """What is known of a network's weights, kept as long as the network is."""
        return self._norms.setdefault(id(net), WeightNorms())

    def holds(self, setting: Setting) -> bool:
        """Whether the network of a setting is still here, or need not be drawn."""
        return setting.model != RANDOM or setting.shape.model_dump_json() in self._drawn

    def described(self) -> list[dict[str, Any]]:
        """For the page: what is known of each without loading it."""
        return [
            {"name": name, "drawn": is_drawn(name), **_about(self._nets.get(name))} for name in self.names
        ]

    def _draw(self, setting: Setting) -> Transformer:
        shape = setting.shape
        key = shape.model_dump_json()
        if key not in self._drawn:
            arch = shape.architecture()
            self._drawn[key] = untrained(arch, RANDOM, shape.seed, shape.init)
            while len(self._drawn) > DRAWN:
                self._let_go(self._drawn.popitem(last=False)[1])
            for old in [old for old in self._remedied if not self.holds(old)]:
                self._let_go(self._remedied.pop(old))
        self._drawn.move_to_end(key)
        return self._drawn[key]

    def _let_go(self, net: Transformer) -> None:
        self._norms.pop(id(net), None)


def _about(net: Transformer | None) -> dict[str, Any]:
    if net is None:
        return {}
    drawn = net.origin is not None and net.origin.described().get("weights") == "random"
    return {**sizes(net.arch), "mlp": net.arch.mlp, "norm": net.arch.norm, "drawn": drawn}


def sizes(arch: Architecture) -> dict[str, Any]:
    """What the page shows of every network."""
    shown = {name: getattr(arch, name) for name in ("layers", "width", "heads", "mask", "divisor")}
    return {**shown, "skip": arch.attention_skip}
