"""Kernels that re-encode what changed between two versions of a matrix, in place and bit-identical to `kernels.encode`.

Changes are looked for in runs of 16 elements. What has to be encoded again is gathered into one short row, so that the
loops of `rlq.quantize.kernels` work on it at full width, and scattered back. Where a tile is small, any change encodes
the tile again. Where it is large (a row, a block), its scale is computed again only if a changed element was, or is
now, large enough to decide it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
import numpy as np

from .kernels import (
    E8M0_BLOCKS,
    FP32,
    I32,
    LARGEST,
    PIECE,
    WHOLE,
    ZERO_SCALE,
    e4m3_scales,
    e8m0_scales,
    encode_row,
    fp32_scales,
    jit,
    raise_runs,
    reduce_runs,
    store_row,
)
from .simd import RUN, float_of, prefetch, run_copy, run_differs, run_fill, run_top

LINE = 64  # codes in a cache line


@jit
def _scatter(fresh, packed, where, count, half, target):
    """Write the gathered codes of `count` runs to the runs `where` of a row of stored codes."""
    if half:
        store_row(fresh, packed[: count * (RUN // 2)])
        eights, sources = target.view(np.uint64), packed.view(np.uint64)
        for n in range(count):
            eights[where[n]] = sources[n]
    else:
        for n in range(count):
            run_copy(target, where[n] * RUN, fresh, n * RUN)


@jit
def update_small_tiles(new, old, tile, rule, element, offset, given, scales, stored_scales, codes, half):
    """Encode again every tile (of one row) that changed. Arguments as for `kernels.encode`.

    Returns:
        Bits of the largest magnitude among the old and the new values of changed tiles.
    """
    rows, columns = new.shape
    per_tile = tile // RUN
    gathered = np.empty(columns, new.dtype)
    which = np.empty(columns // tile + 1, np.int64)
    where = np.empty(columns // RUN, np.int64)
    runs = np.empty(columns // RUN, np.int32)
    tiles = np.empty(columns // tile, np.float32)
    stored = np.empty(columns // tile, np.uint8)
    spread = np.empty(columns, np.float32)
    fresh, packed = np.empty(columns, np.uint8), np.empty(columns // 2, np.uint8)
    words = np.empty(PIECE, np.int32)
    top_old, top_new = I32(0), I32(0)
    for i in range(rows):
        row, before = new[i], old[i]
        for j in range(0, codes.shape[1], LINE):
            prefetch(codes[i], j)
        count = 0
        for c in range(columns // tile):  # without a branch that would be mispredicted at every change
            dirty = run_differs(row, before, c * tile)
            for b in range(1, per_tile):
                dirty |= run_differs(row, before, c * tile + b * RUN)
            which[count] = c
            count += np.int64(dirty)
        if count == 0:
            continue
        for n in range(count):
            for b in range(per_tile):
                run = which[n] * per_tile + b
                where[n * per_tile + b] = run
                run_copy(gathered, (n * per_tile + b) * RUN, row, run * RUN)
                top_old = I32(max(top_old, run_top(before, run * RUN)))
        some, found = tiles[:count], runs[: count * per_tile]
        for b in range(count * per_tile):
            found[b] = run_top(gathered, b * RUN)
            top_new = I32(max(top_new, found[b]))
        reduce_runs(found, per_tile, some)
        if rule == FP32:
            fp32_scales(some, LARGEST[element])
        elif rule == E8M0_BLOCKS:
            e8m0_scales(some, stored[:count], offset)
        else:
            e4m3_scales(some, stored[:count], LARGEST[element], given[0], words)
        for n in range(count):
            for b in range(per_tile):
                run_fill(spread, (n * per_tile + b) * RUN, some[n])
            if rule == FP32:
                scales[i, which[n]] = some[n]
            else:
                stored_scales[i, which[n]] = stored[n]
        part = gathered[: count * tile]
        encode_row(part, part, spread[: count * tile], fresh, words, element)
        _scatter(fresh, packed, where, count * per_tile, half, codes[i])
    return top_old, top_new


@jit
def update_large_tiles(new, old, tile_rows, tile, rule, element, given, scales, codes, half):
    """Encode again the runs that changed, and whole tiles whose fp32 scale changed. Arguments as for `kernels.encode`.

    Returns:
        Bits of the largest magnitude among the old and the new values of changed runs.
    """
    rows, columns = new.shape
    width = columns // RUN
    tile_count = (columns + tile - 1) // tile
    per_tile = max((tile + RUN - 1) // RUN, 1)
    tile_of = np.arange(width) // per_tile
    dirty, counts = np.empty((tile_rows, width + 1), np.int64), np.empty(tile_rows, np.int64)
    old_tops, new_tops = np.empty(tile_count, np.int32), np.empty(tile_count, np.int32)
    runs, tiles = np.empty(width, np.int32), np.empty(tile_count, np.float32)
    gathered, spread = np.empty(columns, new.dtype), np.empty(columns, np.float32)
    fresh, packed = np.empty(columns, np.uint8), np.empty(columns // 2, np.uint8)
    every, words = np.arange(width), np.empty(PIECE, np.int32)
    top_old, top_new = I32(0), I32(0)
    for strip in range((rows + tile_rows - 1) // tile_rows):
        first, last = strip * tile_rows, min((strip + 1) * tile_rows, rows)
        old_tops[:] = 0
        new_tops[:] = 0
        for i in range(first, last):
            row, before, found = new[i], old[i], dirty[i - first]
            for j in range(0, codes.shape[1], LINE):
                prefetch(codes[i], j)
            count = 0
            for b in range(width):  # without a branch that would be mispredicted at every change
                found[count] = b
                count += np.int64(run_differs(row, before, b * RUN))
            counts[i - first] = count
            for b in found[:count]:
                c = tile_of[b]
                old_tops[c] = max(old_tops[c], run_top(before, b * RUN))
                new_tops[c] = max(new_tops[c], run_top(row, b * RUN))
        for c in range(tile_count):
            top_old, top_new = I32(max(top_old, old_tops[c])), I32(max(top_new, new_tops[c]))
        again = False
        if rule != WHOLE:
            again = _renew_scales(new[first:last], per_tile, element, old_tops, new_tops, runs, tiles, scales[strip])
        for i in range(first, last):
            # A new scale is rare; its whole strip is encoded again, the other tiles to what they are.
            which = every if again else dirty[i - first, : counts[i - first]]
            count = which.shape[0]
            if count == 0:
                continue
            for n in range(count):
                run_copy(gathered, n * RUN, new[i], which[n] * RUN)
                run_fill(spread, n * RUN, given[0] if rule == WHOLE else scales[strip, tile_of[which[n]]])
            part = gathered[: count * RUN]
            encode_row(part, part, spread[: count * RUN], fresh, words, element)
            _scatter(fresh, packed, which, count, half, codes[i])
    return top_old, top_new


@jit
def _renew_scales(strip, per_tile, element, old_tops, new_tops, runs, tiles, scales):
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
    runs[:] = 0
    for i in range(strip.shape[0]):
        raise_runs(strip[i], runs)
    reduce_runs(runs, per_tile, tiles)
    fp32_scales(tiles, largest)
    again = False
    for c in range(scales.shape[0]):
        if tiles[c] != scales[c]:
            scales[c] = tiles[c]
            again = True
    return again
