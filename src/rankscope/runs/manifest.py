"""What a run was: enough to run it again, and to know what its numbers may be trusted for."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rankscope.runs.record import Record

PACKAGES = ("rankscope", "torch", "polars", "transformers", "tokenizers")
"""Whose versions may change a number; the last two where they are installed."""


@dataclass(frozen=True, kw_only=True)
class Network(Record):
    """One network that was looked at."""

    variant: str = "as given"
    arithmetic: str = ""
    metrics: tuple[str, ...] = ()
    """Of certificates, the theorems."""
    fingerprint: str | None = None
    """SHA-256 of its weights; None where a live model was looked at."""
    architecture: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    """Of a live model its class, size and dtypes."""
    checks: dict[str, Any] = field(default_factory=dict)
    """What the run found about itself."""


@dataclass(frozen=True, kw_only=True)
class Text(Record):
    """What was read."""

    path: str = ""
    split: str | None = None
    field: str | None = None
    first: str | None = None
    """How the first excerpt begins."""
    limit: int | None = None
    """Excerpts that were asked for at most."""
    read_to_the_end: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Stopped(Record):
    """A run that ended before its time."""

    finished: tuple[str, ...] = ()
    asked: int = 0
    """How many there were to be."""


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
    created: str = ""
    """When, in UTC."""
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    device: str = ""
    networks: tuple[Network, ...] = ()
    command: str | None = None
    """The command line, as it was typed."""
    model: str | None = None
    """What was asked for; `origin` says what it was."""
    origin: dict[str, Any] | None = None
    seed: int | None = None
    init: str | None = None
    text: Text | None = None
    samples: int | None = None
    tokens: int | None = None
    excerpts: int | None = None
    """Of a corpus, how many were measured."""
    closure: float | None = None
    """Of paths, how nearly their sum is the output."""
    stopped: Stopped | None = None
    key: dict[str, Any] | None = None
    """All that decides the numbers, where a run may go on (`key.py`)."""


def manifest_of(
    described: dict[str, Any],
    device: str,
    variant: str,
    arithmetic: str,
    metrics: Sequence[str],
    checks: dict[str, Any],
) -> Manifest:
    """The manifest of one measured network.

    `described` says which network it was: its `architecture` and `fingerprint`, both None where a live model
    was looked at, which says its class, size and dtypes under `model` instead. `checks` is what the run found
    about itself.
    """
    network = Network(variant=variant, arithmetic=arithmetic, metrics=tuple(metrics), checks=checks)
    return begun(device).adding(networks=(network.adding(**described),))


def begun(device: str) -> Manifest:
    """The manifest of a run that begins now, here."""
    return Manifest(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **versions()},
        machine=f"{platform.system()} {platform.machine()}",
        device=device,
    )


def versions() -> dict[str, str]:
    """Of the packages that may change a number, those that are installed."""
    return {name: found for name in PACKAGES if (found := _version(name)) is not None}


@cache
def _version(package: str) -> str | None:
    """Read once: packages are looked up on disk."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def joined(manifests: Sequence[Manifest]) -> Manifest:
    """One manifest for several networks measured together."""
    networks = tuple(network for manifest in manifests for network in manifest.networks)
    return replace(manifests[0], networks=networks)
