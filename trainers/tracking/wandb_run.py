"""wandb: online with a key, offline without, and never the reason why a run fails."""

import logging
import os
from pathlib import Path
from typing import Any

from rlq.environment import wandb_mode
from rlq.metrics import METRICS

logger = logging.getLogger(__name__)

SUMMARIES = tuple((f"train/{m.key}", m.summary) for m in METRICS.values() if m.summary)
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
