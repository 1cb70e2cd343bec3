"""Schemes: how one tensor is quantized (`TensorScheme`) and how a model is (`Scheme`).

A tensor scheme is written `format.granularity`, for example `fp8.channel`. A model scheme names one tensor scheme
for weights and one for activations; the presets are data in `PRESETS`.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .errors import ConfigError
from .formats import FORMATS, Format

GRANULARITIES = {
    "channel": "one scale per output row of a weight",
    "token": "one scale per row of an activation",
}


@dataclass(frozen=True)
class TensorScheme:
    """How one tensor is quantized."""

    format: str
    """Key of `rlq.formats.FORMATS`."""
    granularity: str
    """Key of `GRANULARITIES`: which elements share a scale."""

    @classmethod
    def parse(cls, text: str) -> "TensorScheme":
        """Parse `format.granularity`; raises ConfigError that lists the valid names."""
        name, _, granularity = text.partition(".")
        if name not in FORMATS:
            raise ConfigError(f"unknown format {name!r} in tensor scheme {text!r}; use one of {sorted(FORMATS)}")
        if granularity not in GRANULARITIES:
            raise ConfigError(
                f"unknown granularity {granularity!r} in tensor scheme {text!r}; use one of {sorted(GRANULARITIES)}"
            )
        return cls(name, granularity)

    @property
    def element(self) -> Format:
        """The element format."""
        return FORMATS[self.format]

    def __str__(self) -> str:
        return f"{self.format}.{self.granularity}"


# Module names, exact or `re:` patterns as in compressed-tensors' `ignore`. Heads, norms and MoE router gates are small
# and sensitive; every recipe of the field keeps them in high precision.
DEFAULT_IGNORE = ("lm_head", r"re:.*norm\d*$", r"re:.*\.mlp\.gate$", r"re:.*router$")
# Two-dimensional, but looked up rather than multiplied: never quantized, whatever `ignore` says.
EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|wpe|word_embeddings|position_embeddings|tok_embeddings)$")


def matches(pattern: str, module: str) -> bool:
    """True if an ignore pattern (exact name, or `re:` and a regular expression matched from the start) names `module`."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == module


@dataclass(frozen=True)
class Scheme:
    """How a model is quantized for sampling."""

    name: str
    """Preset name; travels with every snapshot and rollout."""
    weights: TensorScheme | None
    """Scheme of every quantized 2-D linear weight; None keeps bf16."""
    activations: TensorScheme | None
    """Scheme of the inputs of the quantized linears, computed dynamically; None leaves them alone."""
    ignore: tuple[str, ...] = DEFAULT_IGNORE
    """Modules left in bf16: exact names or `re:` patterns."""

    @classmethod
    def preset(cls, name: str, *, ignore: Iterable[str] | None = None) -> "Scheme":
        """Look a preset up; `ignore` replaces the default list. Raises ConfigError that names the closest presets."""
        if name not in PRESETS:
            close = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise ConfigError(f"unknown scheme {name!r}; {hint}presets: {', '.join(PRESETS)}")
        scheme = PRESETS[name]
        return scheme if ignore is None else replace(scheme, ignore=tuple(ignore))

    def for_module(self, module: str, ndim: int) -> TensorScheme | None:
        """Tensor scheme of the weight of `module` (a dotted name without `.weight`), or None if it stays in bf16."""
        if self.weights is None or ndim != 2 or EMBEDDINGS.search(module):
            return None
        return None if any(matches(pattern, module) for pattern in self.ignore) else self.weights

    def check_ignore(self, modules: Iterable[str]) -> None:
        """Refuse a pattern of the caller's own that names no module: a typo would quantize what was to be kept."""
        modules = list(modules)
        for pattern in self.ignore:
            if pattern not in DEFAULT_IGNORE and not any(matches(pattern, module) for module in modules):
                raise ConfigError(f"ignore pattern {pattern!r} matches no module; modules look like {modules[-1]!r}")

    def to_dict(self) -> dict:
        """Plain data for manifests and engine configurations; `from_dict` reads it back."""
        return {"name": self.name, "ignore": list(self.ignore)}

    @classmethod
    def from_dict(cls, data: dict) -> "Scheme":
        """Inverse of `to_dict`."""
        return cls.preset(data["name"], ignore=data["ignore"])


def _preset(name: str, weights: str | None, activations: str | None) -> Scheme:
    parse = TensorScheme.parse
    return Scheme(name, parse(weights) if weights else None, parse(activations) if activations else None)


PRESETS: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        _preset("bf16", None, None),  # identity control
        _preset("fp8", "fp8.channel", "fp8.token"),  # compressed-tensors FP8_DYNAMIC
    )
}
