"""The networks that a page can choose from: those named on the command line, and random ones of any shape.

A page names a network of the shelf; it cannot make the server load anything else.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from rankscope.errors import SettingError, one_of
from rankscope.explorer.settings import RANDOM, Setting
from rankscope.nets import Transformer
from rankscope.sources import named_network
from rankscope.sources.fresh import untrained
from rankscope.theory.observe import WeightNorms

DRAWN = 2
"""Random networks that are kept."""


class Shelf:
    """Networks by name. What is not there yet is loaded when it is first asked for."""

    def __init__(self, nets: Mapping[str, Transformer], later: Iterable[str] = ()) -> None:
        self._nets = dict(nets)
        self._later = [name for name in later if name not in self._nets]
        self._drawn: OrderedDict[str, Transformer] = OrderedDict()
        self._norms: dict[int, tuple[Transformer, WeightNorms]] = {}

    @property
    def names(self) -> list[str]:
        """What a setting may call a model, random ones last."""
        return [*self._nets, *self._later, RANDOM]

    def network(self, setting: Setting) -> Transformer:
        """The network of a setting, with nothing turned yet."""
        if setting.model == RANDOM:
            return self._draw(setting)
        if setting.model not in self.names:
            raise SettingError(one_of("model", setting.model, self.names))
        if setting.model not in self._nets:
            self._nets[setting.model] = named_network(setting.model)
        return self._nets[setting.model]

    def norms(self, net: Transformer) -> WeightNorms:
        """What is known of a network's weights, kept as long as the network is."""
        kept = [*self._nets.values(), *self._drawn.values()]
        self._norms = {
            key: pair for key, pair in self._norms.items() if any(pair[0] is each for each in kept)
        }
        return self._norms.setdefault(id(net), (net, WeightNorms()))[1]

    def described(self) -> list[dict[str, Any]]:
        """For the page: what is known of each without loading it."""
        return [{"name": name, **_about(self._nets.get(name))} for name in self.names]

    def _draw(self, setting: Setting) -> Transformer:
        shape = setting.shape
        key = shape.model_dump_json()
        if key not in self._drawn:
            arch = shape.architecture()
            self._drawn[key] = untrained(arch, RANDOM, shape.seed, shape.init)
            while len(self._drawn) > DRAWN:
                self._drawn.popitem(last=False)
        self._drawn.move_to_end(key)
        return self._drawn[key]


def _about(net: Transformer | None) -> dict[str, Any]:
    if net is None:
        return {}
    arch = net.arch
    return {
        "layers": arch.layers,
        "width": arch.width,
        "heads": arch.heads,
        "skip": arch.attention_skip,
        "mlp": arch.mlp,
        "norm": arch.norm,
        "mask": arch.mask,
        "divisor": arch.divisor,
        "trained": bool(net.origin) and net.origin.described().get("weights") == "trained",  # type: ignore[union-attr]
    }
