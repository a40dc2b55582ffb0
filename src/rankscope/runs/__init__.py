"""What a run is on disk: a typed manifest, one writer, one reader, one key for "the same work"."""

from rankscope.runs.manifest import EarlyStop, Manifest, Network, Text, joined, manifest_of
from rankscope.runs.store import Run, Store, read

__all__ = ["Manifest", "Network", "Run", "EarlyStop", "Store", "Text", "joined", "manifest_of", "read"]
