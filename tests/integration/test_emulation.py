"""Every scheme in a real vLLM engine: ten reloads and twenty deltas read back bit for bit, and log-probs compared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlq.formats.schemes import PRESETS

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests/support/emulation_worker.py"
MIXED = {"per_layer": {r"re:.*\.down_proj$": "fp8", r"re:.*\.layers\.0\.mlp\.(gate|up)_proj$": "mxfp4"}}
CASES = [(name, {}) for name in PRESETS]
CASES += [("bf16", {"kv_cache": kv_cache}) for kv_cache in ("fp8", "int8", "int4", "int8.tensor")]
CASES += [("fp8", {"kv_cache": "fp8.tensor"})]
CASES += [("nvfp4", {"static": True}), ("nvfp4", MIXED)]


def start(params: dict, folder: Path) -> tuple[subprocess.Popen, Path, Path]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    out, err = (folder / f"{len(list(folder.iterdir()))}-{stream}" for stream in ("out", "err"))
    command = [sys.executable, str(WORKER), params["name"], json.dumps(params["options"])]
    with out.open("w") as stdout, err.open("w") as stderr:
        return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment), out, err


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    """The result of a case; while it runs, the next selected case runs beside it, because each takes one core."""
    folder = tmp_path_factory.mktemp("workers")
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    cases = [item.callspec.params for item in here]
    started: list = []

    def of(params: dict) -> dict:
        index = cases.index(params)
        started.extend(start(case, folder) for case in cases[len(started) : index + 2])
        process, out, err = started[index]
        assert process.wait(timeout=600) == 0, err.read_text()[-3000:]
        return json.loads(out.read_text().strip().splitlines()[-1])

    yield of
    for process, _, _ in started:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}-{'-'.join(map(str, o))}".strip("-") for n, o in CASES])
def test_reloads_and_arithmetic(name, options, outcome):
    found = outcome({"name": name, "options": options})
    assert found["digests"] == [True] * 10
    assert found["deltas"]
    assert found["staged"]
    assert found["outdated"]
    assert found["tokens"] > 100
    # Two implementations add in different orders; rarely a quotient next to a tie rounds the other way, and then the
    # difference spreads. The bulk agrees to float32 rounding.
    assert found["gap_median"] < 1e-6
    assert found["gap_mean"] < max(1e-5, 0.03 * found["changed"])
    # The unquantized model is another one, unless the scheme is the control.
    assert (found["changed"] > 1e-3) == (name != "bf16" or bool(options))
