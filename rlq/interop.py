"""The compressed-tensors `quantization_config` of a scheme, for `config.json` and for vLLM's own loader."""

from collections.abc import Iterable

import torch

from .schemes import EMBEDDINGS, Scheme, TensorScheme

STRATEGIES = {"channel": "channel", "token": "token"}


def _quantization_args(scheme: TensorScheme, *, dynamic: bool) -> dict:
    element = scheme.element
    return {
        "num_bits": element.bits,
        "type": element.kind,
        "symmetric": True,
        "strategy": STRATEGIES[scheme.granularity],
        "dynamic": dynamic,
    }


def unquantized_linears(scheme: Scheme, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Modules among a snapshot's 2-D weights that stayed in bf16, embeddings aside: the `ignore` of a checkpoint."""
    modules = [name.removesuffix(".weight") for name, t in tensors.items() if name.endswith(".weight") and t.ndim == 2]
    kept = [m for m in modules if not EMBEDDINGS.search(m) and scheme.for_module(m, 2) is None]
    # A tied head has no tensor of its own, and a loader would still take its module for a quantized linear.
    return kept if "lm_head" in modules else [*kept, "lm_head"]


def quantization_config(scheme: Scheme, ignore: Iterable[str]) -> dict:
    """Describe a scheme to compressed-tensors.

    Args:
        scheme: a scheme that quantizes weights.
        ignore: modules left alone, exact names or `re:` patterns.
    """
    assert scheme.weights is not None
    group: dict = {"targets": ["Linear"], "weights": _quantization_args(scheme.weights, dynamic=False)}
    if scheme.activations is not None:
        group["input_activations"] = _quantization_args(scheme.activations, dynamic=True)
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }
