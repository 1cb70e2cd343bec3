"""What `rlq quantize` writes is read by vLLM itself and runs on vLLM's own kernel."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rlq.formats.schemes import Scheme
from rlq.publish import read_directory
from rlq.types import Rollout
from samplers.testing.reference import TransformersSampler

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "configs/models/sort_digits"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "method", "kernel"), [("int8", "CompressedTensorsW8A8Int8", "CPUInt8ScaledMMLinearKernel")]
)
def test_vllm_alone_serves_what_rlq_writes(scheme, method, kernel, tmp_path):
    """INT8 is the only scheme for which vLLM has a kernel on every x86 CPU.

    The kernel is no oracle of the emulation: measured here, its log-probs are 0.011 nats from the emulated ones and
    0.012 from the unquantized ones (docs/log.md). Weights that were not loaded, or in the wrong place, are nats away.
    """
    subprocess.run(
        [sys.executable, "-m", "rlq.cli.main", "quantize", str(MODEL), str(tmp_path / "out"), "--scheme", scheme],
        check=True,
    )
    worker = ROOT / "tests/support/own_loader_worker.py"
    done = subprocess.run(
        [sys.executable, worker, tmp_path / "out"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["schemes"] == [method]
    config = json.loads((MODEL / "config.json").read_text())
    # qkv, o, gate_up and down of every layer, and nothing else: embeddings and head are not linear layers to vLLM.
    assert answer["kernels"] == {kernel: 4 * config["num_hidden_layers"]}
    reference = TransformersSampler(config, Scheme.preset(scheme))
    reference.install(read_directory(tmp_path / "out"))
    gaps = []
    for row in answer["rows"]:
        prompt, tokens, found = tuple(row["prompt"]), tuple(row["tokens"]), tuple(row["logprobs"])
        rollout = Rollout(prompt, np.array(tokens), np.array(found, np.float32), "length", 0, scheme, 1.0, 0)
        gaps.append((reference.score(rollout) - torch.tensor(found)).abs())
    assert float(torch.cat(gaps).mean()) < 0.03
