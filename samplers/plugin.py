"""vLLM plugin: the quantization method `rlq`, which serves published codes and scales and emulates their arithmetic.

The layer holds the wire tensors as they were published, and next to them the dequantized weight in the engine's
compute dtype. `apply` multiplies exactly the values that a low-precision kernel would multiply. Everything that
`apply` reads is a registered parameter, so vLLM's layer-wise reload replaces it in place.
"""

import torch
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

from rlq.linear import emulated_linear
from rlq.quantize import QuantizedTensor
from rlq.schemes import Scheme, TensorScheme

METHOD = "rlq"
COMPUTE_WEIGHT = "compute_weight"  # derived parameter; never on the wire


@register_weight_loader_v2_supported_method
class EmulatedLinearMethod(LinearMethodBase):
    """Serves one linear layer (fused or not) from published tensors."""

    def __init__(self, weights: TensorScheme | None, activations: TensorScheme | None):
        self.weights = weights
        self.activations = activations

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Register the wire tensors of this layer, in the dtypes in which they are published."""
        loader = extra_weight_attrs["weight_loader"]
        rows = sum(output_partition_sizes)
        layer.logical_widths = output_partition_sizes  # type: ignore[assignment]  # vLLM's convention
        dtype = torch.bfloat16 if self.weights is None else self.weights.element.dtype
        weight = torch.empty(rows, input_size_per_partition, dtype=dtype)
        layer.register_parameter(
            "weight", ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)
        )
        if self.weights is not None:
            scale = torch.empty(rows, 1, dtype=torch.float32)
            layer.register_parameter(
                "weight_scale", ChannelQuantScaleParameter(data=scale, output_dim=0, weight_loader=loader)
            )
        self.compute_dtype = params_dtype

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Dequantize once per installed version."""
        params: dict[str, torch.Tensor] = dict(layer.named_parameters())
        if self.weights is None:
            weight = params["weight"].to(self.compute_dtype)
        else:
            wire = {name: params[name] for name in ("weight", "weight_scale")}
            weight = QuantizedTensor.from_wire(wire, self.weights).dequantize(self.compute_dtype)
        replace_parameter(layer, COMPUTE_WEIGHT, weight, prefer_copy=True)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply."""
        return emulated_linear(x, layer.compute_weight, bias, self.activations)  # type: ignore[arg-type]


class RlqConfig(QuantizationConfig):
    """Reads the scheme from `quantization_config` of the model's (overridden) configuration."""

    def __init__(self, scheme: Scheme | None = None):
        super().__init__()
        self.scheme = scheme or Scheme.preset("bf16")

    def get_name(self) -> str:
        """Name of the method."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Emulation computes in the engine's dtype."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Emulation runs on any device."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """The configuration comes with the model's, not from a file of its own."""
        return []

    @classmethod
    def from_config(cls, config: dict) -> "RlqConfig":
        """Build from `{"quant_method": "rlq", "scheme": Scheme.to_dict()}`."""
        return cls(Scheme.from_dict(config["scheme"]))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> LinearMethodBase | None:
        """Emulate every linear layer; embeddings, heads and attention stay vLLM's own."""
        if not isinstance(layer, LinearBase):
            return None
        shards = self.packed_modules_mapping.get(prefix.rpartition(".")[2], [])
        parent = prefix.rpartition(".")[0]
        names = [f"{parent}.{shard}" for shard in shards] or [prefix]
        schemes = {self.scheme.for_module(name, 2) for name in names}
        if len(schemes) > 1:
            raise ValueError(f"{names} are one fused layer and need one scheme; give all or none of them in `ignore`")
        weights = schemes.pop()
        return EmulatedLinearMethod(weights, self.scheme.activations if weights is not None else None)


def register() -> None:
    """Entry point of `vllm.general_plugins`; idempotent."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(RlqConfig)
