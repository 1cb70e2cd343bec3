"""Composition root of every GRPO run: parse, check, start Ray and the samplers, train.

The scripts beside this file differ only in their default configuration.
"""

import logging
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Read when ray is imported or started: workers at normal priority (Ray's default of nice 15 starves them on a busy
# machine), no usage reports.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main(default_config: str, argv: list[str] | None = None) -> int:
    """Run and return the exit code: 0 done, 1 with one line on stderr for every error that rlq foresees."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("ray._private.authentication").setLevel(
        logging.ERROR
    )  # announces that tokens are on, as they should be
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a job's log shows lines as they come
    from rlq.errors import RlqError

    try:
        plan, sampler_config = prepare(list(sys.argv[1:] if argv is None else argv), ROOT / default_config)
        run(plan, sampler_config)
    except RlqError as error:
        print(f"rlq: error: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"run_dir={plan.run_dir}", flush=True)
    return 0


def prepare(argv: list[str], default_config: Path):
    """Everything that can be checked before an actor starts; returns the learner's plan and the samplers' settings."""
    from launch.settings import build_plan, parse

    return build_plan(*parse(argv, default_config), ROOT)


def run(plan, sampler_config) -> None:
    """Start samplers and learner."""
    import ray
    from transformers import AutoConfig

    from samplers.pool import SamplerPool

    start = time.monotonic()
    if not ray.is_initialized():
        ray.init(include_dashboard=False, logging_level=logging.WARNING)
    model_config = AutoConfig.from_pretrained(plan.model_path).to_dict()
    # Actors load while the learner imports TRL; the first publish waits for them.
    pool = SamplerPool.vllm(model_config, sampler_config)
    try:
        from trainers.learner import train

        seconds = time.monotonic() - start
        print(f"samplers={sampler_config.num_samplers} scheme={plan.scheme.name} starting, {seconds:.1f} s")
        train(plan, pool)
    finally:
        pool.close()
