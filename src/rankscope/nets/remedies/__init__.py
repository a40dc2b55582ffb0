"""Remedies against collapse, as published since 2021: parts and settings that go onto any network.

    net.with_remedy("attnscale", w=0.5)       by name (`catalogue.py`), with its numbers
    net.with_remedy(mine)                     an object of one's own (`remedy.py`)

Here each has its plain rule; its rule in deviation arithmetic, where it has one, is in
`deviation/remedies.py`.
"""

from rankscope.nets.remedies.catalogue import REMEDIES, remedy
from rankscope.nets.remedies.remedy import Remedy

__all__ = ["REMEDIES", "Remedy", "remedy"]
