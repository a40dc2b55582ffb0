"""Networks by the names that the command line takes."""

from pathlib import Path

from rankscope.naming import forgiven
from rankscope.nets import Architecture, Transformer
from rankscope.sources.fresh import fresh, untrained
from rankscope.sources.load import load
from rankscope.sources.presets import PRESETS
from rankscope.sources.streaming import refuse_stream


def is_drawn(model: str) -> bool:
    """True if a network of this name has random weights: a preset or a JSON file of an architecture."""
    return model in PRESETS or model.endswith(".json") or Path(model).is_file()


def named_network(
    model: str, seed: int = 0, init: str = "bert", device: str = "cpu", stream: bool | None = None
) -> Transformer:
    """The network that a command line names: a preset (`bert-base`) or a JSON file of an architecture, both
    with random weights, or anything that `load` takes."""
    model = forgiven(model, ["minilm", *PRESETS])
    if is_drawn(model):
        refuse_stream(stream, model, "has random weights")
    if model in PRESETS:
        return fresh(model, seed=seed, init=init, device=device)
    if is_drawn(model):
        return untrained(Architecture.read(model), Path(model).stem, seed, init, device=device)
    return load(model, device=device, stream=stream)
