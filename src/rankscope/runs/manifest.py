"""`Manifest`: what was run, on what and with what, enough to run it again. Every table of a run holds one.

A manifest and its parts are `Record`s, JSON objects in a file. A field that this version does not know is
kept under `more` and written again, so files of other versions lose nothing.

The key of a piece of work (`key_of`) is all that decides its numbers, as plain Python that can be compared. Two runs
with the same key are the same work: one can resume the other, and use what that has computed. `sweep`, corpora, studies
and `rankscope checkpoints` make keys; `difference` says in what two of them differ.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

R = TypeVar("R", bound="Record")
PACKAGES = ("rankscope", "torch", "polars", "transformers", "tokenizers")  # that may change a number


@dataclass(frozen=True, kw_only=True)
class Record:
    """A JSON object with known fields; a field that is None or empty is not written."""

    more: dict[str, Any] = field(default_factory=dict)  # fields that this version does not know

    def adding(self: R, **values: Any) -> R:
        """A copy with these fields set, whether the class knows them or not."""
        known = {name: values.pop(name) for name in _kinds(type(self)) if name in values}
        return replace(self, **known, more={**self.more, **values})

    def to_dict(self) -> dict[str, Any]:
        """The record as plain Python, for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "more"}
        known = {name: _plain(value) for name, value in values.items() if value not in (None, (), {})}
        return {**known, **self.more}

    @classmethod
    def from_dict(cls: type[R], content: object) -> R:
        """The record that `to_dict` wrote; a ValueError names the first field of another type."""
        if not isinstance(content, dict):
            raise ValueError(f"an object must describe a {cls.__name__.lower()}; got {_type_name(content)}")
        kinds = _kinds(cls)
        present = [name for name in kinds if content.get(name) is not None]
        known = {name: _typed(name, kinds[name], content[name]) for name in present}
        return cls(**known, more={name: value for name, value in content.items() if name not in kinds})


def _read_kinds(cls: type) -> dict[str, Any]:
    """The type of each known field, without None."""
    kinds = {name: kind for name, kind in get_type_hints(cls).items() if name != "more"}
    for name, kind in kinds.items():
        if get_origin(kind) is UnionType:
            kinds[name] = next(option for option in get_args(kind) if option is not NoneType)
    return kinds


_kinds: Callable[[type], dict[str, Any]] = cache(_read_kinds)  # read once a class: it takes longer than a manifest


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _typed(name: str, kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind.from_dict(value)
    origin = get_origin(kind) or kind
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_typed(name, get_args(kind)[0], item) for item in value)
    if kind == dict[str, str] and isinstance(value, dict):
        return {key: _typed(f"{name}.{key}", str, item) for key, item in value.items()}
    if origin is float and value in ("nan", "inf", "-inf"):  # as JSON has them
        return float(value)
    if origin is tuple or not isinstance(value, float | int if origin is float else origin):
        expected = "list" if origin is tuple else origin.__name__
        raise ValueError(f"{name} must be a {expected}; got {_type_name(value)}")
    return value


def _type_name(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


@dataclass(frozen=True, kw_only=True)
class Network(Record):
    """One network that was measured."""

    variant: str = "as given"
    arithmetic: str = ""
    metrics: tuple[str, ...] = ()  # the metrics; of certificates, the theorems
    fingerprint: str | None = None  # the SHA-256 of its weights; None for a live model
    architecture: dict[str, Any] | None = None
    model: dict[str, Any] | None = None  # the class, size and dtypes of a live model
    checks: dict[str, Any] = field(default_factory=dict)  # the checks that the run made of itself


@dataclass(frozen=True, kw_only=True)
class Text(Record):
    """The text that a network was measured on."""

    path: str = ""
    split: str | None = None
    field: str | None = None
    first: str | None = None  # how the first excerpt begins
    limit: int | None = None  # the most excerpts that were to be read
    read_to_the_end: bool | None = None


@dataclass(frozen=True, kw_only=True)
class EarlyStop(Record):
    """How far a run got that ended early: what is finished, and how many there were to be."""

    finished: tuple[str, ...] = ()
    asked: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """What was run, on what, with what; see the fields.

    >>> manifest = Manifest(model="minilm").adding(device="cpu", colour="red")
    >>> manifest.device, manifest.more["colour"]
    ('cpu', 'red')
    >>> Manifest.from_dict(manifest.to_dict()) == manifest
    True
    """

    title: str | None = None
    created: str = ""  # the time in UTC, ISO 8601
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    device: str = ""
    networks: tuple[Network, ...] = ()
    command: str | None = None  # the command line, as it was typed
    model: str | None = None  # the model as it was named; `origin` says what that was
    origin: dict[str, Any] | None = None
    seed: int | None = None
    init: str | None = None
    text: Text | None = None
    samples: int | None = None
    tokens: int | None = None
    excerpts: int | None = None  # the excerpts of a corpus that were measured
    closure: float | None = None  # how nearly the sum of all paths is the output
    stopped: EarlyStop | None = None
    key: dict[str, Any] | None = None  # all that decides the numbers of a run that can be resumed (`key_of`)


def manifest_of(
    described: dict[str, Any],
    device: str,
    variant: str,
    arithmetic: str,
    metrics: Sequence[str],
    checks: dict[str, Any],
) -> Manifest:
    """The manifest of one measured network.

    Args:
        described: Which network it was: its `architecture` and `fingerprint` or, of a live model, its class,
            size and dtypes as `model`.
        device: What it ran on.
        variant: The name of the variant.
        arithmetic: The arithmetic that measured it.
        metrics: The names of the metrics.
        checks: The checks that the run made of itself.
    """
    network = Network(variant=variant, arithmetic=arithmetic, metrics=tuple(metrics), checks=checks)
    return begun(device).adding(networks=(network.adding(**described),))


def network_manifest(net: Any, checks: dict[str, Any], variant: str = "as given") -> Manifest:
    """The manifest of a `Transformer` that ran in its own dtype and where it is, with the origin of its weights;
    `checks` and `variant` are as in `manifest_of`."""
    described = {"architecture": net.arch.to_dict(), "fingerprint": net.fingerprint}
    made = manifest_of(described, str(net.device), variant, str(net.dtype).removeprefix("torch."), [], checks)
    return made.adding(origin=None if net.origin is None else net.origin.described())


def begun(device: str) -> Manifest:
    """The manifest of a run that begins now, on this machine."""
    return Manifest(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **versions()},
        machine=f"{platform.system()} {platform.machine()}",
        device=device,
    )


def versions() -> dict[str, str]:
    """The versions of the packages that may change a number, as far as they are installed."""
    return {name: installed for name in PACKAGES if (installed := _version(name)) is not None}


@cache
def _version(package: str) -> str | None:
    """The version of a package, read from disk once."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def joined(manifests: Sequence[Manifest]) -> Manifest:
    """One manifest for several networks that were measured together."""
    networks = tuple(network for manifest in manifests for network in manifest.networks)
    return replace(manifests[0], networks=networks)


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
