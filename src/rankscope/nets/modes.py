"""`usual_modes`: what torch was told to do elsewhere does not change what is computed here.

`measure`, `decompose`, `certify`, `depth`, `load`, `Transformer.random` and `forecast` compute inside it, so that they
give the same digits under `no_grad`, `inference_mode`, autocast and another default device as without.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

CPU = torch.device("cpu")
CASTING = ("cpu", "cuda", "mps", "xpu")  # Kinds of devices that autocast is asked about


@contextmanager
def usual_modes(device: torch.device = CPU) -> Iterator[None]:
    """Inside, autocast and `inference_mode` are off, and tensors without a device are made on this one. Gradients are
    off where they were; what needs them switches them on, which `inference_mode` alone would not let it.

    >>> with torch.inference_mode(), torch.device("meta"), usual_modes():
    ...     x = torch.ones(2)
    >>> x.device.type, x.is_inference()
    ('cpu', False)
    """
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
        for kind in CASTING:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device() != device:
            modes.enter_context(device)
        yield
