"""Records consecutive bf16 checkpoints of real GRPO runs, for benchmarks/delta.py; `python delta.py --record DIR`.

SmolLM2-135M-Instruct answers sums and is paid by how close it comes, at two learning rates; and the default run of this
repository. All are set up as launch/grpo.py does: FP8 samplers on vLLM behind Ray, fp32 masters, AdamW as TRL has it.

A run that starts from a bf16 checkpoint starts in the middle of every bf16 rounding interval, and for thousands of
steps at such learning rates only the smallest weights leave theirs. The `spread` recordings start anywhere in the
interval, which is where masters are after long training: the same bf16 policy, and more changes per step.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.common import ROOT

CONFIG = ROOT / "configs/grpo_fp8.yaml"
FIRST_NUMBER = re.compile(r"-?\d+")
FOLDER = Path.home() / ".cache/rlq-bench/steps"
MODEL = "smollm2"  # where the downloaded model is kept as a checkpoint


@dataclass(frozen=True)
class Recording:
    """One run, of which some consecutive steps are kept."""

    learning_rate: float
    """As given to AdamW at the kept steps."""
    flags: tuple[str, ...]
    """On top of the default run's configuration."""
    kept: range
    """Steps after which the checkpoint is kept."""
    spread: bool = False
    """Masters start anywhere in their bf16 rounding interval, not in its middle."""


def _smollm2(learning_rate: float, spread: bool) -> Recording:
    flags = {
        "learning_rate": learning_rate, "lr_scheduler_type": "constant", "max_steps": 10, "num_samplers": 1,
        "per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 24,
        "sampler_max_model_len": 96, "sampler_max_num_seqs": 16, "learner_num_threads": 2,
    }  # fmt: skip
    return Recording(learning_rate, tuple(f"--{k}={v}" for k, v in flags.items()), range(6, 10), spread)


RECORDINGS = {
    "smollm2-1e-6": _smollm2(1e-6, spread=False),
    "smollm2-1e-5": _smollm2(1e-5, spread=False),
    "smollm2-1e-6-spread": _smollm2(1e-6, spread=True),
    "smollm2-1e-5-spread": _smollm2(1e-5, spread=True),
    # The learning rate falls to zero over the 60 steps of the default run, and is two thirds of 5e-4 here.
    "default-run": Recording(5e-4 * 40 / 60, (), range(20, 23)),
}


def checkpoints(directory: Path, name: str) -> list[Path]:
    """Kept checkpoints of a recording, in the order of their steps."""
    files = [directory / name / f"step-{step:04}.safetensors" for step in RECORDINGS[name].kept]
    return [file for file in files if file.exists()]


def timings(directory: Path, name: str) -> list[dict[str, float]]:
    """Per step of a recording what its metrics.jsonl says."""
    return [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]


def closeness(completions: list[str], answer: list[int], **kwargs) -> list[float]:
    """1 for the right number, less the further away the first number is, 0 without one."""
    found = [FIRST_NUMBER.search(text) for text in completions]
    return [0.0 if f is None else 1 / (1 + abs(int(f.group()[:9]) - a) / a) for f, a in zip(found, answer, strict=True)]


def record(directory: Path) -> None:
    """Record what is not there yet, each run in its own process."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / MODEL).is_dir():
        save_model(directory)
    for name, recording in RECORDINGS.items():
        if len(checkpoints(directory, name)) < len(recording.kept):
            print(f"recording {name}", flush=True)
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            command = [sys.executable, __file__, str(directory), name]
            subprocess.run(command, cwd=ROOT / "benchmarks", env=environment, check=True)


def save_model(directory: Path) -> None:
    """Write the packaged model as a bf16 checkpoint, and the sums that it is trained on."""
    import torch
    from support.smollm2 import load

    model, tokenizer = load()
    rng = random.Random(0)
    sums = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(256)]
    with (directory / "sums.jsonl").open("w") as file:
        for a, b in sums:
            text = (
                f"<|im_start|>user\nWhat is {a} + {b}? Answer with the number only.<|im_end|>\n<|im_start|>assistant\n"
            )
            file.write(json.dumps({"prompt": text, "answer": a + b}) + "\n")
    tokenizer.save_pretrained(directory / MODEL)
    model.to(torch.bfloat16).save_pretrained(directory / MODEL)


def _spread(parameters) -> None:
    """Move fp32 values that are bf16 numbers to anywhere that rounds to the same bf16 number."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        offsets = torch.randint(-0x7FFF, 0x8000, parameter.shape, generator=generator, dtype=torch.int32)
        parameter.data.view(torch.int32).add_(offsets * (parameter.data != 0))


def _run(directory: Path, name: str) -> None:
    """One recording, in this process."""
    import ray
    from safetensors.torch import save_file
    from transformers import AutoConfig, TrainerCallback

    from launch.grpo import prepare
    from rlq.weights.canonical import bf16_checkpoint
    from samplers.pool.pool import SamplerPool
    from trainers.learner import build_trainer
    from trainers.tracking import records

    recording, out = RECORDINGS[name], directory / name
    out.mkdir(exist_ok=True)

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step in recording.kept:
                assert model is not None
                save_file(bf16_checkpoint(model.named_parameters()), out / f"step-{state.global_step:04}.safetensors")
            control.should_training_stop = state.global_step >= recording.kept[-1]

    flags = ["--save_strategy=no", "--report_to=none", *recording.flags]
    if name.startswith(MODEL):
        data = directory / "sums.jsonl"
        flags += [f"--model_name_or_path={directory / MODEL}", f"--dataset_name={data}"]
        flags += ["--reward_funcs", "record_steps.closeness"]
    with tempfile.TemporaryDirectory() as run_dir:
        plan, sampler_config = prepare([*flags, f"--output_dir={run_dir}"], CONFIG)
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
        pool = SamplerPool.vllm(AutoConfig.from_pretrained(plan.model_path).to_dict(), sampler_config)
        trainer: Any = build_trainer(plan, pool)
        if recording.spread:
            _spread(trainer.model.parameters())
        trainer.add_callback(Keep())
        trainer.train()
        trainer.vllm_generation.close()
        pool.close()
        ray.shutdown()
        (out / "metrics.jsonl").write_text((plan.run_dir / records.FILE).read_text())


if __name__ == "__main__":
    os.environ.update(RAY_worker_niceness="0", HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    _run(Path(sys.argv[1]), sys.argv[2])
