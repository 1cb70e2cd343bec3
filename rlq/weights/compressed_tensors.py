"""The compressed-tensors `quantization_config` of a scheme, for `config.json` and for vLLM's own loader."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError
from ..formats.schemes import LayerScheme, Scheme, TensorScheme
from .quantize import linear_modules

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

# compressed-tensors' names of how a layer's tensors are laid out, by tensor scheme of the weight.
BLOCK_LAYOUTS = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}
RLQ_METHOD = "rlq"  # name of the plugin's method, see samplers.plugin
CALIBRATION = {"observer", "observer_kwargs", "zp_dtype"}  # how others come to scales; of no use to a reader
SCALE_DTYPES = {"fp8": "torch.float8_e4m3fn", "e8m0": "torch.uint8"}


def weight_shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    """Shapes of the weights that a snapshot's tensors stand for, under the names that they had before."""
    shapes = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            per_element = 2 if tensor.dtype == torch.uint8 else 8
            shapes[name.removesuffix("_packed")] = torch.Size((tensor.shape[0], tensor.shape[1] * per_element))
        elif name.endswith(".weight"):
            shapes[name] = tensor.shape
    return shapes


def checkpoint_config(scheme: Scheme, shapes: Mapping[str, torch.Size]) -> dict:
    """The `quantization_config` of a checkpoint.

    compressed-tensors where it can describe the scheme and read the shapes. Otherwise rlq's own method, which vLLM
    knows through the plugin; transformers warns that it does not.

    Args:
        scheme: a scheme that quantizes weights.
        shapes: of all weights by name.
    """
    if unreadable(scheme, shapes) is not None:
        return {"quant_method": RLQ_METHOD, "scheme": scheme.to_dict()}
    linears = linear_modules(shapes)
    kept = [module for module in linears if scheme.for_module(module) is None]
    # A tied head has no tensor of its own, and a loader would still take its module for a quantized linear.
    return quantization_config(scheme, kept if "lm_head" in linears else [*kept, "lm_head"])


def unreadable(scheme: Scheme, shapes: Mapping[str, torch.Size]) -> str | None:
    """Why compressed-tensors cannot read a checkpoint, or None.

    It lacks E5M2, and it infers the tile from the shapes of weight and scale, which goes wrong when tiles are partial
    or when blocks of rows are as wide as the weight.
    """
    for module in linear_modules(shapes):
        weights, shape = scheme.for_module(module), shapes[f"{module}.weight"]
        if weights is None:
            continue
        if weights.element.name == "fp8_e5m2":
            return "compressed-tensors has no E5M2"
        tile = weights.tile(*shape)
        # A single partial tile is a tile of another size to it, with the same numbers.
        partial = [
            size % t and (size > t or weights.block_format is not None) for size, t in zip(shape, tile, strict=True)
        ]
        if any(partial) or (1 < tile[0] < shape[0] and tile[1] >= shape[1]):
            return (
                f"compressed-tensors infers other tiles than {weights} from {module}, which is {shape[0]} x {shape[1]}"
            )
    return None


def quantization_config(scheme: Scheme, ignore: Iterable[str]) -> dict:
    """Describe a scheme to compressed-tensors.

    NVFP4 activations without a calibrated global scale (`Scheme.static`) cannot be described: engines would read a
    scale that is not there. Such a checkpoint is declared as NVFP4A16, whose weights are the same bytes.

    Args:
        scheme: a scheme that quantizes weights.
        ignore: modules left alone, exact names or `re:` patterns.

    Raises:
        ConfigError: compressed-tensors has no such format.
    """
    kept = list(ignore)
    layers = [(["Linear"], LayerScheme(scheme.weights, scheme.activations, scheme.static))]
    for pattern, name in scheme.per_layer:
        other = Scheme.preset(name)
        if other.weights is None:
            kept.append(pattern)
        else:
            # More specific targets win over the class name.
            layers.append(([pattern], LayerScheme(other.weights, other.activations, other.static)))
    from compressed_tensors.quantization import QuantizationConfig  # loads transformers, which `import rlq` must not

    groups = [_group(targets, layer) for targets, layer in layers if layer.weights is not None]
    formats = {group.format for group in groups}
    config = QuantizationConfig.model_validate(
        {
            "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "ignore": kept,
        }
    )
    return config.model_dump(
        mode="json",
        exclude_none=True,
        exclude={"config_groups": {"__all__": {"weights": CALIBRATION, "input_activations": CALIBRATION}}},
    )


def _group(targets: list[str], layer: LayerScheme) -> "QuantizationScheme":
    from compressed_tensors.quantization import QuantizationScheme

    weights, activations = layer.weights, layer.activations
    assert weights is not None
    inputs = None
    if activations is not None:
        two_scales = activations.block_format is not None and activations.block_format.tensor_scale
        if layer.static or not two_scales:
            dynamic = ("local" if two_scales else False) if layer.static else True
            inputs = _quantization_args(activations, dynamic=dynamic)
    return QuantizationScheme.model_validate(
        {
            "targets": targets,
            "weights": _quantization_args(weights, dynamic=False),
            "input_activations": inputs,
            "format": _layout(weights, activations),
        }
    )


def _layout(weights: TensorScheme, activations: TensorScheme | None) -> str:
    if weights.format in BLOCK_LAYOUTS:
        return BLOCK_LAYOUTS[weights.format]
    if weights.element.pack > 1:
        return "pack-quantized"
    return "naive-quantized" if activations is None else f"{weights.element.kind}-quantized"


def _quantization_args(scheme: TensorScheme, *, dynamic: bool | str) -> "QuantizationArgs":
    from compressed_tensors.quantization import QuantizationArgs

    element, block = scheme.element, scheme.block_format
    if element.name == "fp8_e5m2":
        raise ConfigError("compressed-tensors has no E5M2; such a checkpoint could not be read, use fp8")
    args: dict = {"num_bits": element.bits, "type": element.kind, "symmetric": True, "dynamic": dynamic}
    rows, columns = scheme.tile(0, 0)
    if block is not None:
        args["strategy"] = "tensor_group" if block.tensor_scale else "group"
        args |= {"group_size": block.block, "scale_dtype": SCALE_DTYPES[block.scale]}
    elif scheme.granularity.startswith("group"):
        args |= {"strategy": "group", "group_size": columns}
    elif scheme.granularity.startswith("block"):
        args |= {"strategy": "block", "block_structure": [rows, columns]}
    else:
        args["strategy"] = scheme.granularity
    return QuantizationArgs.model_validate(args)
