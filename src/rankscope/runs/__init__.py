"""What a run is on disk: a typed manifest, one writer, one reader, one key for "the same work"."""

from rankscope.runs import tables
from rankscope.runs.key import difference, digest, files_of, key_of
from rankscope.runs.lock import lock_if_free, unlock
from rankscope.runs.manifest import EarlyStop, Manifest, Network, Text, begun, joined, manifest_of
from rankscope.runs.store import Run, Store, document, read

__all__ = [
    "EarlyStop", "Manifest", "Network", "Run", "Store", "Text", "begun", "difference", "digest", "document", "files_of",
    "joined", "key_of", "lock_if_free", "manifest_of", "read", "tables", "unlock",
]  # fmt: skip
