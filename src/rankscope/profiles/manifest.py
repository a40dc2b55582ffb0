"""What a run was: enough to run it again, and to know what its numbers may be trusted for."""

import platform
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import Any

Manifest = dict[str, Any]


def manifest_of(
    described: dict[str, Any],
    device: str,
    variant: str,
    arithmetic: str,
    metrics: list[str],
    checks: dict[str, Any],
) -> Manifest:
    """The manifest of one measured network.

    `described` says which network it was: its `architecture` and `fingerprint`, both None where a live model
    was looked at, which says its class, size and dtypes under `model` instead. `checks` is what the run found
    about itself.
    """
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": dict(_versions()),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": device,
        "networks": [
            {
                "variant": variant,
                "arithmetic": arithmetic,
                "metrics": metrics,
                **described,
                "checks": checks,
            }
        ],
    }


@cache
def _versions() -> dict[str, str]:
    """Read once: packages are looked up on disk."""
    found = {name: version(name) for name in ("rankscope", "torch", "polars")}
    return {"python": platform.python_version(), **found}


def joined(manifests: list[Manifest]) -> Manifest:
    """One manifest for several networks measured together."""
    networks = [network for manifest in manifests for network in manifest["networks"]]
    return {**manifests[0], "networks": networks}
