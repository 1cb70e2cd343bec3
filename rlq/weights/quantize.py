"""Quantize the weights of a whole model, one tensor at a time, in the layout of compressed-tensors checkpoints."""

from collections.abc import Callable, Iterator, Mapping

import torch

from ..errors import ConfigError, SnapshotError
from ..formats.modules import EMBEDDINGS, fused_siblings
from ..formats.schemes import LayerScheme, Scheme, TensorScheme
from ..quantize import largest_magnitude, quantize
from ..quantize.reference import tensor_scale
from ..quantize.tensor import QuantizedTensor
from .canonical import check_finite

INPUT_SCALE, INPUT_GLOBAL_SCALE = "input_scale", "input_global_scale"
CACHE_SCALES = ("k_scale", "v_scale")


def linear_modules(shapes: Mapping[str, torch.Size]) -> list[str]:
    """Modules whose weight is a matrix that is multiplied: what a scheme may quantize."""
    matrices = [name.removesuffix(".weight") for name, s in shapes.items() if name.endswith(".weight") and len(s) == 2]
    return [module for module in matrices if not EMBEDDINGS.search(module)]


def check_scheme(scheme: Scheme, shapes: Mapping[str, torch.Size]) -> None:
    """Refuse a scheme that does not fit a model, before anything is quantized.

    Raises:
        ConfigError: a pattern that does not mean what it says, or fused layers that would get different schemes.
        SnapshotError: the scheme quantizes nothing.
    """
    linears = linear_modules(shapes)
    if scheme.quantizes_weights and not any(scheme.for_module(module) for module in linears):
        raise SnapshotError(
            f"scheme {scheme.name!r} quantizes none of {len(shapes)} tensors; check `ignore` and the model"
        )
    scheme.check_patterns([name.removesuffix(".weight") for name in shapes if name.endswith(".weight")], linears)
    present = set(linears)
    for module in linears:
        for sibling in fused_siblings(module):
            if sibling in present and scheme.layer(sibling) != scheme.layer(module):
                raise ConfigError(
                    f"{module} and {sibling} are one fused layer and need one scheme; give both or neither a pattern"
                )


Rounding = Callable[[str, torch.Tensor, TensorScheme, torch.Tensor | None], QuantizedTensor]
"""Quantizes a weight, given its name, its scheme and the magnitude that fused layers share, or None."""


def round_to_nearest(
    name: str, weight: torch.Tensor, scheme: TensorScheme, amax: torch.Tensor | None
) -> QuantizedTensor:
    """The default `Rounding`."""
    return quantize(weight, scheme, amax=amax)


def quantize_weights(
    weights: Mapping[str, torch.Tensor],
    scheme: Scheme,
    input_amax: Mapping[str, float] | None = None,
    rounding: Rounding = round_to_nearest,
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Quantize every weight that the scheme names; the others pass through.

    Layers that engines fuse (q/k/v, gate/up) share every scale that spans a tensor: the joint amax decides it.

    Args:
        weights: bf16, fp16 or fp32 tensors by name; read one at a time, so a mapping over files keeps memory low.
        scheme: model scheme that has passed `check_scheme`.
        input_amax: largest magnitude of the input of each linear module, if static; see `rlq.recipes.statistics`.
        rounding: how one weight is quantized.

    Yields:
        Each name with its wire tensors by full name: codes and scales, or the tensor itself.

    Raises:
        ConfigError: static activations without a calibrated magnitude.
        SnapshotError: non-finite values.
    """
    joint: dict[tuple[str, ...], torch.Tensor] = {}
    for name in weights:
        weight = weights[name]
        module = name.removesuffix(".weight")
        layer = scheme.layer(module, weight.ndim) if module != name else LayerScheme()
        if layer.weights is None:
            check_finite({name: weight})
            yield name, {name: weight}
            continue
        amax = None
        if layer.weights.spans_tensor:
            group = tuple(s for s in fused_siblings(module) if f"{s}.weight" in weights)
            if len(group) > 1:
                if group not in joint:
                    joint[group] = torch.cat([largest_magnitude(weights[f"{s}.weight"]) for s in group]).max()
                amax = joint[group]
        try:
            wire = rounding(name, weight, layer.weights, amax).to_wire()
        except SnapshotError:
            fused = [f"{sibling}.weight" for sibling in (module, *fused_siblings(module))]
            check_finite({n: weights[n] for n in fused if n in weights})  # says whose values they are
            raise
        if layer.static:
            wire |= _input_scale(module, layer, input_amax or {})
        yield name, {f"{module}.{suffix}": tensor for suffix, tensor in wire.items()}


def cache_scales(scheme: Scheme, amax: Mapping[str, tuple[float, float]]) -> dict[str, torch.Tensor]:
    """Wire tensors of a cache with calibrated scales: `<attention>.k_scale` and `.v_scale`, fp32 (1,).

    Args:
        scheme: model scheme with `calibrated_cache`.
        amax: largest magnitudes of keys and values by attention module.

    Raises:
        ConfigError: nothing was calibrated.
    """
    assert scheme.kv_cache is not None
    tensor = TensorScheme.parse(scheme.kv_cache)
    if not amax:
        raise ConfigError(
            f"kv_cache {scheme.kv_cache!r} needs calibrated keys and values; calibrate, or scale per token"
        )
    return {
        f"{module}.{leaf}": tensor_scale(torch.tensor([value], dtype=torch.float32), tensor)
        for module, pair in amax.items()
        for leaf, value in zip(CACHE_SCALES, pair, strict=True)
    }


def input_scale_suffix(activations: TensorScheme) -> str:
    """Name of a layer's calibrated input scale: the scale itself, or NVFP4's divisor."""
    return INPUT_SCALE if activations.block_format is None else INPUT_GLOBAL_SCALE


def input_scale(amax: float, activations: TensorScheme) -> torch.Tensor:
    """A layer's calibrated input scale as it is published, fp32 (1,), from the largest magnitude of its input."""
    return tensor_scale(torch.tensor([amax], dtype=torch.float32), activations)


def _input_scale(module: str, layer: LayerScheme, input_amax: Mapping[str, float]) -> dict[str, torch.Tensor]:
    assert layer.activations is not None
    if module not in input_amax:
        raise ConfigError(
            f"static activations need the calibrated input of {module!r}; calibrate, or use a dynamic scheme"
        )
    amax = max(input_amax[sibling] for sibling in fused_siblings(module) if sibling in input_amax)
    return {input_scale_suffix(layer.activations): input_scale(amax, layer.activations)}
