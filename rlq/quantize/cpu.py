"""CPU path: hands tensors to the numba kernels, on as many threads as torch may use in this process."""

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from ..formats import ELEMENTS
from ..schemes import TensorScheme
from . import kernels, reference
from .tensor import QuantizedTensor, scale_shape

NONE_GIVEN = np.empty(0, np.float32)
NO_SCALES = np.empty((0, 0), np.float32)
NO_BYTES = np.empty((0, 0), np.uint8)
PER_THREAD = 1 << 19  # elements below which a second thread costs more than it saves


@functools.cache
def _constants(scheme: TensorScheme) -> tuple[int, int, int, np.ndarray]:
    """Rule, element, exponent offset and table of values, as the kernels take them."""
    block, element = scheme.block_format, scheme.element
    if block is None:
        rule = kernels.WHOLE if scheme.granularity == "tensor" else kernels.FP32
    else:
        rule = kernels.E4M3_BLOCKS if block.tensor_scale else kernels.E8M0_BLOCKS
    offset = int(math.log2(element.max_finite))
    return rule, kernels.ELEMENT_ORDER.index(element.name), offset, element.values.numpy()


def can_encode(scheme: TensorScheme, shape: torch.Size) -> bool:
    """False where the kernels do not go: nothing to do, or tiles that are not made of whole runs."""
    columns = shape[-1]
    tile = scheme.tile(1, columns)[1]
    return math.prod(shape) > 0 and (tile >= columns or tile % kernels.RUN == 0)


