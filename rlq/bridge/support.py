"""Sampling settings under which the log ratio is not a ratio of two distributions over the same tokens."""

from __future__ import annotations

from ..errors import ConfigError


def check_support(
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    processed_logprobs: bool = True,
    mask_replayed: bool = False,
) -> None:
    """Refuse settings that bias the ratio.

    With top-p, top-k or min-p the sampler renormalises over the tokens that survive and the learner does not: equal
    weights then give a mean ratio equal to the kept mass (0.8 for p = [.5, .3, .15, .05] and top_p = 0.8), unless the
    learner's log-softmax is taken over the same tokens (mask replay).

    Args:
        temperature: of the sampler; the learner divides its logits by the same.
        top_p: 1 keeps every token.
        top_k: None, 0 or -1 keeps every token.
        min_p: 0 keeps every token.
        repetition_penalty: 1 changes nothing. It depends on the tokens before, and no learner replays it.
        processed_logprobs: whether the sampler's log-probs are those after temperature and filters.
        mask_replayed: whether the learner renormalises over the sampler's surviving tokens.

    Raises:
        ConfigError: the setting, the reason and the mend.
    """
    if not temperature > 0.0:
        raise ConfigError(f"temperature={temperature} leaves the sampler without a distribution: use one above 0")
    if not processed_logprobs and temperature != 1.0:
        raise ConfigError(
            f"raw log-probs at temperature={temperature} are not those that were sampled from: "
            "ask the engine for processed log-probs"
        )
    filters = {"top_p": (top_p, top_p < 1.0), "top_k": (top_k, (top_k or -1) > 0), "min_p": (min_p, min_p > 0.0)}
    for name, (value, cuts) in filters.items():
        if cuts and not mask_replayed:
            raise ConfigError(
                f"{name}={value} cuts the sampler's support, so the mean ratio is the kept mass instead of 1: "
                f"sample from all tokens, or replay the sampling mask in the learner"
            )
    if repetition_penalty != 1.0:
        raise ConfigError(f"repetition_penalty={repetition_penalty} changes the sampler alone: set it to 1")
