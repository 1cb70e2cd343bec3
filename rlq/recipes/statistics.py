"""Statistics of a model's activations: what static scales and recipes are computed from.

A fine-tuned policy moves its outliers, so collect them on the policy that is served, with prompts like those it will
see.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import ConfigError
from ..weights.hooks import attentions, cache_through, inputs_observed


@dataclass(frozen=True)
class Statistics:
    """What calibration found; only the kinds that were asked for are filled."""

    input_amax: Mapping[str, float] = field(default_factory=dict)
    """Linear module to the largest magnitude of its input."""
    cache_amax: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Attention module to the largest magnitudes of its cached keys and values."""
    channel_amax: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Linear module to the largest magnitude of every input channel: fp32 (in,)."""
    hessian: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Linear module to the mean over tokens of x x^T: fp32 (in, in)."""


KINDS = frozenset(Statistics.__dataclass_fields__)
"""What `collect` can be asked for."""


@torch.no_grad()
def collect(model: torch.nn.Module, batches: Iterable[torch.Tensor], needs: Iterable[str]) -> Statistics:
    """Run a model on every batch, once, and record what is needed.

    Args:
        model: called as `model(input_ids=...)`; for `cache_amax` a causal model of transformers.
        batches: token ids (B, T), without padding.
        needs: fields of `Statistics`.

    Raises:
        ConfigError: no batch, or an input, a key or a value that is not finite.
    """
    needs = frozenset(needs)
    if not needs <= KINDS:
        raise ConfigError(f"unknown statistics {', '.join(sorted(needs - KINDS))}; use {', '.join(sorted(KINDS))}")
    walk = _Walk(needs, {module.layer_idx: name for name, module in attentions(model).items()})
    with inputs_observed(model, walk.see_input):
        for batch in batches:
            if "cache_amax" in needs:
                model(input_ids=batch, past_key_values=cache_through(walk.see_cache), use_cache=True)
            else:
                model(input_ids=batch)
    return walk.statistics()


def calibrate_checkpoint(directory: Path, texts: Path, needs: Iterable[str], max_tokens: int = 512) -> Statistics:
    """`collect` from a checkpoint on a file of texts, one per line, each cut to `max_tokens`.

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
    return collect(model, batches, needs)


class _Walk:
    """Running maxima and sums, on the device of the model."""

    def __init__(self, needs: frozenset[str], layers: dict[int, str]):
        self.needs = needs
        self.layers = layers
        self.inputs: dict[str, torch.Tensor] = {}
        self.channels: dict[str, torch.Tensor] = {}
        self.products: dict[str, torch.Tensor] = {}
        self.tokens: dict[str, int] = {}
        self.cache: dict[tuple[str, str], torch.Tensor] = {}

    def see_input(self, name: str, x: torch.Tensor) -> None:
        rows = x.flatten(0, -2)
        if "input_amax" in self.needs:
            _widen(self.inputs, name, x.abs().amax().float())
        if "channel_amax" in self.needs:
            _widen(self.channels, name, rows.abs().amax(0).float())
        if "hessian" in self.needs:
            rows = rows.float()
            product = rows.T @ rows
            self.products[name] = self.products[name] + product if name in self.products else product
            self.tokens[name] = self.tokens.get(name, 0) + len(rows)

    def see_cache(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        _widen(self.cache, (self.layers[layer], "keys"), keys.abs().amax().float())
        _widen(self.cache, (self.layers[layer], "values"), values.abs().amax().float())
        return keys, values

    def statistics(self) -> Statistics:
        hessian = {name: product / self.tokens[name] for name, product in self.products.items()}
        found = {"input_amax": self.inputs, "channel_amax": self.channels, "hessian": hessian}
        for kind, tensors in found.items():
            if kind in self.needs:
                places = {f"the input of {name!r}": tensor for name, tensor in tensors.items()}
                _check(places, "tokens; pass at least one text")
        if "cache_amax" in self.needs:
            places = {f"the {kind} of {name!r}": tensor for (name, kind), tensor in self.cache.items()}
            _check(places, "keys and values; pass at least one text, and a model that caches them")
        return Statistics(
            {name: float(amax) for name, amax in self.inputs.items()},
            {
                name: (float(self.cache[name, "keys"]), float(self.cache[name, "values"]))
                for name in dict.fromkeys(name for name, _ in self.cache)
            },
            self.channels,
            hessian,
        )


def _widen(found: dict, key: object, amax: torch.Tensor) -> None:
    """Take the larger one, elementwise; NaN and infinity stay."""
    found[key] = torch.maximum(found[key], amax) if key in found else amax


def _check(found: dict[str, torch.Tensor], nothing: str) -> None:
    """ConfigError if nothing was found, or something that is not finite."""
    if not found:
        raise ConfigError(f"calibration saw no {nothing}")
    broken = [place for place, tensor in found.items() if not tensor.isfinite().all()]
    if broken:
        raise ConfigError(f"{broken[0]} is not finite on the calibration texts; the model is broken")
