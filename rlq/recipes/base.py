"""Recipes: what is done to weights besides rounding them, as part of a scheme's identity.

A scheme names its recipes as texts, `name` or `name:option=value,option=value` (`Scheme.recipe`); `build` makes them
from `RECIPES`. A new recipe is one module with a frozen dataclass, whose fields are its options, and one row.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping

import torch

from ..errors import ConfigError
from ..formats.schemes import Scheme, TensorScheme
from ..quantize import QuantizedTensor
from .statistics import Statistics


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Changes weights before they are quantized, or quantizes them in its own way; the default does neither."""

    def needs(self) -> frozenset[str]:
        """Fields of `Statistics` that it reads."""
        return frozenset()

    def transform(self, tensors: Mapping[str, torch.Tensor], statistics: Statistics) -> Mapping[str, torch.Tensor]:
        """Return the model's bf16 tensors by canonical name, with other values; names, shapes and devices stay."""
        return tensors

    def quantize(
        self,
        name: str,
        weight: torch.Tensor,
        scheme: TensorScheme,
        statistics: Statistics,
        amax: torch.Tensor | None = None,
    ) -> QuantizedTensor | None:
        """Quantize one weight in place of rounding to nearest; None leaves it to the next recipe.

        Args:
            name: the weight's canonical name.
            weight: (out, in) bf16, on its own device.
            scheme: tensor scheme.
            statistics: what `needs` asked for.
            amax: magnitude that a scale that spans the tensor has to cover: shared by fused layers; None: the weight's.
        """
        return None


class Identity(Recipe):
    """Changes nothing: the control of every other recipe."""


RECIPES: dict[str, type[Recipe]] = {"identity": Identity}


def build(texts: Iterable[str]) -> tuple[Recipe, ...]:
    """Make the recipes that a scheme names.

    Raises:
        ConfigError: an unknown recipe (the message lists the closest) or option, or a value of another type.
    """
    return tuple(_build(text) for text in texts)


def needs(scheme: Scheme) -> frozenset[str]:
    """Fields of `Statistics` that publishing under `scheme` reads."""
    found = {"input_amax"} if scheme.calibrated_inputs else set()
    if scheme.calibrated_cache:
        found.add("cache_amax")
    return frozenset(found).union(*(recipe.needs() for recipe in build(scheme.recipe)))


def transform(
    recipes: Iterable[Recipe], tensors: Mapping[str, torch.Tensor], statistics: Statistics
) -> Mapping[str, torch.Tensor]:
    """Apply recipes one after the other.

    Raises:
        ConfigError: a recipe changed a name or a shape.
    """
    for recipe in recipes:
        changed = recipe.transform(tensors, statistics)
        if {n: t.shape for n, t in changed.items()} != {n: t.shape for n, t in tensors.items()}:
            raise ConfigError(f"recipe {recipe} changed names or shapes of tensors; samplers could not load them")
        tensors = changed
    return tensors


def _build(text: str) -> Recipe:
    name, _, rest = text.partition(":")
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"unknown recipe {name!r}; {hint}recipes: {', '.join(RECIPES)}")
    fields = {field.name: field for field in dataclasses.fields(RECIPES[name])}
    options: dict[str, bool | int | float | str] = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        if key not in fields:
            raise ConfigError(f"recipe {name!r} has no option {key!r}; options: {', '.join(fields) or 'none'}")
        options[key] = _parse(text, value, type(fields[key].default))
    return RECIPES[name](**options)


def _parse(text: str, value: str, kind: type) -> bool | int | float | str:
    try:
        return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        raise ConfigError(f"{value!r} in recipe {text!r} is no {kind.__name__}; correct the value") from None
