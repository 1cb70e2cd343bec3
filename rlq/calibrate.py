"""Calibration: the largest magnitude of each linear layer's input on sample texts, for static activation scales.

A fine-tuned policy moves its outliers, so calibrate on the policy that is served, with prompts like those it will see.
"""

from collections.abc import Iterable
from pathlib import Path

import torch

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
