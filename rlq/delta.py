"""Code-domain deltas: only the codes and scales that changed between two published versions, exact and self-checking.

A delta is one block of bytes: a magic word, the length and the hash of a JSON header, the header, and one payload per
changed tensor. The payload holds where elements changed (gaps between positions, Golomb-Rice coded, which for positions
that are spread evenly is within 4% of their entropy) and by how much (differences of the integers that the elements are
stored as, Huffman coded). Tensors that did not change are not mentioned; tensors for which a delta would be larger are
sent whole.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from .errors import SnapshotError
from .publish import Snapshot, as_bytes, check_specs, tensor_digest
from .schemes import Scheme

MAGIC = b"rlqdelta"
INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
CHUNK = 1 << 20
"""Elements compared at once, so that temporaries stay in cache."""


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


@dataclass(frozen=True)
class Delta:
    """A delta whose bytes have been checked; made by `open_delta`."""

    info: DeltaInfo
    """What it carries."""
    entries: list[dict]
    """Per touched tensor its name, size, width of an element and how its payload is coded."""
    body: memoryview
    """The payloads, one after the other."""

    @property
    def names(self) -> list[str]:
        """Touched tensors, in the order of the snapshot."""
        return [entry["name"] for entry in self.entries]

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
        end = 0
        for entry in self.entries:
            end += entry["nbytes"]
            yield entry["name"], _decode(entry, self.body[end - entry["nbytes"] : end])


def encode(base: Snapshot, new: Snapshot) -> bytes:
    """Encode what turns `base` into `new`.

    Raises:
        SnapshotError: the two differ in scheme, names, dtypes or shapes.
    """
    if base.scheme != new.scheme:
        raise SnapshotError(f"a delta from {base.scheme.name!r} to {new.scheme.name!r} is not possible; send it whole")
    check_specs(new.specs, base.specs)
    entries, payloads = [], []
    changed = 0
    for name, tensor in new.tensors.items():
        old, now = flat_integers(base.tensors[name]), flat_integers(tensor)
        where = _differing(old, now)
        if where.size == 0:
            continue
        changed += where.size
        parameter, payload = _pack_changes(where, now[where] - old[where])
        if len(payload) >= now.nbytes:
            parameter, payload = None, now.tobytes()
        entries.append(
            {
                "name": name,
                "size": now.size,
                "width": now.itemsize,
                "rice": parameter,
                "count": int(where.size),
                "nbytes": len(payload),
            }
        )
        payloads.append(payload)
    body = b"".join(payloads)
    header = {
        "base": [base.version, base.digest],
        "new": [new.version, new.digest],
        "scheme": new.scheme.to_dict(),
        "changed": changed,
        "elements": sum(tensor.numel() for tensor in new.tensors.values()),
        "tensors": entries,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
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
    header = json.loads(bytes(text))
    body = blob[start + size :]
    if hashlib.sha256(body).hexdigest() != header["sha256"]:
        raise SnapshotError("the delta was cut short or damaged on its way; send the whole snapshot")
    (base_version, base_digest), (version, digest) = header["base"], header["new"]
    scheme = Scheme.from_dict(header["scheme"])
    info = DeltaInfo(base_version, base_digest, version, digest, scheme, header["changed"], header["elements"])
    return Delta(info, header["tensors"], body)


def inspect(blob: bytes | memoryview) -> DeltaInfo:
    """What a delta carries; raises as `open_delta` does."""
    return open_delta(blob).info


def apply(base: Snapshot, blob: bytes | memoryview) -> Snapshot:
    """Make the new version; `base` is not touched, and unchanged tensors are shared with it.

    Raises:
        SnapshotError: damaged bytes, another base than the one the delta was made from, or a result whose digest is
            not the published one.
    """
    opened = open_delta(blob)
    opened.check_base(base.version, base.digest)
    tensors = base.tensors | {name: _patched(base.tensors[name], patch) for name, patch in opened.patches()}
    info, found = opened.info, tensor_digest(tensors)
    if found != info.digest:
        raise SnapshotError(f"the delta makes {found[:12]}, not the published {info.digest[:12]}; send it whole")
    return Snapshot(tensors, info.version, info.scheme, info.digest)


def changes(
    base: Mapping[str, Callable[[], torch.Tensor]], version: int | None, digest: str, blob: bytes | memoryview
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that differ, in their new form, each as it is asked for.

    Whoever overwrites the base with them holds one extra tensor at a time; the digest of the result is theirs to check.

    Args:
        base: per name, what reads the tensor; CPU, contiguous.
        version: version of the base.
        digest: its digest.
        blob: what `encode` made.

    Raises:
        SnapshotError: damaged bytes, or another base; before anything is yielded.
    """
    opened = open_delta(blob)
    opened.check_base(version, digest)
    return ((name, _patched(base[name](), patch)) for name, patch in opened.patches())


