"""Which kernel runs where: facts, invariants over every scheme and GPU, and reading it off a model."""

import re
from pathlib import Path

import pytest
import torch

from rlq.formats.schemes import PRESETS, Scheme
from samplers.vllm.kernel_plan import KERNELS, describe, kernel_plan, running_kernels

CAPABILITIES = [None, (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", PRESETS)
def test_every_scheme_on_every_gpu(name, capability):
    scheme = Scheme.preset(name)
    plan = kernel_plan(scheme, capability)
    assert (plan.arithmetic == "kernel") == bool(plan.kernels)
    if plan.arithmetic == "emulated":
        assert plan.quantizes_activations == (scheme.activations is not None)
        assert plan.note
    elif plan.quantizes_activations != (scheme.activations is not None):
        assert "sampler_arithmetic: emulated" in plan.note
    if capability is None or capability < (7, 5) or capability >= (11, 0) or name == "bf16":
        assert plan.arithmetic == "emulated"
    assert "\n" not in str(plan)


@pytest.mark.parametrize(
    ("name", "capability", "kernel", "quantizes"),
    [
        ("fp8", (8, 0), "MarlinFP8ScaledMMLinearKernel", False),
        ("fp8", (8, 9), "CutlassFP8ScaledMMLinearKernel", True),
        ("fp8_block", (8, 9), "MarlinFP8ScaledMMLinearKernel", False),
        ("fp8_block", (9, 0), "CutlassFp8BlockScaledMMKernel", True),
        ("w8a16", (10, 0), "MarlinFP8ScaledMMLinearKernel", False),
        ("int8", (7, 5), "CutlassInt8ScaledMMLinearKernel", True),
        ("int8", (10, 0), None, True),
        ("int8_tensor", (9, 0), None, True),
        ("w4a16", (8, 0), "MarlinLinearKernel", False),
        ("w4a16", (9, 0), "MacheteLinearKernel", False),
        ("w4a8", (8, 9), None, True),
        ("w4a8", (9, 0), "CutlassW4A8LinearKernel", True),
        ("w4a8", (10, 0), None, True),
        ("nvfp4a16", (9, 0), "MarlinNvFp4LinearKernel", False),
        ("nvfp4a16", (10, 0), "FlashInferCuteDslNvFp4W4A16LinearKernel", False),
        ("mxfp4", (7, 5), None, True),
        ("mxfp4", (9, 0), "MarlinMxFp4LinearKernel", False),
        ("mxfp4", (10, 0), "FlashInferMxFp4LinearKernel", True),
        ("mxfp8", (8, 9), "MarlinMxfp8LinearKernel", False),
        ("mxfp8", (10, 0), "FlashInferCutedslMxfp8LinearKernel", True),
        ("fp8_e5m2", (9, 0), None, True),
    ],
)
def test_facts(name, capability, kernel, quantizes):
    plan = kernel_plan(Scheme.preset(name), capability)
    assert kernel in plan.kernels if kernel else plan.kernels == ()
    assert plan.quantizes_activations == quantizes


def test_hopper_runs_nvfp4_weight_only_and_says_so():
    static = Scheme.preset("nvfp4", static=True)
    line = str(kernel_plan(static, (9, 0)))
    assert line == (
        "kernel: HummingNvFp4 or MarlinNvFp4, activations not quantized; on compute capability 9.0 this runs "
        "weight-only, unlike the scheme; sampler_arithmetic: emulated quantizes them"
    )
    assert kernel_plan(static, (10, 0)).quantizes_activations
    # Without calibrated scales the checkpoint is declared as NVFP4A16, on Blackwell too.
    assert "calibrated" in kernel_plan(Scheme.preset("nvfp4"), (10, 0)).note
    assert not kernel_plan(Scheme.preset("nvfp4"), (10, 0)).quantizes_activations


def test_layers_of_their_own_and_caches():
    mixed = Scheme.preset("fp8", per_layer={"re:.*down_proj": "w4a16"})
    plan = kernel_plan(mixed, (9, 0))
    assert plan.arithmetic == "kernel"
    assert {"CutlassFP8ScaledMMLinearKernel", "MacheteLinearKernel"} <= set(plan.kernels)
    assert not plan.quantizes_activations
    assert kernel_plan(Scheme.preset("fp8", per_layer={"re:.*down_proj": "int8_tensor"}), (9, 0)).kernels == ()
    assert kernel_plan(Scheme.preset("bf16", per_layer={"re:.*down_proj": "fp8"}), (9, 0)).arithmetic == "kernel"
    cached = kernel_plan(Scheme.preset("fp8", kv_cache="fp8"), (9, 0))
    assert cached.arithmetic == "emulated"
    assert "cache" in cached.note


def test_the_table_is_ascending_and_of_presets():
    known = {(str(s.weights), None if s.activations is None else str(s.activations)) for s in PRESETS.values()}
    for key, rows in KERNELS.items():
        assert [row[0] for row in rows] == sorted({row[0] for row in rows})
        assert key in known or key == ("nvfp4", "nvfp4 static")


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
        "nvfp4: 30 on MarlinNvFp4LinearKernel, 16-bit activations, 2 not quantized"
    )
    assert describe({"CutlassFP8ScaledMMLinearKernel": 4}, Scheme.preset("fp8")).endswith("quantized activations")
    assert describe({"EmulatedLinearMethod": 4}, Scheme.preset("w4a16")) == (
        "w4a16: 4 layers emulated, activations left alone"
    )


def test_the_table_in_the_docs():
    """Emulated, bold for quantized activations, or the family of a planned kernel, for every preset."""
    text = (Path(__file__).parents[3] / "docs/formats.md").read_text()
    table = text[text.index("| preset | 7.5 |") :].split("\n\n")[0].splitlines()
    columns = [(int(major), int(minor)) for major, minor in re.findall(r"(\d+)\.(\d)", table[0])]
    seen = set()
    for line in table[2:]:
        first, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        names = re.findall(r"`(\w+)`", first)
        seen.update(names)
        for name in names:
            scheme = Scheme.preset(name, static=True) if "calibrated" in first else Scheme.preset(name)
            for capability, cell in zip(columns, cells, strict=True):
                plan = kernel_plan(scheme, capability)
                assert (cell == "emulated") == (plan.arithmetic == "emulated"), (name, capability)
                if plan.kernels:
                    assert cell.startswith("**") == plan.quantizes_activations, (name, capability)
                    families = [family.strip("* ").split()[0].lower() for family in cell.split(" or ")]
                    assert all(any(f in kernel.lower() for kernel in plan.kernels) for f in families), (
                        name,
                        capability,
                    )
    assert seen == set(PRESETS) - {"bf16"}
