"""Schemes: how one tensor is quantized (`TensorScheme`) and how a model is (`Scheme`).

A tensor scheme is written `format.granularity`, for example `fp8.channel`, or as the name of a block format, whose
granularity is fixed. A model scheme names one tensor scheme for weights and one for activations; the presets are data
in `PRESETS`.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from ..errors import ConfigError
from .elements import BLOCKS, ELEMENTS, FORMATS, BlockFormat, Format
from .modules import DEFAULT_IGNORE, EMBEDDINGS, check_pattern, dot_that_matches_more, matches

GRANULARITIES = {
    "tensor": "one scale for the whole tensor",
    "channel": "one scale per output row of a weight",
    "token": "one scale per row of an activation",
    "group<N>": "one scale per N consecutive elements of a row",
    "block<M>x<N>": "one scale per tile of M rows and N columns",
}
_GRANULARITY = re.compile(r"tensor|channel|token|group([1-9]\d*)|block([1-9]\d*)x([1-9]\d*)")


@dataclass(frozen=True)
class TensorScheme:
    """How one tensor is quantized."""

    format: str
    """One of `rlq.formats.elements.FORMATS`."""
    granularity: str
    """Which elements share a scale: a key of `GRANULARITIES` with its numbers filled in."""

    @classmethod
    def parse(cls, text: str) -> "TensorScheme":
        """Parse `format.granularity` or a block format; raises ConfigError that lists the valid names."""
        name, dot, granularity = text.partition(".")
        if name not in FORMATS:
            raise ConfigError(f"unknown format {name!r} in tensor scheme {text!r}; use one of {', '.join(FORMATS)}")
        if name in BLOCKS:
            if dot:
                raise ConfigError(f"the granularity of {name} is fixed; write {name!r}, not {text!r}")
            return cls(name, f"group{BLOCKS[name].block}")
        if not _GRANULARITY.fullmatch(granularity):
            valid = ", ".join(GRANULARITIES)
            raise ConfigError(f"unknown granularity {granularity!r} in tensor scheme {text!r}; use one of {valid}")
        return cls(name, granularity)

    @property
    def block_format(self) -> BlockFormat | None:
        """The block format, or None for an element format with fp32 scales."""
        return BLOCKS.get(self.format)

    @property
    def element(self) -> Format:
        """The element format."""
        return ELEMENTS[BLOCKS[self.format].element if self.format in BLOCKS else self.format]

    def tile(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns that share one scale, in a (rows, columns) matrix; at least 1 each.

        Tiles start at the upper left; the last ones of a matrix that is not a multiple of the tile are partial.
        """
        numbers = re.findall(r"\d+", self.granularity)
        if self.granularity == "tensor":
            return max(rows, 1), max(columns, 1)
        if self.granularity.startswith("block"):
            return int(numbers[0]), int(numbers[1])
        return 1, int(numbers[0]) if numbers else max(columns, 1)

    @property
    def spans_tensor(self) -> bool:
        """True if it has a scale for the whole tensor, so that fused layers have to share it."""
        return self.granularity == "tensor" or (self.block_format is not None and self.block_format.tensor_scale)

    def scale_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Shape of the stored scales of a tensor of `shape`.

        (1,) for `tensor`, (..., 1) for `channel` and `token`, (..., ceil(K / N)) for groups and block formats,
        (ceil(R / M), ceil(K / N)) for blocks of M x N in R rows.
        """
        rows, columns = math.prod(shape[:-1]), shape[-1]
        tile_rows, tile_columns = self.tile(rows, columns)
        if self.granularity == "tensor":
            return (1,)
        if self.granularity.startswith("block"):
            return (-(-rows // tile_rows), -(-columns // tile_columns))
        return (*shape[:-1], -(-columns // tile_columns) if columns else 1)

    def __str__(self) -> str:
        return self.format if self.format in BLOCKS else f"{self.format}.{self.granularity}"


# Formats of cached keys and values: with a scale per token and head, computed as they enter the cache, or with one
# calibrated scale for all keys of a layer and one for all values, as vLLM's own caches have.
KV_CACHES = ("fp8", "int8", "int4", "fp8.tensor", "int8.tensor", "int4.tensor")


@dataclass(frozen=True)
class LayerScheme:
    """How one linear layer is quantized; the default leaves it in bf16."""

    weights: TensorScheme | None = None
    """Scheme of the weight; None keeps bf16."""
    activations: TensorScheme | None = None
    """Scheme of the input; None leaves it alone."""
    static: bool = False
    """True if the input's scale is calibrated and travels with the weight; False computes it per input."""


