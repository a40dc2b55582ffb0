"""The key of a piece of work: all that decides its numbers, as plain Python that can be compared.

Two runs with the same key are the same work: one goes on where the other stopped, and what one has kept
serves the other. Where keys differ, `difference` says in what.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.nets import Transformer
from rankscope.runs.manifest import versions

SHORT = 40
"""Characters up to which a value is shown in a sentence."""


def key_of(nets: Mapping[str, Transformer] | None = None, **settings: object) -> dict[str, Any]:
    """The key of work on these networks under these settings.

    It holds the versions of all packages that matter, of each network its weights' fingerprint, its device,
    and that of its tokenizer and embedding.
    """
    about: dict[str, object] = {"versions": versions(), **settings}
    if nets:
        first = next(iter(nets.values()))
        origins = {id(net.origin): net.origin for net in nets.values()}  # variants share theirs
        marks = {
            number: None if origin is None else origin.fingerprint() for number, origin in origins.items()
        }
        about |= {
            "variants": {name: net.fingerprint for name, net in nets.items()},
            "embedding": [marks[id(net.origin)] for net in nets.values()],
            "device": str(first.device),
        }
    return json.loads(json.dumps(about, sort_keys=True, default=str))


def files_of(name: str) -> list[str]:
    """The files of a model in a folder, with their sizes and times; of a model elsewhere its name."""
    there = sorted(path for path in Path(name).glob("*") if path.is_file()) if Path(name).is_dir() else []
    return [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in there] or [name]


def digest(key: Mapping[str, Any], digits: int = 12) -> str:
    """A short name for the key, the same wherever it is computed.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1})
    True
    """
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:digits]


def difference(kept: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> str:
    """In what two keys differ, in words; nothing where they are the same.

    >>> difference({"tokens": 8, "versions": {"torch": "2.0"}}, {"tokens": 9, "versions": {"torch": "2.1"}})
    'tokens (8, now 9), versions of torch (2.0, now 2.1)'
    """
    said = []
    for name in sorted({*kept, *now}):
        was, comes = kept.get(name), now.get(name)
        if was == comes:
            continue
        if isinstance(was, dict) and isinstance(comes, dict):
            said.append(difference(was, comes, f"{name} of "))
            continue
        shown = [", ".join(map(str, each)) if isinstance(each, list) else str(each) for each in (was, comes)]
        both = f" ({shown[0]}, now {shown[1]})" if max(map(len, shown)) <= SHORT else ""
        said.append(f"{within}{name}{both}")
    return ", ".join(said)
