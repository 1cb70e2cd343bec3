"""vLLM plugin: the quantization method `rlq`, which serves published codes and scales and emulates their arithmetic."""

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from rlq.emulate.linear import quantize_heads
from rlq.errors import ConfigError
from rlq.formats.schemes import Scheme
from rlq.weights.compressed_tensors import RLQ_METHOD
from rlq.weights.hooks import add_cache_scales
from rlq.weights.quantize import CACHE_SCALES

from .linear_method import EmulatedLinearMethod


class RlqConfig(QuantizationConfig):
    """Reads the scheme from `quantization_config` of the model's (overridden) configuration."""

    def __init__(self, scheme: Scheme | None = None):
        super().__init__()
        self.scheme = scheme or Scheme.preset("bf16")

    def get_name(self) -> str:
        """Name of the method."""
        return RLQ_METHOD

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
        """Emulate every linear layer and, if the scheme says so, the KV cache; embeddings and heads stay vLLM's own."""
        if isinstance(layer, Attention) and self.scheme.kv_cache is not None:
            _emulate_kv_cache(layer, self.scheme.kv_cache, self.scheme.calibrated_cache)
        if not isinstance(layer, LinearBase):
            return None
        shards = self.packed_modules_mapping.get(prefix.rpartition(".")[2], [])
        parent = prefix.rpartition(".")[0]
        names = [f"{parent}.{shard}" for shard in shards] or [prefix]
        schemes = {self.scheme.layer(name) for name in names}
        if len(schemes) > 1:
            raise ConfigError(f"{', '.join(names)} are one fused layer and need one scheme; give all or none a pattern")
        return EmulatedLinearMethod(schemes.pop())


def _emulate_kv_cache(layer: Attention, kv_cache: str, calibrated: bool) -> None:
    """Round keys and values on their way into the cache; vLLM asks for the method more than once, this acts once."""
    if hasattr(layer, "rlq_kv_cache"):
        return

    def round_keys_and_values(module: Attention, args: tuple) -> tuple:
        query, key, value, *rest = args
        k_scale, v_scale = (module.get_parameter(leaf) if calibrated else None for leaf in CACHE_SCALES)
        key = quantize_heads(key, kv_cache, module.head_size, k_scale)
        return query, key, quantize_heads(value, kv_cache, module.head_size_v, v_scale), *rest

    if calibrated:
        add_cache_scales(layer)
    layer.rlq_kv_cache = layer.register_forward_pre_hook(round_keys_and_values)  # type: ignore[assignment]


def register() -> None:
    """Entry point of `vllm.general_plugins`; idempotent."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if RLQ_METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(RLQ_METHOD)(RlqConfig)
