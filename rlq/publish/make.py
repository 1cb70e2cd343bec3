"""Make a snapshot: apply the scheme's recipes, quantize a learner's parameters, digest the result."""

from collections.abc import Iterable

import torch

from ..formats.schemes import Scheme, TensorScheme
from ..quantize import QuantizedTensor
from ..recipes.base import Recipe, build, transform
from ..recipes.statistics import Statistics
from ..weights.canonical import bf16_tensors
from ..weights.quantize import Rounding, cache_scales, check_scheme, quantize_weights, round_to_nearest
from .digest import tensor_digest
from .types import Snapshot


def snapshot(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    scheme: Scheme,
    version: int,
    statistics: Statistics | None = None,
    *,
    keep_on_device: bool = False,
) -> Snapshot:
    """Quantize a learner's parameters into the snapshot that samplers install.

    Every weight is cast and quantized on the device on which it lives; what leaves the device are codes and scales.

    Args:
        named_tensors: `model.named_parameters()` or the items of a state dict.
        scheme: model scheme.
        version: learner step, at least 0.
        statistics: what `rlq.recipes.base.needs(scheme)` asks for, collected on these weights.
        keep_on_device: leave codes and scales there, for a transport between devices; the default copies each of
            them to the host, once.

    Raises:
        SnapshotError: see `rlq.weights.canonical.bf16_tensors`; a value is not finite; or the scheme quantizes nothing.
        ConfigError: see `rlq.weights.quantize.check_scheme`; static scales without their statistics; or an unknown
            recipe.
    """
    statistics = statistics or Statistics()
    recipes = build(scheme.recipe)
    bf16 = bf16_tensors(named_tensors)
    check_scheme(scheme, bf16.shapes)
    weights = transform(recipes, bf16, statistics)
    tensors: dict[str, torch.Tensor] = {}
    for _, wire in quantize_weights(weights, scheme, statistics.input_amax, rounding(recipes, statistics)):
        tensors |= wire if keep_on_device else {name: tensor.cpu() for name, tensor in wire.items()}
    if scheme.calibrated_cache:
        tensors |= cache_scales(scheme, statistics.cache_amax)
    return Snapshot(tensors, version, scheme, tensor_digest(tensors))


def rounding(recipes: tuple[Recipe, ...], statistics: Statistics) -> Rounding:
    """How weights are quantized: by the first recipe that has its own way, else to nearest."""

    def quantize(name: str, weight: torch.Tensor, scheme: TensorScheme, amax: torch.Tensor | None) -> QuantizedTensor:
        for recipe in recipes:
            quantized = recipe.quantize(name, weight, scheme, statistics, amax)
            if quantized is not None:
                return quantized
        return round_to_nearest(name, weight, scheme, amax)

    return quantize
