#!/usr/bin/env python3
"""GRPO with rollouts from an NVFP4 copy of the policy, re-published after every step.

ray job submit --working-dir . -- python launch/grpo_nvfp4.py --config configs/grpo_nvfp4.yaml
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.grpo import main

if __name__ == "__main__":
    sys.exit(main("configs/grpo_nvfp4.yaml"))