@dataclass(frozen=True)
class Scheme:
    """How a model is quantized for sampling."""

    name: str
    """Preset name; travels with every snapshot and rollout."""
    weights: TensorScheme | None
    """Scheme of the quantized 2-D linear weights that no `per_layer` pattern names; None keeps bf16."""
    activations: TensorScheme | None
    """Scheme of the inputs of those linears; None leaves them alone."""
    static: bool = False
    """True if the activations' scale is calibrated and travels with the weights; False computes it per input."""
    ignore: tuple[str, ...] = DEFAULT_IGNORE
    """Modules left in bf16: exact names or `re:` patterns. Wins over `per_layer`."""
    per_layer: tuple[tuple[str, str], ...] = ()
    """(pattern, preset) pairs for modules that get another preset; the first pattern that matches counts."""
    kv_cache: str | None = None
    """Format of cached keys and values, one of `KV_CACHES`; None leaves them alone."""
    recipe: tuple[str, ...] = ()
    """What is done to the weights besides rounding, such as `smooth:alpha=0.5`; see `rlq.recipes.base`."""

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        ignore: Iterable[str] | None = None,
        per_layer: Mapping[str, str] | None = None,
        kv_cache: str | None = None,
        static: bool | None = None,
        recipe: Iterable[str] = (),
    ) -> "Scheme":
        """Look a preset up and set its options.

        Args:
            name: key of `PRESETS`.
            ignore: replaces the default list.
            per_layer: module pattern to preset.
            kv_cache: one of `KV_CACHES`.
            static: calibrated instead of dynamic activation scales, for schemes with one that spans the input.
            recipe: recipe texts, in the order in which they are applied.

        Raises:
            ConfigError: an unknown name (the message lists the closest), a pattern that is not a regular expression, or
                `static` for activations that have no such scale.
        """
        scheme = _lookup(name)
        if kv_cache is not None and kv_cache not in KV_CACHES:
            raise ConfigError(f"unknown kv_cache {kv_cache!r}; use one of {', '.join(KV_CACHES)}, or leave it out")
        pairs = tuple((per_layer or {}).items())
        for _, other in pairs:
            _lookup(other)
        static = scheme.static if static is None else static
        if static and (scheme.activations is None or not scheme.activations.spans_tensor):
            raise ConfigError(
                f"scheme {name!r} has no static form: its activations have no scale that spans the tensor; "
                "fp8_tensor, fp8_static, int8_tensor and nvfp4 have one"
            )
        scheme = replace(scheme, per_layer=pairs, kv_cache=kv_cache, static=static, recipe=tuple(recipe))
        scheme = scheme if ignore is None else replace(scheme, ignore=tuple(ignore))
        for pattern in scheme._patterns():
            check_pattern(pattern)
        return scheme

    @property
    def quantizes_weights(self) -> bool:
        """False for the identity control, whose snapshots are bf16."""
        return self.weights is not None or any(PRESETS[name].weights is not None for _, name in self.per_layer)

    @property
    def calibrated_inputs(self) -> bool:
        """True if some layer's activation scale is static, so that every version needs `input_amax`."""
        return self.static or any(PRESETS[name].static for _, name in self.per_layer)

    @property
    def calibrated_cache(self) -> bool:
        """True if the scales of keys and values are static, so that every version needs `cache_amax`."""
        return self.kv_cache is not None and self.kv_cache.endswith(".tensor")

    def layer(self, module: str, ndim: int = 2) -> LayerScheme:
        """What applies to the weight and the input of `module` (a dotted name without `.weight`)."""
        if ndim != 2 or EMBEDDINGS.search(module) or any(matches(pattern, module) for pattern in self.ignore):
            return LayerScheme()
        scheme = next((PRESETS[name] for pattern, name in self.per_layer if matches(pattern, module)), self)
        return LayerScheme(scheme.weights, scheme.activations, scheme.static)

    def for_module(self, module: str, ndim: int = 2) -> TensorScheme | None:
        """Tensor scheme of the weight of `module` (a dotted name without `.weight`), or None if it stays in bf16."""
        return self.layer(module, ndim).weights

    def check_patterns(self, modules: Iterable[str], linears: Iterable[str]) -> None:
        """Refuse patterns of the caller's own that do not mean what they say: a typo quantizes what was to be kept.

        Args:
            modules: every module that holds a weight.
            linears: those whose weight could be quantized.

        Raises:
            ConfigError: a pattern that names no module, one that names every linear, or one whose unescaped dot makes
                it name more modules than the text says (`layers.1.` also matches `layers.10`).
        """
        modules, linears = list(modules), list(linears)
        for pattern in self._patterns():
            named = {module for module in modules if matches(pattern, module)}
            option = "ignore" if pattern in self.ignore else "per_layer"
            if not named:
                raise ConfigError(f"{option} pattern {pattern!r} matches no module; modules look like {modules[-1]!r}")
            if len(linears) > 1 and named.issuperset(linears):
                raise ConfigError(f"{option} pattern {pattern!r} matches every linear; choose another scheme instead")
            if said := dot_that_matches_more(pattern, named):
                extra, literal = said
                raise ConfigError(f"the dot in {option} pattern {pattern!r} also matches {extra!r}; write {literal!r}")

    def __str__(self) -> str:
        options = [f"{key} {value}" for key, value in self.to_dict().items() if key not in ("name", "ignore")]
        if self.ignore != DEFAULT_IGNORE:
            options.append(f"ignore {list(self.ignore)}")
        return f"{self.name} ({', '.join(options)})" if options else self.name

    def _patterns(self) -> list[str]:
        """The caller's own patterns; the defaults name what a model may or may not have."""
        return [p for p in self.ignore if p not in DEFAULT_IGNORE] + [pattern for pattern, _ in self.per_layer]

    def to_dict(self) -> dict:
        """Plain data for manifests and engine configurations; `from_dict` reads it back."""
        data: dict = {"name": self.name, "ignore": list(self.ignore)}
        if self.per_layer:
            data["per_layer"] = dict(self.per_layer)
        if self.kv_cache:
            data["kv_cache"] = self.kv_cache
        if self.static:
            data["static"] = True
        if self.recipe:
            data["recipe"] = list(self.recipe)
        return data

    @classmethod
    def from_dict(cls, data: dict) -> "Scheme":
        """Inverse of `to_dict`."""
        options = {key: data[key] for key in ("ignore", "per_layer", "kv_cache", "static", "recipe") if key in data}
        return cls.preset(data["name"], **options)


