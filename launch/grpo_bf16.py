#!/usr/bin/env python3
"""GRPO with rollouts from an unquantized copy of the policy: the control arm, re-published after every step.

ray job submit --working-dir . -- python launch/grpo_bf16.py --config configs/grpo_bf16.yaml
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.grpo import main

if __name__ == "__main__":
    sys.exit(main("configs/grpo_bf16.yaml"))
