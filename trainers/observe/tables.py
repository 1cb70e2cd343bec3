"""Tables of a batch: breakdown.jsonl, worst_tokens.jsonl, their wandb views, and dumps for `rlq replay`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlq.bridge import Rollouts, bias_audit, breakdown, log_ratio_histogram, worst_tokens, write_rollouts

from ..tracking import records
from ..twin import score
from ..view import Learner
from .batch import RewardTap, ScoredBatch, total_reward


def write_breakdown(learner: Learner, batch: ScoredBatch, taps: Sequence[RewardTap], run_dir: Path) -> None:
    """Write the mismatch by position, probability, entropy and so on, and log the bias audit; all ranks enter."""
    step, advantages = learner.version, batch.out["advantages"]
    _, entropy = score(learner.model, batch.out, learner.args.temperature)
    tables = breakdown(batch.bridge, batch.sampler, entropy=entropy, advantages=advantages, reduce=learner.reducer)
    assert learner.args.num_generations is not None
    groups = torch.arange(len(advantages)) // learner.args.num_generations
    rewards = total_reward(taps).to(advantages.device)
    audit = bias_audit(batch.bridge, rewards, advantages=advantages, groups=groups.to(advantages.device))
    learner.log_rlq(audit.metrics())
    if learner.accelerator.is_main_process:
        rows = [row for table in tables.values() for row in table.rows()]
        worst = worst_tokens(batch.bridge, batch.learner, batch.sampler, batch.out["completion_ids"])
        records.append(run_dir / "breakdown.jsonl", *({"step": step, **row} for row in rows))
        records.append(run_dir / "worst_tokens.jsonl", *({"step": step, **dataclasses.asdict(w)} for w in worst))
        _show(rows, *log_ratio_histogram(batch.bridge.sums), step)


def write_dump(learner: Learner, batch: ScoredBatch, taps: Sequence[RewardTap], scheme: str, run_dir: Path) -> None:
    """Write this rank's batch to `rollouts/`."""
    count, rank, step = len(batch.mask), learner.accelerator.process_index, learner.version
    rollouts = Rollouts(
        sampler_logprobs=batch.sampler.cpu(),
        mask=batch.mask.cpu(),
        old_logprobs=batch.learner.cpu(),
        token_ids=batch.out["completion_ids"].cpu(),
        reward=total_reward(taps),
        advantage=batch.out["advantages"].cpu(),
        version=torch.tensor(learner.rollout_versions[rank * count : (rank + 1) * count]),
        step=torch.full((count,), step),
        scheme=(scheme,) * count,
    )
    folder = run_dir / "rollouts"
    folder.mkdir(exist_ok=True)
    write_rollouts(folder / f"step-{step:06d}-rank-{rank}.parquet", rollouts)


def _show(rows: list[dict[str, Any]], counts: list[float], edges: list[float], step: int) -> None:
    import wandb

    if wandb.run is not None and rows:
        columns = list(rows[0])
        table = wandb.Table(columns=[*columns], data=[[row[c] for c in columns] for row in rows])
        histogram = wandb.Histogram(np_histogram=(np.array(counts), np.array(edges)))
        wandb.run.log({"train/rlq/breakdown": table, "train/rlq/log_ratio": histogram, "train/global_step": step})
