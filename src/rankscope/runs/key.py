"""The key of a piece of work: all that decides its numbers, as plain Python that can be compared.

Two runs with the same key are the same work: one can resume the other, and use what that has computed.
`sweep`, corpora, studies and `rankscope checkpoints` make keys; `difference` says in what two of them differ.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.runs.manifest import versions

SHORT = 40  # characters up to which a value is shown in a sentence


def key_of(nets: Mapping[str, Any] | None = None, **settings: object) -> dict[str, Any]:
    """The key of work on these networks (`Transformer`s by their names) under these settings: with the versions of
    packages, the device, and of each network the fingerprints of its weights and of its tokenizer and embedding."""
    key: dict[str, object] = {"versions": versions(), **settings}
    if nets:
        first = next(iter(nets.values()))
        origins = {id(net.origin): net.origin for net in nets.values()}  # variants share theirs
        marks = {k: None if origin is None else origin.fingerprint() for k, origin in origins.items()}
        key |= {
            "variants": {name: net.fingerprint for name, net in nets.items()},
            "embedding": [marks[id(net.origin)] for net in nets.values()],
            "device": str(first.device),
        }
    return json.loads(json.dumps(key, sort_keys=True, default=str))


def files_of(name: str) -> list[str]:
    """The files of a model in a folder, with their sizes and times; the name of a model that is elsewhere."""
    paths = sorted(path for path in Path(name).glob("*") if path.is_file()) if Path(name).is_dir() else []
    return [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths] or [name]


def digest(key: Mapping[str, Any], digits: int = 12) -> str:
    """A short name for the key, the same wherever it is computed.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1})
    True
    """
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:digits]


def difference(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> str:
    """The settings in which two keys differ, in words; an empty text if they are equal.

    >>> difference({"tokens": 8, "versions": {"torch": "2.0"}}, {"tokens": 9, "versions": {"torch": "2.1"}})
    'tokens (8, now 9), versions of torch (2.0, now 2.1)'
    """
    parts = []
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            parts.append(difference(old, new, f"{name} of "))
            continue
        shown = [", ".join(map(str, x)) if isinstance(x, list) else str(x) for x in (old, new)]
        both = f" ({shown[0]}, now {shown[1]})" if max(map(len, shown)) <= SHORT else ""
        parts.append(f"{within}{name}{both}")
    return ", ".join(parts)
