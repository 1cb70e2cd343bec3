"""Reference quantizers in plain torch, for any device: readable, and the oracle of every fast kernel.

Rounding is to nearest, ties to even, saturating. With amax the largest magnitude of a tile (the elements that share a
scale) and all arithmetic in fp32:

    fp32 scales     scale = amax / max_finite                                  value = code * scale
    MX (OCP 1.0)    scale = 2^(floor(log2 amax) - floor(log2 max_finite))      value = code * scale
    NVFP4           g = (1 / amax(tensor)) * (448 * 6)
                    scale = E4M3(amax / 6 * g)                                 value = code * (scale / g)

Codes are computed against the scale as it is stored. Divisions are true divisions: dividing by a Python scalar becomes
a multiplication by its reciprocal on CUDA and changes half of the scales, hence the divisors on the device. The MX
exponent is one larger where amax >= 1.75 * 2^e, as in compressed-tensors and vLLM: the OCP rule would saturate there.

A tile of zeros gets zero codes and a finite scale: fp32's epsilon, E4M3's 0.125 (both compressed-tensors' choice), or
E8M0's smallest. The sign of zero is kept: -0 and tiny negative numbers get the code of -0 in the float formats.
"""

import functools
import math
from collections.abc import Iterator

import torch

from ..formats.elements import ELEMENTS, Format
from ..formats.schemes import TensorScheme
from .encoded import Encoded

ZERO_TILE_SCALE = torch.finfo(torch.float32).eps
ZERO_BLOCK_SCALE = 0.125
TINY = torch.finfo(torch.float32).tiny
# Elements that are worked on at a time: temporaries stay in a CPU's cache, and far below the size of a large tensor.
# A GPU needs more of them to be busy; its temporaries then take a few hundred MiB.
CHUNK = 1 << 17
DEVICE_CHUNK = 1 << 24


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """amax(|x|), fp32 (1,); NaN or infinity where some element is, 0 for an empty tensor."""
    rows = as_rows(x)
    parts = [
        rows[top:bottom].to(torch.float32).abs().max()
        for top, bottom in row_chunks(rows.shape, 1, x.device)
        if rows.numel()
    ]
    return torch.stack(parts).max().reshape(1) if parts else torch.zeros(1, device=x.device)


def tensor_scale(amax: torch.Tensor, scheme: TensorScheme) -> torch.Tensor:
    """The scale that spans a whole tensor: `scale` of `tensor` granularity, `global_scale` of NVFP4.

    Args:
        amax: fp32, any shape; largest magnitude that the scale has to cover.
        scheme: one for which `spans_tensor` is true.

    Returns:
        fp32, shape of `amax`. NVFP4's is compressed-tensors' divisor 448 * 6 / amax, and 1 where that overflows; like
        theirs it is rounded twice, as (1 / amax) * 2688.
    """
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    if scheme.block_format is None:
        return _fp32_scale(amax, scheme.element)
    largest = ELEMENTS[scheme.block_format.scale].max_finite * scheme.element.max_finite
    scale = amax.clamp(min=TINY).reciprocal() * largest
    return torch.where(scale.isinf(), 1.0, scale)