def _patched(old: torch.Tensor, patch: Patch) -> torch.Tensor:
    new = old.clone()
    patch.apply_(flat_integers(new))
    return new


def flat_integers(tensor: torch.Tensor) -> np.ndarray:
    """Elements of a contiguous CPU tensor as the unsigned integers that they are stored as, flat, without a copy."""
    return as_bytes(tensor).view(INTEGERS[tensor.element_size()])


def _differing(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Ascending positions (int64) at which two flat arrays differ."""
    found = []
    for top in range(0, new.size, CHUNK):
        at = np.flatnonzero(old[top : top + CHUNK] != new[top : top + CHUNK])
        found.append(at + top)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _pack_changes(where: np.ndarray, difference: np.ndarray) -> tuple[int, bytes]:
    """Rice parameter, and the bytes of four streams: lengths, quotients, remainders, differences."""
    gaps = np.diff(where, prepend=-1) - 1
    # The best parameter for gaps of a geometric distribution: log2(ln 2 * mean).
    parameter = max(0, round(math.log2(max(0.6931 * float(gaps.mean()), 1.0))))
    # Quotients in unary: a one bit after as many zeros as the quotient says.
    quotients = gaps >> parameter
    unary = np.zeros(int(quotients.sum()) + gaps.size, np.uint8)
    unary[np.cumsum(quotients + 1) - 1] = 1
    bits = (gaps[:, None] >> np.arange(parameter)) & 1
    streams = [np.packbits(unary).tobytes(), np.packbits(bits.astype(np.uint8)).tobytes(), _huffman(difference)]
    lengths = np.array([len(stream) for stream in streams], np.uint32)
    return parameter, lengths.tobytes() + b"".join(streams)


def _decode(entry: dict, payload: memoryview) -> Patch:
    dtype = np.dtype(INTEGERS[entry["width"]])
    if entry["rice"] is None:
        return Patch(None, np.frombuffer(payload, dtype))
    where, values = _unpack_changes(payload, entry["rice"], entry["count"], dtype)
    return Patch(where.astype(np.int32 if entry["size"] <= 2**31 else np.int64), values)


def _unpack_changes(payload: memoryview, parameter: int, count: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    ends = 12 + np.cumsum(np.frombuffer(payload[:12], np.uint32), dtype=np.int64)
    unary, bits, differences = (payload[start:end] for start, end in zip([12, *ends[:-1]], ends, strict=True))
    stops = np.flatnonzero(np.unpackbits(np.frombuffer(unary, np.uint8)))[:count]
    quotients = np.diff(stops, prepend=-1) - 1
    remainder_bits = np.unpackbits(np.frombuffer(bits, np.uint8))[: count * parameter].reshape(count, parameter)
    remainders = (remainder_bits.astype(np.int64) << np.arange(parameter)).sum(1)
    gaps = (quotients << parameter) + remainders
    return np.cumsum(gaps + 1) - 1, _unhuffman(differences, count, dtype)


def _huffman(difference: np.ndarray) -> bytes:
    """Code signed steps: zigzag, so that small steps of either sign are small numbers, then one plane per byte."""
    signed = difference.view(f"i{difference.itemsize}")
    zigzag = ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)
    planes = zigzag[:, None].view(np.uint8).T
    coder = zlib.compressobj(level=1, strategy=zlib.Z_RLE)  # runs and Huffman codes, no search for repeats
    return coder.compress(planes.tobytes()) + coder.flush()


def _unhuffman(data: memoryview, count: int, dtype: np.dtype) -> np.ndarray:
    planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(dtype.itemsize, count)
    zigzag = np.ascontiguousarray(planes.T).view(dtype)[:, 0]
    return (zigzag >> dtype.type(1)) ^ (dtype.type(0) - (zigzag & dtype.type(1)))
