"""Code-domain deltas: only the codes and scales that changed between two published versions, exact and self-checking.

A delta is one block of bytes: a magic word, the length and the hash of a header, the header (deflated JSON), a body.
The body holds the tensors that are sent whole, because a delta of them would be larger, then the four streams of
`rlq.publish.codec`: where the others changed, in which direction and by how much. The integers that codes are stored as
mostly move by one, which costs next to nothing. Tensors that did not change are not mentioned.
"""

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import SnapshotError
from ..formats.schemes import Scheme
from . import codec
from .digest import as_bytes, tensor_digest
from .types import Snapshot, check_specs

MAGIC = b"rlqdelt2"
OLD_MAGIC = b"rlqdelta"
"""Of deltas with another coding of positions."""
INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
DENSE = 4
"""Below 1/DENSE changed elements, a tensor is not compared in size with its whole self."""


@dataclass(frozen=True)
class DeltaInfo:
    """What a delta carries, readable without its base."""

    base_version: int
    """Version that it applies to."""
    base_digest: str
    """Digest of that version."""
    version: int
    """Version that it makes."""
    digest: str
    """Digest of that version."""
    scheme: Scheme
    """Scheme of both."""
    changed: int
    """Elements that differ, over all tensors."""
    elements: int
    """Elements of all tensors."""


