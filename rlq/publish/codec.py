"""Where two arrays differ and by how much, as deflated byte planes.

Example: elements 3, 4 and 300 of an array change by +1, -1 and +2. The gaps before them (unchanged elements in between)
are 3, 0 and 295, as integers of four bytes 03 00 00 00, 00 00 00 00 and 27 01 00 00. Their lowest bytes 03 00 27 go
into the stream `low`, the rest, byte by byte, 00 00 01 and six zeros, into `high`. `signs` takes one bit per change,
set where the step is negative: 0 1 0. `steps` takes the magnitudes less one, which are mostly zero: 00 00 01. Equal
things side by side cost next to nothing once a stream is deflated by runs and Huffman codes, and low bytes, which are
close to random, cost about their entropy. All tensors share the four streams, because a table of codes per tensor
would outweigh a small change.
"""

import zlib
from collections.abc import Mapping

import numpy as np

PIECE = 1 << 16
"""Changes at a time, so that temporaries stay in a CPU's cache."""
COMPARED = 1 << 20
"""Elements compared at a time; most of them do not change."""
FEED = 1 << 16
"""Deflated bytes handed to zlib at once."""
STREAMS = ("low", "high", "signs", "steps")


def differing(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ascending positions at which two flat unsigned arrays differ, and new minus old there, modulo 2^bits."""
    dtype = position_type(new.size)
    found = [np.empty(0, dtype)]
    for top in range(0, new.size, COMPARED):
        at = _differing(old[top : top + COMPARED], new[top : top + COMPARED])
        found.append(at.astype(dtype) + dtype(top))
    where = np.concatenate(found)
    return where, new[where] - old[where]


def _differing(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Eight bytes at a time first: most words are equal, and only the others are looked at by element."""
    per_word = 8 // old.itemsize
    end = old.size - old.size % per_word
    before, after = (array[:end].view(np.uint64) for array in (old, new))
    words = np.flatnonzero(before != after)
    if 4 * words.size > before.size:
        return np.flatnonzero(old != new)
    at = np.flatnonzero((before[words] ^ after[words]).view(old.dtype))
    rest = end + np.flatnonzero(old[end:] != new[end:])
    return np.concatenate([words[at // per_word] * per_word + at % per_word, rest])


class Changes:
    """The changes of one tensor, split into what the streams take.

    Args:
        where: ascending positions.
        values: new minus old there, unsigned, modulo 2^bits.
        size: elements of the tensor, which decides how wide gaps are.
    """

    def __init__(self, where: np.ndarray, values: np.ndarray, size: int):
        negative = (values >> values.dtype.type(8 * values.itemsize - 1)).astype(bool)
        self.negative = negative
        self.steps = np.where(negative, 0 - values, values) - values.dtype.type(1)
        self.gaps = (np.diff(where, prepend=-1) - 1).astype(gap_type(size))

    def estimate(self) -> float:
        """About how many bytes they will take: the entropy of the planes and a bit per sign."""
        planes = [*_planes(self.gaps), *_planes(self.steps)]
        return self.negative.size / 8 + sum(_entropy_bits(plane) for plane in planes) / 8


class Writer:
    """The streams of all tensors of a delta."""

    def __init__(self) -> None:
        self._deflate = {
            name: zlib.compressobj(level=1, wbits=-15, memLevel=9, strategy=zlib.Z_RLE) for name in STREAMS
        }
        self._out: dict[str, list[bytes]] = {name: [] for name in STREAMS}

    def add(self, changes: Changes) -> None:
        """Append a tensor's changes, in pieces, as they will be read."""
        for start in range(0, changes.gaps.size, PIECE):
            piece = slice(start, start + PIECE)
            low, *high = _planes(changes.gaps[piece])
            self._put("low", low)
            self._put("high", np.concatenate(high))
            self._put("signs", np.packbits(changes.negative[piece]))
            self._put("steps", np.concatenate(_planes(changes.steps[piece])))

    def finish(self) -> dict[str, bytes]:
        """All streams; nothing can be added afterwards."""
        return {name: b"".join([*self._out[name], self._deflate[name].flush()]) for name in STREAMS}

    def _put(self, name: str, data: np.ndarray) -> None:
        self._out[name].append(self._deflate[name].compress(np.ascontiguousarray(data).data))


class Reader:
    """Reads what `Writer` wrote, one tensor after the other, a piece at a time."""

    def __init__(self, streams: Mapping[str, memoryview]):
        self._streams = {name: _Inflated(streams[name]) for name in STREAMS}

    def take(self, count: int, size: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Positions and values of the next tensor: `count` changes of `size` elements of an unsigned `dtype`."""
        where = np.empty(count, position_type(size))
        values = np.empty(count, dtype)
        last = -1
        for start in range(0, count, PIECE):
            positions = where[start : start + PIECE]
            steps = values[start : start + PIECE]
            n = positions.size
            width = np.dtype(gap_type(size)).itemsize
            gaps = np.concatenate([self._take("low", n), self._take("high", n * (width - 1))])
            positions[:] = last + np.cumsum(_joined(gaps, n).astype(np.int64) + 1)
            last = int(positions[-1])
            negative = np.unpackbits(self._take("signs", -(-n // 8)), count=n).view(bool)
            steps[:] = _joined(self._take("steps", n * dtype.itemsize), n)
            steps += dtype.type(1)
            np.negative(steps, out=steps, where=negative)
        return where, values

    def _take(self, name: str, count: int) -> np.ndarray:
        return self._streams[name].take(count)


def position_type(size: int) -> type:
    """Signed integers that hold every position in an array of `size` elements."""
    return np.int32 if size <= 2**31 else np.int64


def gap_type(size: int) -> type:
    """Unsigned integers that hold every gap in an array of `size` elements."""
    return np.uint32 if size <= 2**32 else np.uint64


def _planes(numbers: np.ndarray) -> list[np.ndarray]:
    """One uint8 array per byte of unsigned integers, lowest first."""
    return list(np.ascontiguousarray(numbers).view(np.uint8).reshape(numbers.size, -1).T)


def _joined(planes: np.ndarray, count: int) -> np.ndarray:
    """Inverse of `_planes`, laid end to end."""
    width = planes.size // count
    return np.ascontiguousarray(planes.reshape(width, count).T).view(f"u{width}")[:, 0]


def _entropy_bits(data: np.ndarray) -> float:
    counts = np.bincount(data)
    counts = counts[counts > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum())


class _Inflated:
    """Reads a deflated stream in parts."""

    def __init__(self, stream: memoryview):
        self._inflate = zlib.decompressobj(wbits=-15)
        self._stream = stream
        self._fed = 0

    def take(self, count: int) -> np.ndarray:
        """The next `count` bytes, uint8."""
        out = np.empty(count, np.uint8)
        done = 0
        while done < count:
            ahead = self._inflate.unconsumed_tail
            if not ahead:
                ahead = self._stream[self._fed : self._fed + FEED]
                self._fed += FEED
            piece = self._inflate.decompress(ahead, min(count - done, FEED))
            out[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)
        return out
