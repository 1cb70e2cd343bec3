"""Code-domain deltas: only the codes and scales that changed between two published versions, exact and self-checking.

A delta is one block of bytes: a magic word, the length and the hash of a header, the header (deflated JSON), a body.
The body holds where elements changed, in which direction (`delta_codec.py`) and by how much: the integers that codes
are stored as mostly move by one, which costs next to nothing. Whatever is worth a Huffman code goes into two deflated
streams that all tensors share, because a table per tensor would outweigh a small change. Tensors that did not change
are not mentioned; tensors for which a delta would be larger are sent whole.
"""

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import SnapshotError
from ..formats.schemes import Scheme
from . import codec as delta_codec
from .digest import as_bytes, tensor_digest
from .types import Snapshot, check_specs

MAGIC = b"rlqdelta"
INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
DENSE = 4
"""A tensor of which less than one in so many elements changed is not worth comparing with its whole self."""
FEED = 1 << 16
"""Deflated bytes handed to zlib at once."""


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
    nbytes: int
    """Bytes of the positions' fields, or of the whole tensor."""


@dataclass(frozen=True)
class Delta:
    """A delta whose bytes have been checked; made by `open_delta`."""

    info: DeltaInfo
    """What it carries."""
    parts: list[Part]
    """Touched tensors, in the order of the snapshot."""
    body: memoryview
    """Fields of each part, the classes of all, the magnitudes of all."""
    classes_nbytes: int
    """Bytes of the classes, deflated."""

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
        split = sum(part.nbytes for part in self.parts)
        classes, steps = _Inflated(self.body[split:]), _Inflated(self.body[split + self.classes_nbytes :])
        start = 0
        for part in self.parts:
            yield part.name, _decode(part, self.body[start : start + part.nbytes], classes, steps)
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
    payloads: list[bytes] = []
    classes, steps = _Deflated(), _Deflated()
    for name, tensor in new.tensors.items():
        now = flat_integers(tensor)
        where, values = delta_codec.differing(flat_integers(base.tensors[name]), now)
        if where.size == 0:
            continue
        negative, magnitudes = _signs_and_magnitudes(values)
        planes = magnitudes.view(np.uint8).reshape(-1, now.itemsize).T
        gaps, fields = delta_codec.pack(where, negative)
        whole = where.size * DENSE >= now.size and len(fields) + _entropy_bytes([gaps, *planes]) >= now.nbytes
        payloads.append(now.tobytes() if whole else fields)
        parts.append(Part(name, now.size, now.itemsize, where.size, whole, len(payloads[-1])))
        if not whole:
            classes.add(gaps)
            for start in range(0, where.size, delta_codec.PIECE):
                steps.add(np.ascontiguousarray(planes[:, start : start + delta_codec.PIECE]))
    packed_classes = classes.finish()
    body = b"".join([*payloads, packed_classes, steps.finish()])
    header = {
        "base": [base.version, base.digest],
        "new": [new.version, new.digest],
        "scheme": new.scheme.to_dict(),
        "changed": sum(part.count for part in parts),
        "elements": sum(tensor.numel() for tensor in new.tensors.values()),
        # Equal things side by side deflate better.
        "parts": {f.name: [getattr(part, f.name) for part in parts] for f in dataclasses.fields(Part)},
        "classes": len(packed_classes),
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
    return Delta(info, parts, body, header["classes"])


def apply(base: Snapshot, blob: bytes | memoryview) -> Snapshot:
    """Make the new version; raises as `open_delta` and `Delta.apply` do."""
    return open_delta(blob).apply(base)


def flat_integers(tensor: torch.Tensor) -> np.ndarray:
    """Elements of a contiguous tensor as the unsigned integers that they are stored as, flat; see `as_bytes`."""
    return as_bytes(tensor).view(INTEGERS[tensor.element_size()])


def _signs_and_magnitudes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which differences are negative (uint8, 0 or 1), and their magnitudes less one."""
    negative = values >> values.dtype.type(8 * values.itemsize - 1)
    return negative.astype(np.uint8), np.where(negative, 0 - values, values) - values.dtype.type(1)


def _entropy_bytes(streams: Sequence[np.ndarray]) -> float:
    """About what Huffman codes make of uint8 arrays."""
    counts = [np.bincount(stream) for stream in streams]
    return sum(float((c[c > 0] * np.log2(c.sum() / c[c > 0])).sum()) for c in counts) / 8


class _Deflated:
    """One deflated stream of many arrays: runs and Huffman codes, no search for other repeats."""

    def __init__(self):
        self._deflate = zlib.compressobj(level=1, wbits=-15, strategy=zlib.Z_RLE)
        self._out: list[bytes] = []

    def add(self, array: np.ndarray) -> None:
        self._out.append(self._deflate.compress(array.data))

    def finish(self) -> bytes:
        return b"".join([*self._out, self._deflate.flush()])


class _Inflated:
    """Reads such a stream in parts; what follows the stream is ignored."""

    def __init__(self, stream: memoryview):
        self._inflate, self._stream, self._fed = zlib.decompressobj(wbits=-15), stream, 0

    def take(self, count: int) -> np.ndarray:
        """The next `count` bytes, uint8."""
        out, done = np.empty(count, np.uint8), 0
        while done < count:
            ahead = self._inflate.unconsumed_tail
            if not ahead:
                ahead = self._stream[self._fed : self._fed + FEED]
                self._fed += FEED
            piece = self._inflate.decompress(ahead, min(count - done, FEED))
            out[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)
        return out


def _decode(part: Part, payload: memoryview, classes: _Inflated, steps: _Inflated) -> Patch:
    dtype = np.dtype(INTEGERS[part.width])
    if part.whole:
        return Patch(None, np.frombuffer(payload, dtype))
    where, values = np.empty(part.count, delta_codec.position_type(part.size)), np.empty(part.count, dtype)
    fields, bit, last = np.frombuffer(payload, np.uint8), 0, -1
    for start in range(0, part.count, delta_codec.PIECE):
        here, these = (array[start : start + delta_codec.PIECE] for array in (where, values))
        negative = np.empty(here.size, np.uint8)
        bit = delta_codec.unpack(classes.take(here.size), fields, bit, last, here, negative)
        last = int(here[-1])
        these.view(np.uint8).reshape(-1, part.width).T[:] = steps.take(these.nbytes).reshape(part.width, -1)
        these += dtype.type(1)
        np.negative(these, out=these, where=negative.view(bool))
    return Patch(where, values)
