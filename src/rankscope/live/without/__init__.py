"""Leaves parts out of a live model while it is watched.

`removal.py` attaches and removes the hooks that do it, with `branches.py` for what blocks add and for their skips, and
`heads.py` for heads. `stack_watch.py` is the only caller. What is left out is said by `live/left_out.py`.
"""

from rankscope.live.without.removal import Removal

__all__ = ["Removal"]