def encode(x: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None = None) -> Encoded:
    """Quantize without checks.

    Args:
        x: (..., K) floating point.
        scheme: tensor scheme.
        given: the scale that spans the tensor, fp32 (1,), if the scheme has one; NVFP4 also takes one per row, (R, 1).

    Returns:
        The codes and scales. A tile that holds NaN or infinity has a NaN scale, unless the scale was given.
    """
    rows, element, tile = as_rows(x), scheme.element, scheme.tile(*as_rows(x).shape)
    codes = torch.empty(rows.shape[0], -(-rows.shape[1] // element.pack), dtype=element.dtype, device=x.device)
    scale_dtype = torch.float32 if scheme.block_format is None else ELEMENTS[scheme.block_format.scale].dtype
    scale = torch.empty(scheme.scale_shape(rows.shape), dtype=scale_dtype, device=x.device)
    whole = given if scheme.granularity == "tensor" else None
    for top, bottom in row_chunks(rows.shape, 1 if whole is not None else tile[0], x.device):
        chunk = rows[top:bottom].to(torch.float32)
        if whole is not None:
            quotient = chunk / whole
        else:
            local = given[top:bottom] if given is not None and given.numel() > 1 else given
            stored = _stored_scale(_tile_amax(chunk, tile), scheme, local)
            scale[top // tile[0] : -(-bottom // tile[0])] = stored
            quotient = chunk / _spread(effective_scale(stored, scheme, local), tile, chunk.shape)
        codes.view(torch.uint8)[top:bottom] = pack(_round(quotient, element), element)
    if whole is not None:
        scale.copy_(whole)
    shape = (*x.shape[:-1], -1) if rows.numel() else (*x.shape[:-1], codes.shape[1])
    return Encoded(
        codes.view(shape), scale.view(scheme.scale_shape(x.shape)), scheme, x.shape, given if whole is None else None
    )


def decode(q: Encoded, dtype: torch.dtype) -> torch.Tensor:
    """Codes times effective scales in fp32, rounded once to `dtype`."""
    rows_shape = torch.Size((math.prod(q.shape[:-1]), q.shape[-1]))
    codes = q.codes.reshape(rows_shape[0], -1) if q.codes.numel() else q.codes.new_empty(rows_shape[0], 0)
    scale = q.scale.view(q.scheme.scale_shape(rows_shape))
    tile = q.scheme.tile(*rows_shape)
    values = values_on(q.scheme.element, q.codes.device)
    out = torch.empty(rows_shape, dtype=dtype, device=q.codes.device)
    whole = q.scheme.granularity == "tensor"
    for top, bottom in row_chunks(rows_shape, 1 if whole else tile[0], codes.device):
        value = values[unpack(codes[top:bottom], q.scheme.element, rows_shape[1]).int()]
        if whole:
            out[top:bottom] = value * scale
        else:
            local = q.global_scale
            local = local[top:bottom] if local is not None and local.numel() > 1 else local
            stored = scale[top // tile[0] : -(-bottom // tile[0])]
            out[top:bottom] = value * _spread(effective_scale(stored, q.scheme, local), tile, value.shape)
    return out.view(q.shape)


def encode_activations(x: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None = None) -> torch.Tensor:
    """See `rlq.quantize.quantize_activations`."""
    given = activation_scale(x, scheme) if given is None else given
    return torch.where(x.isfinite(), decode(encode(x, scheme, given), x.dtype), torch.nan)


def activation_scale(x: torch.Tensor, scheme: TensorScheme) -> torch.Tensor | None:
    """The scale that spans an input without a calibrated one, per token for NVFP4; None if the scheme has none."""
    if not scheme.spans_tensor:
        return None
    per_token = scheme.block_format is not None and x.numel() > 0
    return tensor_scale(as_rows(x).abs().amax(-1, keepdim=True).float() if per_token else largest_magnitude(x), scheme)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """View (..., K) as (R, K); a copy only where the strides of three or more dimensions forbid a view."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def row_chunks(shape: torch.Size, multiple: int, device: torch.device | None = None) -> Iterator[tuple[int, int]]:
    """Split the rows of a matrix into ranges of about CHUNK elements, whole tiles of `multiple` rows each."""
    size = CHUNK if device is None or device.type == "cpu" else DEVICE_CHUNK
    step = max(size // max(shape[1], 1) // multiple, 1) * multiple
    return ((top, min(top + step, shape[0])) for top in range(0, shape[0], step))


def values_on(element: Format, device: torch.device) -> torch.Tensor:
    """`Format.values` on a device; copied there once, because a copy waits and cannot be part of a CUDA graph."""
    return element.values if device.type == "cpu" else _values_on(element.name, device)


@functools.cache
def _values_on(name: str, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return ELEMENTS[name].values.to(device)


def _on(device: torch.device, value: float) -> torch.Tensor:
    """A divisor on the device, filled in there."""
    return torch.full((), value, dtype=torch.float32, device=device)


def effective_scale(stored: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None) -> torch.Tensor:
    """What a code is multiplied with, fp32, from the scale as it is stored."""
    if scheme.block_format is None:
        return stored
    table = values_on(ELEMENTS[scheme.block_format.scale], stored.device)
    scale = table[stored.view(torch.uint8).int()]
    return scale if given is None else scale / given


def _stored_scale(amax: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None) -> torch.Tensor:
    """Scale of each tile in its storage dtype."""
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    if scheme.block_format is None:
        return _fp32_scale(amax, scheme.element)
    if given is None:
        return _e8m0_scale(amax, scheme.element)
    scale = ELEMENTS[scheme.block_format.scale]
    wanted = amax / _on(amax.device, scheme.element.max_finite) * given
    stored = wanted.clamp(max=scale.max_finite).to(scale.dtype)
    return torch.where(stored.float() == 0, ZERO_BLOCK_SCALE, stored.float()).to(scale.dtype)


def _fp32_scale(amax: torch.Tensor, element: Format) -> torch.Tensor:
    scale = amax / _on(amax.device, element.max_finite)
    return torch.where(scale == 0, ZERO_TILE_SCALE, scale)


def _e8m0_scale(amax: torch.Tensor, element: Format) -> torch.Tensor:
    """Exponent of the power of two at or above amax / 1.75, less that of the element's largest power of two."""
    exponent = (amax.view(torch.int32) + (1 << 21) >> 23) - int(math.log2(element.max_finite))
    return torch.where(amax.isnan(), ELEMENTS["e8m0"].nan_codes[0], exponent.clamp(min=0)).to(torch.uint8)


def _tile_amax(chunk: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of every tile of a (rows, columns) matrix; partial tiles are padded with zeros."""
    rows, columns = chunk.shape
    padded = torch.nn.functional.pad(chunk.abs(), (0, -columns % tile[1], 0, -rows % tile[0]))
    if not padded.numel():
        return chunk.new_zeros(-(-rows // tile[0]), 1)
    return padded.view(-(-rows // tile[0]), tile[0], -1, tile[1]).amax((1, 3))


def _spread(scale: torch.Tensor, tile: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Give every element the scale of its tile."""
    if tile[0] > 1:
        scale = scale.repeat_interleave(tile[0], 0)[: shape[0]]
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(tile[1], 1)[:, : shape[1]]


def _round(quotient: torch.Tensor, element: Format) -> torch.Tensor:
    """Nearest code, ties to the even one, saturating; uint8, one code per element."""
    # torch versions differ in how they cast out-of-range values to float8, so saturate first.
    quotient = quotient.clamp(-element.max_finite, element.max_finite)
    if element.kind == "int":
        return (quotient.round_().nan_to_num_() + element.bias).to(torch.int8).view(torch.uint8)
    if element.dtype.is_floating_point:
        return quotient.to(element.dtype).view(torch.uint8)
    positive = values_on(element, quotient.device)[: 1 << element.bits - 1]
    positive = positive[positive <= element.max_finite]  # codes of NaN and infinity lie above
    middles = (positive[1:] + positive[:-1]) / 2
    magnitude = quotient.abs().contiguous()
    low, high = (torch.bucketize(magnitude, middles, right=right, out_int32=True) for right in (False, True))
    # The two differ at ties only; the even one of them wins.
    code = torch.where(low % 2 == 0, low, high)
    return (code + quotient.signbit() * (1 << element.bits - 1)).to(torch.uint8)


def pack(codes: torch.Tensor, element: Format) -> torch.Tensor:
    """(R, K) uint8 codes to bytes of their storage: 4-bit codes go two to a byte, low half first, zero bits last."""
    if element.pack == 1:
        return codes
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % element.pack))
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack(stored: torch.Tensor, element: Format, columns: int) -> torch.Tensor:
    """Inverse of `pack`: (R, columns) uint8."""
    stored = stored.contiguous().view(torch.uint8)
    if element.pack == 1:
        return stored
    return torch.stack((stored & 15, stored >> 4), -1).flatten(1)[:, :columns]
