"""What a run was: enough to run it again, and to know what its numbers may be trusted for."""

import platform
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from rankscope.nets import Transformer

Manifest = dict[str, Any]


def manifest_of(
    net: Transformer, variant: str, arithmetic: str, metrics: list[str], checks: dict[str, Any]
) -> Manifest:
    """The manifest of one measured network; `checks` is what the run found about itself."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("rankscope", "torch", "polars")},
        },
        "machine": f"{platform.system()} {platform.machine()}",
        "device": str(net.device),
        "networks": [
            {
                "variant": variant,
                "arithmetic": arithmetic,
                "metrics": metrics,
                "fingerprint": net.fingerprint,
                "architecture": net.arch.to_dict(),
                "checks": checks,
            }
        ],
    }


def joined(manifests: list[Manifest]) -> Manifest:
    """One manifest for several networks measured together."""
    networks = [network for manifest in manifests for network in manifest["networks"]]
    return {**manifests[0], "networks": networks}
