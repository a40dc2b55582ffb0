"""What a run is on disk: a typed manifest, one writer, one reader, one key for "the same work"."""

from rankscope.runs import tables
from rankscope.runs.key import digest, files_of, key_of
from rankscope.runs.lock import lock_if_free, unlock
from rankscope.runs.manifest import EarlyStop, Manifest, Network, Text, begun, joined, manifest_of
from rankscope.runs.signals import read_signals
from rankscope.runs.spikes import SURE, Signal, find_spikes, order_of_events
from rankscope.runs.store import Run, Store, document, read

__all__ = [
    "EarlyStop", "Manifest", "Network", "Run", "SURE", "Signal", "Store", "Text", "begun", "digest", "document",
    "files_of", "find_spikes", "joined", "key_of", "lock_if_free", "manifest_of", "order_of_events", "read",
    "read_signals", "tables", "unlock",
]  # fmt: skip
