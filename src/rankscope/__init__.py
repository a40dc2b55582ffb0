"""rankscope: how fast the tokens of a transformer become the same, and what holds them apart."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope.depths import Cut, DepthCard, depth
    from rankscope.engine import Sweep, sweep
    from rankscope.forecasts import Forecast, forecast
    from rankscope.live import watch
    from rankscope.monitor import Monitor
    from rankscope.nets import Architecture, Transformer
    from rankscope.paths import Decomposition, decompose
    from rankscope.profiles import Profile, measure
    from rankscope.results import Result, read
    from rankscope.sources import fresh, load
    from rankscope.theory import Certificates, certify
    from rankscope.trainings import RunComparison, Spikes, TrainingRun

# The public names of each room. Resolved on first use, so that `import rankscope` does not import torch.
_ROOMS = {
    "depths": ("Cut", "DepthCard", "depth"),
    "engine": ("Sweep", "sweep"),
    "forecasts": ("Forecast", "forecast"),
    "live": ("watch",),
    "monitor": ("Monitor",),
    "nets": ("Architecture", "Transformer"),
    "paths": ("Decomposition", "decompose"),
    "profiles": ("Profile", "measure"),
    "results": ("Result", "read"),
    "sources": ("fresh", "load"),
    "theory": ("Certificates", "certify"),
    "trainings": ("RunComparison", "Spikes", "TrainingRun"),
}
__all__ = [
    "Architecture",
    "Certificates",
    "Cut",
    "Decomposition",
    "DepthCard",
    "Forecast",
    "Monitor",
    "Profile",
    "Result",
    "RunComparison",
    "Spikes",
    "Sweep",
    "TrainingRun",
    "Transformer",
    "certify",
    "decompose",
    "depth",
    "forecast",
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
    for room, names in _ROOMS.items():
        if name in names:
            globals()[name] = getattr(import_module(f"rankscope.{room}"), name)
            return globals()[name]
    raise AttributeError(f"module 'rankscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
