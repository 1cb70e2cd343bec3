"""Where two arrays differ, as bytes: the gaps between positions, each with one flag.

A gap g is sent as the number g + 2. Where its highest bit is and the bit below that make its class, two classes per
octave; the caller has them entropy-coded. The bits below, above the flag, make its field; fields are as wide as the
class says and fill bytes from the lowest bit. Adapted to the classes that occur, this costs less than a Golomb code
where changes cluster, and up to 3% above the entropy where they do not. With numba the loops are compiled
(`delta_kernels.py`); without it they are numpy's, in pieces.
"""

import functools
import importlib.util

import numpy as np

PIECE = 1 << 16
"""Elements or gaps at a time, so that temporaries stay in cache."""


@functools.cache
def _kernels():
    if importlib.util.find_spec("numba") is None:
        return None
    from . import kernels as delta_kernels

    return delta_kernels


def position_type(size: int) -> type:
    """Signed integers that hold every position in an array of `size` elements."""
    return np.int32 if size <= 2**31 else np.int64


def differing(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ascending positions at which two flat unsigned arrays differ, and new minus old there, modulo 2^bits."""
    kernels, dtype = _kernels(), position_type(new.size)
    if kernels is not None:
        # Room for a change of everything; pages that nothing is written to take no memory.
        where, values = np.empty(new.size + 1, dtype), np.empty(new.size + 1, new.dtype)
        count = kernels.find(old, new, where, values)
        return where[:count], values[:count]
    found = [np.empty(0, dtype)]
    for top in range(0, new.size, PIECE):
        at = np.flatnonzero(old[top : top + PIECE] != new[top : top + PIECE])
        found.append(at.astype(dtype) + dtype(top))
    where = np.concatenate(found)
    return where, new[where] - old[where]


def pack(where: np.ndarray, flags: np.ndarray) -> tuple[np.ndarray, bytes]:
    """Classes (uint8) and fields of ascending positions with one flag each (uint8, 0 or 1)."""
    kernels = _kernels()
    if kernels is None:
        return _pack(where, flags)
    classes, widest = np.empty(where.size, np.uint8), (int(where[-1]) + 2).bit_length() - 1
    fields = np.empty(-(-where.size * widest // 8) + 1, np.uint8)
    return classes, fields[: kernels.pack(where, flags, classes, fields)].tobytes()


def unpack(classes: np.ndarray, fields: np.ndarray, begin: int, last: int, where: np.ndarray, flags: np.ndarray) -> int:
    """Read the next positions and flags of what `pack` made.

    Args:
        classes: uint8, one per position; at most PIECE keep temporaries small.
        fields: uint8, all of them.
        begin: bit of `fields` at which to begin.
        last: position before the first; -1 at the beginning.
        where: takes the positions.
        flags: takes the flags, uint8.

    Returns:
        Bit at which the next begin.
    """
    end = begin + classes.size + int((classes >> 1).sum(dtype=np.int64))
    part = fields[begin // 8 : -(-end // 8)]
    kernels = _kernels()
    if kernels is None:
        _unpack(classes, part, begin % 8, last, where, flags)
    else:
        words = np.zeros(part.size // 8 + 2, np.uint64)
        words.view(np.uint8)[: part.size] = part
        kernels.unpack(classes, words, begin % 8, last, where, flags)
    return end


def _pack(where: np.ndarray, flags: np.ndarray) -> tuple[np.ndarray, bytes]:
    classes, out, carried, last = [], [], np.empty(0, np.uint8), -1
    for start in range(0, where.size, PIECE):
        positions = where[start : start + PIECE].astype(np.int64)
        numbers = np.diff(positions, prepend=last) + 1
        last = int(positions[-1])
        low = np.frexp(numbers.astype(np.float64))[1].astype(np.int64) - 2
        classes.append((low << 1 | numbers >> low & 1).astype(np.uint8))
        fields = (numbers & (1 << low) - 1) << 1 | flags[start : start + PIECE]
        begins = np.cumsum(low + 1) - (low + 1)
        bits = np.empty(int((low + 1).sum()), np.uint8)
        for b in range(int(low.max()) + 1):
            there = low >= b
            bits[begins[there] + b] = fields[there] >> b & 1
        bits = np.concatenate([carried, bits])
        whole = bits.size & ~7
        out.append(np.packbits(bits[:whole], bitorder="little").tobytes())
        carried = bits[whole:]
    return np.concatenate(classes), b"".join([*out, np.packbits(carried, bitorder="little").tobytes()])


def _unpack(
    classes: np.ndarray, fields: np.ndarray, begin: int, last: int, where: np.ndarray, flags: np.ndarray
) -> None:
    low, upper = classes.astype(np.int64) >> 1, classes & 1 | np.int64(2)
    begins = np.cumsum(low + 1) - (low + 1) + begin
    bits = np.unpackbits(fields, bitorder="little").astype(np.int64)
    numbers = upper << low
    for b in range(1, int(low.max()) + 1):
        there = low >= b
        numbers[there] |= bits[begins[there] + b] << b - 1
    where[:], flags[:] = last + np.cumsum(numbers - 1), bits[begins]
