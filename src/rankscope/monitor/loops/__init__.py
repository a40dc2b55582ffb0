"""Callbacks that run a `Monitor` in training loops of other libraries: the Hugging Face Trainer
(`transformers.py`) and Lightning (`lightning.py`). Each module is imported by those who use it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rankscope.errors import MonitorError, require_one_of
from rankscope.metrics import Metric
from rankscope.monitor import Monitor
from rankscope.monitor.monitor import OPTIONS
from rankscope.monitor.writers import scalars


def named_options(callback: str, positional: Sequence[object], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a callback by name; the first may be given without one, `metrics`, as to `Monitor`.

    Raises:
        MonitorError: Another option has no name, or one that `Monitor` does not have.
    """
    are_metrics = "metrics" not in options and isinstance(next(iter(positional), None), str | list | tuple | Metric)
    if nameless := positional[are_metrics:]:
        received = f"received a {type(nameless[0]).__name__} without one"
        expected = f"{callback} takes its options by name, but for metrics as the first"
        raise MonitorError(f"{expected}; {received}: {callback}(metrics, probe=batch)", subject="options")
    known = [name for name in OPTIONS if name not in ("model", "step")]
    for name in options:
        require_one_of(f"an option of {callback}", name, known, MonitorError, name)
    return dict(zip(("metrics",), positional, strict=False)) | dict(options)


def last_numbers(monitor: Monitor | None) -> dict[str, float]:
    """The numbers of layers in the last measurement by name, as `relative_mu/layer_03`, for the trainer's own use: of
    metrics of heads the mean."""
    last = None if monitor is None else monitor.last
    names = {} if last is None else scalars(last, heads=False)
    return {name: value for name, value in names.items() if "/layer_" in name}
