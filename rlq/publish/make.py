"""Make a snapshot: apply the scheme's recipes, quantize a learner's parameters, digest the result."""

from collections.abc import Iterable

import torch

from ..formats.schemes import Scheme, TensorScheme
from ..quantize import QuantizedTensor
from ..recipes.base import Recipe, build, transform
from ..recipes.statistics import Statistics
from ..weights.canonical import bf16_checkpoint
from ..weights.quantize import Rounding, cache_scales, check_scheme, quantize_weights, round_to_nearest
from .digest import tensor_digest
from .types import Snapshot


def snapshot(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    scheme: Scheme,
    version: int,
    statistics: Statistics | None = None,
) -> Snapshot:
    """Quantize a learner's parameters into the snapshot that samplers install.

    Args:
        named_tensors: `model.named_parameters()` or the items of a state dict.
        scheme: model scheme.
        version: learner step, at least 0.
        statistics: what `rlq.recipes.base.needs(scheme)` asks for, collected on these weights.

    Raises:
        SnapshotError: see `rlq.weights.canonical.bf16_checkpoint`; or the scheme quantizes nothing.
        ConfigError: see `rlq.weights.quantize.check_scheme`; static scales without their statistics; or an unknown
            recipe.
    """
    statistics = statistics or Statistics()
    recipes = build(scheme.recipe)
    named = list(named_tensors)
    live = {tensor.data_ptr() for _, tensor in named}
    weights = transform(recipes, bf16_checkpoint(named, check=False), statistics)  # quantizing checks
    check_scheme(scheme, {name: weight.shape for name, weight in weights.items()})
    tensors: dict[str, torch.Tensor] = {}
    for _, wire in quantize_weights(weights, scheme, statistics.input_amax, rounding(recipes, statistics)):
        # What is published as it is must not move with the learner.
        tensors |= {name: t.clone() if t.data_ptr() in live else t for name, t in wire.items()}
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
