"""Whole runs through the launch script, as a user starts them: real Ray, real vLLM, real TRL, in fresh processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlq.publish import read_directory
from rlq.quantize import quantize

ROOT = Path(__file__).parents[2]
# What may differ between two equal runs: clocks.
CLOCKS = ("time", "step_time", "_s", "tokens_per_s", "runtime")


def launch(run_dir: Path, *flags: str, script: str = "grpo_fp8", **kwargs) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / f"launch/{script}.py"), "--output_dir", str(run_dir), *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd="/", **kwargs
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    output, _ = process.communicate(timeout=540)
    assert process.returncode == code, output[-3000:]
    return output


def history(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def arguments_of_a_short_run() -> tuple[str, ...]:
    return ("--max_steps", "12", "--save_steps", "4", "--save_total_limit", "5")


def without_clocks(records: list[dict]) -> list[dict]:
    return [{k: v for k, v in r.items() if not k.endswith(CLOCKS)} for r in records]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A 12-step FP8 run with checkpoints at 4, 8 and 12."""
    run_dir = tmp_path_factory.mktemp("runs") / "fp8"
    return run_dir, finish(launch(run_dir, *arguments_of_a_short_run()))


@pytest.mark.slow
def test_a_run_learns_and_leaves_everything_behind(finished):
    run_dir, output = finished
    assert output.strip().splitlines()[-1] == f"run_dir={run_dir}"
    records = history(run_dir)
    assert [r["step"] for r in records] == list(range(1, 13))
    reward = [r["reward"] for r in records]
    assert sum(reward[-3:]) > sum(reward[:3]) + 0.3, "three steps each; chance alone moves this by about 0.1"
    assert all(r["rlq/rollout/accuracy"] == r["reward"] for r in records)
    assert all(1e-5 < r["rlq/sampler_kl_k3"] < 1e-2 for r in records), (
        "an FP8 sampler is close to the learner, not equal"
    )
    assert {r["rlq/sync/version_lag"] for r in records} == {0.0}
    assert {r["rlq/nonfinite_tokens"] for r in records} == {0.0}
    assert (run_dir / "config.yaml").is_file()
    assert (run_dir / "curves.png").stat().st_size > 20_000
    assert list((run_dir / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.slow
def test_the_final_fp8_checkpoint_is_the_quantized_final_policy(finished):
    run_dir, _ = finished
    policy = load_file(run_dir / "final/model.safetensors")
    served = read_directory(run_dir / "final-fp8")
    assert served.version == 12
    for name, weight in policy.items():
        if name.endswith("_proj.weight"):
            expected = quantize(weight, "fp8.channel")
            assert torch.equal(served.tensors[name].view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(served.tensors[f"{name}_scale"], expected.scale)
        else:
            assert torch.equal(served.tensors[name], weight)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_resuming_changes_nothing(finished, tmp_path):
    """A second run is cut after its checkpoint at step 4 is followed by a few steps, then resumed to the end."""
    run_dir, _ = finished
    flags = arguments_of_a_short_run()
    process = launch(tmp_path / "twin", *flags, start_new_session=True)
    deadline = time.monotonic() + 300
    while not (tmp_path / "twin/checkpoints/checkpoint-8/rlq_checkpoint.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # A checkpoint that was being written when the power went.
    (tmp_path / "twin/checkpoints/checkpoint-8/optimizer.pt").write_bytes(b"half")
    output = finish(launch(tmp_path / "twin", *flags, "--resume_from_checkpoint", "true"))
    assert "skipping checkpoint-8: it file optimizer.pt is missing or has another size" in output
    assert without_clocks(history(tmp_path / "twin")) == without_clocks(history(run_dir))
    ours, theirs = (load_file(d / "final/model.safetensors") for d in (run_dir, tmp_path / "twin"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_the_guard_takes_a_coarse_run_back_to_bf16(tmp_path):
    """NVFP4 rollouts of this model drift to a k3 of 4e-3 to 1.4e-2 within three steps; the guard allows 3e-3."""
    rule = "sampler_kl_k3:above:0.003:2:warn+fallback_bf16"
    flags = ("--max_steps", "8", "--guard", "act", "--guard_rules", rule)
    output = finish(launch(tmp_path / "run", *flags, script="grpo_nvfp4"))
    acts = [json.loads(line) for line in (tmp_path / "run/guard.jsonl").read_text().splitlines()]
    warned, fell_back = acts[:2]
    assert [act["guard/action"] for act in acts[:2]] == ["warn", "fallback_bf16"]
    assert all(act["guard/metric"] == "sampler_kl_k3" and act["guard/value"] > 3e-3 for act in acts[:2])
    assert warned["guard/step"] < fell_back["guard/step"] < 7
    assert f"guard: step {fell_back['guard/step']}: fallback_bf16: sampler_kl_k3" in output
    records, after = history(tmp_path / "run"), fell_back["guard/step"] + 1  # the batch that it acted on was NVFP4's
    assert max(record["rlq/sampler_kl_k3"] for record in records[after:]) < 1e-4, "now the samplers are the learner"
    sizes = [record["rlq/sync/bytes"] for record in records]
    assert min(sizes[after:]) > 2 * max(sizes[:after]), "bf16 weights take more room than NVFP4 ones"


def sampler_pids(parent: int) -> list[int]:
    """Sampler actors among the descendants of a driver's Ray."""
    import psutil

    actors = [
        p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0].startswith("ray::SamplerActor")
    ]
    root = psutil.Process(parent)
    family = {p.pid for p in root.children(recursive=True)}
    return [p.pid for p in actors if p.pid in family]


@pytest.mark.slow
def test_a_killed_sampler_does_not_change_the_run(finished, tmp_path):
    run_dir, _ = finished
    process = launch(tmp_path / "hurt", "--max_steps", "6", "--save_steps", "50")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    os.kill(sampler_pids(process.pid)[0], signal.SIGKILL)
    output = finish(process)
    assert "restart 1 of 3" in output
    # The schedule depends on max_steps; rewards of equal steps are compared up to where it first acts, and all counts.
    records = history(tmp_path / "hurt")
    assert [r["step"] for r in records] == list(range(1, 7))
    assert all(r["rlq/tokens"] > 0 for r in records)
    assert records[0]["reward"] == history(run_dir)[0]["reward"]


@pytest.mark.slow
def test_two_learner_ranks_train_like_one(finished, tmp_path):
    run_dir, _ = finished
    finish(
        launch(
            tmp_path / "ranks", "--max_steps", "12", "--save_steps", "50",
            "--learner_num_workers", "2", "--per_device_train_batch_size", "128",
            "--learner_cpus_per_worker", "0.5", "--sampler_num_cpus", "0.5",
        )
    )  # fmt: skip
    one, two = history(run_dir)[0], history(tmp_path / "ranks")[0]
    assert two["reward"] == one["reward"], "the first batch is sampled from the same weights with the same seeds"
    assert two["rlq/tokens"] == one["rlq/tokens"], "counts are summed over ranks"
    assert two["rlq/sampler_kl_k3"] == pytest.approx(one["rlq/sampler_kl_k3"], rel=1e-3)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sampler_scheme", "pf8"), "unknown scheme 'pf8'; did you mean fp8"),
        (("--num_samplers", "99"), "99 samplers need 99 CPU, the cluster has"),
        (("--sampler_max_model_len", "7"), "a prompt of 7 tokens leaves no room in a context of 7; raise sampler_max"),
    ],
)
def test_faults_stop_at_once_with_one_line(tmp_path, flags, message):
    output = finish(launch(tmp_path / "run", "--max_steps", "2", *flags), code=1)
    errors = [line for line in output.splitlines() if line.startswith("rlq: error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in output
