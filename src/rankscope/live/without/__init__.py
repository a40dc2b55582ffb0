"""Leaves parts out of a live model while it is watched; `stack_watch.py` is the only caller."""

from rankscope.live.without.removal import Removal

__all__ = ["Removal"]
