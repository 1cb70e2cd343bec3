"""Whether vLLM has a kernel for a scheme on this GPU, asked of vLLM itself, and which kernels an engine holds."""

import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlq.errors import ConfigError, last_line
from rlq.formats.schemes import PRESETS, Scheme
from rlq.weights.compressed_tensors import quantization_config

WEIGHT_ONLY = ("Marlin", "Humming", "Machete", "A16", "Exllama", "Conch")  # parts of such kernels' class names
NO_INT8 = (10, 0)
"""From this compute capability on there are no INT8 tensor cores."""
SIZE = 256
"""Rows and columns of the layer that vLLM is asked about; every kernel takes multiples of it."""


def arithmetic(scheme: Scheme, capability: tuple[int, int] | None) -> tuple[str, str]:
    """What `sampler_arithmetic: auto` stands for, and why.

    Args:
        scheme: model scheme; with `per_layer` presets vLLM needs a kernel for each of them.
        capability: CUDA compute capability, such as (9, 0) for Hopper; None on a machine without an NVIDIA GPU.

    Returns:
        `kernel` or `emulated`, and the reason for the latter.
    """
    parts = [scheme, *(PRESETS[name] for _, name in scheme.per_layer)]
    quantized = [part for part in parts if part.weights is not None]
    if capability is None:
        return "emulated", "no NVIDIA GPU"
    if scheme.kv_cache is not None:
        return "emulated", f"caches in {scheme.kv_cache} are rlq's own, not vLLM's"
    if not quantized:
        return "emulated", "nothing is quantized"
    for part in quantized:
        if capability >= NO_INT8 and str(part.activations).startswith("int8"):
            # vLLM takes CUTLASS, which refuses the first product.
            where = ".".join(map(str, capability))
            return "emulated", f"vLLM's INT8 kernel does not run on compute capability {where}"
        try:
            chosen_kernel(part)
        except (ConfigError, NotImplementedError, RuntimeError, ValueError) as error:
            operands = f"{part.weights} x {part.activations or '16 bits'}"
            return "emulated", f"vLLM has no kernel for {operands} here ({last_line(error)})"
    return "kernel", ""


def chosen_kernel(scheme: Scheme) -> str:
    """Class name of the kernel that vLLM takes for a linear layer of a scheme, on the GPU of this process.

    Raises:
        ConfigError, NotImplementedError, RuntimeError, ValueError: there is none; what vLLM raises, or rlq.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    quantization = CompressedTensorsConfig.from_config(quantization_config(scheme, ()))
    config = VllmConfig()
    # vLLM's schemes ask for the model's dtype and nothing else of it.
    config.model_config = types.SimpleNamespace(dtype=torch.bfloat16, is_quantized=True)  # type: ignore[assignment]
    with _one_rank(), set_current_vllm_config(config):
        layer = ColumnParallelLinear(
            SIZE, SIZE, bias=False, quant_config=quantization, prefix="layer", params_dtype=torch.bfloat16
        )
    (kernel,) = running_kernels(torch.nn.ModuleList([layer]))
    return kernel


@contextmanager
def _one_rank() -> Iterator[None]:
    """A process group of this process alone, which vLLM's layers need, and the default dtype of vLLM's loader."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    dtype = torch.get_default_dtype()
    with tempfile.TemporaryDirectory() as directory, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{directory}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            destroy_model_parallel()
            destroy_distributed_environment()


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
        elif any(part in name for part in WEIGHT_ONLY):
            unlike = " unlike the scheme (sampler_arithmetic: emulated quantizes them)" if scheme.activations else ""
            parts.append(f"{count} on {name}, 16-bit activations{unlike}")
        else:
            parts.append(f"{count} on {name}, quantized activations")
    return f"{scheme.name}: {', '.join(parts)}"
