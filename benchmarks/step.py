"""Step time of rlq against TRL's own GRPOTrainer with transformers generation: same model, prompts and lengths.

Each trainer lives in its own process and they take turns, four steps each, of which the first is not counted; whoever
waits is blocked on a pipe, with nothing being sampled. rlq takes part twice: on-policy, and with one batch sampled
ahead (`async_steps: 1`). Lengths are either fixed (the shipped model answers with seven tokens) or long-tailed (a
random model ends a completion with probability 1/51 at every token).
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(RAY_worker_niceness="0", HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TURNS, STEPS = 4, 4  # the first turn warms up
LENGTHS = {"fixed": 8, "long_tail": 128}


class Side(NamedTuple):
    """How one of the compared trainers runs."""

    threads: int
    samplers: int
    ahead: int
    pinned: bool = False  # learner on one core, sampler on the other


# For the comparison with TRL what is fastest on two cores; for the overlap one core each.
SIDES = {"trl": Side(2, 0, 0), "rlq": Side(2, 2, 0), "rlq_ahead": Side(1, 1, 1)}
PINNED = {"waiting": Side(1, 1, 0, pinned=True), "overlapping": Side(1, 1, 1, pinned=True)}


def make_model(directory: Path) -> None:
    """A random Llama of the default run's size, whose next-token distribution is nearly uniform over 51 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainers.tasks import char_tokenizer

    tokenizer: Any = char_tokenizer()
    config = LlamaConfig(
        vocab_size=51, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def distinct_tokens(completion_ids, **kwargs) -> list[float]:
    """A reward that differs between completions."""
    return [len(set(ids)) / max(len(ids), 1) for ids in completion_ids]


def child(side: str, kind: str, model: str, directory: str) -> None:
    """One trainer; runs a step for every line on stdin and prints how long it took and how many tokens it sampled.

    After the last step of a turn it waits for what is sampled ahead, so that the next side has the machine to itself.
    """
    import time

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

    threads, samplers, ahead, pinned = (SIDES | PINNED)[side]
    torch.set_num_threads(threads)
    from trainers.compat import GRPOConfig, GRPOTrainer
    from trainers.grpo import QuantGRPOTrainer
    from trainers.options import QuantGRPOConfig
    from trainers.tasks import sort_digits_dataset

    class Gate(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if ahead and state.global_step and state.global_step % STEPS == 0:
                for ordered in trainer.vllm_generation._ahead:
                    ordered.batch.done.result()
            print("ready", flush=True)
            sys.stdin.readline()
            self.start = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "loss" in logs:
                length = logs["completions/mean_length"]
                print(f"step {time.perf_counter() - self.start} {length}", flush=True)

    common: dict[str, Any] = dict(
        output_dir=directory, use_cpu=True, bf16=False, gradient_checkpointing=False, learning_rate=1e-9,
        per_device_train_batch_size=256, num_generations=8, max_completion_length=LENGTHS[kind], logging_steps=1,
        max_steps=TURNS * STEPS, save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
    )  # fmt: skip
    rest: dict[str, Any] = dict(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=distinct_tokens,
        train_dataset=sort_digits_dataset(1024, seed=0),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer: Any
    if side == "trl":
        trainer = GRPOTrainer(args=GRPOConfig(**common), **rest)
    else:
        import ray

        from samplers.options import SamplerConfig
        from samplers.pool.pool import SamplerPool

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        config = SamplerConfig(num_samplers=samplers, sampler_max_model_len=LENGTHS[kind] + 16)
        pool = SamplerPool.vllm(AutoConfig.from_pretrained(model).to_dict(), config)
        trainer = QuantGRPOTrainer(args=QuantGRPOConfig(**common, async_steps=ahead), samplers=pool, **rest)
        if pinned:
            place: Any = ray.get(pool.fleet.members[0].actor.where.remote())
            pin(os.getpid(), 0)
            pin(place.pid, 1)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Gate())
    trainer.train()


def pin(pid: int, core: int) -> None:
    """Keep a process, with the threads that it has and will have, on one core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def measure(kind: str, sides: Iterable[str]) -> dict[str, float]:
    """Median seconds per step and mean completion length of every side."""
    with tempfile.TemporaryDirectory() as directory:
        from support.common import MODEL

        model = str(MODEL) if kind == "fixed" else directory
        if kind != "fixed":
            make_model(Path(directory))
        children: dict[str, Any] = {
            side: subprocess.Popen(
                [sys.executable, __file__, "--child", side, kind, model, directory],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for side in sides
        }  # fmt: skip
        times: dict[str, list[float]] = {side: [] for side in children}
        lengths: dict[str, list[float]] = {side: [] for side in children}
        for turn, (side, process), step in itertools.product(range(TURNS), children.items(), range(STEPS)):
            if step == 0:
                _read(side, process, "ready")
            process.stdin.write("go\n")
            process.stdin.flush()
            _, seconds, length = _read(side, process, "step").split()
            if step < STEPS - 1:
                _read(side, process, "ready")
            if turn and step:
                times[side].append(float(seconds))
                lengths[side].append(float(length))
        for process in children.values():
            process.stdin.close()
            process.wait(timeout=60)
    return {side: statistics.median(t) for side, t in times.items()} | {
        f"{side}_length": statistics.mean(v) for side, v in lengths.items()
    }


def _read(side: str, process, word: str) -> str:
    while not (line := process.stdout.readline()).startswith(word):
        if not line:
            raise SystemExit(f"the {side} trainer ended early; run it alone to see why")
    return line


def main() -> None:
    from support.common import report, row

    rows = []
    for kind, goal in (("fixed", 1.0), ("long_tail", 1.3)):
        m = measure(kind, SIDES)
        for side, what in (("rlq", "on-policy"), ("rlq_ahead", "async_steps 1")):
            speedup = m["trl"] / m[side]
            rows += [
                row(f"{kind} lengths, {what}: TRL step over rlq step", speedup, f">= {goal}", speedup >= goal),
                row(f"{kind} lengths, {what}: rlq step, s", m[side]),
            ]
        rows += [
            row(f"{kind} lengths: TRL step, s", m["trl"]),
            row(f"{kind} lengths: mean completion, rlq tokens", m["rlq_length"]),
            row(f"{kind} lengths: mean completion, TRL tokens", m["trl_length"]),
        ]
    report("step", rows)


def overlap() -> None:
    """What sampling ahead gives when learner and sampler have a core each."""
    from support.common import report, row

    rows = []
    for kind, goal in (("fixed", None), ("long_tail", 1.25)):
        m = measure(kind, PINNED)
        gain = m["waiting"] / m["overlapping"]
        rows += [
            row(f"{kind} lengths, a core each: on-policy step, s", m["waiting"]),
            row(
                f"{kind} lengths, a core each: on-policy step over step with async_steps 1",
                gain,
                f">= {goal}" if goal else "",
                gain >= goal if goal else None,
            ),
        ]
    report("overlap", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=4, metavar=("SIDE", "KIND", "MODEL", "DIR"))
    parser.add_argument("--overlap", action="store_true", help="learner and sampler on a core each, ahead or not")
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
    elif arguments.overlap:
        overlap()
    else:
        main()
