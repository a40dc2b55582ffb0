"""Ways to see attention in a running model: one class each, tried in the order of `OBSERVERS`.

`observer.py` says what such a class is; `torch_functions.py` stands on `kernels.py` and `softmax.py`.
"""

from rankscope.live.attention.multihead import MultiheadModules
from rankscope.live.attention.observer import AttentionCall, AttentionObserver, OnAttention, SelfReportingBlocks
from rankscope.live.attention.torch_functions import TorchFunctions
from rankscope.live.attention.transformers_interface import TransformersInterface
from rankscope.live.modules import WatchedBlocks
from rankscope.plugins import Group, InOrder

SHIPPED = (SelfReportingBlocks(), MultiheadModules(), TransformersInterface(), TorchFunctions())
OBSERVERS: InOrder[AttentionObserver] = InOrder(
    Group(
        "observers",
        "an AttentionObserver",
        lambda each: isinstance(each, AttentionObserver) and not isinstance(each, type),
        named=lambda each: type(each).__name__,
    )
)
"""The observers of plugins, then the built-in ones, which apply to more; the first that applies is used."""

__all__ = ["OBSERVERS", "AttentionCall", "AttentionObserver", "OnAttention", "WatchedBlocks"]
