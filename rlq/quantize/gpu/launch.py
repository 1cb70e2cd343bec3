"""GPU path: hands tensors to the Triton kernels, once a small tensor has shown that they are bit-identical here.

The kernels were compiled for compute capabilities 7.5 to 12.0 and run in Triton's interpreter, on a CPU. Until
`make gpu-check` has run on a GPU nothing about their speed there is known, and that they are exact there is only as
certain as `usable` makes it: before a kernel is used for the first time on a device, for a scheme, a dtype and a size
of program, it has to agree with `reference.py` on that device in every bit, or the reference takes over.
"""

# A CPU installation has no Triton, and a type checker does not know that a kernel takes a grid in brackets.
# pyright: reportMissingImports=false, reportIndexIssue=false
import functools
import math
import subprocess
import sys
import warnings
from dataclasses import dataclass

import torch
import triton

from ...formats.elements import ELEMENTS
from ...formats.schemes import TensorScheme
from .. import reference, selfcheck
from ..encoded import Encoded
from ..rules import scale_rule
from . import kernels as triton_kernels

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PER_PROGRAM = 4096  # elements of a program that can choose
WIDEST = 1 << 16  # elements of the widest tile: 64 for each of the threads that a program can have
PER_WARP = 1024
# What Triton raises where it cannot compile or start a kernel: a missing C compiler, an unknown GPU, too few registers.
UNUSABLE = (triton.errors.TritonError, RuntimeError, OSError, subprocess.SubprocessError)


