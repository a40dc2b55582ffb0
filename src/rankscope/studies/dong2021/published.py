"""The numbers that Dong et al. 2021 published, read off their vector figures."""

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def published() -> dict[str, Any]:
    """All of them, by figure."""
    text = files("rankscope.studies.dong2021").joinpath("published.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
