"""Asks vLLM's own code which kernel it would take on GPUs that are only pretended: prints one JSON list.

The platform object, which all of vLLM shares, is made to say that it is a CUDA device of some compute capability, and
what only a CUDA build can answer (is FlashInfer there, does CUTLASS know FP8) is answered as on a full installation.
Layers are built, not run. Rows: capability, scheme, arithmetic, reason, kernel or null.
"""

import json
import os
import sys

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ["VLLM_PLUGINS"] = ""

from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability, PlatformEnum

from rlq.errors import ConfigError
from rlq.formats.schemes import PRESETS, Scheme
from samplers.vllm.kernel_plan import arithmetic, chosen_kernel

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


def asked(scheme: Scheme, capability: tuple[int, int]) -> list:
    """What `auto` means there, why, and the kernel that vLLM takes, if it takes one."""
    try:
        kernel = chosen_kernel(scheme)
    except (ConfigError, NotImplementedError, RuntimeError, ValueError):
        kernel = None
    return [*arithmetic(scheme, capability), kernel]


def main() -> None:
    presets = [Scheme.preset("nvfp4", static=True), *(s for s in PRESETS.values() if s.weights is not None)]
    chosen_kernel(PRESETS["fp8"])  # imports what the pretense has to replace
    rows = []
    for capability in CAPABILITIES:
        pretend(capability)
        rows += [[capability, scheme.to_dict(), *asked(scheme, capability)] for scheme in presets]
    print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
