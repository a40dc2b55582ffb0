"""rankscope: how fast the tokens of a transformer become the same, and what holds them apart."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope.engine import sweep
    from rankscope.live import Monitor, watch
    from rankscope.nets import Architecture, Transformer
    from rankscope.paths import decompose
    from rankscope.profiles import Profile, measure
    from rankscope.runs import read
    from rankscope.sources import fresh, load
    from rankscope.theory import certify

# Where each public name lives. Resolved on first use, so that `import rankscope` does not import torch.
_HOME = {
    "Architecture": "nets",
    "Transformer": "nets",
    "Profile": "profiles",
    "measure": "profiles",
    "read": "runs",
    "fresh": "sources",
    "load": "sources",
    "Monitor": "live",
    "watch": "live",
    "decompose": "paths",
    "certify": "theory",
    "sweep": "engine",
}
__all__ = [
    "Architecture",
    "Monitor",
    "Profile",
    "Transformer",
    "certify",
    "decompose",
    "fresh",
    "load",
    "measure",
    "read",
    "sweep",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("rankscope")
    if name not in _HOME:
        raise AttributeError(f"module 'rankscope' has no attribute {name!r}")
    value = getattr(import_module(f"rankscope.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
