"""Rules of the remedies (`nets/remedies/`) on states; a network with one that has none here is measured in
float64, and the table says so."""

from collections.abc import Callable
from typing import Any

Rule = Callable[[Any, Any, Any, Any, Any], Any]
"""(remedy, x, block, rules, inside)."""
RULES: dict[type, Rule] = {}
