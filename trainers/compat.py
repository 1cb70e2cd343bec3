"""The one door to TRL: names from `trl`, imported without loading vLLM into the learner.

Wherever vLLM is installed, `trl` imports about 400 of its modules with the trainer, and vLLM's CPU worker patches torch
process-wide. The learner never uses TRL's own vLLM client, so TRL is told that there is none.
"""

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from trl import import_utils

import_utils.is_vllm_available = lambda *args, **kwargs: False

from trl import GRPOConfig, GRPOTrainer, TrlParser  # noqa: E402  (only after the line above)

__all__ = ["GRPOConfig", "GRPOTrainer", "TrlParser"]