@dataclass(frozen=True)
class Program:
    """How much of a matrix one program of the encoder takes; powers of two."""

    tile_rows: int
    """Rows of a tile."""
    tiles: int
    """Tiles side by side."""
    tile: int
    """Columns of a tile; of a tile that spans a row, the next power of two."""

    @property
    def warps(self) -> int:
        """Groups of 32 threads."""
        return min(max(self.tile_rows * self.tiles * self.tile // PER_WARP, 1), 32)


def program(scheme: TensorScheme, columns: int) -> Program | None:
    """The program for a matrix with `columns` columns, or None where the kernels do not go: odd or huge tiles."""
    rows, tile = (1, PER_PROGRAM) if scheme.granularity == "tensor" else scheme.tile(1 << 30, columns)
    if tile >= columns and scheme.granularity in ("channel", "token"):
        tile = max(1 << (columns - 1).bit_length(), 16)
    if rows & (rows - 1) or tile & (tile - 1) or rows * tile > WIDEST or tile % 2:
        return None
    alone = rows > 1 or tile >= columns
    return Program(rows, 1 if alone else max(PER_PROGRAM // tile, 1), tile)


def can_encode(scheme: TensorScheme, x: torch.Tensor) -> bool:
    """False where the kernels do not go, or were found not to be exact."""
    size = program(scheme, x.shape[-1]) if x.numel() else None
    return size is not None and x.dtype in DTYPES and usable(x.device, scheme, x.dtype, size)


def can_decode(q: Encoded, dtype: torch.dtype) -> bool:
    """Like `can_encode`, for the way back to `dtype`."""
    size = program(q.scheme, q.shape[-1]) if q.codes.numel() else None
    return size is not None and dtype in DTYPES and usable(q.codes.device, q.scheme, dtype, size)


@functools.cache
def usable(device: torch.device, scheme: TensorScheme, dtype: torch.dtype, size: Program) -> bool:
    """True if the kernels agree with the reference on a small tensor that is hard to round; warns once if not."""
    # Partial tiles and programs, and for tiles that span a row a width that needs the same program.
    columns = size.tile - 3 if scheme.granularity in ("channel", "token") else size.tiles * size.tile + 7
    try:
        found = selfcheck.first_difference(
            sys.modules[__name__], scheme, dtype, device, (max(2 * size.tile_rows + 3, 40), columns)
        )
    except UNUSABLE as error:
        found = f"{type(error).__name__}: {error}"
    if found is not None:
        warnings.warn(
            f"{scheme} of {dtype} on {device}: plain torch instead of the Triton kernels, because {found}", stacklevel=2
        )
    return found is None


def encode(x: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None) -> Encoded:
    """`reference.encode`."""
    rows, element, block = reference.as_rows(x.detach()), scheme.element, scheme.block_format
    # Zeros, because the codes of a row that ends inside a stored element do not fill it.
    codes = torch.zeros(rows.shape[0], -(-rows.shape[1] // element.pack), dtype=element.dtype, device=x.device)
    scale_dtype = torch.float32 if block is None else ELEMENTS[block.scale].dtype
    scale = torch.empty(scheme.scale_shape(rows.shape), dtype=scale_dtype, device=x.device)
    whole = scheme.granularity == "tensor"
    if whole:
        assert given is not None
        scale.copy_(given)
    _encode(rows, scheme, given, scale if block is None else scale.view(torch.uint8), codes.view(torch.uint8))
    return Encoded(
        codes.view(*x.shape[:-1], codes.shape[1]),
        scale.view(scheme.scale_shape(x.shape)),
        scheme,
        x.shape,
        None if whole else given,
    )


def fake_quantize_rows(x: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None) -> torch.Tensor:
    """`reference.encode_activations`."""
    rows = reference.as_rows(x.detach())
    if given is None and scheme.granularity == "tensor":
        given = reference.tensor_scale(largest_magnitude(x), scheme)
    elif given is None:
        given = reference.activation_scale(x, scheme)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _encode(rows, scheme, given, None, out)
    return out.view(x.shape)


def _encode(
    rows: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None, scale: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Launch the encoder; with `scale` None it writes values instead of codes."""
    element, size = scheme.element, program(scheme, rows.shape[1])
    assert size is not None
    unused = _pointer(out)  # a pointer that is not followed
    grid = -(-rows.shape[0] // size.tile_rows), -(-rows.shape[1] // (size.tiles * size.tile))
    with torch.cuda.device_of(rows):
        triton_kernels.encode[grid](
            _pointer(rows),
            *rows.shape,
            *rows.stride(),
            unused if given is None else given,
            0 if given is None or given.numel() == 1 else 1,
            unused if scale is None else scale,
            1 if scale is None else scale.shape[-1],
            _pointer(out),
            out.shape[1],
            RULE=scale_rule(scheme),
            INTEGER=element.kind == "int",
            LARGEST=element.max_finite,
            MANTISSA=element.mantissa_bits,
            BIAS=element.bias,
            BITS=element.bits,
            OFFSET=int(math.log2(element.max_finite)),
            VALUES=scale is None,
            TILE_ROWS=size.tile_rows,
            TILES=size.tiles,
            TILE=size.tile,
            num_warps=size.warps,
        )


def decode(q: Encoded, dtype: torch.dtype) -> torch.Tensor:
    """`reference.decode`."""
    shape = torch.Size((math.prod(q.shape[:-1]), q.shape[-1]))
    tile_rows, tile = q.scheme.tile(*shape)
    stored = q.scale.reshape(q.scheme.scale_shape(shape))
    scales = reference.effective_scale(stored, q.scheme, q.global_scale).contiguous()
    codes = q.codes.reshape(shape[0], -1).contiguous().view(torch.uint8)
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    with torch.cuda.device_of(codes):
        triton_kernels.decode[shape[0], -(-shape[1] // PER_PROGRAM)](
            codes,
            codes.shape[1],
            reference.values_on(q.scheme.element, codes.device),
            scales,
            tile_rows,
            tile,
            scales.shape[-1],
            _pointer(out),
            shape[1],
            PACK=1 if q.scheme.element.pack == 1 else 2,
            BLOCK=PER_PROGRAM,
        )
    return out.view(q.shape)


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """`reference.largest_magnitude`."""
    rows, at_a_time = reference.as_rows(x.detach()), 8
    top = torch.zeros(1, dtype=torch.int32, device=x.device)
    block = min(max(1 << (rows.shape[1] - 1).bit_length(), 16), 2048)
    with torch.cuda.device_of(rows):
        triton_kernels.raise_to_largest[-(-rows.shape[0] // at_a_time), -(-rows.shape[1] // block)](
            _pointer(rows), *rows.shape, *rows.stride(), top, ROWS=at_a_time, BLOCK=block, num_warps=8
        )
    return top.view(torch.float32)


def _pointer(x: torch.Tensor) -> torch.Tensor:
    """What the kernels take for a tensor, see `triton_kernels._load`."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x