@dataclass(frozen=True)
class Patch:
    """What changes in one tensor, readable without its base."""

    where: np.ndarray | None
    """Ascending flat positions, int32 where they fit, else int64; None if the whole tensor was sent."""
    values: np.ndarray
    """Unsigned integers as wide as an element: differences modulo 2^bits at `where`, or all new elements."""

    def fresh(self, integers: np.ndarray) -> np.ndarray:
        """New elements at `where`, from the old tensor's flat unsigned view, which is not touched."""
        return self.values if self.where is None else integers[self.where] + self.values

    def apply_(self, integers: np.ndarray) -> None:
        """Turn the old tensor's flat unsigned view into the new one's."""
        integers[slice(None) if self.where is None else self.where] = self.fresh(integers)

    def between(self, begin: int, end: int) -> "Patch":
        """The patch to the flat elements from `begin` to before `end`."""
        if self.where is None:
            return Patch(None, self.values[begin:end])
        first, last = np.searchsorted(self.where, (begin, end))
        return Patch(self.where[first:last] - self.where.dtype.type(begin), self.values[first:last])

    def apply_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Turn the old tensor (contiguous, on the CPU) into the new one, in place, and return it."""
        self.apply_(flat_integers(tensor))
        return tensor


@dataclass(frozen=True)
class Part:
    """What a delta says about one touched tensor."""

    name: str
    """Wire tensor."""
    size: int
    """Its elements."""
    width: int
    """Bytes of one."""
    count: int
    """Elements that changed."""
    whole: bool
    """The tensor itself was sent."""

    @property
    def nbytes(self) -> int:
        """Bytes in the body before the streams."""
        return self.size * self.width if self.whole else 0


@dataclass(frozen=True)
class Delta:
    """A delta whose bytes have been checked; made by `open_delta`."""

    info: DeltaInfo
    """What it carries."""
    parts: list[Part]
    """Touched tensors, in the order of the snapshot."""
    body: memoryview
    """Tensors that are sent whole, then the streams."""
    streams: dict[str, int]
    """Bytes of each stream, in the order of the body."""

    @property
    def names(self) -> list[str]:
        """Touched tensors, in the order of the snapshot."""
        return [part.name for part in self.parts]

    def check_base(self, version: int | None, digest: str) -> None:
        """Raise SnapshotError unless the delta was made from this version."""
        info = self.info
        if (version, digest) != (info.base_version, info.base_digest):
            raise SnapshotError(
                f"this delta applies to version {info.base_version} ({info.base_digest[:12]}), not to version "
                f"{version} ({digest[:12]}); send the whole snapshot"
            )

    def patches(self) -> Iterator[tuple[str, Patch]]:
        """Decode one tensor after the other; needs no base."""
        start = sum(part.nbytes for part in self.parts)
        streams: dict[str, memoryview] = {}
        for name, nbytes in self.streams.items():
            streams[name] = self.body[start : start + nbytes]
            start += nbytes
        reader = codec.Reader(streams)
        start = 0
        for part in self.parts:
            dtype = np.dtype(INTEGERS[part.width])
            if part.whole:
                yield part.name, Patch(None, np.frombuffer(self.body[start : start + part.nbytes], dtype))
            else:
                yield part.name, Patch(*reader.take(part.count, part.size, dtype))
            start += part.nbytes

    def apply(self, base: Snapshot) -> Snapshot:
        """Make the new version; `base` is not touched, and unchanged tensors are shared with it.

        Raises:
            SnapshotError: another base than the one the delta was made from, or a result whose digest is not the
                published one.
        """
        self.check_base(base.version, base.digest)
        changed = {name: patch.apply_to(base.tensors[name].to("cpu", copy=True)) for name, patch in self.patches()}
        info, tensors = self.info, base.tensors | changed
        found = tensor_digest(tensors)
        if found != info.digest:
            raise SnapshotError(f"the delta makes {found[:12]}, not the published {info.digest[:12]}; send it whole")
        return Snapshot(tensors, info.version, info.scheme, info.digest)


def encode(base: Snapshot, new: Snapshot) -> bytes:
    """Encode what turns `base` into `new`.

    Raises:
        SnapshotError: the two differ in scheme, names, dtypes or shapes.
    """
    if base.scheme != new.scheme:
        raise SnapshotError(f"a delta from '{base.scheme}' to '{new.scheme}' is not possible; send it whole")
    check_specs(new.specs, base.specs)
    parts: list[Part] = []
    whole: list[bytes] = []
    writer = codec.Writer()
    for name, tensor in new.tensors.items():
        now = flat_integers(tensor)
        where, values = codec.differing(flat_integers(base.tensors[name]), now)
        if where.size == 0:
            continue
        changes = codec.Changes(where, values, now.size)
        dense = where.size * DENSE >= now.size and changes.estimate() >= now.nbytes
        parts.append(Part(name, now.size, now.itemsize, where.size, dense))
        if dense:
            whole.append(now.tobytes())
        else:
            writer.add(changes)
    streams = writer.finish()
    body = b"".join([*whole, *streams.values()])
    header = {
        "base": [base.version, base.digest],
        "new": [new.version, new.digest],
        "scheme": new.scheme.to_dict(),
        "changed": sum(part.count for part in parts),
        "elements": sum(tensor.numel() for tensor in new.tensors.values()),
        # Equal things side by side deflate better.
        "parts": {f.name: [getattr(part, f.name) for part in parts] for f in dataclasses.fields(Part)},
        "streams": {name: len(stream) for name, stream in streams.items()},
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    text = zlib.compress(json.dumps(header, separators=(",", ":")).encode(), level=9)
    return MAGIC + len(text).to_bytes(4, "little") + hashlib.sha256(text).digest() + text + body


def open_delta(blob: bytes | memoryview) -> Delta:
    """Check a delta's bytes, once, and read its header; `blob` is referenced, not copied.

    Raises:
        SnapshotError: these are not the bytes of a delta, or not all of them, or not as they were written.
    """
    blob = memoryview(blob).cast("B")
    start = len(MAGIC) + 4 + 32
    size = int.from_bytes(blob[len(MAGIC) : len(MAGIC) + 4], "little")
    text = blob[start : start + size]
    if blob[: len(OLD_MAGIC)] == OLD_MAGIC:
        raise SnapshotError("this delta was written by an older rlq; send the whole snapshot")
    if blob[: len(MAGIC)] != MAGIC or hashlib.sha256(text).digest() != blob[start - 32 : start]:
        raise SnapshotError("these bytes are not a delta, or its header was damaged; send the whole snapshot")
    header = json.loads(zlib.decompress(text))
    body = blob[start + size :]
    if hashlib.sha256(body).hexdigest() != header["sha256"]:
        raise SnapshotError("the delta was cut short or damaged on its way; send the whole snapshot")
    (base_version, base_digest), (version, digest) = header["base"], header["new"]
    scheme = Scheme.from_dict(header["scheme"])
    info = DeltaInfo(base_version, base_digest, version, digest, scheme, header["changed"], header["elements"])
    parts = [Part(*values) for values in zip(*header["parts"].values(), strict=True)]
    return Delta(info, parts, body, header["streams"])


def apply(base: Snapshot, blob: bytes | memoryview) -> Snapshot:
    """Make the new version; raises as `open_delta` and `Delta.apply` do."""
    return open_delta(blob).apply(base)


def flat_integers(tensor: torch.Tensor) -> np.ndarray:
    """Elements of a contiguous tensor as the unsigned integers that they are stored as, flat; see `as_bytes`."""
    return as_bytes(tensor).view(INTEGERS[tensor.element_size()])
