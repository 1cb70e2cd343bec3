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
from .publish import Snapshot, TensorSpec, as_bytes, check_specs, tensor_digest
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
        old, now = _integers(base.tensors[name]), _integers(tensor)
        where = _differing(old, now)
        if where.size == 0:
            continue
        changed += where.size
        parameter, payload = _pack_changes(where, now[where] - old[where])
        if len(payload) >= now.nbytes:
            parameter, payload = None, now.tobytes()
        entries.append({"name": name, "rice": parameter, "count": int(where.size), "nbytes": len(payload)})
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


def inspect(blob: bytes) -> DeltaInfo:
    """Read a delta's header.

    Raises:
        SnapshotError: these are not the bytes of a delta, or not all of them, or not as they were written.
    """
    header, _ = _open(blob)
    scheme = Scheme.from_dict(header["scheme"])
    (base_version, base_digest), (version, digest) = header["base"], header["new"]
    return DeltaInfo(base_version, base_digest, version, digest, scheme, header["changed"], header["elements"])


def apply(base: Snapshot, blob: bytes) -> Snapshot:
    """Make the new version; `base` is not touched, and unchanged tensors are shared with it.

    Raises:
        SnapshotError: damaged bytes, another base than the one the delta was made from, or a result whose digest is
            not the published one.
    """
    read = {name: (lambda tensor=tensor: tensor) for name, tensor in base.tensors.items()}
    tensors = base.tensors | dict(changes(read, base.version, base.digest, blob))
    info = inspect(blob)
    found = tensor_digest(tensors)
    if found != info.digest:
        raise SnapshotError(f"the delta makes {found[:12]}, not the published {info.digest[:12]}; send it whole")
    return Snapshot(tensors, info.version, info.scheme, info.digest)


def changes(
    base: Mapping[str, Callable[[], torch.Tensor]], version: int | None, digest: str, blob: bytes
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
    header, body = _open(blob)
    wanted = tuple(header["base"])
    if (version, digest) != wanted:
        raise SnapshotError(
            f"this delta applies to version {wanted[0]} ({wanted[1][:12]}), not to version {version} "
            f"({digest[:12]}); send the whole snapshot"
        )
    parts = zip(header["tensors"], _split(body, header["tensors"]), strict=True)
    return ((entry["name"], _apply_tensor(base[entry["name"]](), entry, payload)) for entry, payload in parts)


def changed_tensors(blob: bytes) -> list[str]:
    """Names of the tensors that a delta touches."""
    return [entry["name"] for entry in _open(blob)[0]["tensors"]]


def _open(blob: bytes) -> tuple[dict, bytes]:
    start = len(MAGIC) + 4 + 32
    size = int.from_bytes(blob[len(MAGIC) : len(MAGIC) + 4], "little")
    text = blob[start : start + size]
    if blob[: len(MAGIC)] != MAGIC or hashlib.sha256(text).digest() != blob[start - 32 : start]:
        raise SnapshotError("these bytes are not a delta, or its header was damaged; send the whole snapshot")
    header = json.loads(text)
    body = blob[start + size :]
    if hashlib.sha256(body).hexdigest() != header["sha256"]:
        raise SnapshotError("the delta was cut short or damaged on its way; send the whole snapshot")
    return header, body


def _split(body: bytes, entries: list[dict]) -> list[bytes]:
    ends = np.cumsum([entry["nbytes"] for entry in entries], dtype=np.int64)
    return [body[end - entry["nbytes"] : end] for entry, end in zip(entries, ends, strict=True)]


def _integers(tensor: torch.Tensor) -> np.ndarray:
    """Elements as the unsigned integers that they are stored as, flat, without a copy."""
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


def _unpack_changes(payload: bytes, parameter: int, count: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.frombuffer(payload[:12], np.uint32)
    unary, bits, differences = _split(payload[12:], [{"nbytes": int(n)} for n in lengths])
    ends = np.flatnonzero(np.unpackbits(np.frombuffer(unary, np.uint8)))[:count]
    quotients = np.diff(ends, prepend=-1) - 1
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


def _unhuffman(data: bytes, count: int, dtype: np.dtype) -> np.ndarray:
    planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(dtype.itemsize, count)
    zigzag = np.ascontiguousarray(planes.T).view(dtype)[:, 0]
    return (zigzag >> dtype.type(1)) ^ (dtype.type(0) - (zigzag & dtype.type(1)))


def _apply_tensor(old: torch.Tensor, entry: dict, payload: bytes) -> torch.Tensor:
    spec = TensorSpec.of(old)
    integers = _integers(old)
    if entry["rice"] is None:
        fresh = np.frombuffer(payload, integers.dtype).copy()
    else:
        where, difference = _unpack_changes(payload, entry["rice"], entry["count"], integers.dtype)
        fresh = integers.copy()
        fresh[where] += difference
    return torch.from_numpy(fresh.view(np.uint8)).view(getattr(torch, spec.dtype)).view(spec.shape)
