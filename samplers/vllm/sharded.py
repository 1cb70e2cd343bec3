"""Tensor-parallel engines: every rank holds a part of each published tensor, cut by vLLM's own loaders.

A version lies in shared memory, where each rank's process reads it. What the ranks hold is compared with the parts of
what was published: ranks send hashes, not weights.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from rlq.publish import Snapshot, TensorSpec, as_bytes

from ..transport.shared_memory import FileTicket
from .slots import Slot, is_padded, slots


@dataclass(frozen=True)
class Part:
    """What one rank holds of a published tensor."""

    spec: TensorSpec
    """Type and shape, block scales with one row per row of the weight."""
    tile_rows: int
    """Stored rows per published row."""
    first: int | None
    """First row, for vocabularies, whose parts differ in length; None where the shapes tell."""
    digest: str = ""
    """SHA-256 of its bytes, if it was asked for."""


def parts(model: torch.nn.Module, *, hashed: bool) -> dict[str, Part]:
    """What this rank holds; runs in its process."""
    return {name: _part(slot, hashed) for name, slot in slots(model).items()}


def _part(slot: Slot, hashed: bool) -> Part:
    rows = slot.rows(slot.module.get_parameter(slot.leaf).data)
    spec = TensorSpec.of(rows.to("meta", slot.dtype))
    digest = _sha256(rows.to("cpu", slot.dtype)) if hashed else ""
    first = slot.module.shard_indices.org_vocab_start_index if is_padded(slot.module) else None  # type: ignore[union-attr]
    return Part(spec, slot.tile_rows, first, digest)  # type: ignore[arg-type]


def load(worker: Any, ticket: FileTicket) -> None:
    """Read a version and take this rank's parts, through vLLM's reload; runs in its process."""
    version = ticket.open()
    assert isinstance(version, Snapshot)
    worker.reload_weights(weights_iterator=iter(version.tensors.items()))


def misfits(snap: Snapshot, expected: list[dict[str, Part]]) -> list[str]:
    """Tensors that are missing or unexpected, or else those that cannot be cut into what the ranks hold."""
    return sorted(set(expected[0]) ^ set(snap.tensors)) or [
        name for name in snap.tensors if not _fits(snap, name, [rank[name] for rank in expected])
    ]


def differing_parts(snap: Snapshot, held: list[dict[str, Part]]) -> list[str]:
    """Parts, as `name of rank r`, that are not what the rank should hold."""
    return [
        f"{name} of rank {rank}"
        for name in snap.tensors
        for rank, own in enumerate(held)
        if own[name].digest != _sha256(_cut(snap, name, own[name], rank, len(held)))
    ]


def _expanded(snap: Snapshot, name: str, tile_rows: int) -> torch.Tensor:
    if tile_rows == 1:
        return snap.tensors[name]
    rows = len(snap.tensors[name.removesuffix("_scale")])
    return snap.tensors[name].repeat_interleave(tile_rows, 0)[:rows]


def _cut(snap: Snapshot, name: str, part: Part, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of a published tensor.

    vLLM cuts one dimension into equal parts; where there are fewer parts than ranks (heads of keys and values),
    neighbours hold the same one.
    """
    tensor = _expanded(snap, name, part.tile_rows)
    if part.first is not None:
        return tensor[part.first : part.first + part.spec.shape[0]]
    for dim, (whole, own) in enumerate(zip(tensor.shape, part.spec.shape, strict=True)):
        if whole != own:
            tensor = tensor.narrow(dim, rank // (ranks // (whole // own)) * own, own)
    return tensor


def _fits(snap: Snapshot, name: str, ranks: list[Part]) -> bool:
    spec, one = TensorSpec.of(_expanded(snap, name, ranks[0].tile_rows)), ranks[0].spec
    if spec.dtype != one.dtype or len(spec.shape) != len(one.shape):
        return False
    dims = list(zip(spec.shape, one.shape, strict=True))
    rows = {row for p in ranks if p.first is not None for row in range(p.first, p.first + p.spec.shape[0])}
    if rows:
        return rows == set(range(spec.shape[0])) and spec.shape[1:] == one.shape[1:]
    return all(0 < own <= whole and whole % own == 0 and len(ranks) % (whole // own) == 0 for whole, own in dims)


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor).data).hexdigest()
