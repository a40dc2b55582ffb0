"""Remedies against collapse (`nets/remedies/`), as the page chooses them.

Depth comes first, then remedies in their order, then everything else that is turned: a remedy that goes by
the depth goes by the one shown, and one can be seen with skips, MLP or norms taken out.
"""

from dataclasses import fields
from typing import Any

from rankscope.errors import SettingError
from rankscope.explorer.settings import Setting
from rankscope.nets import Transformer
from rankscope.remedies import REMEDIES, Remedy, remedy

MOST = 4
"""Remedies at a time."""
LARGEST = 100.0
"""A number of a remedy, up or down: rounds of Sinkhorn take their time, each."""


def described() -> list[dict[str, Any]]:
    """For the page: every remedy, what it does, and its numbers as published."""
    return [
        {
            "name": name, "says": kind.formula, "source": kind.citation,
            "numbers": {each.name: each.default for each in fields(kind)},  # type: ignore[arg-type]
        }
        for name, kind in REMEDIES.items()
    ]  # fmt: skip


def chosen(setting: Setting) -> list[Remedy]:
    """The remedies of a setting; a sentence where one is none."""
    specs = [] if setting.remedies is None else setting.remedies.split(";")
    if len(specs) > MOST:
        raise SettingError(f"remedies must be {MOST} at most; got {len(specs)}")
    found = [remedy(spec) for spec in specs]
    for each in found:
        for field in fields(each):  # type: ignore[arg-type]
            number = getattr(each, field.name)
            if abs(number) > LARGEST:
                raise SettingError(
                    f"{field.name} of {each.name} must be from {-LARGEST:g} to {LARGEST:g} here; got "
                    f"{number:g}"
                )
    return [*found]


def remedied(net: Transformer, setting: Setting) -> Transformer:
    """The network at the depth of a setting, with its remedies."""
    found = net if setting.layers is None else net.variant(layers=setting.layers)
    for each in chosen(setting):
        found = found.with_remedy(each)
    return found