def _lookup(name: str) -> Scheme:
    if name not in PRESETS:
        close = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ConfigError(f"unknown scheme {name!r}; {hint}presets: {', '.join(PRESETS)}")
    return PRESETS[name]


def _preset(name: str, weights: str | None, activations: str | None, *, static: bool = False) -> Scheme:
    parse = TensorScheme.parse
    return Scheme(name, parse(weights) if weights else None, parse(activations) if activations else None, static)


PRESETS: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        _preset("bf16", None, None),  # identity control
        _preset("fp8", "fp8.channel", "fp8.token"),  # compressed-tensors FP8_DYNAMIC
        _preset("fp8_tensor", "fp8.tensor", "fp8.tensor"),
        _preset("fp8_block", "fp8.block128x128", "fp8.group128"),  # the DeepSeek-V3 recipe
        _preset("fp8_static", "fp8.channel", "fp8.tensor", static=True),
        _preset("fp8_e5m2", "fp8_e5m2.channel", "fp8_e5m2.token"),  # for study: the wrong FP8 for inference
        _preset("w8a16", "fp8.channel", None),
        _preset("int8", "int8.channel", "int8.token"),  # compressed-tensors W8A8
        _preset("int8_tensor", "int8.channel", "int8.tensor"),  # for study: the INT8 failure
        _preset("w4a16", "int4.group128", None),  # compressed-tensors W4A16
        _preset("w4a8", "int4.group128", "fp8.token"),  # QServe's corner
        _preset("nvfp4", "nvfp4", "nvfp4"),
        _preset("nvfp4a16", "nvfp4", None),
        _preset("mxfp4", "mxfp4", "mxfp4"),
        _preset("mxfp4a16", "mxfp4", None),
        _preset("mxfp8", "mxfp8", "mxfp8"),
    )
}
