"""Which kernel of vLLM multiplies a scheme on which GPU, and which kernels an engine really holds.

The table is read from the kernel lists of vLLM 0.32 (`vllm/model_executor/kernels/linear`) and its compressed-tensors
schemes; a test compares it with vLLM's own choice on pretended GPUs. Nothing in it has been run on a GPU.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from rlq.formats.schemes import PRESETS, Scheme

W8A16 = ("HummingFP8ScaledMMLinearKernel", "MarlinFP8ScaledMMLinearKernel")
NVFP4_A16 = ("HummingNvFp4LinearKernel", "MarlinNvFp4LinearKernel")
WEIGHT_ONLY = ("Marlin", "Humming", "Machete", "A16", "Exllama", "Conch")  # parts of such kernels' class names
OLDEST, UNKNOWN = (7, 5), (11, 0)


@dataclass(frozen=True)
class KernelPlan:
    """What multiplies the quantized linear layers of an engine."""

    arithmetic: str
    """`kernel` where vLLM has a kernel for the scheme, `emulated` where it has none or one that would fail."""
    kernels: tuple[str, ...]
    """Class names of vLLM's kernels, none if emulated; a layer gets the first that is installed and fits its shape."""
    quantizes_activations: bool
    """True if inputs are rounded before they are multiplied."""
    note: str
    """What a reader of the numbers has to know, or empty."""

    def __str__(self) -> str:
        kernels = " or ".join(_family(name) for name in self.kernels) or "rlq's plugin"
        inputs = "quantized activations" if self.quantizes_activations else "activations not quantized"
        return f"{self.arithmetic}: {kernels}, {inputs}" + (f"; {self.note}" if self.note else "")


# Weights and activations -> (lowest compute capability, kernels, whether they quantize activations), ascending.
_Rows = tuple[tuple[tuple[int, int], tuple[str, ...], bool], ...]
_FP8: _Rows = ((OLDEST, W8A16, False), ((8, 9), ("CutlassFP8ScaledMMLinearKernel",), True))
_NVFP4_A16: _Rows = (
    (OLDEST, ("MarlinNvFp4LinearKernel",), False),
    ((9, 0), NVFP4_A16, False),
    ((10, 0), ("FlashInferCuteDslNvFp4W4A16LinearKernel", "MarlinNvFp4LinearKernel"), False),
)
_MXFP4: _Rows = (
    ((8, 0), ("MarlinMxFp4LinearKernel",), False),
    ((9, 0), ("HummingMxFp4LinearKernel", "MarlinMxFp4LinearKernel"), False),
    ((10, 0), ("FlashInferMxFp4LinearKernel",), True),
)
KERNELS: dict[tuple[str, str | None], _Rows] = {
    ("fp8.channel", "fp8.token"): _FP8,
    ("fp8.tensor", "fp8.tensor"): _FP8,
    ("fp8.channel", "fp8.tensor"): _FP8,
    ("fp8.channel", None): ((OLDEST, W8A16, False),),
    ("fp8.block128x128", "fp8.group128"): (
        (OLDEST, W8A16, False),
        ((8, 9), ("MarlinFP8ScaledMMLinearKernel",), False),
        (
            (9, 0),
            (
                "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
                "DeepGemmFp8BlockScaledMMKernel",
                "CutlassFp8BlockScaledMMKernel",
            ),
            True,
        ),
    ),
    # From 10.0 on vLLM still picks CUTLASS, which then refuses at the first product: there are no INT8 tensor cores.
    ("int8.channel", "int8.token"): ((OLDEST, ("CutlassInt8ScaledMMLinearKernel",), True), ((10, 0), (), False)),
    ("int4.group128", None): (
        (OLDEST, ("MarlinLinearKernel",), False),
        ((9, 0), ("MacheteLinearKernel", "HummingLinearKernel", "MarlinLinearKernel"), False),
        ((10, 0), ("MarlinLinearKernel",), False),
    ),
    ("int4.group128", "fp8.token"): (((9, 0), ("CutlassW4A8LinearKernel",), True), ((9, 1), (), False)),
    ("nvfp4", None): _NVFP4_A16,
    ("nvfp4", "nvfp4"): _NVFP4_A16,
    ("nvfp4", "nvfp4 static"): (
        (OLDEST, ("MarlinNvFp4LinearKernel",), False),
        ((9, 0), NVFP4_A16, False),
        ((10, 0), ("FlashInferCuteDslNvFp4LinearKernel", "CutlassNvFp4LinearKernel"), True),
    ),
    ("mxfp4", None): _MXFP4,
    ("mxfp4", "mxfp4"): _MXFP4,
    ("mxfp8", "mxfp8"): (
        (OLDEST, ("MarlinMxfp8LinearKernel",), False),
        ((9, 0), ("HummingMxfp8LinearKernel", "MarlinMxfp8LinearKernel"), False),
        ((10, 0), ("FlashInferCutedslMxfp8LinearKernel", "FlashInferCutlassMxfp8LinearKernel"), True),
    ),
}


