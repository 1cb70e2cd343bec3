"""Which modules of a model a scheme names: patterns, what is never quantized, and which layers engines fuse."""

import re
from collections.abc import Collection, Iterable

from ..errors import ConfigError

# Module names, exact or `re:` patterns as in compressed-tensors' `ignore`. Heads, norms and MoE router gates are small
# and sensitive; every recipe of the field keeps them in high precision.
DEFAULT_IGNORE = ("lm_head", r"re:.*norm\d*$", r"re:.*\.mlp\.gate$", r"re:.*router$")
# Two-dimensional, but looked up rather than multiplied: never quantized, whatever `ignore` says.
EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|wpe|word_embeddings|position_embeddings|tok_embeddings)$")
# Projections that read one input and that engines fuse into one matrix; they share every scale that spans a tensor.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# A dot that was probably meant as a dot: both in `layers.1.mlp`, none in `.*mlp`, both in `layers.1.*`.
_BARE_DOT = re.compile(r"(?<!\\)\.(?![*+?{])|(?<=\d)\.(?=[*+])")


def matches(pattern: str, module: str) -> bool:
    """True if a pattern (exact name, or `re:` and a regular expression matched from the start) names `module`."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == module


def check_pattern(pattern: str) -> None:
    """Raise ConfigError unless a pattern is a name or a regular expression."""
    try:
        re.compile(pattern[3:] if pattern.startswith("re:") else "")
    except re.error as error:
        raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}") from None


def dot_that_matches_more(pattern: str, named: Collection[str]) -> tuple[str, str] | None:
    """A module that a pattern names only because its dots match any character, and the pattern with escaped dots.

    None if all dots mean what they say. Example: `re:.*layers.1.` names `layers.10` as well as `layers.1.mlp`.

    Args:
        pattern: as for `matches`.
        named: all modules that it names.
    """
    if not pattern.startswith("re:"):
        return None
    literal = "re:" + _BARE_DOT.sub(_literal_dot, pattern[3:])
    extra = sorted(module for module in named if not matches(literal, module))
    return (extra[0], literal) if extra and len(extra) < len(named) else None


def fused_siblings(module: str) -> tuple[str, ...]:
    """The modules that engines fuse with `module`, itself included; just itself if it is not one of `FUSED`."""
    parent, dot, leaf = module.rpartition(".")
    return next((tuple(parent + dot + name for name in group) for group in FUSED if leaf in group), (module,))


def parse_per_layer(texts: Iterable[str], option: str) -> dict[str, str]:
    """Pattern to preset of texts such as `re:.*down_proj$=fp8`; the last `=` separates.

    Args:
        texts: what the user wrote.
        option: the setting's name, for the message.

    Raises:
        ConfigError: a text without a pattern.
    """
    pairs = {pattern: name for pattern, _, name in (text.rpartition("=") for text in texts)}
    if "" in pairs:
        raise ConfigError(f"{option} takes PATTERN=SCHEME, such as 're:.*down_proj$=fp8'")
    return pairs


def _literal_dot(dot: re.Match) -> str:
    wildcard = dot.string[dot.end() : dot.end() + 1] in ("*", "+")
    return r"\.." if wildcard else r"\."
