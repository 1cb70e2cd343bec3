"""Module walks over a transformers model: its linears, its attention layers, and what passes through its cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .quantize import CACHE_SCALES


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Linear modules by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


@contextmanager
def inputs_observed(model: torch.nn.Module, observe: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call `observe(name, input)` before every linear computes, as long as the block runs."""

    def hook(name: str):
        return lambda _, args: observe(name, args[0].detach())

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in linears(model).items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def attentions(model: torch.nn.Module) -> dict[str, Any]:
    """Attention modules by name; transformers sets `layer_idx`, their place among the layers."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.endswith(("attn", "attention")) and isinstance(getattr(module, "layer_idx", None), int)
    }


def cache_through(change: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """An empty cache of transformers; keys, values and the layer's index pass through `change` before they enter it."""
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    store = cache.update
    cache.update = lambda keys, values, layer, *rest, **more: store(*change(keys, values, layer), layer, *rest, **more)
    return cache


def add_cache_scales(module: torch.nn.Module) -> None:
    """Give an attention layer the parameters that its published `k_scale` and `v_scale` are loaded into."""
    for leaf in CACHE_SCALES:
        scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float32), requires_grad=False)
        module.register_parameter(leaf, scale)
