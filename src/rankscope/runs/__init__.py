"""What a run is on disk: a typed manifest, one writer, one reader, one key for "the same work"."""

from rankscope.runs import tables
from rankscope.runs.journal import Journal
from rankscope.runs.lock import lock_if_free, unlock
from rankscope.runs.manifest import (
    EarlyStop,
    Manifest,
    Network,
    Text,
    begun,
    difference,
    digest,
    files_of,
    joined,
    key_of,
    manifest_of,
    network_manifest,
    versions,
)
from rankscope.runs.store import MANIFEST, Run, Store, checksum, document, read
from rankscope.runs.tables import JOURNAL, SavedTable, manifest_in, read_parquet, write_parquet

__all__ = [
    "EarlyStop", "JOURNAL", "Journal", "MANIFEST", "Manifest", "Network", "Run", "SavedTable", "Store", "Text", "begun",
    "checksum", "difference", "digest", "document", "files_of", "joined", "key_of", "lock_if_free", "manifest_in",
    "manifest_of", "network_manifest", "read", "read_parquet", "tables", "unlock", "versions", "write_parquet",
]  # fmt: skip
