"""Publish: a bf16 checkpoint becomes a digested snapshot, whole, as a delta, or in a directory."""

from .digest import as_bytes, combined_digest, digest_entry, own_digest, tensor_digest
from .directory import MANIFEST, read_directory, write_directory, write_manifest
from .make import snapshot
from .pack import ALIGN, pack, unpack
from .types import PackedSnapshot, Snapshot, TensorSpec, check_specs

__all__ = [
    "ALIGN",
    "MANIFEST",
    "PackedSnapshot",
    "Snapshot",
    "TensorSpec",
    "as_bytes",
    "check_specs",
    "combined_digest",
    "digest_entry",
    "own_digest",
    "pack",
    "read_directory",
    "snapshot",
    "tensor_digest",
    "unpack",
    "write_directory",
    "write_manifest",
]
