"""A transformers model that computes what a sampler computes: dequantized weights, rounded activations and caches."""

from typing import Any

import torch

from ..formats.schemes import LayerScheme, Scheme
from ..publish.types import Snapshot
from ..quantize import QuantizedTensor
from ..weights.hooks import add_cache_scales, attentions, cache_through
from ..weights.quantize import CACHE_SCALES, INPUT_GLOBAL_SCALE, INPUT_SCALE
from .linear import emulated_linear, quantize_heads


class EmulatedLinear(torch.nn.Module):
    """A linear layer that holds published tensors and multiplies through `rlq.emulate.linear.emulated_linear`."""

    def __init__(self, linear: torch.nn.Linear, scheme: LayerScheme):
        super().__init__()
        self.scheme = scheme
        self.input_scale: torch.Tensor | None = None
        self.weight = torch.nn.Parameter(torch.empty_like(linear.weight), requires_grad=False)
        self.bias = linear.bias

    def load(self, wire: dict[str, torch.Tensor]) -> None:
        """Take the layer's wire tensors."""
        assert self.scheme.weights is not None
        weight = QuantizedTensor.from_wire(wire, self.scheme.weights, self.weight.shape[1])
        self.weight.copy_(weight.dequantize(self.weight.dtype))
        self.input_scale = wire.get(INPUT_SCALE, wire.get(INPUT_GLOBAL_SCALE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return emulated_linear(x, self.weight, self.bias, self.scheme.activations, self.input_scale)


def emulate(model: Any, scheme: Scheme) -> None:
    """Replace, in place, every linear that `scheme` quantizes by an `EmulatedLinear`, and round what is cached."""
    for name, module in list(model.named_modules()):
        layer = scheme.layer(name)
        if isinstance(module, torch.nn.Linear) and layer.weights is not None:
            model.set_submodule(name, EmulatedLinear(module, layer))
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
