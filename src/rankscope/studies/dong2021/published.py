"""The numbers that Dong et al. 2021 published, read off their vector figures."""

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def published() -> dict[str, Any]:
    """All of them, by figure."""
    text = files("rankscope").joinpath("data/dong2021.json").read_text(encoding="utf-8")
    numbers: dict[str, Any] = json.loads(text)
    return numbers
