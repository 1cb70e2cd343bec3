"""A transformers model that computes what a sampler computes: dequantized weights, rounded activations and caches."""

from typing import Any

import torch

from ..errors import ConfigError
from ..formats.modules import fused_siblings
from ..formats.schemes import Scheme
from ..publish.types import Snapshot
from ..weights.hooks import add_cache_scales, attentions, cache_through, linears
from ..weights.quantize import CACHE_SCALES
from .linear import EmulatedLinear, quantize_heads


def emulate(model: Any, scheme: Scheme, *, trainable: bool = False) -> None:
    """Replace, in place, every linear that `scheme` quantizes by an `EmulatedLinear`, and round what is cached.

    Args:
        model: a causal model of transformers.
        scheme: model scheme.
        trainable: keep the parameters as masters, see `EmulatedLinear`; otherwise they wait for `load_snapshot`.

    Raises:
        ConfigError: trainable, and the scheme has recipes, which work on a whole model's weights.
    """
    if trainable and scheme.recipe:
        raise ConfigError(f"scheme '{scheme}' cannot be trained through its recipes; leave them out")
    replaced: dict[str, EmulatedLinear] = {}
    for name, module in linears(model).items():
        layer = scheme.layer(name)
        if layer.weights is not None:
            replaced[name] = EmulatedLinear(module, layer, trainable=trainable)
            model.set_submodule(name, replaced[name])
    for name, module in replaced.items():
        module.fused = tuple(replaced[sibling] for sibling in fused_siblings(name) if sibling in replaced)
    if scheme.kv_cache is not None:
        _emulate_cache(model, scheme.kv_cache, scheme.calibrated_cache)


def _emulate_cache(model: Any, kv_cache: str, calibrated: bool) -> None:
    layers = {module.layer_idx: module for module in attentions(model).values()}
    if calibrated:
        for module in layers.values():
            add_cache_scales(module)

    def rounded(keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = [getattr(layers[layer], leaf) if calibrated else None for leaf in CACHE_SCALES]
        k, v = (quantize_heads(x, kv_cache, x.shape[-1], s) for x, s in zip((keys, values), scales, strict=True))
        return k, v

    def supply(_, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = cache_through(rounded)
        return args, kwargs

    model.base_model.register_forward_pre_hook(supply, with_kwargs=True)


@torch.no_grad()
def load_snapshot(model: torch.nn.Module, snap: Snapshot) -> None:
    """Load a snapshot into a model prepared by `emulate`."""
    modules = dict(model.named_modules())
    wires: dict[EmulatedLinear, dict[str, torch.Tensor]] = {}
    for name, tensor in snap.tensors.items():
        owner, _, leaf = name.rpartition(".")
        module = modules[owner]
        if isinstance(module, EmulatedLinear) and leaf != "bias":
            wires.setdefault(module, {})[leaf] = tensor
        else:
            module.get_parameter(leaf).copy_(tensor)
    for module, wire in wires.items():
        module.load(wire)
