"""The line that a training job prints once per step when RLQ_PROGRESS=json is in its environment, and its reader.

    rlq-step {"step": 12, "max_steps": 60, "reward": 0.71, "rlq/sampler_kl_k3": 0.0005, "eta_s": 61}

`trainers/tracking` prints it, `launch/follow.py` makes a progress bar of it.
"""

import json
from typing import Any

PREFIX = "rlq-step "
VARIABLE, VALUE = "RLQ_PROGRESS", "json"


def write(step: dict[str, Any]) -> str:
    """The line of a step; `step` and `max_steps` are among its keys."""
    return PREFIX + json.dumps(step)


def read(line: str) -> dict[str, Any] | None:
    """The step of a line; None for every other line, a damaged one included."""
    if not line.startswith(PREFIX):
        return None
    try:
        step = json.loads(line.removeprefix(PREFIX))
    except json.JSONDecodeError:
        return None
    return step if isinstance(step, dict) and "step" in step else None
