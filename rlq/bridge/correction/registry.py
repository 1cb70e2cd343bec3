"""A user's own correction: a function from the log ratio to weights, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import ConfigError
from ..ratio import LogRatio

WeightFunction = Callable[[LogRatio], Tensor]

_REGISTRY: dict[str, WeightFunction] = {}


def register_correction(name: str) -> Callable[[WeightFunction], WeightFunction]:
    """Decorator: make ``Correction(custom=name)`` use the function for its weights.

    The function takes a ``LogRatio`` and returns (B, T) weights: finite, non-negative, without gradient. A token of
    weight 0 leaves the loss. Rejection rules, veto, normalisation, denominator and metrics apply as to any other.
    Registration is per process: register where the ``Correction`` is built.

    Raises:
        ConfigError: the name is taken by another function.
    """

    def register(function: WeightFunction) -> WeightFunction:
        if name in _REGISTRY:
            raise ConfigError(f"a correction named {name!r} is registered already: choose another name")
        _REGISTRY[name] = function
        return function

    return register


def check_registered(name: str) -> None:
    """Raise ConfigError unless ``name`` was registered in this process."""
    if name not in _REGISTRY:
        known = ", ".join(sorted(_REGISTRY)) or "none"
        raise ConfigError(f"no correction named {name!r} is registered (registered: {known}): call register_correction")


def custom_weights(name: str, ratio: LogRatio) -> Tensor:
    """Call a registered function and refuse weights that would corrupt a loss.

    Raises:
        ConfigError: wrong shape, negative or non-finite weights on finite tokens, or weights with a gradient.
    """
    weights = _REGISTRY[name](ratio)
    if weights.shape != ratio.exact_BT.shape:
        raise ConfigError(f"correction {name!r} returned shape {tuple(weights.shape)}: return one weight per token")
    if weights.requires_grad:
        raise ConfigError(f"correction {name!r} returned weights with a gradient: detach them")
    usable = torch.isfinite(weights) & (weights >= 0)
    if not bool((usable | ~ratio.finite_BT).all()):
        raise ConfigError(f"correction {name!r} returned a negative or non-finite weight: bound it before returning")
    return weights.to(ratio.exact_BT.dtype)
