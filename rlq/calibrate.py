"""Calibration: the largest magnitudes of linear layers' inputs, and of keys and values, for static scales.

A fine-tuned policy moves its outliers, so calibrate on the policy that is served, with prompts like those it will see.
"""

import math
from collections.abc import Iterable
from pathlib import Path

import torch

from .emulate import attentions, cache_through
from .errors import ConfigError


def input_amax(model: torch.nn.Module, batches: Iterable[torch.Tensor]) -> dict[str, float]:
    """Run a model and record amax(|x|) of the input of every `torch.nn.Linear`, by module name.

    Args:
        model: called as `model(input_ids=...)`.
        batches: token ids (B, T), without padding.

    Raises:
        ConfigError: no batch, or an input that is not finite.
    """
    found: dict[str, torch.Tensor] = {}

    def record(name: str):
        def hook(_, args: tuple) -> None:
            amax = args[0].detach().abs().amax().float()
            found[name] = torch.maximum(found[name], amax) if name in found else amax

        return hook

    hooks = [
        module.register_forward_pre_hook(record(name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    try:
        with torch.no_grad():
            for batch in batches:
                model(input_ids=batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        raise ConfigError("calibration saw no tokens; pass at least one text")
    broken = [name for name, amax in found.items() if not amax.isfinite()]
    if broken:
        raise ConfigError(f"the input of {broken[0]!r} is not finite on the calibration texts; the model is broken")
    return {name: float(amax) for name, amax in found.items()}


def cache_amax(model: torch.nn.Module, batches: Iterable[torch.Tensor]) -> dict[str, float]:
    """Run a model and record amax of the keys and of the values that each attention layer puts into its cache.

    Args:
        model: a causal model of transformers, called as `model(input_ids=..., past_key_values=...)`.
        batches: token ids (B, T), without padding.

    Returns:
        `<attention>.k_cache` and `<attention>.v_cache`, by module name.

    Raises:
        ConfigError: no batch, or keys and values that are not finite.
    """
    names = {module.layer_idx: name for name, module in attentions(model).items()}
    found: dict[str, float] = {}

    def record(keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        for kind, tensor in (("k", keys), ("v", values)):
            name = f"{names[layer]}.{kind}_cache"
            found[name] = max(found.get(name, 0.0), float(tensor.abs().amax()))
        return keys, values

    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch, past_key_values=cache_through(record), use_cache=True)
    if not found:
        raise ConfigError("calibration saw no keys and values; pass at least one text, and a model that caches them")
    broken = [name for name, amax in found.items() if not math.isfinite(amax)]
    if broken:
        raise ConfigError(f"{broken[0]!r} is not finite on the calibration texts; the model is broken")
    return found


def calibrate_checkpoint(directory: Path, texts: Path, max_tokens: int = 512) -> dict[str, float]:
    """`input_amax` of a checkpoint on a file of texts, one per line, each cut to `max_tokens`.

    Raises:
        ConfigError: the file has no text.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        lines = [line for line in texts.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"calibration file {texts} cannot be read ({error}); name a text file") from None
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    batches = (tokenizer(line, return_tensors="pt", truncation=True, max_length=max_tokens).input_ids for line in lines)
    return input_amax(model, batches)
