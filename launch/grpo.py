"""Composition root of every GRPO run: parse, check, start Ray and the samplers, train.

The scripts beside this file differ only in their default configuration.
"""

import logging
import os
import sys
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
    logging.getLogger("samplers").setLevel(logging.INFO)  # one line: what multiplies
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
    """Start Ray and the learner, in this process or as several ranks under Ray Train."""
    import ray

    if not ray.is_initialized():
        ray.init(include_dashboard=False, logging_level=logging.WARNING)
    try:
        if plan.run.learner_num_workers == 1:
            learn(plan, sampler_config)
        else:
            learn_on_ranks(plan)
    finally:
        ray.shutdown()  # also stops the forwarding of workers' output, so that the last line is ours


def learn(plan, sampler_config, *, is_main: bool = True) -> None:
    """Train on this rank; the main one owns the samplers."""
    from transformers import AutoConfig

    from samplers.pool.pool import SamplerPool

    pool = None
    if is_main:
        # Actors load while the learner imports TRL; the first publish waits for them.
        pool = SamplerPool.vllm(AutoConfig.from_pretrained(plan.model_path).to_dict(), sampler_config)
    try:
        from trainers.learner import train

        train(plan, pool)
    finally:
        if pool is not None:
            pool.close()


def learn_on_ranks(plan) -> None:
    """Train on several ranks; each reads the run's resolved configuration, so they cannot disagree."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    from rlq.errors import RlqError

    resources = {"CPU": plan.run.learner_cpus_per_worker, "GPU": plan.run.learner_gpus_per_worker}
    scaling = ScalingConfig(
        num_workers=plan.run.learner_num_workers,
        use_gpu=plan.run.learner_gpus_per_worker > 0,
        resources_per_worker={name: amount for name, amount in resources.items() if amount},
    )
    trainer = TorchTrainer(
        rank_main,
        train_loop_config={"config": str(plan.run_dir / "config.yaml"), "root": str(ROOT)},
        scaling_config=scaling,
        run_config=RunConfig(name="ray_train", storage_path=str(plan.run_dir)),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:  # wraps whatever a rank raised; rlq's own errors are unwrapped
        for cause in (error.__cause__, *getattr(error, "worker_failures", {}).values()):
            if isinstance(cause, RlqError):
                raise cause from None
        raise


def rank_main(loop_config: dict[str, str]) -> None:
    """One learner rank under Ray Train."""
    import sys

    sys.path.insert(0, loop_config["root"])
    import ray.train

    from launch.grpo import learn, prepare

    config = loop_config["config"]
    plan, sampler_config = prepare(["--config", config], Path(config))
    learn(plan, sampler_config, is_main=ray.train.get_context().get_world_rank() == 0)