def encode(x: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None) -> QuantizedTensor:
    """`reference.encode` for a scale that spans the tensor, if any, of one element."""
    rows = reference.as_rows(x.detach())
    rule, index, offset, _ = _constants(scheme)
    tile_rows, tile = scheme.tile(*rows.shape)
    tile_rows = 1 if rule == kernels.WHOLE else tile_rows
    # Allocated by numpy: for a small matrix a torch.empty and its view as an array cost as much as the codes.
    element = scheme.element
    codes = np.empty((rows.shape[0], -(-rows.shape[1] // element.pack) * element.dtype.itemsize), np.uint8)
    scale = np.empty(scale_shape(rows.shape, scheme), np.float32 if scheme.block_format is None else np.uint8)
    scales = scale if rule == kernels.FP32 else NO_SCALES
    stored = scale if scheme.block_format is not None else NO_BYTES
    whole = 0.0 if given is None else given.item()

    def work(top: int, bottom: int) -> None:
        part, strips = _as_kernel_input(rows[top:bottom]), slice(top // tile_rows, -(-bottom // tile_rows))
        outputs = scales[strips], stored[strips], codes[top:bottom]
        kernels.encode(part, tile_rows, tile, rule, index, offset, whole, *outputs)

    _in_threads(work, rows, tile_rows)
    scale_dtype = torch.float32 if scheme.block_format is None else ELEMENTS[scheme.block_format.scale].dtype
    return QuantizedTensor(
        torch.from_numpy(codes).view(element.dtype).view(*x.shape[:-1], codes.shape[1] // element.dtype.itemsize),
        torch.from_numpy(scale).view(scale_dtype).view(scale_shape(x.shape, scheme)) if rule != kernels.WHOLE else given.clone(),
        scheme,
        x.shape,
        given if rule == kernels.E4M3_BLOCKS else None,
    )


def decode(q: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """`reference.decode`."""
    rows_shape = torch.Size((math.prod(q.shape[:-1]), q.shape[-1]))
    tile_rows, tile = q.scheme.tile(*rows_shape)
    stored = q.scale.reshape(scale_shape(rows_shape, q.scheme))
    scales = (
        reference.effective_scale(stored, q.scheme, q.global_scale).reshape(-1, stored.shape[-1]).contiguous().numpy()
    )
    codes = q.codes.reshape(rows_shape[0], -1).contiguous().view(torch.uint8).numpy()
    values = _constants(q.scheme)[3]
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
    rule, index, offset, values = _constants(scheme)
    if given is None and rule == kernels.WHOLE:
        given = reference.tensor_scale(largest_magnitude(x), scheme)
    whole = 0.0 if given is None else given.item()
    tile = scheme.tile(1, x.shape[-1])[1]
    plain = x.dtype == torch.float32 and x.ndim == 2 and x.is_contiguous() and not x.requires_grad
    rows = x if plain else reference.as_rows(x.detach()).to(torch.float32).contiguous()
    out = torch.from_numpy(kernels.fake_quantize_rows(rows.numpy(), tile, rule, index, offset, whole, values))
    return out if plain else out.view(x.shape).to(x.dtype)


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """`reference.largest_magnitude`."""
    rows = reference.as_rows(x.detach())
    tops: list[int] = []
    _in_threads(lambda top, bottom: tops.append(kernels.amax(_as_kernel_input(rows[top:bottom]))), rows, 1)
    return torch.tensor([max(tops)], dtype=torch.int32).view(torch.float32)


def _as_kernel_input(rows: torch.Tensor) -> np.ndarray:
    """float32, or bfloat16 as its bits; a copy for other types and layouts."""
    if rows.dtype == torch.bfloat16:
        return rows.contiguous().view(torch.uint16).numpy()
    return rows.to(torch.float32).contiguous().numpy()


def _in_threads(work: Callable[[int, int], None], rows: torch.Tensor, multiple: int) -> None:
    """Call work(top, bottom) for ranges of whole tiles that cover the rows, on at most torch's number of threads.

    A matrix that `_as_kernel_input` has to copy is cut into pieces of CHUNK elements, so that the copies stay small.
    """
    direct = rows.dtype in (torch.float32, torch.bfloat16) and rows.is_contiguous()
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


def can_update(scheme: TensorScheme, old: torch.Tensor, new: torch.Tensor) -> bool:
    """False where the kernels for changes do not go: other layouts, and columns that are no whole runs or tiles."""
    plain = all(x.dtype in (torch.float32, torch.bfloat16) and x.is_contiguous() for x in (old, new))
    columns = new.shape[-1]
    tile = scheme.tile(1, columns)[1]
    small = scheme.granularity.startswith("group")
    return (
        plain
        and new.numel() > 0
        and columns % kernels.RUN == 0
        and (not small or columns % tile == 0)
        and tile % kernels.RUN == 0
    )


def update(q: QuantizedTensor, old: torch.Tensor, new: torch.Tensor) -> tuple[float, float]:
    """Encode again, in place, what differs; the scale that spans the tensor stays as it is.

    Returns:
        Largest magnitude in the changed parts before and after; infinite or NaN where something is not finite.
    """
    from . import changed

    before, after = (reference.as_rows(x.detach()) for x in (old, new))
    rule, index, offset, _ = _constants(q.scheme)
    tile_rows, tile = q.scheme.tile(*after.shape)
    tile_rows = 1 if rule == kernels.WHOLE else tile_rows
    codes = q.codes.view(after.shape[0], -1).view(torch.uint8).numpy()
    scale = q.scale.view(scale_shape(after.shape, q.scheme))
    scales = scale.numpy() if rule == kernels.FP32 else NO_SCALES
    stored = scale.view(torch.uint8).numpy() if q.scheme.block_format is not None else NO_BYTES
    given = q.scale if rule == kernels.WHOLE else q.global_scale
    whole = 0.0 if given is None else given.item()
    tops: list[tuple[int, int]] = []

    def work(top: int, bottom: int) -> None:
        rows = _as_kernel_input(after[top:bottom]), _as_kernel_input(before[top:bottom])
        strips = slice(top // tile_rows, -(-bottom // tile_rows))
        if q.scheme.granularity.startswith("group"):
            outputs = scales[strips], stored[strips], codes[top:bottom]
            tops.append(changed.update_small_tiles(*rows, tile, rule, index, offset, whole, *outputs))
        else:
            outputs = scales[strips], codes[top:bottom]
            tops.append(changed.update_large_tiles(*rows, tile_rows, tile, rule, index, whole, *outputs))

    _in_threads(work, after, tile_rows)
    top_old, top_new = (np.array([max(side)], np.int32).view(np.float32).item() for side in zip(*tops, strict=True))
    return top_old, top_new
