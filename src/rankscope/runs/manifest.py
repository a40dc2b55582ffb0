"""`Manifest`: what was run, on what and with what, enough to run it again. Every table of a run holds one."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rankscope.runs.record import Record

PACKAGES = ("rankscope", "torch", "polars", "transformers", "tokenizers")
"""Packages whose versions may change a number; those that are installed are listed."""


@dataclass(frozen=True, kw_only=True)
class Network(Record):
    """One network that was measured."""

    variant: str = "as given"
    arithmetic: str = ""
    metrics: tuple[str, ...] = ()
    """The metrics; of certificates, the theorems."""
    fingerprint: str | None = None
    """The SHA-256 of its weights; None for a live model."""
    architecture: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    """The class, size and dtypes of a live model."""
    checks: dict[str, Any] = field(default_factory=dict)
    """The checks that the run made of itself."""


@dataclass(frozen=True, kw_only=True)
class Text(Record):
    """The text that a network was measured on."""

    path: str = ""
    split: str | None = None
    field: str | None = None
    first: str | None = None
    """How the first excerpt begins."""
    limit: int | None = None
    """The most excerpts that were to be read."""
    read_to_the_end: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Stopped(Record):
    """How far a run came that ended early: what is finished, and how many there were to be."""

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
    created: str = ""
    """The time in UTC, ISO 8601."""
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    device: str = ""
    networks: tuple[Network, ...] = ()
    command: str | None = None
    """The command line, as it was typed."""
    model: str | None = None
    """The model as it was named; `origin` says what that was."""
    origin: dict[str, Any] | None = None
    seed: int | None = None
    init: str | None = None
    text: Text | None = None
    samples: int | None = None
    tokens: int | None = None
    excerpts: int | None = None
    """The excerpts of a corpus that were measured."""
    closure: float | None = None
    """How nearly the sum of all paths is the output."""
    stopped: Stopped | None = None
    key: dict[str, Any] | None = None
    """All that decides the numbers of a run that can be resumed (`key.py`)."""


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
