"""A snapshot as one flat buffer."""

import warnings
from typing import overload

import torch

from ..formats.schemes import Scheme
from .digest import flat_bytes
from .types import PackedSnapshot, Snapshot, TensorSpec

ALIGN = 64
"""Bytes; every tensor of a packed buffer starts at a multiple, for vector loads."""


@overload
def pack(snap: Snapshot) -> PackedSnapshot: ...
@overload
def pack(snap: Snapshot, device: torch.device | str) -> tuple[dict, torch.Tensor]: ...
def pack(snap: Snapshot, device: torch.device | str | None = None) -> PackedSnapshot | tuple[dict, torch.Tensor]:
    """Copy a snapshot into one aligned buffer.

    Args:
        snap: the snapshot; its tensors may live anywhere.
        device: where to put the buffer.

    Returns:
        The packed snapshot in host memory; with a device, the header and the buffer there, uint8.
    """
    entries = []
    offset = 0
    for name, tensor in snap.tensors.items():
        spec = TensorSpec.of(tensor)
        entries.append(
            {"name": name, "dtype": spec.dtype, "shape": spec.shape, "offset": offset, "nbytes": tensor.nbytes}
        )
        offset += -(-tensor.nbytes // ALIGN) * ALIGN
    buffer = torch.empty(offset, dtype=torch.uint8, device=device or "cpu")
    for entry, tensor in zip(entries, snap.tensors.values(), strict=True):
        buffer[entry["offset"] : entry["offset"] + entry["nbytes"]].copy_(flat_bytes(tensor))
    header = {"version": snap.version, "scheme": snap.scheme.to_dict(), "digest": snap.digest, "tensors": entries}
    return PackedSnapshot(header, buffer.numpy()) if device is None else (header, buffer)


def unpack(packed: PackedSnapshot) -> Snapshot:
    """View a packed snapshot's tensors without a copy; they must not be written to."""
    header = packed.header
    with warnings.catch_warnings():
        # The store's buffer is read-only and torch has no read-only tensors; nobody writes to these.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(packed.buffer)
    return views(header, flat)


def views(header: dict, flat: torch.Tensor) -> Snapshot:
    """View the tensors of a packed snapshot's buffer (uint8, on any device) without a copy."""
    tensors = {
        entry["name"]: flat[entry["offset"] : entry["offset"] + entry["nbytes"]]
        .view(getattr(torch, entry["dtype"]))
        .view(tuple(entry["shape"]))
        for entry in header["tensors"]
    }
    return Snapshot(tensors, header["version"], Scheme.from_dict(header["scheme"]), header["digest"])
