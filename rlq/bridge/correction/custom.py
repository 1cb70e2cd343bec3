"""A user's own correction: a function from the log ratio to weights, named by its dotted path."""

import importlib
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import ConfigError, last_line
from ..ratio import LogRatio

WeightFunction = Callable[[LogRatio], Tensor]


def load_weights(path: str) -> WeightFunction:
    """Import the weight function at a dotted path, such as `my_module.my_weights`.

    The function takes a `LogRatio` and returns (B, T) weights: finite, non-negative, without gradient. A token of
    weight 0 leaves the loss. Rejection rules, veto, normalization, denominator and metrics apply as to any other.

    Raises:
        ConfigError: nothing callable with one argument can be imported there.
    """
    module, _, attribute = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f"correction {path!r} cannot be imported ({last_line(error)}): "
            "give the dotted path of a function, such as my_module.my_weights, in a module that Python finds"
        ) from None
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        raise ConfigError(
            f"correction {path!r} is not a function of one argument: write def {attribute}(ratio: LogRatio) -> Tensor"
        ) from None
    return function


def custom_weights(path: str, ratio: LogRatio) -> Tensor:
    """Call the function at `path` and refuse weights that would corrupt a loss.

    Returns:
        (B, T) weights in the dtype of the ratio.

    Raises:
        ConfigError: no such function; wrong shape, negative or non-finite weights on finite tokens, or a gradient.
    """
    weights = load_weights(path)(ratio)
    if weights.shape != ratio.exact_BT.shape:
        raise ConfigError(f"correction {path!r} returned shape {tuple(weights.shape)}: return one weight per token")
    if weights.requires_grad:
        raise ConfigError(f"correction {path!r} returned weights with a gradient: detach them")
    usable = torch.isfinite(weights) & (weights >= 0)
    if not bool((usable | ~ratio.finite_BT).all()):
        raise ConfigError(f"correction {path!r} returned a negative or non-finite weight: bound it before returning")
    return weights.to(ratio.exact_BT.dtype)
