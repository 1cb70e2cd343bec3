"""Make a snapshot: quantize a learner's parameters and digest the result."""

from collections.abc import Iterable, Mapping

import torch

from ..formats.schemes import Scheme
from ..weights.canonical import bf16_checkpoint
from ..weights.quantize import cache_scales, check_scheme, quantize_weights
from .digest import tensor_digest
from .types import Snapshot


def snapshot(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    scheme: Scheme,
    version: int,
    amax: Mapping[str, float] | None = None,
) -> Snapshot:
    """Quantize a learner's parameters into the snapshot that samplers install.

    Args:
        named_tensors: `model.named_parameters()` or the items of a state dict.
        scheme: model scheme.
        version: learner step, at least 0.
        amax: calibrated magnitudes from `rlq.recipes.statistics`, for schemes with static scales of inputs or caches.

    Raises:
        SnapshotError: see `rlq.weights.canonical.bf16_checkpoint`; or the scheme quantizes nothing.
        ConfigError: see `rlq.weights.quantize.check_scheme`; or static scales without their magnitudes.
    """
    named = list(named_tensors)
    live = {tensor.data_ptr() for _, tensor in named}
    weights = bf16_checkpoint(named, check=False)  # quantizing does
    check_scheme(scheme, {name: weight.shape for name, weight in weights.items()})
    tensors: dict[str, torch.Tensor] = {}
    for _, wire in quantize_weights(weights, scheme, amax):
        # What is published as it is must not move with the learner.
        tensors |= {name: t.clone() if t.data_ptr() in live else t for name, t in wire.items()}
    if scheme.calibrated_cache:
        tensors |= cache_scales(scheme, amax or {})
    return Snapshot(tensors, version, scheme, tensor_digest(tensors))
