"""CPU path: hands tensors to the numba kernels, on as many threads as torch may use in this process."""

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from ...formats.elements import ELEMENTS
from ...formats.schemes import TensorScheme
from .. import reference
from ..encoded import Encoded
from ..rules import E4M3_BLOCKS, WHOLE, scale_rule
from . import kernels
from .codes import ELEMENT_ORDER
from .simd import RUN

NO_SCALES = np.empty((0, 0), np.float32)
NO_BYTES = np.empty((0, 0), np.uint8)
PER_THREAD = 1 << 19  # elements below which a second thread costs more than it saves


@dataclass(frozen=True)
class _Plan:
    """What the kernels have to know about a scheme and a (rows, columns) shape; looked up once per call."""

    rule: int
    """How the scale follows from the largest magnitude, as for `kernels.encode`."""
    element: int
    """Place in `codes.ELEMENT_ORDER`."""
    offset: int
    """Exponent of the element's largest power of two."""
    tile_rows: int
    """Rows that share a scale; 1 where one spans the tensor, because each row can then be worked on alone."""
    tile: int
    """Columns that share a scale."""
    code_bytes: int
    """Bytes of the codes of one row."""
    scale_shape: tuple[int, ...]
    """Shape of the stored scales of the matrix."""
    scale_dtype: torch.dtype
    """Type of the stored scales."""
    in_bytes: bool
    """False if they are fp32."""

    @property
    def constants(self) -> tuple[int, int, int, int]:
        """Arguments that the kernels share."""
        return self.tile, self.rule, self.element, self.offset

    def strips(self, scale: np.ndarray, top: int, bottom: int) -> tuple[np.ndarray, np.ndarray]:
        """The scales of rows `top` to `bottom`, as fp32 and as bytes; empty where they are not of that type."""
        if self.rule == WHOLE:
            return NO_SCALES, NO_BYTES
        strip = scale[top // self.tile_rows : -(-bottom // self.tile_rows)]
        return (NO_SCALES, strip) if self.in_bytes else (strip, NO_BYTES)


@functools.lru_cache(maxsize=4096)
def _plan(scheme: TensorScheme, rows: int, columns: int) -> _Plan:
    block, element = scheme.block_format, scheme.element
    rule = scale_rule(scheme)
    tile_rows, tile = scheme.tile(rows, columns)
    return _Plan(
        rule=rule,
        element=ELEMENT_ORDER.index(element.name),
        offset=int(math.log2(element.max_finite)),
        tile_rows=1 if rule == WHOLE else tile_rows,
        tile=tile,
        code_bytes=-(-columns // element.pack) * element.dtype.itemsize,
        scale_shape=scheme.scale_shape(torch.Size((rows, columns))),
        scale_dtype=torch.float32 if block is None else ELEMENTS[block.scale].dtype,
        in_bytes=block is not None,
    )


@functools.lru_cache(maxsize=4096)
def can_encode(scheme: TensorScheme, shape: torch.Size) -> bool:
    """False where the kernels do not go: nothing to do, an element that they do not know, or tiles of partial runs."""
    columns = shape[-1]
    tile = scheme.tile(1, columns)[1]
    known = scheme.element.name in ELEMENT_ORDER
    return known and math.prod(shape) > 0 and (tile >= columns or tile % RUN == 0)


def encode(x: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None) -> Encoded:
    """`reference.encode` for a scale that spans the tensor, if any, of one element."""
    rows = reference.as_rows(x.detach())
    plan = _plan(scheme, *rows.shape)
    # Allocated by numpy: for a small matrix, torch.empty and a view of it as an array take as long as the kernel.
    codes = np.empty((rows.shape[0], plan.code_bytes), np.uint8)
    scale = np.empty(plan.scale_shape, np.uint8 if plan.in_bytes else np.float32)
    _encode_rows(rows, plan, given, codes, scale)
    code_tensor, scale_tensor = torch.from_numpy(codes).view(scheme.element.dtype), torch.from_numpy(scale)
    if plan.in_bytes:
        scale_tensor = scale_tensor.view(plan.scale_dtype)
    if x.ndim != 2:
        code_tensor = code_tensor.view(*x.shape[:-1], code_tensor.shape[1])
        scale_tensor = scale_tensor.view(scheme.scale_shape(x.shape))
    return Encoded(code_tensor, scale_tensor, scheme, x.shape, given if plan.rule == E4M3_BLOCKS else None)


def _encode_rows(
    rows: torch.Tensor, plan: _Plan, given: torch.Tensor | None, codes: np.ndarray, scale: np.ndarray
) -> None:
    whole = 0.0 if given is None else given.item()
    part = _parts(rows)

    def work(top: int, bottom: int) -> None:
        outputs = *plan.strips(scale, top, bottom), codes[top:bottom]
        kernels.encode(part(top, bottom), plan.tile_rows, *plan.constants, whole, *outputs)

    _in_threads(work, rows, plan.tile_rows)
    if plan.rule == WHOLE:
        scale[:] = whole


def decode(q: Encoded, dtype: torch.dtype) -> torch.Tensor:
    """`reference.decode`."""
    rows_shape = torch.Size((math.prod(q.shape[:-1]), q.shape[-1]))
    tile_rows, tile = q.scheme.tile(*rows_shape)
    stored = q.scale.reshape(q.scheme.scale_shape(rows_shape))
    scales = (
        reference.effective_scale(stored, q.scheme, q.global_scale).reshape(-1, stored.shape[-1]).contiguous().numpy()
    )
    codes = q.codes.reshape(rows_shape[0], -1).contiguous().view(torch.uint8).numpy()
    values = q.scheme.element.values.numpy()
    out = torch.empty(rows_shape, dtype=dtype)

    def work(top: int, bottom: int) -> None:
        part = out[top:bottom] if dtype == torch.float32 else torch.empty(bottom - top, rows_shape[1])
        first = top // tile_rows
        kernels.decode(
            codes[top:bottom], q.scheme.element.pack > 1, values, tile_rows, tile, scales[first:], part.numpy()
        )
        if dtype != torch.float32:
            out[top:bottom] = part

    _in_threads(work, out, tile_rows)
    return out.view(q.shape)


def fake_quantize_rows(x: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None) -> torch.Tensor:
    """`reference.encode_activations` for tiles within a row."""
    plan = _plan(scheme, 1, x.shape[-1])
    if given is None and plan.rule == WHOLE:
        given = reference.tensor_scale(largest_magnitude(x), scheme)
    whole = 0.0 if given is None else given.item()
    plain = x.dtype == torch.float32 and x.ndim == 2 and x.is_contiguous() and not x.requires_grad
    rows = x if plain else reference.as_rows(x.detach()).to(torch.float32).contiguous()
    out = torch.from_numpy(kernels.fake_quantize_rows(rows.numpy(), *plan.constants, whole))
    return out if plain else out.view(x.shape).to(x.dtype)


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """`reference.largest_magnitude`."""
    rows = reference.as_rows(x.detach())
    part = _parts(rows)
    tops: list[int] = []
    _in_threads(lambda top, bottom: tops.append(kernels.amax(part(top, bottom))), rows, 1)
    return torch.tensor([max(tops)], dtype=torch.int32).view(torch.float32)


def _is_direct(rows: torch.Tensor) -> bool:
    """True if the kernels can read a matrix where it is."""
    return rows.dtype in (torch.float32, torch.bfloat16) and rows.is_contiguous()


def _parts(rows: torch.Tensor) -> Callable[[int, int], np.ndarray]:
    """part(top, bottom): those rows as the kernels take them, float32 or bfloat16 as its bits; copies if need be."""
    if not _is_direct(rows):
        return lambda top, bottom: rows[top:bottom].to(torch.float32).contiguous().numpy()
    matrix = (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()
    return lambda top, bottom: matrix[top:bottom]


def _in_threads(work: Callable[[int, int], None], rows: torch.Tensor, multiple: int) -> None:
    """Call work(top, bottom) for ranges of whole tiles that cover the rows, on at most torch's number of threads.

    A matrix that `_parts` has to copy is cut into pieces of CHUNK elements, so that the copies stay small.
    """
    direct = _is_direct(rows)
    threads = max(1, min(torch.get_num_threads(), rows.numel() // PER_THREAD))
    if direct and threads == 1:
        work(0, rows.shape[0])
        return
    step = -(-rows.shape[0] // threads) if direct else reference.CHUNK // rows.shape[1]
    step = max(-(-step // multiple), 1) * multiple
    ranges = [(top, min(top + step, rows.shape[0])) for top in range(0, rows.shape[0], step)]
    if threads == 1:
        for top, bottom in ranges:
            work(top, bottom)
        return
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work, *bounds) for bounds in ranges]:
            future.result()
