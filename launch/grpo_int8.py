#!/usr/bin/env python3
"""GRPO with rollouts from an INT8 copy of the policy, re-published after every step.

ray job submit --working-dir . -- python launch/grpo_int8.py --config configs/grpo_int8.yaml
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.grpo import main

if __name__ == "__main__":
    sys.exit(main("configs/grpo_int8.yaml"))
