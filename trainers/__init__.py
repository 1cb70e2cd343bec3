"""The learner: TRL's GRPO trainer on rollouts of quantized samplers."""

from .grpo import QuantGRPOTrainer
from .options import QuantGRPOConfig

__all__ = ["QuantGRPOConfig", "QuantGRPOTrainer"]
