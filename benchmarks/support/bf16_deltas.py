"""The other side of benchmarks/delta.py: how small a delta between two bf16 checkpoints can be made.

The checkpoints are flat uint16 arrays, all tensors in a row; results are bytes on the wire.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow
import torch

from rlq.publish.delta import flat_integers

LEVELS = (1, 3, 19)


def flat(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """All elements in one uint16 array."""
    return np.concatenate([flat_integers(tensor) for tensor in tensors.values()])


def zstd(data: np.ndarray, level: int) -> int:
    """Bytes after zstd."""
    return len(pyarrow.Codec("zstd", level).compress(np.ascontiguousarray(data).tobytes(), asbytes=True))


def varints(numbers: np.ndarray) -> np.ndarray:
    """Base-128, least significant group first, the high bit meaning that more follow; uint8."""
    lengths = np.sum([numbers >= 1 << 7 * n for n in range(5)], axis=0)
    lengths[numbers == 0] = 1
    starts = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    for n in range(5):
        there = lengths > n
        more = (lengths[there] > n + 1) * 0x80
        out[starts[there] + n] = (numbers[there] >> 7 * n & 0x7F) | more
    return out


def planes(numbers: np.ndarray) -> list[np.ndarray]:
    """One array per byte of an integer, least significant first."""
    return list(numbers.view(np.uint8).reshape(numbers.size, -1).T)


def _changes(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    where = np.flatnonzero(old != new)
    signed = (new[where] - old[where]).view(np.int16)
    zigzag = ((signed << 1) ^ (signed >> 15)).view(np.uint16)
    return np.diff(where, prepend=-1) - 1, zigzag, new[where]


def gaps_and_zstd(old: np.ndarray, new: np.ndarray) -> int:
    """What is published most: gaps as varints and the new values as they are, both through zstd."""
    gaps, _, values = _changes(old, new)
    streams = [varints(gaps), values]
    return min(sum(zstd(stream, level) for stream in streams) for level in LEVELS)


def others(old: np.ndarray, new: np.ndarray) -> dict[str, int]:
    """Variants of it, and XOR of everything."""
    gaps, zigzag, values = _changes(old, new)
    wide = planes(gaps.astype(np.uint32))
    streams = {
        "varint gaps, differences": [varints(gaps), *planes(zigzag)],
        "varint gaps, values by byte": [varints(gaps), *planes(values)],
        "gaps by byte, differences": [*wide, *planes(zigzag)],
    }
    sizes = {name: min(sum(zstd(s, level) for s in them) for level in LEVELS) for name, them in streams.items()}
    return sizes | {"xor of everything, by byte": sum(zstd(plane, 3) for plane in planes(old ^ new))}


def entropy(counts: np.ndarray) -> float:
    """Bits that an ideal coder spends on as many symbols of each kind."""
    counts = counts[counts > 0].astype(np.float64)
    return float((counts * np.log2(counts.sum() / counts)).sum())


def ideal(old: np.ndarray, new: np.ndarray) -> float:
    """Bytes of an ideal coder of each element's change that knows the old element, as a receiver could.

    Of bf16 it looks at the sign and the exponent: the smaller an element, the finer its grid and the more often it
    moves, so these say most of what can be known. Of codes it looks at the byte.
    """
    difference = new - old
    there = difference != 0
    seen = old if old.itemsize == 1 else old >> 7
    everything, changed = (np.bincount(e, minlength=512) for e in (seen, seen[there]))
    bits = sum(entropy(np.array([c, n - c])) for c, n in zip(changed, everything, strict=True))
    grouped = difference[there][np.argsort(seen[there], kind="stable")]
    for values in np.split(grouped, np.cumsum(changed)[:-1]):
        bits += entropy(np.unique(values, return_counts=True)[1])
    return bits / 8
