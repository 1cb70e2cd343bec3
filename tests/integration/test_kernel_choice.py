"""vLLM is asked for its kernel, for every preset on every GPU that can be pretended."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlq.formats.schemes import PRESETS

ROOT = Path(__file__).parents[2]
MARLIN, CUTLASS = "MarlinFP8ScaledMMLinearKernel", "CutlassFP8ScaledMMLinearKernel"
# What vLLM's documentation says of some of them.
FACTS = {
    ("fp8", 8, 0): MARLIN,
    ("fp8", 8, 9): CUTLASS,
    ("fp8", 9, 0): CUTLASS,
    ("w8a16", 9, 0): MARLIN,
    ("int8", 8, 0): "CutlassInt8ScaledMMLinearKernel",
    ("w4a16", 9, 0): "MacheteLinearKernel",
    ("w4a8", 9, 0): "CutlassW4A8LinearKernel",
    ("nvfp4a16", 9, 0): "MarlinNvFp4LinearKernel",
    ("w4a8", 8, 0): None,
    ("int8_tensor", 9, 0): None,
    ("fp8_e5m2", 9, 0): None,
    ("mxfp4", 7, 5): None,
}


@pytest.mark.slow
def test_auto_is_what_vllm_has_a_kernel_for():
    worker = ROOT / "tests/support/kernel_choice_worker.py"
    done = subprocess.run([sys.executable, worker], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 5 * len(PRESETS)  # bf16 left out, a static NVFP4 added
    chosen = {}
    for capability, scheme, arithmetic, reason, kernel in rows:
        key = (scheme["name"], *capability)
        chosen[key] = kernel
        refuses_later = capability == [10, 0] and scheme["name"] == "int8"
        assert (arithmetic == "kernel") == (kernel is not None and not refuses_later), (key, kernel, reason)
        assert bool(reason) == (arithmetic == "emulated")
    assert {key: chosen[key] for key in FACTS} == FACTS
