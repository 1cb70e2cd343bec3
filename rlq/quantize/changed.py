"""Kernels that re-encode what changed between two versions of a matrix, in place and bit-identical to `kernels.encode`.

They are for schemes with a scale that spans the tensor, which stays as it is here: what they save is the pass over the
whole tensor that finds the largest magnitude. Elsewhere encoding everything is as fast as reading both versions.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
import numpy as np

from .codes import FP4, INT4, encode_listed
from .kernels import E4M3_BLOCKS, F32, I32, given_scale, jit, part, round_up, tile_scales
from .simd import RUN, listed_top, prefetch, run_differs, runs_top


@part
def _changed(row, before, tile, starts):
    """Put where the tiles of a row that changed begin into `starts`, intp (tiles + 1,); their number.

    There is no branch, which would be mispredicted at every change. The next rows are fetched meanwhile.
    """
    count = 0
    for start in range(0, row.shape[0], tile):
        differs = False
        for j in range(start, start + tile, RUN):
            prefetch(row, row.shape[0] + j)
            prefetch(before, row.shape[0] + j)
            differs |= run_differs(row, before, j)
        starts[count] = start
        count += np.intp(differs)
    return count


@part
def _fetch_codes(codes, starts, count, element):
    """Ask for the codes that are about to be overwritten."""
    per_byte = 2 if element in (FP4, INT4) else 1
    for n in range(count):
        prefetch(codes, starts[n] // per_byte)


@jit
def update(new, old, tile, rule, element, offset, given, stored_scales, codes):
    """Encode again every tile of E4M3_BLOCKS, or every run of WHOLE, that changed. Arguments as for `kernels.encode`.

    Returns:
        Bits of the largest magnitude among the old and the new values of what changed.
    """
    rows, columns = new.shape
    whole = F32(given)
    tile = tile if rule == E4M3_BLOCKS else RUN
    tiles, per_tile = columns // tile, tile // RUN
    changed, tops = np.empty(tiles + 1, np.intp), np.empty(tiles, np.int32)
    starts, tile_of = np.empty(columns // RUN, np.intp), np.zeros(columns // RUN, np.intp)
    scales, stored = np.empty(round_up(tiles), np.float32), np.empty(round_up(tiles), np.uint8)
    inverses = np.empty(tiles, np.float32)
    scales[:] = whole
    how = given_scale(scales[:tiles], inverses, element)
    top_old, top_new = I32(0), I32(0)
    for i in range(rows):
        row, before = new[i], old[i]
        count = _changed(row, before, tile, changed)
        _fetch_codes(codes[i], changed, count, element)
        for n in range(count):
            tops[n] = runs_top(row, changed[n], changed[n] + tile)
            top_new = max(top_new, tops[n])
            for b in range(per_tile):
                starts[n * per_tile + b] = changed[n] + b * RUN
                tile_of[n * per_tile + b] = n
        top_old = max(top_old, listed_top(before, starts, 0, count * per_tile))
        if rule == E4M3_BLOCKS:
            padded = scales[: round_up(count)]
            how = tile_scales(tops[:count], rule, element, offset, whole, padded, inverses, stored)
            for n in range(count):
                stored_scales[i, changed[n] // tile] = stored[n]
        encode_listed(row, starts, tile_of, count * per_tile, scales, inverses, how, codes[i], element)
    return top_old, top_new
