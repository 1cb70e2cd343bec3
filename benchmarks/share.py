"""Share of a step that a sync takes, in GRPO of SmolLM2-135M-Instruct with a batch of ordinary size for its length.

Nothing overlaps (`async_steps: 0`): quantizing, shipping, staging and switching are all on the critical path.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record_steps import FOLDER, MODEL, save_model
from support.common import ROOT, report, row

COMPLETIONS, TOKENS, STEPS = 64, 128, 3
SYNC = ("rlq/sync/quantize_s", "rlq/sync/ship_s", "rlq/sync/install_s")
"""Seconds of a sync, one part after the other; `rlq/sync/pause_s` lies within the last one."""


def main() -> None:
    if not (FOLDER / MODEL).is_dir():
        FOLDER.mkdir(parents=True, exist_ok=True)
        save_model(FOLDER)
    with tempfile.TemporaryDirectory() as scratch:
        prompts = Path(scratch, "prompts.jsonl")
        lines = [
            f"<|im_start|>user\nExplain step by step how to add {n} and {100 - n}.<|im_end|>\n<|im_start|>assistant\n"
            for n in range(10, 90)
        ]
        prompts.write_text("".join(json.dumps({"prompt": line, "answer": 100}) + "\n" for line in lines))
        flags = {
            "model_name_or_path": FOLDER / MODEL, "dataset_name": prompts, "reward_funcs": "record_steps.closeness",
            "learning_rate": 1e-6, "lr_scheduler_type": "constant", "max_steps": STEPS, "num_samplers": 2,
            "per_device_train_batch_size": 16, "gradient_accumulation_steps": COMPLETIONS // 16, "num_generations": 8,
            "max_completion_length": TOKENS, "sampler_max_model_len": 192,
            "sampler_max_num_seqs": 64, "learner_num_threads": 2,
            "report_to": "none", "save_strategy": "no", "output_dir": Path(scratch, "run"),
        }  # fmt: skip
        command = [sys.executable, ROOT / "launch/grpo_fp8.py", *(f"--{name}={value}" for name, value in flags.items())]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks"), "RAY_worker_niceness": "0"}
        subprocess.run(command, env=environment | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL, check=True)
        log = [json.loads(line) for line in Path(scratch, "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in log if "loss" in line][1:]  # the first one compiles
    syncs = [sum(line[name] for name in SYNC) for line in steps]
    share = statistics.median(sync / line["step_time"] for sync, line in zip(syncs, steps, strict=True))
    canary = statistics.median(line["rlq/time/canary_s"] for line in steps)
    size = f"{COMPLETIONS} completions of {statistics.mean(s['completions/mean_length'] for s in steps):.0f} tokens"
    rows = [
        row(f"SmolLM2, {size}: sync over step, %", 100 * share, "<= 1", share <= 0.01),
        row("step, s", statistics.median(line["step_time"] for line in steps)),
        row("sync, s", statistics.median(syncs)),
        row("what the canary's copy of the learner takes besides, s", canary),
    ]
    report("share", rows)


if __name__ == "__main__":
    main()
