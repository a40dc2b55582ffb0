"""A network by what a command line calls it."""

from pathlib import Path

from rankscope.naming import forgiven
from rankscope.nets import Architecture, Transformer
from rankscope.sources.fresh import fresh, untrained
from rankscope.sources.load import load
from rankscope.sources.presets import PRESETS
from rankscope.sources.streamed import refuse_stream


def is_drawn(model: str) -> bool:
    """Whether a network of this name is drawn at random."""
    return model in PRESETS or model.endswith(".json") or Path(model).is_file()


def named_network(
    model: str, seed: int = 0, init: str = "bert", device: str = "cpu", stream: bool | None = None
) -> Transformer:
    """A usual size (`bert-base`: random weights), a JSON file of an architecture (random weights), or what
    `load` takes: `minilm`, a directory, an id on the hub, its layers in memory or left in their files."""
    model = forgiven(model, ["minilm", *PRESETS])
    if is_drawn(model):
        refuse_stream(stream, model, "has random weights")
    if model in PRESETS:
        return fresh(model, seed=seed, init=init, device=device)
    if is_drawn(model):
        return untrained(Architecture.read(model), Path(model).stem, seed, init, device=device)
    return load(model, device=device, stream=stream)
