"""Calibration: the largest magnitudes of linear layers' inputs, and of keys and values, for static scales.

A fine-tuned policy moves its outliers, so calibrate on the policy that is served, with prompts like those it will see.
"""

from collections.abc import Iterable
from pathlib import Path

import torch

from ..emulate.model import attentions, cache_through
from ..errors import ConfigError


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
        return lambda _, args: _note(found, name, args[0])

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
    return _finite(found, "tokens; pass at least one text", "the input of {!r}")


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
    found: dict[str, torch.Tensor] = {}

    def record(keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        for kind, tensor in (("k", keys), ("v", values)):
            _note(found, f"{names[layer]}.{kind}_cache", tensor)
        return keys, values

    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch, past_key_values=cache_through(record), use_cache=True)
    return _finite(found, "keys and values; pass at least one text, and a model that caches them", "{!r}")


def _note(found: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    """Widen what was found under a name; NaN and infinity stay."""
    amax = tensor.detach().abs().amax().float()
    found[name] = torch.maximum(found[name], amax) if name in found else amax


def _finite(found: dict[str, torch.Tensor], nothing: str, place: str) -> dict[str, float]:
    """What was found, as numbers; ConfigError if that is nothing, or not finite."""
    if not found:
        raise ConfigError(f"calibration saw no {nothing}")
    broken = [name for name, amax in found.items() if not amax.isfinite()]
    if broken:
        raise ConfigError(f"{place.format(broken[0])} is not finite on the calibration texts; the model is broken")
    return {name: float(amax) for name, amax in found.items()}


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