def kernel_plan(scheme: Scheme, capability: tuple[int, int] | None) -> KernelPlan:
    """What multiplies the linear layers of a scheme, and whether it computes what the scheme says.

    Args:
        scheme: model scheme; with `per_layer` presets a kernel is planned only if all of them have one.
        capability: CUDA compute capability, such as (9, 0) for Hopper; None on a machine without an NVIDIA GPU.
    """
    parts = [scheme, *(PRESETS[name] for _, name in scheme.per_layer)]
    plans = [_plan(part, capability) for part in parts if part.weights is not None]
    if scheme.kv_cache is not None:
        note = f"caches in {scheme.kv_cache} are rlq's own, not vLLM's"
        return KernelPlan("emulated", (), scheme.activations is not None, note)
    if not plans:
        return KernelPlan("emulated", (), False, "nothing is quantized")
    without = next((plan for plan in plans if plan.arithmetic == "emulated"), None)
    if without is not None or len(plans) == 1:
        return without or plans[0]
    kernels = tuple(dict.fromkeys(name for plan in plans for name in plan.kernels))
    notes = "; ".join(dict.fromkeys(plan.note for plan in plans if plan.note))
    return KernelPlan("kernel", kernels, all(plan.quantizes_activations for plan in plans), notes)


def _plan(scheme: Scheme, capability: tuple[int, int] | None) -> KernelPlan:
    def emulated(note: str) -> KernelPlan:
        return KernelPlan("emulated", (), scheme.activations is not None, note)

    if capability is None:
        return emulated("no NVIDIA GPU")
    where = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= UNKNOWN:
        return emulated(f"rlq does not know which kernels vLLM has for {where}; sampler_arithmetic: kernel tries")
    activations = None if scheme.activations is None else str(scheme.activations)
    key = (str(scheme.weights), f"{activations} static" if scheme.static and activations == "nvfp4" else activations)
    found = [row for row in KERNELS.get(key, ()) if row[0] <= capability]
    if not found or not found[-1][1]:
        return emulated(f"vLLM has no kernel for {key[0]} x {activations or '16 bits'} on {where}")
    _, kernels, quantizes = found[-1]
    return KernelPlan("kernel", kernels, quantizes, _note(scheme, quantizes, where))


def _note(scheme: Scheme, quantizes: bool, where: str) -> str:
    if scheme.activations is None:
        return "but the scheme leaves them alone; sampler_arithmetic: emulated does too" if quantizes else ""
    if not quantizes:
        reason = (
            f"on {where} this runs weight-only"
            if scheme.static or str(scheme.activations) != "nvfp4"
            else ("without calibrated scales vLLM runs NVFP4 weight-only")
        )
        return f"{reason}, unlike the scheme; sampler_arithmetic: emulated quantizes them"
    if str(scheme.activations) == "fp8.tensor" and not scheme.static:
        return "per token, not per tensor as in the scheme"
    if str(scheme.activations) == "fp8.group128":
        return "DeepGEMM may round scales up to powers of two (VLLM_USE_DEEP_GEMM_E8M0)"
    return ""


def running_kernels(model: torch.nn.Module) -> dict[str, int]:
    """Class names of what the linear layers of a loaded vLLM model multiply with, and how many layers have each.

    A kernel of vLLM if the layer holds one, otherwise its method: `EmulatedLinearMethod` is rlq's emulation,
    `UnquantizedLinearMethod` a layer in high precision. Runs in the engine, through `LLM.apply_model`.
    """
    found: Counter[str] = Counter()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        # Attention has a method too, and so have embeddings, which otherwise look like linear layers.
        if method is None or not hasattr(module, "output_size") or hasattr(module, "num_embeddings"):
            continue
        holders = (method, getattr(module, "scheme", None))
        held = [value for holder in holders if holder is not None for value in vars(holder).values()]
        kernels = [type(value) for value in held if type(value).__module__.startswith("vllm.model_executor.kernels.")]
        found[(kernels or [type(method)])[0].__name__] += 1
    return dict(sorted(found.items()))


def describe(running: dict[str, int], scheme: Scheme) -> str:
    """One line for a log: what runs, and whether activations are really quantized."""
    parts = []
    for name, count in running.items():
        if name == "EmulatedLinearMethod":
            inputs = "quantized activations" if scheme.activations is not None else "activations left alone"
            parts.append(f"{count} layers emulated, {inputs}")
        elif name == "UnquantizedLinearMethod":
            parts.append(f"{count} not quantized")
        else:
            inputs = "16-bit activations" if any(part in name for part in WEIGHT_ONLY) else "quantized activations"
            parts.append(f"{count} on {name}, {inputs}")
    return f"{scheme.name}: {', '.join(parts)}"


def _family(kernel: str) -> str:
    """A kernel's class name without what all of them say."""
    return kernel.removesuffix("Kernel").removesuffix("Linear").removesuffix("ScaledMM")
