"""Asks vLLM's own code which kernel it would take on GPUs that are only pretended: prints one JSON list.

The platform object, which all of vLLM shares, is made to say that it is a CUDA device of some compute capability, and
what only a CUDA build can answer (is FlashInfer there, does CUTLASS know FP8) is answered as on a full installation.
Layers are built, not run. Rows: capability, scheme, kernel or null, error or null.
"""

import json
import os
import sys
import tempfile
import types

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ["VLLM_PLUGINS"] = ""

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability, PlatformEnum

from rlq.errors import ConfigError
from rlq.formats.schemes import PRESETS, Scheme
from rlq.weights.compressed_tensors import quantization_config
from samplers.vllm.kernel_plan import running_kernels

CAPABILITIES = ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0))


def replace_everywhere(name: str, value: object) -> None:
    """Modules import such functions by name, so each has one of its own."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm") and name in vars(module):
            setattr(module, name, value)


def pretend(capability: tuple[int, int]) -> None:
    """Make vLLM believe that it runs on such a GPU."""
    ours = DeviceCapability(*capability)
    number = ours.to_int()

    def as_int(asked: int | tuple[int, int]) -> int:
        return asked if isinstance(asked, int) else 10 * asked[0] + asked[1]

    platform = current_platform
    platform._enum = PlatformEnum.CUDA
    answers = {
        "is_cuda": lambda: True,
        "is_cuda_alike": lambda: True,
        "is_cpu": lambda: False,
        "get_device_capability": lambda *_, **__: ours,
        "has_device_capability": lambda asked, *_, **__: number >= as_int(asked),
        "is_device_capability": lambda asked, *_, **__: number == as_int(asked),
        "is_device_capability_family": lambda asked, *_, **__: number // 10 == as_int(asked) // 10,
    }
    for name, answer in answers.items():
        setattr(platform, name, answer)
    for name in ("has_flashinfer", "has_flashinfer_cutedsl", "has_flashinfer_bf16_fp4"):
        replace_everywhere(name, lambda: True)
    for name in ("is_deep_gemm_supported", "is_flashinfer_fp8_blockscale_gemm_supported"):
        replace_everywhere(name, lambda: False)
    replace_everywhere("has_humming", lambda: False)  # its kernels load it to be chosen, so it cannot be pretended
    replace_everywhere("cutlass_fp8_supported", lambda: number >= 89)
    replace_everywhere("cutlass_fp4_supported", lambda: number >= 100)
    replace_everywhere("CUTLASS_BLOCK_FP8_SUPPORTED", number >= 90)


def chosen(scheme: Scheme, config: VllmConfig) -> tuple[str | None, str | None]:
    """Kernel of one linear layer, or why there is none."""
    try:
        quantization = CompressedTensorsConfig.from_config(quantization_config(scheme, ()))
        with set_current_vllm_config(config):
            layer = ColumnParallelLinear(
                256, 256, bias=False, quant_config=quantization, prefix="model.layers.0.mlp.down_proj",
                params_dtype=torch.bfloat16,
            )  # fmt: skip
    except (ConfigError, NotImplementedError, RuntimeError, ValueError) as error:
        return None, str(error)
    (kernel,) = running_kernels(torch.nn.ModuleList([layer]))
    return kernel, None


def main() -> None:
    config = VllmConfig()
    # Schemes ask for the model's dtype and nothing else.
    config.model_config = types.SimpleNamespace(dtype=torch.bfloat16, is_quantized=True)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as directory, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{directory}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    torch.set_default_dtype(torch.bfloat16)  # vLLM's loader does; some kernels ask
    presets = [Scheme.preset("nvfp4", static=True), *(s for s in PRESETS.values() if s.weights is not None)]
    rows = []
    for capability in CAPABILITIES:
        pretend(capability)
        rows += [[capability, scheme.to_dict(), *chosen(scheme, config)] for scheme in presets]
    print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
