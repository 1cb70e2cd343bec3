"""Kernels that re-encode what changed between two versions of a matrix, in place and bit-identical to `kernels.encode`.

Changes are looked for in runs of 16 elements. Where a tile is small, any change encodes the tile again. Where it is
large (a row, a block), only the changed runs are encoded, and its scale is computed again only if a changed element
was, or is now, large enough to decide it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
import numpy as np

from .codes import CORRECT, DIVIDE, encode_runs
from .kernels import (
    F32,
    FP4,
    I32,
    INT4,
    LARGEST,
    WHOLE,
    ZERO_SCALE,
    fp32_scales,
    given_scale,
    invert,
    jit,
    part,
    raise_tops,
    round_up,
    tile_scales,
)
from .simd import RUN, float_of, prefetch, run_differs, runs_top


@part
def _changed_tiles(row, before, tile, found):
    """Put the indices of the tiles of a row that changed into `found` (tiles + 1,); their number.

    There is no branch, which would be mispredicted at every change. The next rows are fetched meanwhile.
    """
    count = 0
    for c in range(row.shape[0] // tile):
        differs = False
        for j in range(c * tile, (c + 1) * tile, RUN):
            prefetch(row, row.shape[0] + j)
            prefetch(before, row.shape[0] + j)
            differs |= run_differs(row, before, j)
        found[count] = c
        count += np.int64(differs)
    return count


@part
def _codes_at(codes, start, element):
    """The codes of a row from element `start` on."""
    return codes[start // 2 :] if element == FP4 or element == INT4 else codes[start:]


@part
def _fetch_codes(codes, tile, found, element):
    """Ask for the codes that are about to be overwritten; `found` are indices of tiles."""
    for c in found:
        prefetch(_codes_at(codes, c * tile, element), 0)


@jit
def update_small_tiles(new, old, tile, rule, element, offset, given, scales, stored_scales, codes):
    """Encode again every tile (of one row) that changed. Arguments as for `kernels.encode`.

    Returns:
        Bits of the largest magnitude among the old and the new values of changed tiles.
    """
    rows, columns = new.shape
    tiles = columns // tile
    whole = F32(given)
    found, tops = np.empty(tiles + 1, np.int64), np.empty(tiles, np.int32)
    fresh, stored = np.empty(round_up(tiles), np.float32), np.empty(round_up(tiles), np.uint8)
    inverses = np.empty(tiles, np.float32)
    top_old, top_new = I32(0), I32(0)
    for i in range(rows):
        row, before = new[i], old[i]
        count = _changed_tiles(row, before, tile, found)
        _fetch_codes(codes[i], tile, found[:count], element)
        for n in range(count):
            start = found[n] * tile
            tops[n] = runs_top(row, start, start + tile)
            top_old = max(top_old, runs_top(before, start, start + tile))
            top_new = max(top_new, tops[n])
        padded = round_up(count)
        how = tile_scales(tops[:count], rule, element, offset, whole, fresh[:padded], inverses, stored)
        for n in range(count):
            start = found[n] * tile
            changed, target = row[start : start + tile], _codes_at(codes[i], start, element)
            encode_runs(changed, changed, tile, fresh[n:], inverses[n:], how, target, element)
            if scales.shape[0]:
                scales[i, found[n]] = fresh[n]
            else:
                stored_scales[i, found[n]] = stored[n]
    return top_old, top_new


@jit
def update_large_tiles(new, old, tile_rows, tile, rule, element, given, scales, codes):
    """Encode again the runs that changed, and whole tiles whose fp32 scale changed. Arguments as for `kernels.encode`.

    Returns:
        Bits of the largest magnitude among the old and the new values of changed runs.
    """
    rows, columns = new.shape
    tiles, per_tile = (columns + tile - 1) // tile, tile // RUN
    found, counts = np.empty((tile_rows, columns // RUN + 1), np.int64), np.empty(tile_rows, np.int64)
    old_tops, new_tops = np.empty(tiles, np.int32), np.empty(tiles, np.int32)
    inverses, present = np.empty(tiles, np.float32), np.empty(tiles, np.float32)
    present[:] = F32(given)
    how = given_scale(present, inverses, element)
    top_old, top_new = I32(0), I32(0)
    for strip in range((rows + tile_rows - 1) // tile_rows):
        first, last = strip * tile_rows, min((strip + 1) * tile_rows, rows)
        old_tops[:] = 0
        new_tops[:] = 0
        for i in range(first, last):
            row, before, which = new[i], old[i], found[i - first]
            counts[i - first] = _changed_tiles(row, before, RUN, which)
            which = which[: counts[i - first]]
            _fetch_codes(codes[i], RUN, which, element)
            for b in which:
                c = b // per_tile
                old_tops[c] = max(old_tops[c], runs_top(before, b * RUN, (b + 1) * RUN))
                new_tops[c] = max(new_tops[c], runs_top(row, b * RUN, (b + 1) * RUN))
        again = False
        if rule != WHOLE:
            again = _renew_scales(new[first:last], tile, element, old_tops, new_tops, scales[strip])
            present[:] = scales[strip]
            how = CORRECT if invert(present, inverses) else DIVIDE
        for c in range(tiles):
            top_old, top_new = max(top_old, old_tops[c]), max(top_new, new_tops[c])
        for i in range(first, last):
            row = new[i]
            if again:  # rare; the other tiles of the strip are encoded to what they are
                encode_runs(row, row, tile, present, inverses, how, codes[i], element)
                continue
            for b in found[i - first, : counts[i - first]]:
                changed, target = row[b * RUN : (b + 1) * RUN], _codes_at(codes[i], b * RUN, element)
                c = b // per_tile
                encode_runs(changed, changed, RUN, present[c:], inverses[c:], how, target, element)
    return top_old, top_new


@part
def _renew_scales(strip, tile, element, old_tops, new_tops, scales):
    """Renew the scales of one strip's tiles whose largest magnitude may have changed; True if one is another."""
    largest = LARGEST[element]
    rescan = False
    for c in range(scales.shape[0]):
        was, becomes = float_of(old_tops[c]) / largest, float_of(new_tops[c]) / largest
        # `not <` also holds for NaN, and a tile of zeros has a scale that no magnitude explains.
        if old_tops[c] > 0 or new_tops[c] > 0:
            rescan |= was >= scales[c] or not becomes < scales[c] or scales[c] == ZERO_SCALE
    if not rescan:
        return False
    tops, fresh = np.zeros(scales.shape[0], np.int32), np.empty(scales.shape[0], np.float32)
    for i in range(strip.shape[0]):
        raise_tops(strip[i], tile, tops)
    fp32_scales(tops, fresh, largest)
    again = False
    for c in range(scales.shape[0]):
        if fresh[c] != scales[c]:
            scales[c] = fresh[c]
            again = True
    return again
