"""What `sampler_arithmetic: auto` stands for, with vLLM's answers scripted, and reading kernels off a model."""

import pytest
import torch

from rlq.formats.schemes import PRESETS, Scheme
from samplers.vllm import kernel_plan
from samplers.vllm.kernel_plan import arithmetic, describe, running_kernels


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Schemes that vLLM was asked about; it has a kernel for all but `w4a8`."""
    names: list[str] = []

    def answer(scheme: Scheme) -> str:
        names.append(scheme.name)
        if scheme.name == "w4a8":
            raise ValueError("tried:\nno kernel fits")
        return "SomeKernel"

    monkeypatch.setattr(kernel_plan, "chosen_kernel", answer)
    return names


@pytest.mark.parametrize("name", PRESETS)
def test_without_a_gpu_everything_is_emulated_and_nobody_is_asked(name, asked):
    assert arithmetic(Scheme.preset(name), None) == ("emulated", "no NVIDIA GPU")
    assert asked == []


@pytest.mark.parametrize(
    ("scheme", "capability", "expected", "reason"),
    [
        (Scheme.preset("fp8"), (9, 0), "kernel", ""),
        (Scheme.preset("w4a8"), (8, 0), "emulated", "no kernel for int4.group128 x fp8.token here (no kernel fits)"),
        (Scheme.preset("fp8", per_layer={"re:.*down_proj": "w4a8"}), (9, 0), "emulated", "int4.group128"),
        (Scheme.preset("fp8", per_layer={"re:.*down_proj": "w4a16"}), (9, 0), "kernel", ""),
        (Scheme.preset("bf16", per_layer={"re:.*down_proj": "fp8"}), (9, 0), "kernel", ""),
        (Scheme.preset("bf16"), (9, 0), "emulated", "nothing is quantized"),
        (Scheme.preset("int8"), (9, 0), "kernel", ""),
        (Scheme.preset("int8"), (10, 0), "emulated", "INT8 kernel does not run on compute capability 10.0"),
        (Scheme.preset("int8"), (12, 0), "emulated", "INT8 kernel does not run on compute capability 12.0"),
        (Scheme.preset("fp8", per_layer={"re:.*down_proj": "int8"}), (10, 0), "emulated", "INT8"),
        (Scheme.preset("fp8", kv_cache="fp8"), (9, 0), "emulated", "caches in fp8"),
    ],
)
def test_a_kernel_needs_every_part_of_the_scheme(scheme, capability, expected, reason, asked):
    found, why = arithmetic(scheme, capability)
    assert found == expected
    assert reason in why
    assert "\n" not in why
    assert bool(why) == (expected == "emulated")


def layer(kernel: str | None, method: str) -> torch.nn.Module:
    """A linear layer as vLLM builds it: a method, and a scheme that holds a kernel."""
    module = torch.nn.Module()
    module.output_size = 8  # type: ignore[assignment]
    module.quant_method = type(method, (), {})()  # type: ignore[assignment]
    if kernel is not None:
        module.scheme = type("CompressedTensorsScheme", (), {})()  # type: ignore[assignment]
        held = type(kernel, (), {"__module__": "vllm.model_executor.kernels.linear.scaled_mm.cutlass"})()
        module.scheme.strategy, module.scheme.fp8_linear = "channel", held  # type: ignore[union-attr]
    return module


def test_running_kernels_are_read_off_the_layers():
    head = torch.nn.Module()
    head.quant_method = object()  # type: ignore[assignment]
    fp8 = layer("CutlassFP8ScaledMMLinearKernel", "CompressedTensorsLinearMethod")
    model = torch.nn.ModuleList([fp8, fp8, layer(None, "UnquantizedLinearMethod"), head, torch.nn.Linear(2, 2)])
    # A module that is held twice is one layer.
    assert running_kernels(model) == {"CutlassFP8ScaledMMLinearKernel": 1, "UnquantizedLinearMethod": 1}
    assert running_kernels(torch.nn.ModuleList([layer(None, "EmulatedLinearMethod")])) == {"EmulatedLinearMethod": 1}


def test_the_line_states_what_runs():
    running = {"MarlinNvFp4LinearKernel": 30, "UnquantizedLinearMethod": 2}
    assert describe(running, Scheme.preset("nvfp4")) == (
        "nvfp4: 30 on MarlinNvFp4LinearKernel, 16-bit activations unlike the scheme (sampler_arithmetic: emulated "
        "quantizes them), 2 not quantized"
    )
    assert describe({"MarlinLinearKernel": 4}, Scheme.preset("w4a16")).endswith("Kernel, 16-bit activations")
    assert describe({"CutlassFP8ScaledMMLinearKernel": 4}, Scheme.preset("fp8")).endswith("quantized activations")
    assert describe({"EmulatedLinearMethod": 4}, Scheme.preset("w4a16")) == (
        "w4a16: 4 layers emulated, activations left alone"
    )
