"""wandb: online with a key, offline without, and never the reason why a run fails."""

import logging
import os
from pathlib import Path
from typing import Any

from rlq.environment import wandb_mode

logger = logging.getLogger(__name__)

SUMMARIES: tuple[tuple[str, str], ...] = (
    ("train/reward", "max,last"),
    ("train/rlq/rollout/accuracy", "max,last"),
    ("train/rlq/sampler_kl_k1", "max,last"),
    ("train/rlq/sampler_kl_k3", "max,last"),
    ("train/rlq/ess_seq", "min,last"),
    ("train/rlq/ess_token", "min,last"),
    ("train/rlq/clip_frac_high", "max,last"),
    ("train/rlq/clip_frac_low", "max,last"),
    ("train/rlq/kept_token_frac", "min,last"),
    ("train/rlq/nonfinite_tokens", "max"),
    ("train/rlq/sync/version_lag", "max,last"),
    ("train/rlq/sync/install_s", "max,last"),
    ("train/rlq/rollout/tokens_per_s", "min,last"),
)
"""Metric and the summaries that the run table shows for it; the default view draws one panel per metric."""

INIT_TIMEOUT_S = 30


def start(run_dir: Path, name: str, group: str, config: dict[str, Any]) -> Any:
    """Start the run that HF's WandbCallback will find and log to; offline if there is no key or no server."""
    import wandb
    from wandb.errors import Error

    os.environ.setdefault("WANDB_SILENT", "true")  # transformers' callback would print a URL that is not there
    mode, _ = wandb_mode()
    settings = wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True, console="off")
    arguments: dict[str, Any] = {
        "project": os.environ.get("WANDB_PROJECT", "rlq"),
        "name": name,
        "group": group,
        "job_type": "learner",
        "config": config,
        "dir": str(run_dir),
        "settings": settings,
    }
    try:
        run = wandb.init(**arguments, mode=mode)  # type: ignore[arg-type]  # a name that wandb checks
    except (Error, OSError) as error:
        reason = str(error).partition("\n")[0]
        logger.warning("wandb is not reachable (%s); logging offline, upload later with `wandb sync`", reason)
        run = wandb.init(mode="offline", **arguments)
    run.define_metric("train/global_step")
    run.define_metric("*", step_metric="train/global_step", step_sync=True)
    for metric, summary in SUMMARIES:
        run.define_metric(metric, step_metric="train/global_step", step_sync=True, summary=summary)
    return run
