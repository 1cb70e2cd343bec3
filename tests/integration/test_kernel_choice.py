"""The table of samplers.hardware against vLLM's own choice, for every preset on every GPU that can be pretended."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlq.formats.schemes import PRESETS, Scheme
from samplers.vllm.kernel_plan import kernel_plan

ROOT = Path(__file__).parents[2]
# Not pretended to be installed, so the next kernel of a plan is expected.
ABSENT = ("Humming", "FlashInferFp8DeepGEMM", "DeepGemm")


@pytest.mark.slow
def test_vllm_chooses_what_the_table_says():
    worker = ROOT / "tests/support/kernel_choice_worker.py"
    done = subprocess.run([sys.executable, worker], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 5 * len(PRESETS)  # bf16 left out, a static NVFP4 added
    wrong, refused_later = [], 0
    for capability, data, kernel, error in rows:
        plan = kernel_plan(Scheme.from_dict(data), tuple(capability))
        expected = next((name for name in plan.kernels if not name.startswith(ABSENT)), None)
        if (data["name"], capability) == ("int8", [10, 0]):
            # vLLM takes CUTLASS, whose dispatcher refuses INT8 from compute capability 10.0 on when it is called.
            refused_later += kernel == "CutlassInt8ScaledMMLinearKernel" and plan.arithmetic == "emulated"
        elif kernel != expected or (kernel is None) != (error is not None):
            wrong.append(f"{data} on {capability}: {kernel or error}, the table says {plan}")
    assert not wrong, "\n".join(wrong)
    assert refused_later == 1
